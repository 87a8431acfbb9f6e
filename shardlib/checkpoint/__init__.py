"""Checkpoints: tensors by name and global shape, which can be loaded on any mesh."""

from __future__ import annotations

from shardlib.checkpoint._load import Loaded, load
from shardlib.checkpoint._manager import Checkpoints
from shardlib.checkpoint._save import Saving, save

__all__ = ["Checkpoints", "Loaded", "Saving", "load", "save"]

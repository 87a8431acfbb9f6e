"""Checkpoints: every tensor by its name and global shape, whatever mesh it was saved on and is loaded into."""

from __future__ import annotations

from shardlib.checkpoint._load import Loaded, load
from shardlib.checkpoint._manager import Checkpoints
from shardlib.checkpoint._save import Saving, save

__all__ = ["Checkpoints", "Loaded", "Saving", "load", "save"]

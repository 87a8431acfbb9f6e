"""Weights on the move, in memory: to another mesh of the same job, and from one sharded model to another."""

from __future__ import annotations

from shardlib.weights._reshard import reshard
from shardlib.weights._transfer import transfer

__all__ = ["reshard", "transfer"]

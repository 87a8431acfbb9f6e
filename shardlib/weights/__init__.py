"""Weights on the move, in memory: from one sharded model to another."""

from __future__ import annotations

from shardlib.weights.transfer import transfer

__all__ = ["transfer"]

"""Weights on the move, in memory: to another mesh of the same job, and from one sharded model to another, and
out of one, tensor by tensor."""

from __future__ import annotations

from shardlib.weights._reshard import reshard
from shardlib.weights._stream import stream_weights
from shardlib.weights._transfer import transfer

__all__ = ["reshard", "stream_weights", "transfer"]

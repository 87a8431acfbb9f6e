"""Layouts: how one tensor is sharded over a mesh, their text form, and conversions to DTensor placements and JAX
specs."""

from __future__ import annotations

from torch.distributed.tensor import Replicate, Shard

from shardlib.layout._dims import Dim, Factor
from shardlib.layout._layout import Layout
from shardlib.layout._shard_spec import ShardSpec, shard_spec
from shardlib.layout._transition import Collective, cost, transition

__all__ = [
    "Collective",
    "Dim",
    "Factor",
    "Layout",
    "Replicate",
    "Shard",
    "ShardSpec",
    "cost",
    "shard_spec",
    "transition",
]

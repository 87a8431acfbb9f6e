"""Layouts: how one tensor is sharded over a mesh, their text form, and conversions to DTensor placements and JAX
specs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardlib.layout._dims import Dim, Factor
from shardlib.layout._layout import Layout
from shardlib.layout._shard_spec import ShardSpec, shard_spec
from shardlib.layout._transition import Collective, cost, transition

if TYPE_CHECKING:
    from torch.distributed.tensor import Replicate, Shard

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


def __getattr__(name: str) -> Any:
    """Return one of torch's placements; layouts themselves do not import torch."""
    if name in ("Replicate", "Shard"):
        from torch.distributed import tensor

        return getattr(tensor, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

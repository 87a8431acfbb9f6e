"""`shardlib check --jax`: check a layout by JAX's sharding types, on a mesh without devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from shardlib._mesh_shape import MeshShape
from shardlib.cli import inputs
from shardlib.rules import Rules

if TYPE_CHECKING:
    from shardlib.jax import LayoutReport

__all__ = ["typed"]


def typed(model: nn.Module, mesh: str, rules: Rules, example: Any) -> LayoutReport:
    """Run `shardlib.jax.check_layouts` for inputs of one data rank.

    Raises:
        ShardlibError: JAX is missing; what `check_layouts` raises.
        UsageError: there is no example, and the model does not tell what it takes.
    """
    from shardlib.jax import check_layouts

    shape = MeshShape.of(mesh)
    config = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False  # type: ignore[union-attr]  # a cache is not an output that a graph can have
    given = inputs.of_model(model, shape) if example is None else example
    return check_layouts(model, shape, rules, example=inputs.of_all_ranks(given, shape.data_ranks))

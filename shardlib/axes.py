"""Axes of meshes: the registry of their kinds, and the process groups along them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardlib._mesh_shape import register_axis

if TYPE_CHECKING:
    from shardlib.engine.ranks.groups import axis_groups

__all__ = ["axis_groups", "register_axis"]


def __getattr__(name: str) -> Any:
    """Import `axis_groups` at its first use: it needs torch, and the registry does not."""
    if name != "axis_groups":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from shardlib.engine.ranks import groups

    return groups.axis_groups

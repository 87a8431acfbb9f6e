"""Axes of meshes: the registry of their kinds, and the process groups along them."""

from __future__ import annotations

from shardlib._mesh_shape import register_axis
from shardlib.engine.ranks.groups import axis_groups

__all__ = ["axis_groups", "register_axis"]

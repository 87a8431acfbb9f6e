"""shardlib: write the model once, for one device; say in a dozen lines how its tensors lie on a named mesh."""

from __future__ import annotations

from shardlib import errors as errors
from shardlib._mesh import MeshShape, mesh, register_axis

__version__ = "0.1.0.dev0"
__all__ = ["MeshShape", "errors", "mesh", "register_axis"]

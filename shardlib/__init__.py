"""shardlib: write the model once, for one device; say in a dozen lines how its tensors lie on a named mesh."""

from __future__ import annotations

from torch.distributed.tensor import Replicate, Shard

from shardlib import errors, layouts
from shardlib._mesh import MeshShape, mesh, register_axis
from shardlib._plan import Plan
from shardlib.engine import (
    OptimizerWrapper,
    exact_random,
    full_state_dict,
    no_sync,
    plan,
    plan_of,
    register_elementwise,
    shard_model,
)
from shardlib.layout import Layout
from shardlib.rules import Rules, register_dims
from shardlib.transforms import accumulate, checkpoint_activations, fsdp, hsdp, offload, precision, replicate, zero

__version__ = "0.1.0.dev0"
__all__ = [
    "Layout",
    "MeshShape",
    "OptimizerWrapper",
    "Plan",
    "Replicate",
    "Rules",
    "Shard",
    "accumulate",
    "checkpoint_activations",
    "errors",
    "exact_random",
    "fsdp",
    "full_state_dict",
    "hsdp",
    "layouts",
    "mesh",
    "no_sync",
    "offload",
    "plan",
    "plan_of",
    "precision",
    "register_axis",
    "register_dims",
    "register_elementwise",
    "replicate",
    "shard_model",
    "zero",
]

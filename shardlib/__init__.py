"""shardlib: write the model once, for one device; lay out its tensors on a named mesh in a dozen lines."""

from __future__ import annotations

from shardlib import _supported as _supported

# isort: split

from torch.distributed.tensor import Replicate, Shard

from shardlib import errors, layouts
from shardlib._mesh import MeshShape, mesh, register_axis
from shardlib._plan import Plan
from shardlib.checkpoint import Checkpoints, load, save
from shardlib.engine import (
    LazyInitContext,
    OptimizerWrapper,
    Pipe,
    balance_by_size,
    balance_by_time,
    clip_grad_norm_,
    clip_grad_value_,
    exact_random,
    full_state_dict,
    get_grad_norm,
    no_sync,
    pipeline_step,
    plan,
    plan_of,
    reduce_gradients_by,
    register_elementwise,
    register_per_tensor,
    shard_model,
)
from shardlib.engine.groups import axis_groups
from shardlib.layout import Layout
from shardlib.rules import Balanced, Rules, register_dims, register_tensor_mode, tensor_mode
from shardlib.transforms import (
    accumulate,
    capacity,
    checkpoint_activations,
    fit,
    fsdp,
    hsdp,
    offload,
    pipeline,
    precision,
    replicate,
    zero,
)

__version__ = "0.1.0"
__all__ = [
    "Balanced",
    "Checkpoints",
    "Layout",
    "LazyInitContext",
    "MeshShape",
    "OptimizerWrapper",
    "Pipe",
    "Plan",
    "Replicate",
    "Rules",
    "Shard",
    "accumulate",
    "axis_groups",
    "balance_by_size",
    "balance_by_time",
    "capacity",
    "checkpoint_activations",
    "clip_grad_norm_",
    "clip_grad_value_",
    "errors",
    "exact_random",
    "fit",
    "fsdp",
    "full_state_dict",
    "get_grad_norm",
    "hsdp",
    "layouts",
    "load",
    "mesh",
    "no_sync",
    "offload",
    "pipeline",
    "pipeline_step",
    "plan",
    "plan_of",
    "precision",
    "reduce_gradients_by",
    "register_axis",
    "register_dims",
    "register_elementwise",
    "register_per_tensor",
    "register_tensor_mode",
    "replicate",
    "save",
    "shard_model",
    "tensor_mode",
    "zero",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

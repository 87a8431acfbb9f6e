"""The names that `import shardlib` offers, each with its module: read by type checkers, and by the package itself."""

from . import errors as errors, layouts as layouts, transforms as transforms
from ._mesh import (
    MeshShape as MeshShape,
    mesh as mesh,
    register_axis as register_axis,
)
from ._plan import Plan as Plan
from .checkpoint import (
    Checkpoints as Checkpoints,
    load as load,
    save as save,
)
from .engine import (
    OptimizerWrapper as OptimizerWrapper,
    clip_grad_norm_ as clip_grad_norm_,
    clip_grad_value_ as clip_grad_value_,
    exact_random as exact_random,
    full_state_dict as full_state_dict,
    get_grad_norm as get_grad_norm,
    no_sync as no_sync,
    pipeline_step as pipeline_step,
    plan as plan,
    plan_of as plan_of,
    reduce_gradients_by as reduce_gradients_by,
    register_elementwise as register_elementwise,
    register_per_tensor as register_per_tensor,
    shard_model as shard_model,
)
from .engine.groups import axis_groups as axis_groups
from .layout import (
    Layout as Layout,
    Replicate as Replicate,
    Shard as Shard,
)
from .rules import (
    Balanced as Balanced,
    Rules as Rules,
    register_dims as register_dims,
    register_tensor_mode as register_tensor_mode,
    tensor_mode as tensor_mode,
)
from .transforms import (
    accumulate as accumulate,
    capacity as capacity,
    checkpoint_activations as checkpoint_activations,
    fit as fit,
    fsdp as fsdp,
    hsdp as hsdp,
    offload as offload,
    pipeline as pipeline,
    precision as precision,
    replicate as replicate,
    zero as zero,
)

__version__: str

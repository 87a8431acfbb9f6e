"""The names that `import shardlib` offers, each with its module: read by type checkers, and by the package itself."""

from . import (
    axes as axes,
    booster as booster,
    errors as errors,
    layouts as layouts,
    rules as rules,
    transforms as transforms,
)
from ._mesh import mesh as mesh
from ._mesh_shape import MeshShape as MeshShape
from ._plan import Cluster as Cluster, Plan as Plan
from .checkpoint import (
    Checkpoints as Checkpoints,
    load as load,
    save as save,
)
from .engine import (
    OptimizerWrapper as OptimizerWrapper,
    clip_grad_norm_ as clip_grad_norm_,
    exact_random as exact_random,
    full_state_dict as full_state_dict,
    no_sync as no_sync,
    pipeline_step as pipeline_step,
    plan as plan,
    get_plan as get_plan,
    register_gradient_reduction as register_gradient_reduction,
    register_optimizer as register_optimizer,
    shard_model as shard_model,
)
from .layout import (
    Layout as Layout,
    Replicate as Replicate,
    Shard as Shard,
)
from .planner import (
    BestPlans as BestPlans,
    best_plans as best_plans,
    check_memory as check_memory,
    memory_advice as memory_advice,
)
from .rules import (
    Rules as Rules,
)
from .weights import (
    reshard as reshard,
    stream_weights as stream_weights,
    transfer as transfer,
)
from .transforms import (
    accumulate as accumulate,
    checkpoint_activations as checkpoint_activations,
    expert_capacity as expert_capacity,
    fit_memory as fit_memory,
    fsdp as fsdp,
    hsdp as hsdp,
    offload as offload,
    pipeline as pipeline,
    precision as precision,
    replicate as replicate,
    zero as zero,
)

__version__: str

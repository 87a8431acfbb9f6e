"""The names that `shardlib.jax` offers, each with its module."""

from . import rules as rules
from ._check import (
    LayoutReport as LayoutReport,
    check_layouts as check_layouts,
)
from ._compile import (
    Compiled as Compiled,
    compile_model as compile_model,
)
from ._exchange import (
    shares_memory as shares_memory,
    to_jax as to_jax,
    to_torch as to_torch,
)
from ._load import (
    load as load,
)
from ._mesh import (
    from_named_sharding as from_named_sharding,
    make_mesh as make_mesh,
    named_sharding as named_sharding,
)
from ._module import (
    JaxModule as JaxModule,
)
from ._step import (
    TrainState as TrainState,
    TrainStep as TrainStep,
    train_step as train_step,
)
from ._trained import (
    copy_to_torch as copy_to_torch,
)
from ._table import (
    Lowering as Lowering,
    known_ops as known_ops,
    lowering as lowering,
)
from ._typer import (
    Finding as Finding,
    TypedLine as TypedLine,
)
from .rules import (
    cast as cast,
    plan as plan,
    shard_params as shard_params,
    shardings as shardings,
)

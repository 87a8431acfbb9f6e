"""The record of a sharded model, which lives as long as the model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardlib.engine.pipeline.step_context import StepContext
from shardlib.errors import ShardingError

if TYPE_CHECKING:
    from shardlib._plan import Plan
    from shardlib.engine.compile import CompileReport
    from shardlib.engine.fp8 import History
    from shardlib.engine.gradients import GradientReducer
    from shardlib.engine.pipeline.stages import Pipeline
    from shardlib.engine.units import Units

__all__ = ["Sharded", "is_sharded", "keep", "record_of"]


@dataclass(frozen=True, eq=False)
class Sharded:
    """The record of a sharded model.

    If the mesh has a pipeline axis, `plan` and `mesh` are those of this rank's stages.

    Attributes:
        plan: the plan that was carried out.
        mesh: the mesh of all axes of `plan`.
        model_mesh: the mesh of the model axes; None if they have one rank.
        reducer: the reducer of the model's gradients.
        compiled: the report on compiled blocks.
        fp8_history: the history of float8 scales, if they depend on earlier steps.
        units: groups of parameters that are unsharded together; None if none is stored in shards.
        pipeline: the stages, if there are several.
        meets_in_modules: whether some modules communicate with other data ranks while they compute.
        has_values: whether its tensors have values; in a dry run they do not.
    """

    plan: Plan
    mesh: DeviceMesh
    model_mesh: DeviceMesh | None
    reducer: GradientReducer
    compiled: CompileReport
    fp8_history: History | None
    units: Units | None
    pipeline: Pipeline | None
    meets_in_modules: bool
    has_values: bool

    @cached_property
    def step_context(self) -> StepContext:
        """The role of this rank in steps of a pipeline. Cached: Python time in a step stalls every rank."""
        return StepContext.of(self)


# The records of all sharded models. Weak: a record must not keep its model alive.
_records: WeakKeyDictionary[nn.Module, Sharded] = WeakKeyDictionary()


def keep(model: nn.Module, record: Sharded) -> None:
    """Register the record of a sharded model for `record_of`."""
    _records[model] = record


def is_sharded(model: nn.Module) -> bool:
    """Tell whether `shard_model` has sharded this model."""
    return model in _records


def record_of(model: nn.Module) -> Sharded:
    """Return the record of a sharded model.

    Raises:
        ShardingError: the model was not sharded by shardlib.
    """
    if model not in _records:
        raise ShardingError(
            f"This {type(model).__name__} was not sharded by shardlib; "
            "call shardlib.shard_model(model, mesh, rules) first."
        )
    return _records[model]

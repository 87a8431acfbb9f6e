"""The record of a sharded model: what shardlib keeps of it, found by the model for as long as that lives."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardlib.engine.pipeline.standing import Standing
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
    """What shardlib keeps of a sharded model.

    Where the mesh has a pipeline axis, `plan` and `mesh` are those of this rank's stages.

    Attributes:
        plan: that was carried out.
        mesh: of all axes of `plan`.
        model_mesh: of the model axes; None where they split nothing.
        reducer: of the model's gradients.
        compiled: which blocks are compiled.
        fp8_history: what float8 is scaled by, if by earlier steps.
        units: parameters that are unsharded together; None where none is stored in shards.
        pipeline: the stages, where there are several.
        meets_in_modules: whether some modules wait for other data ranks while they compute.
        has_values: whether its tensors have values; those of a dry run have not.
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
    def standing(self) -> Standing:
        """Where this rank stands in steps of a pipeline. Cached: Python time in a step stalls every rank."""
        return Standing.of(self)


# The one table from models to what is kept of them. Weak: the record must not keep the model.
_records: WeakKeyDictionary[nn.Module, Sharded] = WeakKeyDictionary()


def keep(model: nn.Module, record: Sharded) -> None:
    """Let `record_of` find the record of a model that has been sharded."""
    _records[model] = record


def is_sharded(model: nn.Module) -> bool:
    """Return whether `shard_model` has sharded this model."""
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

"""The record of a sharded model, which the model owns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardlib.engine import _torch
from shardlib.engine.undo import Undo
from shardlib.errors import ShardingError

if TYPE_CHECKING:
    from shardlib._plan import Plan
    from shardlib.engine.data.gradients import GradientReducer
    from shardlib.engine.data.params import ParamState
    from shardlib.engine.data.schedule import Updates
    from shardlib.engine.data.units import Units
    from shardlib.engine.feature.comparison import StepComparison
    from shardlib.engine.feature.compile import CompileReport
    from shardlib.engine.pipeline.record import Pipeline

__all__ = [
    "Sharded",
    "Stateful",
    "is_sharded",
    "keep",
    "param_state_of",
    "param_states_of",
    "record_of",
    "records_of",
    "updates_of",
    "wait_for_updates",
]


class Stateful(Protocol):
    """The state that a feature keeps from one step to the next."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> Any: ...


@dataclass(frozen=True, eq=False)
class Sharded:
    """The record of a sharded model.

    If the mesh has a pipeline axis, `plan` and `mesh` are those of this rank's stages.

    Attributes:
        plan: the plan that was carried out.
        mesh: the mesh of all axes of `plan`.
        reducer: the reducer of the model's gradients.
        compiled: the report on compiled blocks.
        stateful: what features keep between steps. It is saved with the optimizer, under these names.
        units: groups of parameters that are unsharded together; None if none is stored in shards.
        updates: all-gathers parameters after a step; None if no state is sharded without its parameter.
        pipeline: the stages, if there are several.
        meets_in_modules: whether some modules communicate with other data ranks while they compute.
        comparison: what ranks compare in every step; None without `check="always"`.
        has_values: whether its tensors have values; in a dry run they do not.
        installed: takes away what was installed on the modules of the model.
        options: arguments of `apply_plan` besides the plan and the mesh.
    """

    plan: Plan
    mesh: DeviceMesh
    reducer: GradientReducer
    compiled: CompileReport
    stateful: Mapping[str, Stateful]
    units: Units | None
    updates: Updates | None
    pipeline: Pipeline | None
    meets_in_modules: bool
    comparison: StepComparison | None
    has_values: bool
    installed: Undo
    options: Mapping[str, Any]

    @cached_property
    def param_states(self) -> dict[int, ParamState]:
        """The state of each parameter, by the parameter's id."""
        return {id(one.param): one for one in self.reducer.param_states}

    @property
    def full_plan(self) -> Plan:
        """The plan of the whole model; `plan` is that of this rank's stages."""
        return self.plan if self.pipeline is None else self.pipeline.stages.plan

    @cached_property
    def changes_steps(self) -> bool:
        """Whether the step of an optimizer is another one than on a single device."""
        step, alone = self.plan.step, self.plan.mesh.world_size == 1 and self.pipeline is None
        changed = any(one.master_dtype or one.offloaded for one in self.param_states.values())
        return not alone or step.scaler is not None or step.accumulate > 1 or changed


# The attribute that holds the record. In a table of all models a record would keep its model for ever, if a hook on a
# submodule or a parameter, which the record has, refers to the model.
_RECORD = "_shardlib_record"
_by_param: WeakValueDictionary[int, Sharded] = WeakValueDictionary()  # by the ids of the parameters that a record owns


def keep(model: nn.Module, record: Sharded, undo: Undo) -> None:
    """Give a sharded model its record."""
    vars(model)[_RECORD] = record
    undo.callback(vars(model).pop, _RECORD, None)
    _by_param.update(dict.fromkeys(record.param_states, record))


def param_state_of(param: torch.Tensor) -> ParamState | None:
    """Return the state of a parameter of a sharded model, by identity; None for any other tensor."""
    record = _by_param.get(id(param))
    return None if record is None else record.param_states[id(param)]


def param_states_of(records: Iterable[Sharded]) -> dict[int, ParamState]:
    """Return the states of all parameters of some models, by the parameter's id."""
    return {key: one for record in records for key, one in record.param_states.items()}


def records_of(params: Iterable[torch.Tensor]) -> list[Sharded]:
    """Return the records of the models of some parameters, each once."""
    found = (_by_param.get(id(param)) for param in params)
    return list({id(record): record for record in found if record is not None}.values())


def is_sharded(model: nn.Module) -> bool:
    """Tell whether `shard_model` has sharded this model."""
    return _RECORD in vars(_torch.without_compiled_wrapper(model))


def record_of(model: nn.Module) -> Sharded:
    """Return the record of a sharded model.

    Raises:
        ShardingError: the model was not sharded by shardlib.
    """
    model = _torch.without_compiled_wrapper(model)
    record: Sharded | None = vars(model).get(_RECORD)
    if record is None:
        raise ShardingError(
            f"This {type(model).__name__} was not sharded by shardlib; "
            "call shardlib.shard_model(model, mesh, rules) first."
        )
    return record


def wait_for_updates(params: Iterable[torch.Tensor]) -> None:
    """Wait until parameters have the values of the last step."""
    for updates in updates_of(params):
        updates.wait()


def updates_of(params: Iterable[torch.Tensor]) -> list[Updates]:
    """Return the `Updates` of the models of some parameters."""
    return [record.updates for record in records_of(params) if record.updates is not None]

"""The steps of `shard_model` for a mesh with a pipeline axis.

The ranks of one stage have their own mesh, the whole mesh without the pipeline axis. On this mesh, the rest of the
model after the cut is sharded like any model; that code gets all it needs to know of other stages from this module.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardlib._mesh import MeshShape, device_here
from shardlib._plan import Plan, movements_of, rows_by_name
from shardlib.engine import _torch
from shardlib.engine.groups import group_of
from shardlib.engine.params import ParamState
from shardlib.engine.pipeline.cut import Place, fake_copy, mesh_with_stages, of_stages, remove_foreign
from shardlib.engine.pipeline.route import Route
from shardlib.engine.pipeline.shared import Shared
from shardlib.engine.pipeline.transport import Channels, Timetable
from shardlib.engine.undo import Undo
from shardlib.errors import PlanError

__all__ = ["Pipeline", "has_pipeline"]


def has_pipeline(plan: Plan) -> bool:
    """Tell whether a plan is for a mesh whose ranks run different stages."""
    return any(plan.mesh[axis] > 1 for axis in plan.mesh.pipeline_axes)


class Pipeline:
    """A model that is cut into stages; `shard_model` makes it, cuts the model, and installs the route.

    Creates process groups: collective over all ranks.

    Attributes:
        plan: the plan of the whole model.
        mesh: the whole mesh.
        place: the coordinate and the stages of this rank.
        stage_plan, stage_mesh: what this rank's stages carry out, and the mesh of the ranks that do.
        skeleton: a copy of all modules with fake tensors.
        route: runs microbatches through this rank's stages.
        channels: the process groups to the ranks of other stages.
        shared: the tensors that several stages hold, the same list on all ranks.

    Raises:
        PlanError: the plan has no stages, or cannot be carried out on them.
    """

    route: Route
    channels: Channels
    shared: Sequence[Shared]

    def __init__(self, model: nn.Module, plan: Plan, mesh: DeviceMesh, *, exact_random: bool) -> None:
        self.axis = plan.mesh.pipeline_axes[0]
        if not plan.stages:
            raise PlanError(
                f'Mesh "{plan.mesh}" has the pipeline axis "{self.axis}", and the rules name no stages for it. Name '
                'them: Rules(..., stages="embed, blocks.0-3 | blocks.4-7, norm, head"), or stages=Balanced(); a layout '
                "file's rules take them with rules.with_stages(Balanced())."
            )
        if exact_random:
            raise PlanError(
                'rng="exact" draws in the order of one device, and the stages of a pipeline run at the same time. Use '
                'rng="fast" on a mesh with a pipeline axis.'
            )
        self.plan, self.mesh = plan, mesh_with_stages(mesh)
        self.shape = MeshShape.of(self.mesh)
        self.place = Place(plan, self.mesh.get_local_rank(self.axis), model)
        of_stage = MeshShape({name: size for name, size in self.shape.items() if name != self.axis})
        self.stage_plan = of_stages(plan, self.place, of_stage)
        self.stage_mesh = self.mesh[tuple(name for name in self.shape.names if name != self.axis)]
        self.device = device_here(self.mesh.device_type)
        self._open_groups()
        self.mode = _torch.imagining()
        dtypes = {name: row.compute.dtype for row in plan.rows for name in row.tied if row.compute.dtype is not None}
        self.skeleton = fake_copy(model, self.mode, self.device, dtypes)

    def _open_groups(self) -> None:
        """Create all process groups that any stage may need: all ranks of the job must create each of them together."""
        names = self.stage_mesh.mesh_dim_names or ()
        for count in range(2, len(names) + 1):
            for axes in itertools.combinations(names, count):
                _torch.flattened(self.stage_mesh, axes)
        self.everyone = _torch.flattened(self.mesh, self.shape.names).get_group()

    @cached_property
    def names(self) -> dict[str, str]:
        """Canonical names by the names of this rank's tensors."""
        rows = rows_by_name(self.plan.rows)
        return {row.name: rows[row.name].name for row in self.stage_plan.rows}

    @cached_property
    def names_here(self) -> dict[str, str]:
        """The names of this rank's tensors by their canonical names."""
        return {first: name for name, first in self.names.items()}

    def cut(self, model: nn.Module, undo: Undo) -> None:
        """Remove the tensors of other stages."""
        remove_foreign(model, self.place, self.mode, self.device, undo)

    @property
    def pipeline_group(self) -> dist.ProcessGroup:
        """The ranks with this rank's coordinates in all stages."""
        return self.mesh[self.axis].get_group()

    @cached_property
    def counted_elsewhere(self) -> frozenset[str]:
        """Names of this rank's parameters that an earlier stage also holds, and counts in norms."""
        params = (row for row in self.plan.rows if row.kind == "parameter" and row.name in self.names_here)
        elsewhere = (row for row in params if self.place.holders(row.tied)[0] != self.place.index)
        return frozenset(self.names_here[row.name] for row in elsewhere)

    def install(
        self,
        model: nn.Module,
        param_states: Mapping[str, ParamState],
        casting: Any,
        region: DeviceMesh | None,
        undo: Undo,
    ) -> None:
        """Install the route of this rank's stages, once they are sharded. Creates groups: collective over all ranks.

        `region` is the mesh of the model axes, if all of this rank's model computes on DTensors.
        """
        group = self.pipeline_group
        tagged = dist.get_backend(group) in (dist.Backend.GLOO, dist.Backend.FAKE)
        lines = [] if tagged else self.shape.groups((self.axis,))
        self.channels = Channels.open(group, lines, self.device)
        self.route = Route(model, self.skeleton, self.mode, self.place, casting, region)
        self.route.install(model, undo)
        undo.callback(model.register_load_state_dict_pre_hook(self._drop_foreign).remove)
        self.shared = self._shared(param_states)

    def _shared(self, param_states: Mapping[str, ParamState]) -> list[Shared]:
        made = []
        groups: dict[tuple[int, ...], Any] = {}
        for row in self.plan.rows:
            holders = self.place.holders(row.tied)
            if row.kind != "parameter" or len(holders) == 1:
                continue
            if holders not in groups:
                groups[holders] = self._group_of(holders)
            param_state = param_states[self.names_here[row.name]] if row.name in self.names_here else None
            group = groups[holders]
            among = param_state.executor.transport((self.axis,), group) if param_state and group else None
            with _torch.no_modes():
                shared = {row.name: len(holders)}
                every = movements_of([row], self.plan.mesh, self.plan.units, self.plan.step, holders=shared)
                sums = tuple(one for one in every if one.purpose == "gradients, stages")
            made.append(Shared(param_state, among, sums))
        return made

    def _group_of(self, holders: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return the group of the ranks with these coordinates on this rank's pipeline."""
        if len(holders) == self.place.ranks:
            return self.pipeline_group
        own_group = None
        ranks = _torch.ranks_of_mesh(self.mesh)
        for line in self.shape.lines((self.axis,)):
            made = group_of([ranks[line[holder]] for holder in holders], "tied parameters")
            own_group = made if made is not None else own_group
        return own_group

    def _drop_foreign(
        self,
        model: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        """Drop the entries of other stages, so that a state dict of the whole model can be loaded.

        What torch would say of them is said here: a load raises on all stages or on none.
        """
        here = set(model.state_dict(keep_vars=True))
        foreign = {name: row for row in self.plan.rows for name in row.tied if name not in here}
        given = {name: state.pop(prefix + name) for name in foreign if prefix + name in state}
        if given:  # a stage's own state dict has none of them
            missing += [prefix + n for n, row in foreign.items() if row.kind == "parameter" and n not in given]
        errors += [
            f"size mismatch for {prefix}{name}: its shape is {tuple(value.shape)} in the state dict and "
            f"{tuple(foreign[name].global_shape)} in the model, in another stage."
            for name, value in given.items()
            if isinstance(value, torch.Tensor) and tuple(value.shape) != tuple(foreign[name].global_shape)
        ]

    @cached_property
    def timetable(self) -> Callable[[Sequence[Hashable], bool], Timetable]:
        """A cached function that returns the messages for microbatches of these keys, with or without backward."""
        return lru_cache(maxsize=256)(
            lambda keys, train: Timetable(self.place, [self.route.boundaries(key) for key in keys], train=train)
        )

    @property
    def foreign(self) -> set[str]:
        """All names of tensors that only other ranks hold."""
        return {name for row in self.plan.rows if row.name not in self.names_here for name in row.tied}

    def full_state(self, own: Mapping[str, torch.Tensor], names: Collection[str] | None) -> dict[str, torch.Tensor]:
        """Return the state dict of the whole model: each tensor from the first rank of the pipeline that holds it.

        Collective over the pipeline axis.

        Args:
            own: full tensors of this rank's stages, by name.
            names: the entries to return, the same on all ranks; None for all.
        """
        rows = rows_by_name(self.plan.rows)
        sent: dict[str, torch.Tensor] = {}
        found = {}
        for name in self.skeleton.state_dict():
            if names is not None and name not in names:
                continue
            row = rows[name]
            if row.name not in sent:
                local = next((own[each] for each in row.tied if each in own), None)
                value = torch.empty(row.global_shape, dtype=row.stored.dtype or row.dtype) if local is None else local
                moving = value.to(self.device).contiguous()
                dist.broadcast(moving, group=self.pipeline_group, group_src=self.place.holders(row.tied)[0])
                sent[row.name] = moving.to(value.device)
            found[name] = sent[row.name]
        return found

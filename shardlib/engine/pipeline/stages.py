"""What `shard_model` does where the mesh has a pipeline axis, before and after it shards what a rank keeps.

The ranks of one stage are a mesh of their own, the whole mesh without the pipeline axis. On it, what is left of the
model after the cut is sharded like any model; nothing there knows of other stages but what is told here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardlib._mesh import MeshShape, device_here
from shardlib._plan import Plan
from shardlib._plan.schedules import Action, order
from shardlib.engine import _torch
from shardlib.engine.held import Held
from shardlib.engine.pipeline.cut import Place, imagined_copy, mesh_with_stages, of_stages, remove_foreign
from shardlib.engine.pipeline.route import Route
from shardlib.engine.pipeline.shared import Shared
from shardlib.engine.pipeline.transport import Channels, Parcel, Timetable
from shardlib.errors import PlanError

__all__ = ["Pipeline", "has_pipeline", "names_here", "prepare"]


@dataclass(frozen=True, eq=False)
class Pipeline:
    """What shardlib keeps of a model that is cut into stages.

    Attributes:
        plan: of the whole model.
        mesh: the whole mesh.
        place: of this rank.
        route: of microbatches through this rank's stages.
        channels: to the ranks of other stages.
        shared: the tensors that several stages hold, the same list on all ranks.
        names: of this rank's tensors, what the whole model calls them first.
    """

    plan: Plan
    mesh: DeviceMesh
    place: Place
    route: Route
    channels: Channels
    shared: Sequence[Shared]
    names: Mapping[str, str]

    @cached_property
    def timetable(self) -> Callable[[Sequence[Hashable], bool], Timetable]:
        """Of microbatches of these kinds, whose ways the route knows, and whether they go back: what ranks send."""
        return lru_cache(maxsize=256)(self._timetable)

    def _timetable(self, keys: Sequence[Hashable], train: bool) -> Timetable:
        place, count, last = self.place, len(keys), len(self.place.stages) - 1
        if train:
            orders: Sequence[Sequence[Action]] = order(place.schedule, place.ranks, last + 1, count)
        else:
            orders = [
                [Action("F", s, m) for m in range(count) for s in range(last + 1) if place.rank_of(s) == rank]
                for rank in range(place.ranks)
            ]
        gates = [self.route.gates(key) for key in keys]

        def metas(parcel: Parcel) -> list[tuple[tuple[int, ...], torch.dtype]]:
            forward = parcel.kind == "forward"
            gate = gates[parcel.microbatch][parcel.stage if forward else parcel.stage + 1]
            assert gate is not None
            return [(each.shape, each.dtype) for each in gate.messages if forward or each.has_gradient]

        return Timetable(orders, place.index, place.rank_of, metas)

    @property
    def foreign(self) -> set[str]:
        """All names of tensors that are on other ranks only."""
        here = set(self.names.values())
        return {name for row in self.plan.rows if row.name not in here for name in row.tied}

    def whole_state(self, own: Mapping[str, torch.Tensor], names: Collection[str] | None) -> dict[str, torch.Tensor]:
        """Return the state dict of the whole model: each tensor from the first rank of the pipeline that holds it.

        Collective over the pipeline axis.

        Args:
            own: whole tensors of this rank's stages, by name.
            names: of the entries that are wanted, the same on all ranks; None is all.
        """
        rows = {name: row for row in self.plan.rows for name in row.tied}
        group, device = self.mesh[self.plan.mesh.pipeline_axes[0]].get_group(), device_here(self.mesh.device_type)
        ranks = dist.get_process_group_ranks(group)
        sent: dict[str, torch.Tensor] = {}
        found = {}
        for name in self.route.skeleton.state_dict():
            if names is not None and name not in names:
                continue
            row = rows[name]
            if row.name not in sent:
                here = next((own[each] for each in row.tied if each in own), None)
                value = torch.empty(row.global_shape, dtype=row.stored.dtype or row.dtype) if here is None else here
                moving = value.to(device).contiguous()
                dist.broadcast(moving, ranks[self.place.holders(row.tied)[0]], group=group)
                sent[row.name] = moving.to(value.device)
            found[name] = sent[row.name]
        return found


def names_here(model: nn.Module, pipeline: Pipeline | None) -> dict[str, str]:
    """Of the parameters that a rank has: what the whole model calls them first, and what they are called here."""
    if pipeline is None:
        return {name: name for name, _ in model.named_parameters()}
    return {first: name for name, first in pipeline.names.items()}


def has_pipeline(plan: Plan) -> bool:
    """Whether a plan is for a mesh whose ranks run different stages."""
    return any(plan.mesh[axis] > 1 for axis in plan.mesh.pipeline_axes)


def prepare(model: nn.Module, plan: Plan, mesh: DeviceMesh, *, exact_random: bool) -> Whole:
    """Look at the model before it is cut. Opens groups: collective over all ranks.

    Raises:
        PlanError: a plan without stages, or one that cannot be carried out on them.
    """
    axis = plan.mesh.pipeline_axes[0]
    if not plan.stages:
        raise PlanError(
            f'Mesh "{plan.mesh}" has the pipeline axis "{axis}", and the rules name no stages for it. Name them: '
            'Rules(..., stages="embed, blocks.0-3 | blocks.4-7, norm, head"), or stages=Balanced(); a layout file\'s '
            "rules take them with rules.with_stages(Balanced())."
        )
    if exact_random:
        raise PlanError(
            'rng="exact" draws in the order of one device, and the stages of a pipeline run at the same time. Use '
            'rng="fast" on a mesh with a pipeline axis.'
        )
    return Whole(model, plan, mesh)


class Whole:
    """A model on the way to its stages."""

    def __init__(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
        self.plan, self.mesh = plan, mesh_with_stages(mesh)
        self.shape = MeshShape.of(self.mesh)
        self.axis = plan.mesh.pipeline_axes[0]
        self.place = Place(plan, self.mesh.get_local_rank(self.axis))
        of_stage = MeshShape({name: size for name, size in self.shape.items() if name != self.axis})
        self.stage_plan = of_stages(plan, self.place, of_stage)
        self.stage_mesh = self.mesh[tuple(name for name in self.shape.names if name != self.axis)]
        self.device = device_here(self.mesh.device_type)
        self._open_groups()
        self.mode = _torch.imagining()
        dtypes = {name: row.compute.dtype for row in plan.rows for name in row.tied if row.compute.dtype is not None}
        self.skeleton = imagined_copy(model, self.mode, self.device, dtypes)

    def _open_groups(self) -> None:
        """Groups are made by all ranks of the job together, and stages may need different ones: so all are made."""
        names = self.stage_mesh.mesh_dim_names or ()
        for count in range(2, len(names) + 1):
            for axes in itertools.combinations(names, count):
                _torch.flattened(self.stage_mesh, axes)
        self.everyone = _torch.flattened(self.mesh, self.shape.names).get_group()

    @cached_property
    def names(self) -> dict[str, str]:
        """Of this rank's tensors, by the name that they have here: what the whole model calls them first."""
        first = {name: row.name for row in self.plan.rows for name in row.tied}
        return {row.name: first[row.name] for row in self.stage_plan.rows}

    @cached_property
    def names_here(self) -> dict[str, str]:
        """Maps what the whole model calls this rank's tensors first to their names here."""
        return {first: name for name, first in self.names.items()}

    def cut(self, model: nn.Module, undo: ExitStack) -> None:
        """Take out what other stages hold."""
        remove_foreign(model, self.place, self.mode, self.device, undo)

    @property
    def pipeline_group(self) -> dist.ProcessGroup:
        """This rank and those with its place in other stages."""
        return self.mesh[self.axis].get_group()

    @cached_property
    def counted_elsewhere(self) -> frozenset[str]:
        """Names of this rank's parameters that an earlier stage holds too, and counts in norms."""
        here = self.names_here
        params = (row for row in self.plan.rows if row.kind == "parameter" and row.name in here)
        return frozenset(here[row.name] for row in params if self.place.holders(row.tied)[0] != self.place.index)

    def install(
        self, model: nn.Module, held: Mapping[str, Held], casting: Any, region: DeviceMesh | None, undo: ExitStack
    ) -> Pipeline:
        """Install what runs this rank's stages, once they are sharded. Opens groups: collective over all ranks.

        Args:
            model: with this rank's stages alone.
            held: its parameters by name.
            casting: in which dtypes it computes.
            region: the mesh of the model axes where all of this rank's model computes on DTensors.
            undo: takes everything away.
        """
        group = self.pipeline_group
        tagged = dist.get_backend(group) in (dist.Backend.GLOO, dist.Backend.FAKE)
        channels = Channels.open(group, [] if tagged else self.shape.groups((self.axis,)), tagged=tagged)
        route = Route(
            model,
            self.skeleton,
            self.mode,
            self.place.stages,
            self.place.own,
            self.place.everywhere,
            casting,
            splits_backward=self.place.splits_backward,
            region=region,
        )
        route.install(model, undo)
        undo.callback(model.register_load_state_dict_pre_hook(self._drop_foreign).remove)
        return Pipeline(self.plan, self.mesh, self.place, route, channels, self._shared(held), self.names)

    def _shared(self, held: Mapping[str, Held]) -> list[Shared]:
        here = self.names_here
        groups: dict[tuple[int, ...], Any] = {}
        made = []
        for row in self.plan.rows:
            holders = self.place.holders(row.tied)
            if row.kind != "parameter" or len(holders) == 1:
                continue
            if holders not in groups:
                groups[holders] = self._group_of(holders)
            mine = held[here[row.name]] if row.name in here else None
            made.append(Shared(row.tied, mine, groups[holders], self.place.index == holders[0]))
        return made

    def _group_of(self, holders: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The ranks at these places of this rank's line along the pipeline axis."""
        if len(holders) == self.place.ranks:
            return self.pipeline_group
        mine = None
        ranks = _torch.ranks_of_mesh(self.mesh)
        for line in self.shape.lines((self.axis,)):
            made = _torch.new_group([ranks[line[holder]] for holder in holders])
            mine = made if made is not None else mine
        return mine

    def _drop_foreign(
        self, model: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_unused: Any
    ) -> None:
        """A state dict of the whole model loads: what is on other stages is theirs to load."""
        here = set(model.state_dict(keep_vars=True))
        for row in self.plan.rows:
            for name in row.tied:
                if name not in here:
                    state.pop(prefix + name, None)

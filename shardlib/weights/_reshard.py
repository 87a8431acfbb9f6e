"""`reshard`: change the mesh and the plan of a model that trains, in place, with its optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardlib._mesh import device_here
from shardlib._mesh import mesh as make_mesh
from shardlib._mesh_shape import MeshLike
from shardlib._plan import Plan
from shardlib._plan.moves import Laid, Moves, Pair, laid_by, matched
from shardlib.checkpoint._items import Item
from shardlib.checkpoint._manifest import Saved
from shardlib.checkpoint._optimizer import Known, describe, joined, known, make_state, optimizer_items
from shardlib.checkpoint._peers import Peers, peers
from shardlib.engine.apply import apply_plan, checked, planned
from shardlib.engine.apply.copies import bare_again, on_meta_again
from shardlib.engine.data.optimizer import watch_optimizers
from shardlib.engine.sharded import Sharded, is_sharded, record_of
from shardlib.errors import InputError, PlanError, ShardingError, short_traceback
from shardlib.transforms import parse
from shardlib.weights._carry import carry, torn
from shardlib.weights._lying import all_items_of, check_sizes, everywhere, local_of, refuse_in_backward

__all__ = ["reshard"]

M = TypeVar("M", bound=nn.Module)


@short_traceback
def reshard(
    model: M,
    plan: MeshLike | Plan,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    bucket_mb: float = 25.0,
    node: int = 8,
    timeout: float | None = None,
) -> M:
    """Change the mesh of a sharded model and its optimizer between two steps, in place. Collective over the job.

    Parameters, buffers and optimizer state move in memory: each rank is sent the elements that it lacks, once. Training
    goes on with the numbers of a job that had the new mesh from the start. `rng="exact"` draws are those of one device
    throughout; with "fast" data ranks get streams of their own again.

    Args:
        model: a model that `shard_model` has sharded.
        plan: the new mesh, as "tp=4" or a `DeviceMesh` of all ranks: rules and transforms stay; or a `Plan` for a mesh
            of all ranks.
        optimizer: the model's optimizer. Its groups get the new parameters; schedulers need no change.
        bucket_mb: most megabytes that a rank sends, and that it receives, at a time.
        node: the number of ranks that share a node: among ranks that hold the same element, one of the same node sends.
        timeout: seconds that ranks wait for each other in each phase; by default those of the job's process group.

    Returns:
        The same model. Its parameters are new ones: an optimizer that was not given is of no use any more, and refused.

    Raises:
        ShardingError: the model is not sharded, a backward pass is running, or parameters have gradients.
        PlanError, LayoutError, MeshError: the rules cannot be carried out on this mesh. Nothing has changed.
        CheckpointError: ranks gave different arguments, or a rank is lost.

    Example:
        >>> import shardlib as sl
        >>> model = sl.shard_model(nn.Linear(4, 8), "dp=1", {"**": "colwise"})
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> sl.get_plan(reshard(model, "tp=1", optimizer)).mesh
        MeshShape("tp=1")
    """
    everyone = peers("sl.reshard", f"resharding {type(model).__name__}", timeout)
    everyone.run("check arguments", lambda: _check(model, optimizer, bucket_mb, node))
    record = record_of(model)
    device_mesh = make_mesh(plan.mesh if isinstance(plan, Plan) else plan)
    target = everyone.run("plan", lambda: _planned(model, record, plan, device_mesh))
    everyone.compare(plan=target.lines(), bucket_mb=bucket_mb, node=node)
    job = _Job(everyone, int(bucket_mb * 2**20), node)
    trained = None if optimizer is None else job.look(model, optimizer)
    features = {name: kept.state_dict() for name, kept in record.stateful.items()}
    watch_optimizers({param: name for name, param in model.named_parameters()})
    with torn(model):
        shards = job.move_model(model, record, target, device_mesh)
        bare_again(model)
        apply_plan(model, target, device_mesh, values=shards, **record.options)
        for name, kept in record_of(model).stateful.items():
            if name in features:
                kept.load_state_dict(features[name])
        if trained is not None:
            job.move_optimizer(model, trained)
    return model


def _check(model: Any, optimizer: Any, bucket_mb: float, node: int) -> None:
    if not isinstance(model, nn.Module) or not is_sharded(model):
        raise ShardingError(
            f"reshard() was given a {type(model).__name__} that is not sharded. Shard it first: sl.shard_model(model, "
            "mesh, rules)."
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"reshard(optimizer=...) was given a {type(optimizer).__name__}; give a torch optimizer.")
    check_sizes("reshard", node, bucket_mb=bucket_mb)
    refuse_in_backward("reshard", model)
    graded = [name for name, param in model.named_parameters() if param.grad is not None]
    if graded:
        raise ShardingError(
            f'{len(graded)} parameters have gradients, such as "{graded[0]}", which are not moved. Call reshard() '
            "after optimizer.step() and optimizer.zero_grad()."
        )


def _planned(model: nn.Module, record: Sharded, given: Any, device_mesh: DeviceMesh) -> Plan:
    """Return the new plan, checked: nothing has changed yet."""
    plain = on_meta_again(model)
    if isinstance(given, Plan):
        made = planned(plain, device_mesh, given)
    else:
        old = record.full_plan
        if old.rules is None:
            raise PlanError("This model was sharded by a plan without rules, from JSON. Give reshard() a Plan.")
        made = planned(plain, device_mesh, old.rules, [_again(name) for name in old.transforms])
        made = made.replace(step=made.step.replace(bucket_mb=old.step.bucket_mb))
    checked(plain, made, device_mesh, exact_random=record.options["rng"] == "exact")
    return made


def _again(name: str) -> Any:
    try:
        return parse(name)
    except PlanError as error:
        raise PlanError(
            f"This model was sharded with the transform {name}, which is none of shardlib's. Give reshard() a Plan: "
            "sl.plan(model, mesh, rules, transforms=...)."
        ) from error


@dataclass
class _Trained:
    """An optimizer before the model was resharded.

    Attributes:
        items: the tensors of its state on this rank, by name, until they have been moved.
        laid: how all of them lie, in order.
        description: groups with names and other state, of all stages.
        kept: tensors among the options.
    """

    optimizer: torch.optim.Optimizer
    items: dict[str, Item]
    laid: dict[str, Laid]
    description: dict[str, Any]
    kept: dict[str, torch.Tensor]


@dataclass
class _Job:
    """The ranks that reshard together."""

    everyone: Peers
    bucket_bytes: int
    node: int

    def carry(self, phase: str, pairs: Iterable[Pair], source: Any, target: Any, gone: Any) -> None:
        moves = Moves(tuple(pairs), self.node)
        carry(self.everyone, phase, moves, source, target, bucket_bytes=self.bucket_bytes, gone=gone)

    # The model

    def move_model(
        self, model: nn.Module, record: Sharded, plan: Plan, device_mesh: DeviceMesh
    ) -> dict[str, torch.Tensor]:
        """Return this rank's local shards of the new plan, by name; the model loses its own."""
        items = all_items_of(model, self.everyone.size)
        have = everywhere(self.everyone, "tell of the model", model, items)
        rows = {row.name: row for row in plan.rows}
        want = [replace(laid, dtype=rows[laid.name].dtype) for laid in laid_by(plan, range(plan.mesh.world_size))]
        device, at = device_here(device_mesh.device_type), plan.mesh.coordinate(self.everyone.rank)
        made = dict[str, torch.Tensor]()

        def room(name: str) -> torch.Tensor:
            if name not in made:
                row = rows[name]
                shape = row.stored.local_shape(row.global_shape, plan.mesh, at)
                made[name] = torch.empty(shape, dtype=row.dtype, device=device)
            return made[name]

        def gone(name: str) -> None:
            _free(items.pop(name).local)

        self.carry("move the model", matched(have, want), partial(local_of, items), room, gone)
        for laid in want:  # those without elements here
            if any(rank == self.everyone.rank for _, rank in laid.ranks):
                room(laid.name)
        return {alias: tensor for name, tensor in made.items() for alias in rows[name].tied}

    # The optimizer

    def look(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> _Trained:
        """Return what is known of an optimizer, by names."""
        of, kept = known(model), dict[str, torch.Tensor]()
        items = {item.name: item for item in optimizer_items(optimizer, of, self.everyone.size)}
        laid = everywhere(self.everyone, "tell of the optimizer", None, items)
        told = self.everyone.gather("describe the optimizer", lambda: describe(optimizer, of, kept.__setitem__))
        return _Trained(optimizer, items, {each.name: each for each in laid}, joined(told), kept)

    def move_optimizer(self, model: nn.Module, trained: _Trained) -> None:
        """Give an optimizer the new parameters, and their state."""
        of, optimizer = known(model), trained.optimizer
        here = {name: param for param, name in ((p, of.names[id(p)]) for p in model.parameters())}
        for group, told in zip(optimizer.param_groups, trained.description["groups"], strict=True):
            own = set(told["params"])
            group["params"] = [param for name, param in here.items() if name in own]
        optimizer.state.clear()
        for names in self._chunks(trained):
            self._move_state(names, {_param_of(name) for name in names}, trained, of)
        self._move_state([], trained.description["values"].keys() - set(map(_param_of, trained.laid)), trained, of)

    def _move_state(self, names: Sequence[str], params: Set[str], trained: _Trained, of: Known) -> None:
        """Move the state of some parameters, given the names of its tensors."""
        saved = {name: Saved(trained.laid[name].shape, trained.laid[name].dtype, ()) for name in names}
        values = {name: value for name, value in trained.description["values"].items() if name in params}
        get, size = trained.kept.__getitem__, self.everyone.size
        rooms, state = make_state(trained.optimizer, of, saved, values, {}, get, size)
        items = dict(rooms)
        want = {laid.name: laid for laid in everywhere(self.everyone, "tell of new state", None, items)}
        pairs = [Pair(trained.laid[name], want[name]) for name in names if name in want]
        give, take = partial(local_of, trained.items), partial(local_of, items)
        self.carry("move the optimizer", pairs, give, take, trained.items.pop)
        trained.optimizer.state.update(state)

    def _chunks(self, trained: _Trained) -> Iterator[list[str]]:
        """Cut the names of state into runs of parameters whose state takes a bucket on a rank."""
        chunk, size = list[str](), 0
        last = ""
        for name, laid in trained.laid.items():
            param = _param_of(name)
            each = math.prod(laid.shape) * laid.dtype.itemsize // len(laid.ranks)
            if param != last and chunk and size + each > self.bucket_bytes:
                yield chunk
                chunk, size = [], 0
            chunk.append(name)
            size, last = size + each, param
        if chunk:
            yield chunk


def _param_of(name: str) -> str:
    """Return the parameter whose state has a tensor of this name, "state.<parameter>.<key>"."""
    return name.removeprefix("state.").rpartition(".")[0]


def _free(tensor: torch.Tensor) -> None:
    """Free the memory of a tensor that the model still has, unless others share it."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == tensor.numel() * tensor.itemsize and storage.resizable():
        storage.resize_(0)

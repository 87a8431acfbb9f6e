"""`reshard`: change the mesh and the plan of a model that trains, in place, with its optimizers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardlib._mesh import device_here
from shardlib._mesh import mesh as make_mesh
from shardlib._mesh_shape import MeshLike
from shardlib._plan import Plan, Row
from shardlib._plan.moves import Laid, Moves, Pair, laid_by, matched
from shardlib.checkpoint._items import Item, first_names
from shardlib.checkpoint._manifest import Saved
from shardlib.checkpoint._optimizer import Known, describe, inner_of, joined, known, make_state, optimizer_items
from shardlib.checkpoint._peers import Peers, peers
from shardlib.engine import _torch
from shardlib.engine.apply import apply_plan
from shardlib.engine.apply.copies import bare_again
from shardlib.engine.data import params
from shardlib.engine.data.full_step import MASTER
from shardlib.engine.data.optimizer import steps_whole_tensors, watch_optimizers
from shardlib.engine.data.reduction import register_gradient_reduction
from shardlib.engine.ranks import agree
from shardlib.engine.sharded import param_state_of, record_of, wait_for_updates
from shardlib.engine.torn import torn
from shardlib.errors import ShardingError, short_traceback
from shardlib.weights._carry import carry
from shardlib.weights._lying import all_items_of, everywhere, local_of
from shardlib.weights._replanned import check, let_train, ranks_of, refuse_part, replanned, splits, training

__all__ = ["reshard"]

M = TypeVar("M", bound=nn.Module)


@short_traceback
@torch.inference_mode(False)
def reshard(
    model: M,
    plan: MeshLike | Plan,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
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
        optimizer: the model's optimizer, or several. Their groups get the new parameters; schedulers need no change.
        bucket_mb: most megabytes that a rank sends, and that it receives, at a time.
        node: the number of ranks that share a node: among ranks that hold the same element, one of the same node sends.
        timeout: seconds that ranks wait for each other in each phase; by default those of the job's process group.

    Returns:
        The same model. Its parameters are new ones: an optimizer that was not given is of no use any more, and refused.

    Raises:
        ShardingError: the model is not sharded, a step has begun, or the layout of optimizer state is not known.
        PlanError, LayoutError, MeshError: the rules cannot be carried out on this mesh. Nothing has changed.
        CheckpointError: ranks gave different arguments, or a rank is lost.

    Example:
        >>> import shardlib as sl
        >>> model = sl.shard_model(nn.Linear(4, 8), "dp=1", {"**": "colwise"})
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> sl.get_plan(reshard(model, "tp=1", optimizer)).mesh
        MeshShape("tp=1")
    """
    refuse_part(module := _torch.without_compiled_wrapper(model))
    everyone = peers("sl.reshard", f"resharding {type(module).__name__}", timeout, keeps_kinds=True)
    several = isinstance(optimizer, list | tuple)
    optimizers: list[Any] = [*optimizer] if several else [] if optimizer is None else [optimizer]  # type: ignore[misc]
    mesh = plan.mesh if isinstance(plan, Plan) else plan
    everyone.run("check arguments", lambda: check(module, optimizers, mesh, bucket_mb, node))
    device_mesh = make_mesh(mesh)
    ranks, trains = ranks_of(device_mesh), training(everyone, module)
    target = everyone.run("plan", lambda: replanned(module, plan, device_mesh, trains))
    everyone.compare(plan=_brief(target, ranks), bucket_mb=bucket_mb, node=node)
    _Job(everyone, int(bucket_mb * 2**20), node, target, device_mesh, ranks).reshard(module, optimizers, trains)
    return model


def _brief(plan: Plan, ranks: Sequence[int]) -> str:
    """Return a short text that is another one for another plan."""
    digest = hashlib.sha256("\n".join(plan.lines()).encode()).hexdigest()[:8]
    return f'"{plan.mesh}" on ranks {list(ranks)}, {" | ".join(plan.transforms) or "no transforms"}, rows {digest}'


@dataclass
class _Trained:
    """An optimizer before the model was resharded.

    Attributes:
        items: the tensors of its state on this rank, by name, until they have been moved.
        laid: how all of them lie, in order.
        description: groups with names and other state, of all stages.
        kept: tensors among the options.
        own_dtype: the tensors of its state that have another dtype than their parameter.
    """

    optimizer: torch.optim.Optimizer
    items: dict[str, Item]
    laid: dict[str, Laid]
    description: dict[str, Any]
    kept: dict[str, torch.Tensor]
    own_dtype: Set[str]


@dataclass
class _Job:
    """The ranks that reshard together, and the plan that they change to."""

    everyone: Peers
    bucket_bytes: int
    node: int
    plan: Plan
    device_mesh: DeviceMesh
    ranks: tuple[int, ...]

    def reshard(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], trains: Mapping[str, bool]
    ) -> None:
        record = record_of(model)
        carrier = self._carrier(model, optimizers)
        every = [self.look(model, each) for each in (*optimizers, *carrier)]
        self.everyone.run("look at optimizers", lambda: self._refuse_state(every))
        wait_for_updates(model.parameters())
        features = {name: kept.state_dict() for name, kept in record.stateful.items()}
        watch_optimizers({param: name for name, param in model.named_parameters()})
        for param in model.parameters():
            if param.requires_grad:
                param.register_hook(_torch.own_hook(_refuse_old_loss))
        with torn(model, "reshard"):
            shards = self.move_model(model)
            bare_again(model)
            _torch.forget_specs()  # an equal sub-mesh of the old mesh has other copies
            let_train(model, trains)
            apply_plan(model, self.plan, self.device_mesh, values=shards, **record.options)
            for name, kept in record_of(model).stateful.items():
                if name in features:
                    kept.load_state_dict(features[name])
            if (reduction := record.reducer.reductions.registered) is not None:
                register_gradient_reduction(model, reduction)
            for each in every:
                self.move_optimizer(model, each)
            for sgd in carrier:
                _keep_masters(sgd)

    def carry(self, phase: str, moves: Moves, source: Any, target: Any, gone: Any) -> None:
        carry(self.everyone, phase, moves, source, target, bucket_bytes=self.bucket_bytes, gone=gone)

    # The model

    def move_model(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return this rank's local shards of the new plan, by name; the model loses its own."""
        plan, rank = self.plan, self.everyone.rank
        first = first_names(model)
        tensors = {first.get(name, name): tensor for name, tensor in agree.named_tensors(model).items()}
        items = all_items_of(model, self.everyone.size)
        have = everywhere(self.everyone, "tell of the model", model, items)
        rows = {row.name: row for row in plan.rows}
        want = [replace(laid, dtype=rows[laid.name].dtype) for laid in laid_by(plan, self.ranks)]
        device, at = device_here(self.device_mesh.device_type), plan.mesh.coordinate(self.ranks.index(rank))
        made = dict[str, torch.Tensor]()

        def room(name: str) -> torch.Tensor:
            if name not in made:
                row = rows[name]
                shape = row.stored.local_shape(row.global_shape, plan.mesh, at)
                made[name] = torch.empty(shape, dtype=row.dtype, device=device)
            return made[name]

        def gone(name: str) -> None:
            del items[name]
            _free(tensors.pop(name))

        moves = Moves(matched(have, want), self.node)
        for name in items.keys() - {move.source_name for move in moves.all if move.source == rank}:
            gone(name)  # other ranks give what this one has too
        self.carry("move the model", moves, partial(local_of, items), room, gone)
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
        own = {each.name for each in laid if each.dtype != _dtype_of(of.rows[_param_of(each.name)])}
        return _Trained(optimizer, items, {each.name: each for each in laid}, joined(told), kept, own)

    def _carrier(self, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
        """Return an optimizer with the wide copies that no given one steps on, if there are any on any rank."""
        given = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
        states = [one for one in record_of(model).reducer.param_states if one.mutable.master is not None]
        rest = [one.param for one in states if id(one.param) not in given]
        some = any(self.everyone.gather("count wide copies", lambda: len(rest)))
        return [torch.optim.SGD([{"params": rest}])] if some else []

    def _refuse_state(self, every: Iterable[_Trained]) -> None:
        """Refuse state whose new layout is not known, or that has tensors inside of others."""
        for trained in every:
            nested = next((name for name in trained.kept if name.startswith("optimizer.state.")), None)
            if nested is not None:
                raise ShardingError(
                    f'"{nested}" is a tensor inside of a list or dict, whose layout is not known. Let the optimizer '
                    "keep each tensor by itself in its state; or reshard without it, and build a new one."
                )
            if steps_whole_tensors(inner_of(trained.optimizer)):
                continue
            for name, laid in trained.laid.items():
                row = self.plan[_param_of(name)]
                if laid.shape != row.global_shape and math.prod(laid.shape) != 1 and splits(row, self.plan.mesh) > 1:
                    raise ShardingError(
                        f'Optimizer state "{name}" has shape {laid.shape}, and its parameter, of global shape '
                        f"{row.global_shape}, is sharded by the new plan: the layout of this state is not known. "
                        "Reshard without the optimizer, and build a new one; or register its class by "
                        'sl.register_optimizer(needs="tensor").'
                    )

    def move_optimizer(self, model: nn.Module, trained: _Trained) -> None:
        """Give an optimizer the new parameters, and their state."""
        of, optimizer = known(model), trained.optimizer
        called = {param: name for name, param in model.named_parameters()}
        here = {of.names[id(param)]: param for param in called}
        for group, told in zip(optimizer.param_groups, trained.description["groups"], strict=True):
            group["params"] = [here[name] for name in told["params"] if name in here]
            if "param_names" in group:
                group["param_names"] = [called[param] for param in group["params"]]
        optimizer.state.clear()
        for names in self._chunks(trained):
            self._move_state(names, {_param_of(name) for name in names}, trained, of)
        self._move_state([], trained.description["values"].keys() - set(map(_param_of, trained.laid)), trained, of)

    def _move_state(self, names: Sequence[str], params: Set[str], trained: _Trained, of: Known) -> None:
        """Move the state of some parameters, given the names of its tensors."""
        saved = {name: Saved(trained.laid[name].shape, trained.laid[name].dtype, ()) for name in names}
        values = {name: value for name, value in trained.description["values"].items() if name in params}
        get, size = trained.kept.__getitem__, self.everyone.size
        rooms, state = make_state(trained.optimizer, of, saved, values, {}, get, size, kept=trained.own_dtype)
        items = dict(rooms)
        want = {laid.name: laid for laid in everywhere(self.everyone, "tell of new state", None, items)}
        pairs = [Pair(trained.laid[name], want[name]) for name in names if name in want]
        give, take = partial(local_of, trained.items), partial(local_of, items)
        self.carry("move the optimizer", Moves(tuple(pairs), self.node), give, take, trained.items.pop)
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


def _dtype_of(row: Row) -> torch.dtype:
    """Return the dtype that state has which has none of its own: that of the plan, or of the parameter."""
    layout = row.state if row.state is not None and row.state.dtype is not None else row.stored
    return layout.dtype or row.dtype


def _free(tensor: torch.Tensor) -> None:
    """Free the memory of a tensor that the model still has. What else shares it, as a state dict does, keeps it."""
    local = _torch.local_of(tensor) if isinstance(tensor, DTensor) else tensor
    local.data = torch.empty(0, dtype=local.dtype, device=local.device)


def _keep_masters(carrier: torch.optim.Optimizer) -> None:
    """Give wide copies back to their parameters, until the state of an optimizer has them."""
    for param, state in carrier.state.items():
        if (master := state.get(MASTER)) is not None and (param_state := param_state_of(param)) is not None:
            param_state.keep_master(params.local_of(master))


def _refuse_old_loss(_grad: torch.Tensor) -> None:
    raise ShardingError(
        "backward() was called on a loss from before reshard(), whose graph ends in the parameters of before. Compute "
        "the loss again."
    )

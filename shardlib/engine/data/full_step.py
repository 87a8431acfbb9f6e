"""Step optimizers that need full tensors: each full tensor is on one rank, its owner, which steps it for all ranks.

LAMB takes norms of full parameters, Adafactor sums of rows and columns, Muon full matrices. Tensors are assigned to the
ranks of the mesh by size. For a step, the gradient, parameter and state of a tensor are gathered at its owner, and
afterwards scattered in the layouts of the plan. Between steps they are laid out as those of any other optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardlib._mesh_shape import MeshShape
from shardlib._plan import Movement, Purpose, state_update
from shardlib.engine import _torch
from shardlib.engine.data import offload
from shardlib.engine.data.params import ParamState, local_of
from shardlib.engine.ranks import agree
from shardlib.layout import Layout
from shardlib.layout._local import put_shard

__all__ = ["MASTER", "FullTensorStep"]

MASTER = "master_parameter"
"""The key in the optimizer's state of the copy that is stepped on, where the plan has one."""


@dataclass(eq=False)
class _Owned:
    """The step of one tensor.

    Attributes:
        param_state: the parameter.
        owner: the rank of the mesh that steps the parameter.
        movements: the movements of the parameter in the step, by purpose.
        leaf: the full parameter, on the owner.
    """

    param_state: ParamState
    owner: int
    movements: Mapping[Purpose, Movement]
    leaf: torch.Tensor | None = None

    @classmethod
    def of(cls, param_state: ParamState, owner: int) -> _Owned:
        every = param_state.list_movements(param_state.row, "per_tensor")
        return cls(param_state, owner, {purpose: param_state.named(one) for purpose, one in every.items()})


@dataclass(eq=False)
class _Move:
    """One tensor that moves to its owner, or from it.

    Attributes:
        one: the parameter that the tensor belongs to.
        movement: the movement of the plan.
        local: this rank's shard, to be sent or to be filled.
        full: the full tensor, on the owner.
        key: its key in the optimizer's state.
    """

    one: _Owned
    movement: Movement
    local: torch.Tensor
    full: torch.Tensor | None = None
    key: str = ""


class FullTensorStep:
    """One step, from gathering to scattering. Collective over the mesh of the parameters.

    Args:
        param_states: the parameters that have gradients, the same in the same order on every rank.
    """

    def __init__(self, param_states: Sequence[ParamState]) -> None:
        self.shape = MeshShape.of(param_states[0].mesh)
        axes = tuple(axis for axis, size in self.shape.items() if size > 1)
        self.executor = param_states[0].executor
        self.transport = self.executor.transport(axes) if axes else None
        self.rank = 0 if self.transport is None else self.transport.index
        in_order = _torch.ranks_of_mesh(param_states[0].mesh)
        ranks = in_order if self.transport is None else self.transport.ranks
        self.coordinates = [self.shape.at(in_order.index(rank)) for rank in ranks]
        self.tensors = [
            _Owned.of(one, owner) for one, owner in zip(param_states, _owners(param_states, len(ranks)), strict=True)
        ]

    @property
    def leaves(self) -> dict[torch.Tensor, torch.Tensor]:
        """The full parameters that this rank steps, by the model's parameters."""
        return {one.param_state.param: one.leaf for one in self.tensors if one.leaf is not None}

    # --- before -------------------------------------------------------------------------------------------------------

    def gather(self, state: Mapping[torch.Tensor, Mapping[str, Any]]) -> dict[torch.Tensor, dict[str, Any]]:
        """Gather the full parameters and gradients of `leaves`; return their full state.

        Args:
            state: the optimizer state by parameter, in the layouts between steps, with this rank's shard of the copy
                that is stepped on under `MASTER`.
        """
        parameters, gradients, states = list[_Move](), list[_Move](), list[_Move]()
        full: dict[torch.Tensor, dict[str, Any]] = {}
        for one in self.tensors:
            param = one.param_state.param
            assert param.grad is not None
            values = dict(state[param])
            if (master := values.pop(MASTER, None)) is None:
                parameters.append(_Move(one, one.movements["parameters, step"], local_of(param)))
            else:
                parameters.append(_Move(one, one.movements["state, step"], master))
            gradients.append(_Move(one, one.movements["gradients, step"], local_of(param.grad)))
            for key, value in values.items():
                if isinstance(value, DTensor):
                    if "state, step" in one.movements:
                        states.append(_Move(one, one.movements["state, step"], local_of(value), key=key))
                        continue
                    value = local_of(value)  # all of it: a checkpoint was loaded into a replicated tensor
                if one.owner == self.rank:
                    away = isinstance(value, torch.Tensor) and "state" in one.param_state.offloaded
                    full.setdefault(param, {})[key] = value.to(offload.HOST) if away else value
        for one, _, leaf in self._to_owners(parameters):
            one.leaf = leaf
        for one, _, grad in self._to_owners(gradients):
            assert one.leaf is not None
            one.leaf.grad = grad.to(one.leaf.dtype)
        for one, key, value in self._to_owners(states):
            full.setdefault(one.param_state.param, {})[key] = value
        leaves = self.leaves
        return {leaves[param]: values for param, values in full.items()}

    # --- after --------------------------------------------------------------------------------------------------------

    def scatter(self, state: Mapping[torch.Tensor, Mapping[str, Any]]) -> dict[torch.Tensor, dict[str, Any]]:
        """Scatter updated parameters into their memory; return the state by parameter, in the layouts between steps.

        Args:
            state: the optimizer state by leaf, on the ranks that own leaves.
        """
        moves = []
        for one in self.tensors:
            memory = local_of(one.param_state.param)
            low = None if one.leaf is None else one.leaf.detach().to(memory.dtype)
            moves.append(_Move(one, one.movements["updated parameters"], memory, low))
        self._from_owners(moves)
        return self._scatter_state(state)

    def _scatter_state(self, state: Mapping[torch.Tensor, Mapping[str, Any]]) -> dict[torch.Tensor, dict[str, Any]]:
        full: dict[int, dict[str, Any]] = {}
        for i, one in enumerate(self.tensors):
            if one.leaf is not None:
                master = {} if one.param_state.master_dtype is None else {MASTER: one.leaf}
                full[i] = {**state.get(one.leaf, {}), **master}
        described_here = {i: {key: _described(value) for key, value in values.items()} for i, values in full.items()}
        group = None if self.transport is None else self.transport.group
        described = {i: keys for entry in agree.exchange(described_here, group) for i, keys in entry.items()}
        made: dict[torch.Tensor, dict[str, Any]] = {}
        moves = []
        for i, one in enumerate(self.tensors):
            param_state, row = one.param_state, one.param_state.row
            for key, (shape, dtype, value) in described[i].items():
                if shape is not None:
                    update = param_state.named(state_update(row, self.shape, shape))
                    size = update.target.local_shape(shape, self.shape, self.coordinates[self.rank])
                    local = torch.empty(size, dtype=dtype, device=param_state.state_device)
                    moves.append(_Move(one, update, local, full.get(i, {}).get(key)))
                    split = shape and shape == row.global_shape and param_state.has_sharded_state
                    value = param_state.wrap(local) if split else local
                made.setdefault(param_state.param, {})[key] = value
        self._from_owners(moves)
        return made

    # --- moving -------------------------------------------------------------------------------------------------------

    def _to_owners(self, moves: Iterable[_Move]) -> Iterator[tuple[_Owned, str, torch.Tensor]]:
        """Gather full tensors at their owners from the local shards of all ranks; of replicas, the first one is sent.

        A full tensor is on the host if its state is offloaded. It is sent from device to device.
        """
        for wave in _waves(moves):
            yield from self._send_to_owners(wave)

    def _send_to_owners(self, moves: Sequence[_Move]) -> Iterator[tuple[_Owned, str, torch.Tensor]]:
        sends, receives, arriving = [], [], []
        for move in moves:
            source, local, owner = move.movement.source, move.local, move.one.owner
            shape, device = move.movement.global_shape, move.one.param_state.device
            holders = [rank for rank, at in enumerate(self.coordinates) if source.replica_id(self.shape, at) == 0]
            if self.rank in holders and self._copies(move, source):
                local = local.to(device)
            if owner == self.rank:
                move.full = torch.empty(shape, dtype=local.dtype, device=device)
                for rank in holders:
                    slices = source.local_slices(shape, self.shape, self.coordinates[rank])
                    size = source.local_shape(shape, self.shape, self.coordinates[rank])
                    shard = local if rank == self.rank else torch.empty(size, dtype=local.dtype, device=device)
                    if rank != self.rank and shard.numel():
                        receives.append((shard, rank))
                    arriving.append((move.full, slices, shard))
            elif self.rank in holders and local.numel():
                sends.append((local.contiguous(), owner))
        self._exchange("gather", sends, receives, moves)
        for full, slices, shard in arriving:
            put_shard(full, slices, shard)
        for move in moves:
            if move.full is not None:
                device, copies = move.one.param_state.device, self._copies(move, move.movement.target)
                yield move.one, move.key, offload.on_host(move.full, device) if copies else move.full

    def _copies(self, move: _Move, end: Layout) -> bool:
        """Tell whether one end of a movement is on the host, and record the copy."""
        if end.memory != "host" or not move.one.param_state.offloaded:
            return False
        self.executor.copied([move.movement])
        return True

    def _from_owners(self, moves: Iterable[_Move]) -> None:
        """Scatter the owners' full tensors into the local memory of every rank."""
        for wave in _waves(moves):
            self._send_from_owners(wave)

    def _send_from_owners(self, moves: Sequence[_Move]) -> None:
        sends, receives, arriving = [], [], []
        for move in moves:
            device, layout, memory = move.one.param_state.device, move.movement.target, move.local
            if move.one.owner == self.rank:
                assert move.full is not None
                self._copies(move, move.movement.source)
                for rank, coordinate in enumerate(self.coordinates):
                    shard = layout.take(move.full.detach(), self.shape, coordinate)
                    if rank == self.rank:
                        memory.copy_(shard)
                    elif shard.numel():
                        sends.append((shard.to(memory.dtype).to(device).contiguous(), rank))
            elif memory.numel():
                fit = memory.is_contiguous() and memory.device == device
                target = memory if fit else torch.empty(memory.shape, dtype=memory.dtype, device=device)
                receives.append((target, move.one.owner))
                arriving.append((move, target))
        self._exchange("scatter", sends, receives, moves)
        for move, target in arriving:
            self._copies(move, move.movement.target)
            if target is not move.local:
                move.local.copy_(target)

    def _exchange(self, kind: str, sends: list[Any], receives: list[Any], moves: Sequence[_Move]) -> None:
        if self.transport is not None:
            self.transport.exchange(kind, sends, receives, (move.movement for move in moves)).wait()


def _waves(moves: Iterable[_Move]) -> Iterator[list[_Move]]:
    """Yield what moves together; offloaded tensors move one by one, since the device need not hold them all."""
    together: list[_Move] = []
    apart: list[_Move] = []
    for move in moves:
        (apart if move.one.param_state.offloaded else together).append(move)
    yield from ([together] if together else [])
    yield from ([move] for move in apart)


def _owners(param_states: Sequence[ParamState], ranks: int) -> list[int]:
    """Return the owner of each tensor: the largest tensor first, to the rank that has least so far."""
    load, owner = [0] * ranks, {}
    for i in sorted(range(len(param_states)), key=lambda i: (-param_states[i].param.numel(), i)):
        owner[i] = load.index(min(load))
        load[owner[i]] += param_states[i].param.numel()
    return [owner[i] for i in range(len(param_states))]


def _described(value: Any) -> tuple[tuple[int, ...] | None, torch.dtype | None, Any]:
    """Return the shape and dtype of a tensor, or a value that is not a tensor."""
    return (tuple(value.shape), value.dtype, None) if isinstance(value, torch.Tensor) else (None, None, value)

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

from shardlib._mesh import MeshShape
from shardlib._plan import Movement, Purpose, state_update
from shardlib.engine import _torch, agree, offload
from shardlib.engine.params import ParamState, local_of
from shardlib.layout import Layout

__all__ = ["FullTensorStep"]


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
        return cls(param_state, owner, param_state.list_movements(param_state.row, "per_tensor"))


class FullTensorStep:
    """One step, from gathering to scattering. Collective over the mesh of the parameters.

    Args:
        param_states: the parameters that have gradients, the same in the same order on every rank.
        masters: this rank's shards of master copies, by the parameter's id, where the optimizer steps on copies.
    """

    def __init__(self, param_states: Sequence[ParamState], masters: dict[int, torch.Tensor]) -> None:
        self.masters = masters
        self.mesh = param_states[0].mesh
        self.shape = MeshShape.of(self.mesh)
        axes = tuple(axis for axis, size in self.shape.items() if size > 1)
        self.executor = param_states[0].executor
        self.transport = self.executor.transport(axes) if axes else None
        self.rank = 0 if self.transport is None else self.transport.index
        self.count = 1 if self.transport is None else self.transport.count
        owners = _owners(param_states, self.count)
        self.tensors = [_Owned.of(one, owner) for one, owner in zip(param_states, owners, strict=True)]

    @property
    def owned(self) -> list[_Owned]:
        """The tensors that this rank steps."""
        return [one for one in self.tensors if one.owner == self.rank]

    # --- before -------------------------------------------------------------------------------------------------------

    def gather(self, state: Any) -> dict[torch.Tensor, dict[str, Any]]:
        """Gather full parameters and gradients into the leaves of `owned`; return their full state.

        Args:
            state: the optimizer state by parameter, in the layouts between steps.
        """
        jobs = []
        for one in self.tensors:
            param_state = one.param_state
            master = self.masters.get(id(param_state.param))
            if master is None:
                jobs.append((one, one.movements["parameters, step"], local_of(param_state.param)))
            else:
                jobs.append((one, one.movements["state, step"], master))
        for one, leaf in self._to_owners(jobs):
            one.leaf = leaf
        jobs = [(one, one.movements["gradients, step"], local_of(_grad(one.param_state))) for one in self.tensors]
        for one, grad in self._to_owners(jobs):
            assert one.leaf is not None
            one.leaf.grad = grad.to(one.leaf.dtype)
        return self._gather_state(state)

    def _gather_state(self, state: Any) -> dict[torch.Tensor, dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        jobs = []
        for one in self.tensors:
            for key, value in state.get(one.param_state.param, {}).items():
                if isinstance(value, DTensor):
                    jobs.append(((one, key), one.movements["state, step"], local_of(value)))
                else:
                    away = isinstance(value, torch.Tensor) and "state" in one.param_state.offloaded
                    found.setdefault(id(one), {})[key] = value.to(offload.HOST) if away else value
        for (one, key), full in self._to_owners(jobs):
            found.setdefault(id(one), {})[key] = full
        return {one.leaf: found[id(one)] for one in self.owned if id(one) in found and one.leaf is not None}

    # --- after --------------------------------------------------------------------------------------------------------

    def scatter(self, state: Any) -> dict[torch.Tensor, dict[str, Any]]:
        """Scatter updated parameters into their memory; return the state by parameter, in the layouts between steps.

        Args:
            state: the optimizer state by leaf, on the ranks that own leaves.
        """
        jobs: list[Any] = []
        for one in self.tensors:
            param_state, memory = one.param_state, local_of(one.param_state.param)
            low = None if one.leaf is None else one.leaf.detach().to(memory.dtype)
            jobs.append((one, one.movements["updated parameters"], low, memory))
            if (master := self.masters.get(id(param_state.param))) is not None:
                jobs.append(
                    (one, state_update(param_state.row, self.shape, param_state.row.global_shape), one.leaf, master)
                )
        self._from_owners(jobs)
        return self._scatter_state(state)

    def _scatter_state(self, state: Any) -> dict[torch.Tensor, dict[str, Any]]:
        described_here = {
            i: {key: _described(value) for key, value in state.get(one.leaf, {}).items()}
            for i, one in enumerate(self.tensors)
            if one.owner == self.rank
        }
        group = None if self.transport is None else self.transport.group
        described = {i: keys for entry in agree.exchange(described_here, group) for i, keys in entry.items()}
        made: dict[torch.Tensor, dict[str, Any]] = {}
        jobs = []
        for i, one in enumerate(self.tensors):
            param_state, param = one.param_state, one.param_state.param
            for key, (shape, dtype, value) in described[i].items():
                full = state[one.leaf][key] if one.owner == self.rank else None
                if shape is None:
                    made.setdefault(param, {})[key] = value
                    continue
                update = state_update(param_state.row, self.shape, shape)
                size = update.target.local_shape(shape, self.shape, self.shape.at(self.rank))
                memory = torch.empty(size, dtype=dtype, device=param_state.state_device)
                jobs.append((one, update, full, memory))
                split = shape and shape == param_state.row.global_shape and param_state.has_sharded_state
                made.setdefault(param, {})[key] = param_state.wrap(memory) if split else memory
        self._from_owners(jobs)
        return made

    # --- moving -------------------------------------------------------------------------------------------------------

    def _to_owners(self, jobs: Iterable[tuple[Any, Movement, torch.Tensor]]) -> list[tuple[Any, torch.Tensor]]:
        """Gather full tensors at their owners from the local shards of all ranks; of replicas, the first one is sent.

        A full tensor is on the host if its state is offloaded. It is sent from device to device.
        """
        return [made for wave in _waves(jobs) for made in self._send_to_owners(wave)]

    def _send_to_owners(self, jobs: Sequence[tuple[Any, Movement, torch.Tensor]]) -> list[tuple[Any, torch.Tensor]]:
        sends, receives, arriving, made = [], [], [], []
        for key, movement, local in jobs:
            one, holders = _owned(key), self._first_holders(movement.source)
            shape, device = movement.global_shape, one.param_state.device
            if self.rank in holders and self._copies(one, movement, movement.source):
                local = offload.on_device(local, device)
            if one.owner == self.rank:
                full = torch.empty(shape, dtype=local.dtype, device=device)
                made.append((key, movement, full))
            for rank in holders:
                coordinate = self.shape.at(rank)
                size = movement.source.local_shape(shape, self.shape, coordinate)
                if not torch.Size(size).numel():
                    continue
                if one.owner == self.rank:
                    shard = local if rank == self.rank else torch.empty(size, dtype=local.dtype, device=device)
                    if rank != self.rank:
                        receives.append((shard, rank))
                    arriving.append((full, movement.source, coordinate, shard))
                elif rank == self.rank:
                    sends.append((local.contiguous(), one.owner))
        self._exchange("gather", sends, receives, (movement for _, movement, _ in jobs))
        for full, layout, coordinate, shard in arriving:
            _copy_shard(full, layout, self.shape, coordinate, shard)
        return [(key, self._in_stepping_memory(_owned(key), movement, full)) for key, movement, full in made]

    def _in_stepping_memory(self, one: _Owned, movement: Movement, full: torch.Tensor) -> torch.Tensor:
        copies = self._copies(one, movement, movement.target)
        return offload.on_host(full, one.param_state.device) if copies else full

    def _copies(self, one: _Owned, movement: Movement, end: Layout) -> bool:
        """Tell whether one end of a movement is on the host, and record the copy."""
        if end.memory != "host" or not one.param_state.offloaded:
            return False
        self.executor.copied([movement])
        return True

    def _from_owners(self, jobs: Iterable[tuple[_Owned, Movement, torch.Tensor | None, torch.Tensor]]) -> None:
        """Scatter the owners' full tensors into the local memory of every rank."""
        for wave in _waves(jobs):
            self._send_from_owners(wave)

    def _send_from_owners(self, jobs: Sequence[tuple[_Owned, Movement, torch.Tensor | None, torch.Tensor]]) -> None:
        sends, receives, arriving = [], [], []
        for one, movement, full, memory in jobs:
            device, layout = one.param_state.device, movement.target
            if one.owner == self.rank:
                assert full is not None
                self._copies(one, movement, movement.source)
                for rank in range(self.count):
                    shard = layout.take(full.detach(), self.shape, self.shape.at(rank))
                    if rank == self.rank:
                        memory.copy_(shard)
                    elif shard.numel():
                        sent = offload.on_device(shard.to(memory.dtype), device).contiguous()
                        sends.append((sent, rank))
            elif memory.numel():
                fit = memory.is_contiguous() and memory.device == device
                target = memory if fit else torch.empty(memory.shape, dtype=memory.dtype, device=device)
                receives.append((target, one.owner))
                arriving.append((one, movement, memory, target))
        self._exchange("scatter", sends, receives, (movement for _, movement, _, _ in jobs))
        for one, movement, memory, target in arriving:
            self._copies(one, movement, movement.target)
            if target is not memory:
                memory.copy_(target)

    def _exchange(self, kind: str, sends: list[Any], receives: list[Any], carries: Iterable[Movement]) -> None:
        if self.transport is not None:
            self.transport.exchange(kind, sends, receives, carries).wait()

    def _first_holders(self, layout: Layout) -> list[int]:
        replicated = [axis for axis in self.shape.names if axis not in layout.axes]
        return [r for r in range(self.count) if not any(self.shape.at(r)[axis] for axis in replicated)]


def _owned(key: Any) -> _Owned:
    """Return the tensor that a job moves; the job's key is a tuple where it moves state."""
    one = key[0] if isinstance(key, tuple) else key
    assert isinstance(one, _Owned)
    return one


def _waves(jobs: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield the jobs that move together; offloaded tensors move one by one, since the device need not hold them all."""
    together: list[Any] = []
    apart: list[Any] = []
    for job in jobs:
        (apart if _owned(job[0]).param_state.offloaded else together).append(job)
    yield from ([together] if together else [])
    yield from ([job] for job in apart)


def _owners(param_states: Sequence[ParamState], ranks: int) -> list[int]:
    """Return the owner of each tensor: the largest tensor first, to the rank that has least so far."""
    load, owner = [0] * ranks, {}
    for i in sorted(range(len(param_states)), key=lambda i: (-param_states[i].param.numel(), i)):
        owner[i] = min(range(ranks), key=lambda rank: (load[rank], rank))
        load[owner[i]] += param_states[i].param.numel()
    return [owner[i] for i in range(len(param_states))]


def _grad(param_state: ParamState) -> torch.Tensor:
    assert param_state.param.grad is not None
    return param_state.param.grad


def _described(value: Any) -> tuple[tuple[int, ...] | None, torch.dtype | None, Any]:
    """Return the shape and dtype of a tensor, or a value that is not a tensor."""
    return (tuple(value.shape), value.dtype, None) if isinstance(value, torch.Tensor) else (None, None, value)


def _copy_shard(
    full: torch.Tensor, layout: Layout, mesh: MeshShape, coordinate: dict[str, int], shard: torch.Tensor
) -> None:
    target, done = [full], [shard]
    for dim, slices in enumerate(layout.local_slices(tuple(full.shape), mesh, coordinate)):
        offset = 0
        pieces, sources = [], []
        for chosen in slices:
            size = chosen.stop - chosen.start
            pieces += [t.narrow(dim, chosen.start, size) for t in target]
            sources += [s.narrow(dim, offset, size) for s in done]
            offset += size
        target, done = pieces, sources
    _torch.copy_all(target, done)

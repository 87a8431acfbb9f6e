"""Optimizers that need whole tensors: each tensor is whole on one rank, which steps it for all.

LAMB takes norms of whole parameters, Adafactor sums of rows and columns, Muon whole matrices. The ranks of the mesh
share the tensors among them by size. For a step, gradient, parameter and state of a tensor are gathered at its owner,
and afterwards handed out again in the layouts of the plan, so that between steps they lie like any optimizer's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardlib._mesh import MeshShape
from shardlib.engine import _torch, agree, offload
from shardlib.engine.held import Held, local_of
from shardlib.engine.transport import exchange
from shardlib.layout import Layout

__all__ = ["WholeStep"]


@dataclass(eq=False)
class _Owned:
    """One tensor's step.

    Attributes:
        held: the parameter.
        owner: the rank of the mesh that steps it.
        leaf: the whole parameter, on the owner.
    """

    held: Held
    owner: int
    leaf: torch.Tensor | None = None


class WholeStep:
    """One step, from gathering to handing out. Collective over the mesh of the parameters.

    Args:
        held: the parameters that have gradients, the same in the same order on every rank.
        masters: of those that have one, this rank's part of the copy that is stepped on.
    """

    def __init__(self, held: Sequence[Held], masters: dict[int, torch.Tensor]) -> None:
        self.masters = masters
        self.mesh = held[0].mesh
        self.shape = MeshShape.of(self.mesh)
        axes = tuple(axis for axis, size in self.shape.items() if size > 1)
        self.group = _torch.flattened(self.mesh, axes).get_group() if axes else None
        self.rank = 0 if self.group is None else dist.get_rank(self.group)
        self.count = 1 if self.group is None else dist.get_world_size(self.group)
        self.tensors = [_Owned(one, owner) for one, owner in zip(held, _owners(held, self.count), strict=True)]

    @property
    def own(self) -> list[_Owned]:
        return [one for one in self.tensors if one.owner == self.rank]

    # --- before -------------------------------------------------------------------------------------------------------

    def gather(self, state: Any) -> dict[torch.Tensor, dict[str, Any]]:
        """Whole parameters and gradients as leaves of `own`; returns their state, whole too.

        Args:
            state: the optimizer's, by parameter, as it lies between steps.
        """
        jobs = []
        for one in self.tensors:
            held = one.held
            master = self.masters.get(id(held.param))
            stored = (held.home, local_of(held.param)) if master is None else (held.layout, master)
            jobs.append((one, *stored))
        for one, leaf in self._to_owners(jobs):
            one.leaf = leaf
        jobs = [(one, one.held.grad_layout, local_of(_grad(one.held))) for one in self.tensors]
        for one, grad in self._to_owners(jobs):
            assert one.leaf is not None
            one.leaf.grad = grad.to(one.leaf.dtype)
        return self._whole_state(state)

    def _whole_state(self, state: Any) -> dict[torch.Tensor, dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        jobs = []
        for one in self.tensors:
            for key, value in state.get(one.held.param, {}).items():
                if isinstance(value, DTensor):
                    jobs.append(((one, key), one.held.layout, local_of(value)))
                else:
                    away = isinstance(value, torch.Tensor) and "state" in one.held.hosted
                    found.setdefault(id(one), {})[key] = value.to(offload.HOST) if away else value
        for (one, key), whole in self._to_owners(jobs):
            found.setdefault(id(one), {})[key] = whole
        return {one.leaf: found[id(one)] for one in self.own if id(one) in found and one.leaf is not None}

    # --- after --------------------------------------------------------------------------------------------------------

    def hand_out(self, state: Any) -> dict[torch.Tensor, dict[str, Any]]:
        """Write updated parameters where they lie; returns the state by parameter, as it lies between steps.

        Args:
            state: the optimizer's, by leaf, on the ranks that own some.
        """
        jobs: list[Any] = []
        for one in self.tensors:
            held, memory = one.held, local_of(one.held.param)
            low = None if one.leaf is None else one.leaf.detach().to(memory.dtype)
            jobs.append((one, held.home, low, memory))
            if (master := self.masters.get(id(held.param))) is not None:
                jobs.append((one, held.layout, one.leaf, master))
        self._from_owners(jobs)
        return self._state_in_parts(state)

    def _state_in_parts(self, state: Any) -> dict[torch.Tensor, dict[str, Any]]:
        mine = {
            i: {key: _described(value) for key, value in state.get(one.leaf, {}).items()}
            for i, one in enumerate(self.tensors)
            if one.owner == self.rank
        }
        described = {i: keys for entry in agree.exchange(mine, self.group) for i, keys in entry.items()}
        made: dict[torch.Tensor, dict[str, Any]] = {}
        jobs = []
        for i, one in enumerate(self.tensors):
            param = one.held.param
            for key, (shape, dtype, value) in described[i].items():
                here = state[one.leaf][key] if one.owner == self.rank else None
                if shape is None:
                    made.setdefault(param, {})[key] = value
                    continue
                split = shape == tuple(one.held.param.shape) and len(shape) > 0
                layout = one.held.layout if split else Layout.replicate(len(shape))
                place = self.shape.at(self.rank)
                size = layout.local_shape(shape, self.shape, place)
                memory = torch.empty(size, dtype=dtype, device=one.held.state_device)
                jobs.append((one, layout, here, memory))
                made.setdefault(param, {})[key] = one.held.wrap(memory) if split and one.held.is_split else memory
        self._from_owners(jobs)
        return made

    # --- moving -------------------------------------------------------------------------------------------------------

    def _to_owners(self, jobs: Iterable[tuple[Any, Layout, torch.Tensor]]) -> list[tuple[Any, torch.Tensor]]:
        """Whole tensors, on their owners, of the parts that ranks hold; of replicas the first one is sent.

        On the host where their state is. They travel from device to device.
        """
        made = []
        for wave in _waves(jobs):
            for key, whole in self._send_to_owners(wave):
                held = _owned(key).held
                made.append((key, offload.on_host(whole, held.device) if "state" in held.hosted else whole))
        return made

    def _send_to_owners(self, jobs: Iterable[tuple[Any, Layout, torch.Tensor]]) -> list[tuple[Any, torch.Tensor]]:
        sends, receives, arriving, made = [], [], [], []
        for key, layout, stored in jobs:
            one = _owned(key)
            shape, local = tuple(one.held.param.shape), offload.on_device(stored, one.held.device)
            if one.owner == self.rank:
                whole = torch.empty(shape, dtype=local.dtype, device=local.device)
                made.append((key, whole))
            for rank in self._first_holders(layout):
                place = self.shape.at(rank)
                size = layout.local_shape(shape, self.shape, place)
                if not torch.Size(size).numel():
                    continue
                if one.owner == self.rank:
                    part = local if rank == self.rank else torch.empty(size, dtype=local.dtype, device=local.device)
                    if rank != self.rank:
                        receives.append((part, rank))
                    arriving.append((whole, layout, place, part))
                elif rank == self.rank:
                    sends.append((local.contiguous(), one.owner))
        self._exchange(sends, receives)
        for whole, layout, place, part in arriving:
            _put(whole, layout, self.shape, place, part)
        return made

    def _from_owners(self, jobs: Iterable[tuple[_Owned, Layout, torch.Tensor | None, torch.Tensor]]) -> None:
        """What owners have whole, in parts, into the memory of every rank."""
        for wave in _waves(jobs):
            self._send_from_owners(wave)

    def _send_from_owners(self, jobs: Iterable[tuple[_Owned, Layout, torch.Tensor | None, torch.Tensor]]) -> None:
        sends, receives, arriving = [], [], []
        for one, layout, whole, memory in jobs:
            device = one.held.device
            if one.owner == self.rank:
                assert whole is not None
                for rank in range(self.count):
                    part = layout.take(whole.detach(), self.shape, self.shape.at(rank))
                    if rank == self.rank:
                        memory.copy_(part)
                    elif part.numel():
                        sent = offload.on_device(part.to(memory.dtype), device).contiguous()
                        sends.append((sent, rank))
            elif memory.numel():
                fit = memory.is_contiguous() and memory.device == device
                target = memory if fit else torch.empty(memory.shape, dtype=memory.dtype, device=device)
                receives.append((target, one.owner))
                arriving.append((memory, target))
        self._exchange(sends, receives)
        for memory, target in arriving:
            if target is not memory:
                memory.copy_(target)

    def _exchange(self, sends: list[tuple[torch.Tensor, int]], receives: list[tuple[torch.Tensor, int]]) -> None:
        if self.group is not None:
            exchange(sends, receives, self.group).wait()

    def _first_holders(self, layout: Layout) -> list[int]:
        whole = [axis for axis in self.shape.names if axis not in layout.axes]
        return [r for r in range(self.count) if not any(self.shape.at(r)[axis] for axis in whole)]


def _owned(key: Any) -> _Owned:
    """The tensor that a job is about, whose key has more in it where it moves state."""
    one = key[0] if isinstance(key, tuple) else key
    assert isinstance(one, _Owned)
    return one


def _waves(jobs: Iterable[Any]) -> Iterator[list[Any]]:
    """Jobs that move together. What lies on the host goes one by one: a device need not hold all of it to step."""
    together: list[Any] = []
    apart: list[Any] = []
    for job in jobs:
        (apart if _owned(job[0]).held.hosted else together).append(job)
    yield from ([together] if together else [])
    yield from ([job] for job in apart)


def _owners(held: Sequence[Held], ranks: int) -> list[int]:
    """Whose each tensor is: the largest first, to the rank that has least so far."""
    load, owner = [0] * ranks, {}
    for i in sorted(range(len(held)), key=lambda i: (-held[i].param.numel(), i)):
        owner[i] = min(range(ranks), key=lambda rank: (load[rank], rank))
        load[owner[i]] += held[i].param.numel()
    return [owner[i] for i in range(len(held))]


def _grad(held: Held) -> torch.Tensor:
    assert held.param.grad is not None
    return held.param.grad


def _described(value: Any) -> tuple[tuple[int, ...] | None, torch.dtype | None, Any]:
    """Shape and dtype of a tensor, or a value that is none."""
    return (tuple(value.shape), value.dtype, None) if isinstance(value, torch.Tensor) else (None, None, value)


def _put(whole: torch.Tensor, layout: Layout, mesh: MeshShape, place: dict[str, int], part: torch.Tensor) -> None:
    target, done = [whole], [part]
    for dim, slices in enumerate(layout.local_slices(tuple(whole.shape), mesh, place)):
        at = 0
        pieces, sources = [], []
        for chosen in slices:
            size = chosen.stop - chosen.start
            pieces += [t.narrow(dim, chosen.start, size) for t in target]
            sources += [s.narrow(dim, at, size) for s in done]
            at += size
        target, done = pieces, sources
    _torch.copy_all(target, done)

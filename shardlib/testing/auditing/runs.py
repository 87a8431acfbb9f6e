"""The runs that an audit compares: the sharded model with its host's means, and one device that works as data ranks
do."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardlib._mesh import mesh as make_mesh
from shardlib.engine._torch import pytree
from shardlib.engine.ranks import agree
from shardlib.errors import InputError
from shardlib.layout import Layout
from shardlib.testing.auditing.foreign import check_meshes
from shardlib.testing.auditing.hosts import Host
from shardlib.testing.equivalence import parts
from shardlib.testing.equivalence.case import Case
from shardlib.testing.equivalence.trace import clean
from shardlib.testing.equivalence.train import Run

__all__ = ["UNCLIPPED", "ByRank", "HostRun", "StaleOptimizer", "remade"]

UNCLIPPED = 1e12  # a norm to clip to, that no gradient has


class HostRun(Run):
    """The sharded model, trained by the means of its host."""

    def __init__(
        self,
        case: Case,
        host: Host,
        rank_coordinate: parts.RankCoordinate,
        clip: Callable[[Any], torch.Tensor] | None = None,
        context: Callable[[], AbstractContextManager[Any]] | None = None,
        shares: int = 1,
    ) -> None:
        self.context = context
        self.host, self.rank_coordinate, self.users_clip = host, rank_coordinate, clip
        self.rows_of_one_device: dict[str, int] = {}
        self.cut_by_hand: dict[str, _Cut] = {}
        super().__init__(case, host.model, rank_coordinate.data, sharded=True, made=host.optimizer, shares=shares)
        check_meshes(self.tensors()[0], rank_coordinate.mesh)

    @property
    def module(self) -> nn.Module:
        """The model without the wrapper of a host."""
        return self.host.module

    @property
    def plan(self) -> None:
        """None: nothing here was sharded by a plan."""
        return None

    def _randomness(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def _reducing(self, micro: int) -> AbstractContextManager[None]:
        return nullcontext() if self.context is None else self.context()

    def loss_of(self, batch: Any) -> torch.Tensor:
        with self._reducing(0):
            return super().loss_of(batch)

    def parts_of(self, batches: Iterable[Any]) -> list[Any]:
        """Return this rank's rows of global batches."""
        return [self._part_of(batch) for batch in batches]

    def _refuse_streams_of_its_own(self, before: torch.Tensor) -> None:
        if self.rows[1] > 1 and not torch.equal(before, torch.get_rng_state()):
            raise InputError(
                "The model draws random numbers in its forward, and each data rank draws its own: no single device "
                "draws the same. Leave them out; dropout is off by itself."
            )

    def begin(self, step: int) -> None:
        self.host.zero_grad(self.optimizer)

    def _backward(self, loss: torch.Tensor, micro: int) -> None:
        self.host.backward(loss, last=micro == self.case.accumulate - 1)

    def clip(self) -> torch.Tensor | None:
        norm = self.case.clip
        return None if norm is None or callable(norm) else self._clipped(norm)

    def norm(self) -> torch.Tensor | None:
        """Return the norm that the host's clipping computes of all gradients."""
        return self._clipped(UNCLIPPED)

    def _clipped(self, norm: float) -> torch.Tensor | None:
        """Clip by the user's means or by the host's."""
        if self.users_clip is not None:
            found: Any = self.users_clip(self.host.returned)
        else:
            found = self.host.clip(self.optimizer, norm)
        return found.full_tensor() if isinstance(found, DTensor) else found

    def step(self) -> None:
        self.host.step(self.optimizer)

    def tensors(self) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
        params, buffers = self.host.tensors()
        return {name: self._whole(name, p) for name, p in params.items()}, {
            name: self._whole(name, b) for name, b in buffers.items()
        }

    def gradients(self) -> dict[str, torch.Tensor | None]:
        found = self.host.gradients()
        return {name: None if g is None else self._whole(name, g) for name, g in found.items()}

    def state(self) -> dict[str, torch.Tensor]:
        found = self.host.state(self.optimizer)
        return {name: self._whole(name.split(": ")[0], tensor) for name, tensor in found.items()}

    def find_cuts(self, single: Mapping[str, torch.Tensor]) -> None:
        """Find out how plain tensors were cut that code of the user's own has cut, by their values. Collective."""
        every = {name: t for tree in self.host.tensors() for name, t in tree.items()}
        fitting = {
            name: [layout.text for layout in self._fitting(t, single[name])]
            for name, t in every.items()
            if name in single and not isinstance(t, DTensor) and t.shape != single[name].shape
        }
        by_rank = agree.exchange(fitting)
        mesh = make_mesh(self.rank_coordinate.mesh) if any(by_rank) else None
        for name, texts in by_rank[0].items():
            text = next((t for t in texts if all(t in of_rank.get(name, ()) for of_rank in by_rank)), None)
            if text is not None and mesh is not None:
                self.cut_by_hand[name] = _Cut(Layout.parse(text), mesh, single[name].shape, every[name].shape)

    def _fitting(self, local: torch.Tensor, full: torch.Tensor) -> Iterator[Layout]:
        if local.ndim != full.ndim:
            return
        found = [
            layout
            for layout, part in parts.cuts(full, tuple(local.shape), self.rank_coordinate)
            if torch.equal(part, local.detach())
        ]
        data = set(self.rank_coordinate.mesh.data_axes)
        yield from sorted(found, key=lambda layout: bool(layout.axes & data))  # parameters are seldom cut over them

    def _whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor as one device has it: what was cut by hand as a DTensor, and without rows that pad it."""
        cut = self.cut_by_hand.get(name)
        return self._unpadded(name, tensor if cut is None else cut.wrapped(tensor))

    def _unpadded(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor without the rows that sharding has added to those of one device. Collective where it has."""
        rows = self.rows_of_one_device.get(name, 0)
        if not rows or not tensor.ndim or len(tensor) <= rows:
            return tensor
        with torch.no_grad():
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            return full.detach()[:rows]

    def locals(self) -> dict[str, torch.Tensor]:
        """Return this rank's local tensors."""
        params, buffers = self.tensors()
        return {name: parts.local(tensor) for name, tensor in {**params, **buffers}.items()}

    def layouts(self) -> dict[str, str]:
        """Return the layouts of parameters, as text."""
        return {
            name: str(parts.layout_of(p)[0]) if isinstance(p, DTensor) else f"plain {tuple(p.shape)}"
            for name, p in self.tensors()[0].items()
        }

    def full_values(self, buffers: bool = False) -> dict[str, torch.Tensor]:
        """Return full parameters and buffers, or buffers alone. Collective."""
        params, others = self.tensors()
        with torch.no_grad():
            return {
                name: t.full_tensor().detach() if isinstance(t, DTensor) else t.detach().clone()
                for name, t in (others if buffers else {**params, **others}).items()
            }


@dataclass(frozen=True)
class _Cut:
    """The way in which code has cut a plain tensor: local tensors of shape `local` of one of shape `shape`."""

    layout: Layout
    mesh: DeviceMesh
    shape: torch.Size
    local: torch.Size

    def wrapped(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor) or tensor.shape != self.local:
            return tensor
        placements = self.layout.placements(self.mesh)
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            tensor.detach(), self.mesh, placements, run_check=False, shape=self.shape, stride=stride
        )


class ByRank(Run):
    """One device that computes the mean of the data ranks' means, each of its own rows; buffers are this rank's."""

    def __init__(
        self, case: Case, model: nn.Module, place: tuple[int, int], made: torch.optim.Optimizer | None = None
    ) -> None:
        super().__init__(case, model, made=made)
        self.place = place

    def forward_backward(self, step: int, micro: int) -> torch.Tensor:
        index, count = self.place
        losses, outputs = [], []
        mine: dict[str, torch.Tensor] = {}
        before = {name: b.clone() for name, b in self.model.named_buffers()}
        for part in range(count):
            self._set_buffers(before)
            self.rows = (part, count)
            losses.append(super().forward_backward(step, micro))
            outputs.append(self.output)
            if part == index:
                mine = {name: b.clone() for name, b in self.model.named_buffers()}
        self._set_buffers(mine)
        self.output = pytree.tree_map(_together, *outputs)
        return torch.stack(losses).mean()

    def loss_of(self, batch: Any) -> torch.Tensor:
        losses, outputs = [], []
        for part in range(self.place[1]):
            self.rows = (part, self.place[1])
            losses.append(super().loss_of(batch))
            outputs.append(self.output)
        self.output = pytree.tree_map(_together, *outputs)
        return torch.stack(losses).mean()

    def _backward(self, loss: torch.Tensor, _micro: int) -> None:
        (loss / self.place[1]).backward()

    def _set_buffers(self, values: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(values[name])


def _together(*of_ranks: Any) -> Any:
    """Join outputs of data ranks: rows one after another, scalars as their mean."""
    if not isinstance(of_ranks[0], torch.Tensor):
        return of_ranks[0]
    return torch.cat(of_ranks) if of_ranks[0].ndim else torch.stack(of_ranks).mean()


def _nth(groups: Sequence[Mapping[str, Any]], param: torch.Tensor, names: list[str]) -> str:
    """Return the name of a parameter by its place among those of the optimizer, which has all of them in order."""
    every = [id(p) for group in groups for p in group["params"]]
    return names[every.index(id(param))] if len(every) == len(names) else "the first"


class StaleOptimizer(Exception):
    """An optimizer of parameters that are not the model's."""


def remade(host: Host, sharded: HostRun, single: nn.Module) -> torch.optim.Optimizer | None:
    """Make the optimizer that `shard` returned again for one device: its class, with its groups of parameters.

    Raises:
        StaleOptimizer: it has parameters that the sharded model does not have.
    """
    made = host.optimizer
    if made is None:
        return None
    inner = getattr(made, "optimizer", made)
    names = {id(p): clean(name) for name, p in host.module.named_parameters()}
    mine = dict(Run(sharded.case, single).tensors()[0])
    theirs, groups = host.groups(), []
    for group in theirs:
        strange = [p for p in group["params"] if id(p) not in names]
        if strange:
            raise StaleOptimizer(
                f"{len(strange)} parameters of the optimizer, such as {_nth(theirs, strange[0], list(mine))}, are not "
                "the sharded model's: it was made before sharding, and steps tensors that nothing computes with"
            )
        rest = {key: value for key, value in group.items() if key != "params"}
        own = [mine[name] for p in group["params"] if (name := names[id(p)]) in mine]  # else "values" tells of it
        groups.append({**rest, "params": own})
    takes = inspect.signature(type(inner)).parameters
    return type(inner)(groups, **{name: value for name, value in inner.defaults.items() if name in takes})

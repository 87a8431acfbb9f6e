"""Tensors between the stages of a pipeline, each sent once and received once.

What will travel is known before anything does: every rank knows the orders of all ranks and the shapes of all messages.
So receives are posted in the order in which their sender sends, one rank's ahead of what it computes, and nothing but
the tensors themselves is sent. On back ends whose messages between two ranks are told apart by their order alone, each
direction between two ranks has a group of its own; gloo's carry a tag.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from shardlib._plan.schedules import Action
from shardlib.engine import _torch

__all__ = ["Channels", "Parcel", "Timetable", "Transport"]

Kind = Literal["forward", "backward"]
Metas = Sequence[tuple[tuple[int, ...], torch.dtype]]


class Parcel(NamedTuple):
    """All that goes from one stage to a neighbour for one microbatch: what forward makes, or gradients of that."""

    kind: Kind
    stage: int  # that gets it
    microbatch: int

    @property
    def source(self) -> int:
        """The stage that sends it."""
        return self.stage - 1 if self.kind == "forward" else self.stage + 1


def sent_by(action: Action, last: int) -> Parcel | None:
    """What the rest of the pipeline waits for after an action."""
    kind, stage, m = action
    if kind == "F":
        return Parcel("forward", stage + 1, m) if stage < last else None
    return Parcel("backward", stage - 1, m) if kind in "BI" and stage else None


@dataclass(frozen=True)
class Channels:
    """How a rank reaches the others of its pipeline.

    Attributes:
        group: of the pipeline axis.
        pairs: by source and target, the group of one direction; empty where messages have tags.
    """

    group: dist.ProcessGroup
    pairs: dict[tuple[int, int], dist.ProcessGroup] = field(default_factory=dict)

    @classmethod
    def open(cls, group: dist.ProcessGroup, lines: Sequence[Sequence[int]], *, tagged: bool) -> Channels:
        """Collective over the job: `lines` are the ranks of every pipeline in it."""
        pairs: dict[tuple[int, int], dist.ProcessGroup] = {}
        for line in () if tagged else lines:
            for source in range(len(line)):
                for target in {(source + 1) % len(line), (source - 1) % len(line)} - {source}:
                    made = _torch.new_group(sorted((line[source], line[target])))
                    if made is not None:
                        pairs[source, target] = made
        return cls(group, pairs)

    def between(self, source: int, target: int) -> dist.ProcessGroup:
        return self.pairs.get((source, target), self.group)


class Timetable:
    """What rank of a pipeline sends what to which, for microbatches of certain shapes: the same in each such step.

    Args:
        orders: what every rank of the pipeline does.
        index: which of them this one is.
        rank_of: of a stage.
        metas: the shapes and dtypes of a parcel's tensors.

    Attributes:
        own: what this rank does.
    """

    def __init__(
        self,
        orders: Sequence[Sequence[Action]],
        index: int,
        rank_of: Callable[[int], int],
        metas: Callable[[Parcel], Metas],
    ) -> None:
        self.own, self.index, self.rank_of, self.metas = orders[index], index, cache(rank_of), cache(metas)
        self.last = max(action.stage for order in orders for action in order)
        self.microbatches = 1 + max(action.microbatch for order in orders for action in order)
        self.coming = {source: tuple(self._sent_here(order)) for source, order in enumerate(orders) if source != index}

    def _sent_here(self, actions: Sequence[Action]) -> Iterator[Parcel]:
        """In the order in which they come from one rank."""
        for action in actions:
            parcel = sent_by(action, self.last)
            if parcel is not None and self.rank_of(parcel.stage) == self.index and self.metas(parcel):
                yield parcel

    def tag(self, parcel: Parcel, place: int) -> int:
        """A number that no other tensor of the step has."""
        kind = 1 if parcel.kind == "backward" else 0
        return ((place * 2 + kind) * (self.last + 1) + parcel.stage) * self.microbatches + parcel.microbatch


class Transport:
    """The messages of one step.

    Args:
        channels: to other ranks.
        timetable: what comes when.
        device: where tensors lie.
    """

    def __init__(self, channels: Channels, timetable: Timetable, device: torch.device) -> None:
        self.channels, self.timetable, self.device = channels, timetable, device
        self._ranks, self._limit = dist.get_process_group_ranks(channels.group), _torch.limit_of(channels.group)
        self._coming = {source: deque(parcels) for source, parcels in timetable.coming.items()}
        self._posted: dict[Parcel, tuple[list[torch.Tensor], list[dist.Work]]] = {}
        self._sending: list[tuple[dist.Work, torch.Tensor]] = []
        self._handed: dict[Parcel, Sequence[torch.Tensor]] = {}

    def metas(self, parcel: Parcel) -> Metas:
        """The shapes and dtypes of a parcel's tensors."""
        return self.timetable.metas(parcel)

    def send(self, parcel: Parcel, tensors: Sequence[torch.Tensor]) -> None:
        """Let them go; to a stage on this rank they are handed over as they are."""
        index, target = self.timetable.index, self.timetable.rank_of(parcel.stage)
        if target == index:
            self._handed[parcel] = tensors
            return
        group = self.channels.between(index, target)
        for place, tensor in enumerate(tensors):
            whole = tensor.contiguous()
            work = dist.isend(whole, self._ranks[target], group=group, tag=self.timetable.tag(parcel, place))
            if work is not None:
                self._sending.append((work, whole))

    def expect(self, parcel: Parcel) -> None:
        """Post its receives, if that has not been done."""
        source = self.timetable.rank_of(parcel.source)
        if source == self.timetable.index or parcel in self._posted or not self.metas(parcel):
            return
        while parcel not in self._posted:
            self._post(self._coming[source].popleft(), source)

    def _post(self, parcel: Parcel, source: int) -> None:
        group = self.channels.between(source, self.timetable.index)
        tensors, works = [], []
        for place, (shape, dtype) in enumerate(self.metas(parcel)):
            tensors.append(torch.empty(shape, dtype=dtype, device=self.device))
            work = dist.irecv(tensors[-1], self._ranks[source], group=group, tag=self.timetable.tag(parcel, place))
            assert work is not None
            works.append(work)
        self._posted[parcel] = tensors, works

    def receive(self, parcel: Parcel) -> Sequence[torch.Tensor]:
        """The tensors of a parcel, once they are there."""
        if parcel in self._handed:
            return self._handed.pop(parcel)
        if not self.metas(parcel):
            return []
        self.expect(parcel)
        tensors, works = self._posted.pop(parcel)
        _torch.wait_for(works, self._limit)
        return tensors

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        _torch.wait_for((work for work, _ in self._sending), self._limit)
        self._sending.clear()

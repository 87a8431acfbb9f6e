"""Point-to-point messages between the stages of a pipeline, each sent once and received once.

A message has all tensors of one microbatch from a stage to a neighbour: outputs of its forward, or gradients of its
inputs. The action that needs it names it: "F" of the next stage, or "B" of the stage before, which stands for "I" too.

All messages are known before the first is sent: every rank knows the order of actions of all ranks and the shapes of
all messages. Receives are posted in the order in which the sender sends, and only the tensors themselves are sent.

Messages of gloo carry a tag, and their receives are posted some actions ahead of the computation: a sender waits for
them. NCCL matches messages between two ranks by their order alone, so each direction between two ranks has a process
group of its own. There a receive is a kernel that runs until the message is there, and whatever waits for the whole
device, such as the creation of a communicator, waits for this kernel too. So communicators are created first, and a
receive is posted by the action that needs it: what it waits for never depends on what this rank has yet to do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from shardlib._plan.schedules import Action, order
from shardlib.engine import _torch
from shardlib.engine.pipeline.route import StageBoundary
from shardlib.engine.pipeline.stages import Stages, as_bytes
from shardlib.engine.ranks.groups import group_of
from shardlib.engine.ranks.transport import exchange, limit_of

__all__ = ["Channels", "Messages", "Timetable"]

# Dtypes that every back end sends as they are.
_SENT = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)

Metas = Sequence[tuple[tuple[int, ...], torch.dtype]]


def sent_by(action: Action, stages: int) -> Action | None:
    """Return the message that an action of one of so many stages produces; None if there is none.

    >>> sent_by(Action("F", 0, 3), 2), sent_by(Action("I", 1, 3), 2), sent_by(Action("F", 1, 3), 2)
    (Action(kind='F', stage=1, microbatch=3), Action(kind='B', stage=0, microbatch=3), None)
    """
    kind, stage, m = action
    message = Action("F", stage + 1, m) if kind == "F" else Action("B", stage - 1, m)
    return message if kind != "W" and 0 <= message.stage < stages else None


@dataclass(frozen=True)
class Channels:
    """The process groups between this rank and the others of its pipeline.

    Attributes:
        group: the group of the pipeline axis.
        pairs: the group of each direction, by source and target; empty if messages have tags.
    """

    group: dist.ProcessGroup
    pairs: dict[tuple[int, int], dist.ProcessGroup] = field(default_factory=dict)

    @classmethod
    def open(cls, group: dist.ProcessGroup, lines: Sequence[Sequence[int]], device: torch.device) -> Channels:
        """Make the groups, once for all models of a job, and connect their ranks. Collective over the job.

        Args:
            group: the group of this rank's pipeline.
            lines: the ranks of every pipeline of the job; none if messages have tags, which need no other groups.
            device: the device of the tensors.
        """
        pairs: dict[tuple[int, int], dist.ProcessGroup] = {}
        for line in lines:
            for source in range(len(line)):
                for target in sorted({(source + 1) % len(line), (source - 1) % len(line)} - {source}):
                    direction = "up" if source < target else "down"
                    made = group_of(sorted((line[source], line[target])), f"pipeline, {direction}")
                    if made is not None:
                        pairs[source, target] = made
                        sends = dist.get_rank() == line[source]
                        one = [(torch.zeros(1, device=device), 1 - dist.get_rank(made))]
                        exchange(one if sends else [], [] if sends else one, made).wait()
        return cls(group, pairs)

    @property
    def ahead(self) -> int:
        """The number of actions, this one included, whose receives are posted before an action."""
        return 1 if self.pairs else 4

    def between(self, source: int, target: int) -> dist.ProcessGroup:
        return self.pairs.get((source, target), self.group)


class Timetable:
    """The messages between the ranks of a pipeline for microbatches of certain shapes, the same in each such step.

    Attributes:
        index: the coordinate of this rank.
        rank_of: the coordinate of the rank that runs each stage.
        own: the actions of this rank.
        metas: the shapes and dtypes of the tensors of each message.
        coming: the messages of each other rank to this one, in the order in which they are sent.
    """

    def __init__(self, given: Stages, boundaries: Sequence[Sequence[StageBoundary | None]], *, train: bool) -> None:
        stages, self.microbatches = range(len(given.plan.stages)), len(boundaries)
        self.index, self.rank_of = given.index, [given.rank_of(stage) for stage in stages]
        if train:
            orders: Sequence[Sequence[Action]] = order(given.schedule, given.ranks, len(stages), self.microbatches)
        else:
            forwards = [Action("F", stage, m) for m in range(self.microbatches) for stage in stages]
            orders = [[each for each in forwards if self.rank_of[each.stage] == rank] for rank in range(given.ranks)]
        self.own = orders[given.index]
        sent = [[m for action in each if (m := sent_by(action, len(stages))) is not None] for each in orders]
        self.metas = {message: _metas(message, boundaries) for each in sent for message in each}
        self.coming = {
            source: tuple(m for m in each if self.rank_of[m.stage] == given.index and self.metas[m])
            for source, each in enumerate(sent)
            if source != given.index
        }

    def tag(self, message: Action, place: int) -> int:
        """Return a number that is unique among the tensors of the step."""
        kind = 1 if message.kind == "B" else 0
        return ((place * 2 + kind) * len(self.rank_of) + message.stage) * self.microbatches + message.microbatch


def _metas(message: Action, boundaries: Sequence[Sequence[StageBoundary | None]]) -> Metas:
    forward = message.kind == "F"
    boundary = boundaries[message.microbatch][message.stage if forward else message.stage + 1]
    assert boundary is not None
    return [(each.shape, each.dtype) for each in boundary.messages if forward or each.has_gradient]


def _needed_by(action: Action) -> Action:
    return action._replace(kind="B") if action.kind == "I" else action


class Messages:
    """Sends and receives the messages of one step."""

    def __init__(self, channels: Channels, timetable: Timetable, device: torch.device) -> None:
        self.channels, self.timetable, self.device = channels, timetable, device
        self._ranks, self._limit = dist.get_process_group_ranks(channels.group), limit_of(channels.group)
        self._coming = {source: deque(messages) for source, messages in timetable.coming.items()}
        self._posted: dict[Action, tuple[list[torch.Tensor], list[dist.Work]]] = {}
        self._sending: list[tuple[list[dist.Work], list[torch.Tensor]]] = []
        self._local: dict[Action, Sequence[torch.Tensor]] = {}

    def expect(self, actions: Sequence[Action]) -> None:
        """Post the receives of the next actions that are not posted yet, as far ahead as the back end allows."""
        for action in actions[: self.channels.ahead]:
            self._expect(_needed_by(action))

    def _expect(self, message: Action) -> None:
        if not self.timetable.metas.get(message):
            return
        source = self.timetable.rank_of[message.stage - 1 if message.kind == "F" else message.stage + 1]
        while source != self.timetable.index and message not in self._posted:
            self._post(self._coming[source].popleft(), source)

    def _post(self, message: Action, source: int) -> None:
        metas = self.timetable.metas[message]
        tensors = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in metas]
        self._posted[message] = tensors, self._begin(dist.irecv, message, tensors, source)

    def _begin(
        self, op: Callable[..., Any], message: Action, tensors: Sequence[torch.Tensor], other: int
    ) -> list[dist.Work]:
        """Begin to send or receive all tensors of a message."""
        index, tag = self.timetable.index, self.timetable.tag
        group = self.channels.between(*((index, other) if op is dist.isend else (other, index)))
        peer = self._ranks[other]
        sent = [tensor if tensor.dtype in _SENT else as_bytes(tensor) for tensor in tensors]
        ops = [dist.P2POp(op, tensor, peer, group, tag(message, place)) for place, tensor in enumerate(sent)]
        return dist.batch_isend_irecv(ops) if ops else []

    def receive(self, action: Action) -> Sequence[torch.Tensor]:
        """Wait for the tensors that an action begins with."""
        message = _needed_by(action)
        if not self.timetable.metas.get(message):
            return []
        if message in self._local:
            return self._local.pop(message)
        self._expect(message)
        tensors, works = self._posted.pop(message)
        _torch.wait_for(works, self._limit)
        return tensors

    def send(self, action: Action, made: Sequence[torch.Tensor] | None) -> None:
        """Send the tensors that an action has made, or zeros if it has failed.

        Those for a stage on this rank are handed over without a copy.
        """
        message = sent_by(action, len(self.timetable.rank_of))
        if message is None:
            return
        if made is None:
            made = [torch.zeros(shape, dtype=d, device=self.device) for shape, d in self.timetable.metas[message]]
        target = self.timetable.rank_of[message.stage]
        if target == self.timetable.index:
            self._local[message] = made
            return
        contiguous = [tensor.contiguous() for tensor in made]
        self._sending.append((self._begin(dist.isend, message, contiguous, target), contiguous))

    def finish(self) -> None:
        """Wait until all sends have completed."""
        _torch.wait_for((work for works, _ in self._sending for work in works), self._limit)
        self._sending.clear()

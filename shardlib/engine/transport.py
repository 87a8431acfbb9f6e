"""How flat buffers travel among the ranks of a group: one interface, two implementations.

Which collective is cheapest depends on the back end. NCCL has a real reduce-scatter and all-gather. Over gloo a
reduce-scatter sends as much as an all-reduce, and an all-gather takes twice the time that its bytes need; there every
rank sends each block straight to its owner, and the owner adds up. Either way a rank sends (n-1)/n of the elements
(Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 7).

Nothing else that moves shards asks which back end there is. SHARDLIB_TRANSPORT chooses another implementation than the
back end's own. Each call names the movements of the plan that it carries, so that what a step sends can be compared
with what the plan lists.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist

from shardlib._plan import Movement
from shardlib.engine import _torch
from shardlib.errors import InputError

__all__ = [
    "VARIABLE",
    "CollectiveTransport",
    "Handle",
    "PointToPointTransport",
    "Sent",
    "Transport",
    "Workspace",
    "chosen",
    "exchange",
    "over",
]

VARIABLE = "SHARDLIB_TRANSPORT"


class Workspace:
    """Memory that movements borrow and give back: few large buffers, since freeing many small ones leaves a process
    as large as if they were still there."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor of at least so many elements, of any content."""
        free = self._free.setdefault((dtype, device), [])
        fitting = [i for i, buffer in enumerate(free) if buffer.numel() >= numel]
        if fitting:
            return free.pop(min(fitting, key=lambda i: free[i].numel()))
        if free:
            free.pop()  # one that has become too small
        return torch.empty(numel, dtype=dtype, device=device)

    def give(self, buffer: torch.Tensor) -> None:
        """Let others borrow it."""
        self._free.setdefault((buffer.dtype, buffer.device), []).append(buffer)


@dataclass(eq=False)
class Handle:
    """Blocks under way.

    Attributes:
        blocks: where what arrives lies, once `wait` has returned.
        borrowed: memory to give back when nobody reads the blocks any more.
        group: whose time limit holds, where the back end has none of its own.
    """

    blocks: list[torch.Tensor]
    borrowed: list[torch.Tensor]
    works: list[dist.Work]
    group: dist.ProcessGroup | None = None

    def wait(self) -> None:
        """Return when all has arrived; on an accelerator, let its current stream do so."""
        _torch.wait_for(self.works, None if self.group is None else _torch.limit_of(self.group))


@dataclass(frozen=True)
class Sent:
    """One call of a transport.

    Attributes:
        kind: "all_reduce", "reduce_scatter" or "all_gather", as in `shardlib.layout.Collective`.
        axes: the mesh axes whose ranks take part.
        carries: the movements of the plan that it is a part of.
    """

    kind: str
    axes: tuple[str, ...]
    carries: tuple[Movement, ...]


class Transport(ABC):
    """The ranks of a group, which exchange blocks of flat buffers: one block for each rank.

    Attributes:
        group: the process group.
        axes: the mesh axes that it lies along.
        log: where each call is noted, while somebody records them.
        ranks: its global ranks, in order.
        index: this rank's place among them.
        count: how many they are.
        takes_uneven: whether blocks may differ in size.
    """

    name: ClassVar[str]
    takes_uneven: ClassVar[bool]

    def __init__(self, group: dist.ProcessGroup, axes: tuple[str, ...] = ()) -> None:
        self.group, self.axes = group, axes
        self.log: list[Sent] | None = None
        self.ranks = dist.get_process_group_ranks(group)
        self.index = dist.get_rank(group)
        self.count = len(self.ranks)

    def note(self, kind: str, carries: Iterable[Movement]) -> None:
        if self.log is not None:
            self.log.append(Sent(kind, self.axes, tuple(carries)))

    def all_reduce(self, buffer: torch.Tensor) -> Handle:
        """Begin to sum a buffer over all ranks, in place."""
        return Handle([buffer], [], [dist.all_reduce(buffer, group=self.group, async_op=True)])

    @abstractmethod
    def reduce_scatter(self, blocks: Sequence[torch.Tensor], workspace: Workspace) -> Handle:
        """Begin to sum blocks over all ranks, each at the rank that it is of.

        Args:
            blocks: one for each rank, to be left as they are until the end; consecutive in one buffer, and
                of one size, where the transport takes no uneven ones.
            workspace: memory that this borrows.

        Returns:
            This rank's block, in summands that are yet to be added, in the order of ranks; all may be written over but
            its own. No summands where its block is empty.
        """

    @abstractmethod
    def all_gather(self, blocks: Sequence[torch.Tensor]) -> Handle:
        """Begin to give every rank's block to all.

        Args:
            blocks: memory of one for each rank, as in `reduce_scatter`, in which this rank's is filled.
        """


class CollectiveTransport(Transport):
    """Collectives of the back end. Blocks have one size; what is uneven is padded."""

    name = "collectives"
    takes_uneven = False

    def reduce_scatter(self, blocks: Sequence[torch.Tensor], workspace: Workspace) -> Handle:
        size = blocks[0].numel()
        buffer = workspace.take(size, blocks[0].dtype, blocks[0].device)
        mine = buffer[:size]
        work = dist.reduce_scatter_single(mine, _joined(blocks), group=self.group, async_op=True)
        return Handle([mine] if size else [], [buffer], [work], self.group)

    def all_gather(self, blocks: Sequence[torch.Tensor]) -> Handle:
        own = blocks[self.index].clone()
        work = dist.all_gather_single(_joined(blocks), own, group=self.group, async_op=True)
        return Handle(list(blocks), [], [work], self.group)


class PointToPointTransport(Transport):
    """Each rank sends each block straight to where it is needed."""

    name = "point-to-point"
    takes_uneven = True

    def reduce_scatter(self, blocks: Sequence[torch.Tensor], workspace: Workspace) -> Handle:
        mine = blocks[self.index]
        size = mine.numel()
        inbox = workspace.take(size * (self.count - 1), mine.dtype, mine.device)
        summands, works = {self.index: mine}, []
        for place, other in enumerate(self._others()):
            summands[other] = inbox[place * size : (place + 1) * size]
            works += self._send(blocks[other], other) + self._receive(summands[other], other)
        in_order = [summands[rank] for rank in range(self.count)] if size else []
        return Handle(in_order, [inbox], works, self.group)

    def all_gather(self, blocks: Sequence[torch.Tensor]) -> Handle:
        works: list[dist.Work] = []
        for other in self._others():
            works += self._send(blocks[self.index], other) + self._receive(blocks[other], other)
        return Handle(list(blocks), [], works, self.group)

    def _others(self) -> list[int]:
        """Places in the group of all others, the next one first, so that not all send to the same rank at once."""
        return [(self.index + step) % self.count for step in range(1, self.count)]

    def _send(self, block: torch.Tensor, to: int) -> list[dist.Work]:
        work = dist.isend(block, self.ranks[to], group=self.group) if block.numel() else None
        return [] if work is None else [work]

    def _receive(self, block: torch.Tensor, source: int) -> list[dist.Work]:
        work = dist.irecv(block, self.ranks[source], group=self.group) if block.numel() else None
        return [] if work is None else [work]


_KNOWN: dict[str, type[Transport]] = {kind.name: kind for kind in (CollectiveTransport, PointToPointTransport)}


def over(group: dist.ProcessGroup, device: torch.device, axes: tuple[str, ...] = ()) -> Transport:
    """What is cheapest over the back end of a group, or what SHARDLIB_TRANSPORT says.

    A dry run does what its device's own back end would do.

    Raises:
        InputError: the variable names none.
    """
    name = chosen()
    if name is None:
        backend = dist.get_backend(group)
        over_gloo = backend == dist.Backend.GLOO or (backend == dist.Backend.FAKE and device.type == "cpu")
        return (PointToPointTransport if over_gloo else CollectiveTransport)(group, axes)
    return _KNOWN[name](group, axes)


def chosen() -> str | None:
    """What SHARDLIB_TRANSPORT says."""
    name = os.environ.get(VARIABLE) or None
    if name is not None and name not in _KNOWN:
        raise InputError(f'{VARIABLE}="{name}" names no transport; set "collectives" or "point-to-point".')
    return name


def exchange(
    sends: Iterable[tuple[torch.Tensor, int]], receives: Iterable[tuple[torch.Tensor, int]], group: dist.ProcessGroup
) -> Handle:
    """Begin to send whole tensors to single ranks of a group, and to receive others.

    Args:
        sends: contiguous tensors, each with the place in the group of the rank that it goes to.
        receives: contiguous memory, each with the place of the rank that sends it.
        group: of all of them; two ranks that exchange several tensors name them in the same order.
    """
    ranks = dist.get_process_group_ranks(group)
    ops = [dist.P2POp(dist.isend, tensor, ranks[to], group=group) for tensor, to in sends]
    memory = [*receives]
    ops += [dist.P2POp(dist.irecv, tensor, ranks[source], group=group) for tensor, source in memory]
    works = dist.batch_isend_irecv(ops) if ops else []
    return Handle([tensor for tensor, _ in memory], [], works, group)


def _joined(blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    """The buffer that consecutive blocks are."""
    first = blocks[0]
    return first.as_strided((sum(block.numel() for block in blocks),), (1,), first.storage_offset())

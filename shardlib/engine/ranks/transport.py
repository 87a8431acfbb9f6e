"""Move flat buffers among the ranks of a group: one interface, two implementations.

The cheapest collective depends on the back end. NCCL implements reduce-scatter and all-gather natively. Over gloo, a
reduce-scatter sends as much as an all-reduce, and an all-gather takes twice the time that its bytes need; every rank
therefore sends each block directly to its owner, and the owner adds up. In both implementations a rank sends (n-1)/n of
the elements (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 7).

No other code of the engine depends on the back end. The variable SHARDLIB_TRANSPORT overrides the implementation.
Each call names the movements of the plan that it carries, so that the traffic of a step can be compared with the plan.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist

from shardlib._plan import Movement, free_buffer
from shardlib.engine import _torch
from shardlib.errors import InputError

__all__ = [
    "VARIABLE",
    "CollectiveTransport",
    "Compare",
    "Handle",
    "PointToPointTransport",
    "Sent",
    "Transport",
    "Workspace",
    "chosen",
    "exchange",
    "has_tags",
    "limit_of",
    "over",
]

VARIABLE = "SHARDLIB_TRANSPORT"


class Workspace:
    """A pool of workspace buffers that movements borrow and give back.

    It keeps few large buffers: freeing many small ones would not return their memory to the system. `free_buffer` says
    which one serves, and which gives way to a new one.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialized flat tensor of at least `numel` elements."""
        free = self._free.setdefault((dtype, device), [])
        at = free_buffer([buffer.numel() for buffer in free], numel)
        if at is not None and (buffer := free.pop(at)).numel() >= numel:
            return buffer
        with torch.inference_mode(False):  # it is used again outside of one
            return torch.empty(numel, dtype=dtype, device=device)

    def give(self, buffer: torch.Tensor) -> None:
        """Return a buffer to the pool."""
        self._free.setdefault((buffer.dtype, buffer.device), []).append(buffer)


@dataclass(eq=False)
class Handle:
    """Pending blocks.

    Attributes:
        blocks: the memory of the blocks that arrive, complete once `wait` has returned.
        borrowed: workspace buffers to give back when the blocks have been read.
        works: the pending operations of the process group.
        group: the group whose time limit applies, where the back end has no time limit of its own.
    """

    blocks: list[torch.Tensor]
    borrowed: list[torch.Tensor]
    works: list[dist.Work]
    group: dist.ProcessGroup | None = None

    def wait(self) -> None:
        """Wait until all blocks have arrived; on an accelerator, let its current stream wait."""
        _torch.wait_for(self.works, None if self.group is None else limit_of(self.group))


@dataclass(frozen=True)
class Sent:
    """One call of a transport.

    Attributes:
        kind: "all_reduce", "copy", ..., as in `shardlib.layout.Collective`.
        axes: the mesh axes whose ranks take part.
        carries: the movements of the plan that the call carries.
    """

    kind: str
    axes: tuple[str, ...]
    carries: tuple[Movement, ...]


Compare = Callable[[str, tuple[Movement, ...], dist.ProcessGroup], None]
_OF_ALL_RANKS = ("all_reduce", "reduce_scatter", "all_gather")


class Transport(ABC):
    """Exchanges blocks of flat buffers among the ranks of a group: one block for each rank.

    Attributes:
        name: the name in SHARDLIB_TRANSPORT.
        group: the process group.
        axes: the mesh axes of the group.
        log: the list to which each call is appended, while calls are recorded.
        compare: called with the kind of a collective, what it carries and the group, before it begins.
        ranks: the global ranks of the group, in order.
        index: the index of this rank in the group.
        count: the number of ranks.
        takes_uneven: whether blocks may differ in size.
    """

    calls: ClassVar[int] = 0  # of all transports of this process
    name: ClassVar[str]
    takes_uneven: ClassVar[bool]

    def __init__(self, group: dist.ProcessGroup, axes: tuple[str, ...] = ()) -> None:
        self.group, self.axes = group, axes
        self.log: list[Sent] | None = None
        self.compare: Compare | None = None
        self.ranks = dist.get_process_group_ranks(group)
        self.index = dist.get_rank(group)
        self.count = len(self.ranks)

    def note(self, kind: str, carries: Iterable[Movement]) -> None:
        """Count a call; record it, while calls are recorded; and let ranks compare it."""
        Transport.calls += 1
        if self.compare is None and self.log is None:
            return
        carries = tuple(carries)
        if self.compare is not None and kind in _OF_ALL_RANKS:
            self.compare(kind, carries, self.group)
        if self.log is not None:
            self.log.append(Sent(kind, self.axes, carries))

    def all_reduce(self, buffer: torch.Tensor, carries: Iterable[Movement] = ()) -> Handle:
        """Begin to sum a buffer over all ranks, in place. `carries` names the movements of the plan in it."""
        self.note("all_reduce", carries)
        return Handle([buffer], [], [dist.all_reduce(buffer, group=self.group, async_op=True)])

    def reduce_scatter(
        self, blocks: Sequence[torch.Tensor], workspace: Workspace, carries: Iterable[Movement] = ()
    ) -> Handle:
        """Begin to sum blocks over all ranks, each at its owner.

        Args:
            blocks: one block for each rank, which must not change until the end; consecutive in one buffer, and of one
                size, where the transport does not take uneven blocks.
            workspace: the pool of buffers for arriving blocks.
            carries: the movements of the plan in them.

        Returns:
            The summands of this rank's block, in the order of ranks, which the caller adds up and may overwrite, apart
            from the rank's own; no summands where the block is empty.
        """
        self.note("reduce_scatter", carries)
        return self._reduce_scatter(blocks, workspace)

    def all_gather(self, blocks: Sequence[torch.Tensor], carries: Iterable[Movement] = ()) -> Handle:
        """Begin to send every rank's block to all ranks.

        Args:
            blocks: the memory of one block for each rank, as in `reduce_scatter`; this rank's block is filled.
            carries: the movements of the plan in them.
        """
        self.note("all_gather", carries)
        return self._all_gather(blocks)

    def exchange(
        self,
        kind: str,
        sends: Iterable[tuple[torch.Tensor, int]],
        receives: Iterable[tuple[torch.Tensor, int]],
        carries: Iterable[Movement] = (),
    ) -> Handle:
        """Begin to send tensors to single ranks and to receive others, as in `exchange`."""
        self.note(kind, carries)
        return exchange(sends, receives, self.group)

    @abstractmethod
    def _reduce_scatter(self, blocks: Sequence[torch.Tensor], workspace: Workspace) -> Handle:
        """Send the blocks of `reduce_scatter`."""

    @abstractmethod
    def _all_gather(self, blocks: Sequence[torch.Tensor]) -> Handle:
        """Send the blocks of `all_gather`."""


class CollectiveTransport(Transport):
    """Calls the collectives of the back end. Blocks have one size, with padding."""

    name = "collectives"
    takes_uneven = False

    def _reduce_scatter(self, blocks: Sequence[torch.Tensor], workspace: Workspace) -> Handle:
        size = blocks[0].numel()
        buffer = workspace.take(size, blocks[0].dtype, blocks[0].device)
        local_block = buffer[:size]
        work = dist.reduce_scatter_single(local_block, _joined(blocks), group=self.group, async_op=True)
        return Handle([local_block] if size else [], [buffer], [work], self.group)

    def _all_gather(self, blocks: Sequence[torch.Tensor]) -> Handle:
        local_block = blocks[self.index].clone()
        work = dist.all_gather_single(_joined(blocks), local_block, group=self.group, async_op=True)
        return Handle(list(blocks), [], [work], self.group)


class PointToPointTransport(Transport):
    """Sends each block directly to the ranks that need it."""

    name = "point-to-point"
    takes_uneven = True

    def _reduce_scatter(self, blocks: Sequence[torch.Tensor], workspace: Workspace) -> Handle:
        local_block = blocks[self.index]
        size = local_block.numel()
        inbox = workspace.take(size * (self.count - 1), local_block.dtype, local_block.device)
        summands, works = {self.index: local_block}, []
        for i, other in enumerate(self._others()):
            summands[other] = inbox[i * size : (i + 1) * size]
            works += self._send(blocks[other], other) + self._receive(summands[other], other)
        in_order = [summands[rank] for rank in range(self.count)] if size else []
        return Handle(in_order, [inbox], works, self.group)

    def _all_gather(self, blocks: Sequence[torch.Tensor]) -> Handle:
        works: list[dist.Work] = []
        for other in self._others():
            works += self._send(blocks[self.index], other) + self._receive(blocks[other], other)
        return Handle(list(blocks), [], works, self.group)

    def _others(self) -> list[int]:
        """Return the indices of the other ranks, the next one first, so that not all send to the same rank at once."""
        return [(self.index + step) % self.count for step in range(1, self.count)]

    def _send(self, block: torch.Tensor, to: int) -> list[dist.Work]:
        work = dist.isend(block, self.ranks[to], group=self.group) if block.numel() else None
        return [] if work is None else [work]

    def _receive(self, block: torch.Tensor, source: int) -> list[dist.Work]:
        work = dist.irecv(block, self.ranks[source], group=self.group) if block.numel() else None
        return [] if work is None else [work]


_KNOWN: dict[str, type[Transport]] = {kind.name: kind for kind in (CollectiveTransport, PointToPointTransport)}


def over(group: dist.ProcessGroup, device: torch.device, axes: tuple[str, ...] = ()) -> Transport:
    """Return the cheapest transport over the back end of a group, or the one that SHARDLIB_TRANSPORT names.

    A dry run uses the transport of its device's back end.

    Raises:
        InputError: the variable does not name a transport.
    """
    name = chosen()
    if name is None:
        backend = dist.get_backend(group)
        over_gloo = backend == dist.Backend.GLOO or (backend == dist.Backend.FAKE and device.type == "cpu")
        return (PointToPointTransport if over_gloo else CollectiveTransport)(group, axes)
    return _KNOWN[name](group, axes)


def chosen() -> str | None:
    """Return the name in SHARDLIB_TRANSPORT, or None."""
    name = os.environ.get(VARIABLE) or None
    if name is not None and name not in _KNOWN:
        raise InputError(f'{VARIABLE}="{name}" names no transport; set "collectives" or "point-to-point".')
    return name


def exchange(
    sends: Iterable[tuple[torch.Tensor, int]], receives: Iterable[tuple[torch.Tensor, int]], group: dist.ProcessGroup
) -> Handle:
    """Begin to send tensors to single ranks of a group, and to receive others.

    Args:
        sends: contiguous tensors, each with the index in the group of its receiver.
        receives: contiguous memory, each with the index in the group of its sender.
        group: the group of all these ranks; two ranks that exchange several tensors list them in the same order.
    """
    ranks = dist.get_process_group_ranks(group)
    ops = [dist.P2POp(dist.isend, tensor, ranks[to], group=group) for tensor, to in sends]
    memory = [*receives]
    ops += [dist.P2POp(dist.irecv, tensor, ranks[source], group=group) for tensor, source in memory]
    works = dist.batch_isend_irecv(ops) if ops else []
    return Handle([tensor for tensor, _ in memory], [], works, group)


def has_tags(group: dist.ProcessGroup) -> bool:
    """Tell whether messages between two ranks of a group are matched by tags, and not by their order alone."""
    return dist.get_backend(group) in (dist.Backend.GLOO, dist.Backend.FAKE)


def limit_of(group: dist.ProcessGroup) -> timedelta | None:
    """Return how long to wait for sends and receives of a group: no longer than the group's timeout.

    By itself gloo (2.13.0) waits for these as long as the group was made to, whatever has been set since.
    On NCCL, a wait with a timeout would hold up the host.
    """
    return _torch.timeout_of(group) if dist.get_backend(group) == dist.Backend.GLOO else None


def _joined(blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the buffer that consecutive blocks form."""
    first = blocks[0]
    return first.as_strided((sum(block.numel() for block in blocks),), (1,), first.storage_offset())

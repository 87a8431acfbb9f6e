"""Tensors that are cut alike move together: shards are summed at the ranks that own them, and gathered again.

A large tensor whose shards are runs of its memory moves by itself, from and to where it lies. Small ones are packed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import torch

from shardlib._plan import ALONE_BYTES, Movement
from shardlib.engine import _torch
from shardlib.engine.transport import Handle, Transport, Workspace
from shardlib.layout import Cut

__all__ = ["Bucket", "goes_alone", "in_batches"]

T = TypeVar("T")


def goes_alone(local: torch.Tensor, cut: Cut | None) -> bool:
    """Whether a tensor moves by itself, from and to where it lies."""
    return local.nbytes >= ALONE_BYTES and local.is_contiguous() and (cut is None or cut.in_runs)


def in_batches(
    items: Iterable[T],
    *,
    alone: Callable[[T], bool],
    key: Callable[[T], Hashable],
    size: Callable[[T], int],
    limit: float,
) -> list[list[T]]:
    """Items that move together: those of one key, until they reach a size; in the order in which batches are full."""
    batches: list[list[T]] = []
    pending: dict[Hashable, list[T]] = {}
    filled: dict[Hashable, int] = {}
    for item in items:
        if alone(item):
            batches.append([item])
            continue
        kind = key(item)
        pending.setdefault(kind, []).append(item)
        filled[kind] = filled.get(kind, 0) + size(item)
        if filled[kind] >= limit:
            batches.append(pending.pop(kind))
            del filled[kind]
    return batches + list(pending.values())


class Bucket:
    """Tensors of one dtype whose parts lie on the same ranks, and that move together.

    Args:
        cuts: how each is divided.
        transport: among which ranks, and how.
        dtype: in which they travel.
        device: of all of them.
        workspace: memory that movements borrow.
    """

    def __init__(
        self,
        cuts: Sequence[Cut],
        transport: Transport | None,
        dtype: torch.dtype,
        device: torch.device,
        workspace: Workspace,
    ) -> None:
        assert transport is not None, "what is cut is cut among ranks"
        self.cuts, self.transport, self.dtype, self.device, self.workspace = cuts, transport, dtype, device, workspace
        self.sizes = [sum(cut.numels[rank] for cut in cuts) for rank in range(transport.count)]
        self.alone = len(cuts) == 1 and cuts[0].in_runs and (transport.takes_uneven or cuts[0].even)
        # In a bucket, every rank's block has room for the largest one.
        self.pitch = max(self.sizes)
        self.starts = list(cuts[0].starts) if self.alone else [rank * self.pitch for rank in range(transport.count)]
        self.total = sum(self.sizes) if self.alone else self.pitch * transport.count
        self._rows_of: dict[int, list[torch.Tensor]] = {}  # by address of a borrowed buffer

    @property
    def arriving_bytes(self) -> int:
        """What summing borrows for the parts of others, as a number that all ranks share."""
        return self.pitch * (self.transport.count - 1) * self.dtype.itemsize

    @property
    def packed_bytes(self) -> int:
        """What a buffer of all parts takes; nothing where a tensor moves alone."""
        return 0 if self.alone else self.total * self.dtype.itemsize

    @property
    def own(self) -> int:
        """Elements of this rank's parts."""
        return self.sizes[self.transport.index]

    def block_of_own(self, packed: torch.Tensor) -> torch.Tensor:
        """This rank's block of a buffer, or of a tensor that moves alone."""
        start = self.starts[self.transport.index]
        return packed[start : start + self.own]

    def _blocks(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """What of a buffer is each rank's, with its padding where a transport needs that."""
        sizes = self.sizes if self.transport.takes_uneven else [self.pitch] * self.transport.count
        return [packed[start : start + size] for start, size in zip(self.starts, sizes, strict=True)]

    def parts_in(self, flat: torch.Tensor, rank: int | None = None) -> list[torch.Tensor]:
        """The parts of one rank, by default this one, as views of a flat tensor that holds them all."""
        rank = self.transport.index if rank is None else rank
        sizes = [cut.numels[rank] for cut in self.cuts]
        views = flat[: sum(sizes)].split(sizes)
        return [view.view(cut.part_shape(rank)) for view, cut in zip(views, self.cuts, strict=True)]

    @functools.cached_property
    def _in_rows(self) -> bool:
        """Whether each tensor is a row of equal runs, one for each rank: it is then copied as a whole."""
        return all(cut.in_runs and cut.even for cut in self.cuts)

    def _rows(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """For each tensor, where a buffer has the runs of all ranks, as (ranks, elements of a run)."""
        rows = self._rows_of.get(packed.data_ptr())
        if rows is None:
            rows, at = [], packed.storage_offset()
            for cut in self.cuts:
                rows.append(packed.as_strided((self.transport.count, cut.numels[0]), (self.pitch, 1), at))
                at += cut.numels[0]
            self._rows_of = {packed.data_ptr(): rows}
        return rows

    def rows_of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Whole tensors as rows of the ranks' runs; none where they do not lie so."""
        fits = self._in_rows and all(tensor.is_contiguous() for tensor in tensors)
        return [tensor.view(self.transport.count, -1) for tensor in tensors] if fits else []

    # --- summing ------------------------------------------------------------------------------------------------------

    def reduce(
        self, tensors: Sequence[torch.Tensor], into: torch.Tensor | None = None, carries: Iterable[Movement] = ()
    ) -> Handle:
        """Begin to sum tensors over the ranks; each gets the sum of its parts from `sum_into`.

        A tensor that moves alone must be left as it is until then. Others are packed into a borrowed buffer, or `into`
        a flat one of `total` elements.
        """
        borrowed = []
        if into is not None:
            packed = into
            self._pack(tensors, packed)
        elif self.alone and tensors[0].dtype == self.dtype and tensors[0].is_contiguous():
            packed = tensors[0].view(-1)
        else:
            packed = self.workspace.take(self.total, self.dtype, self.device)
            borrowed.append(packed)
            self._pack(tensors, packed)
        self.transport.note("reduce_scatter", carries)
        moving = self.transport.reduce_scatter(self._blocks(packed), self.workspace)
        moving.borrowed += borrowed
        return moving

    def _pack(self, tensors: Sequence[torch.Tensor], packed: torch.Tensor) -> None:
        if rows := self.rows_of(tensors):
            _torch.copy_all(self._rows(packed), rows)
            return
        targets, sources = [], []
        for rank, start in enumerate(self.starts):
            targets += self.parts_in(packed[start : start + self.sizes[rank]], rank)
            sources += [cut.take(tensor, rank) for cut, tensor in zip(self.cuts, tensors, strict=True)]
        _torch.copy_all(targets, sources)

    def sum_into(self, moving: Handle, out: torch.Tensor, scale: float) -> None:
        """Wait, and write the sum of this rank's parts times `scale` into a flat tensor.

        Summed in the order of ranks, so that the result does not depend on where in a buffer an element lies. `out` may
        be this rank's part of what it sent.
        """
        moving.wait()
        if self.own:
            _scaled_sum([block[: self.own] for block in moving.blocks], scale, out, own=self.transport.index)
        for buffer in moving.borrowed:
            self.workspace.give(buffer)

    # --- gathering ----------------------------------------------------------------------------------------------------

    def gather(self, mine: torch.Tensor, tensors: Sequence[torch.Tensor], carries: Iterable[Movement] = ()) -> Handle:
        """Begin to gather every rank's parts, flat as in `parts_in`, into whole tensors; `unpack` ends it.

        Where a tensor moves alone, `mine` may be this rank's part of it.
        """
        borrowed = []
        if self.alone and tensors[0].dtype == self.dtype and tensors[0].is_contiguous():
            packed = tensors[0].view(-1)
        else:
            packed = self.workspace.take(self.total, self.dtype, self.device)
            borrowed.append(packed)
        blocks = self._blocks(packed)
        here = blocks[self.transport.index]
        if self.own and here.data_ptr() != mine.data_ptr():
            here[: self.own].copy_(mine)
        self.transport.note("all_gather", carries)
        moving = self.transport.all_gather(blocks)
        moving.borrowed += borrowed
        return moving

    def unpack(self, moving: Handle, tensors: Sequence[torch.Tensor], rows: list[torch.Tensor] | None = None) -> None:
        """Wait for a gathering, and put what came into its places; `rows_of` them, where the caller knows."""
        moving.wait()
        if moving.borrowed and (rows := self.rows_of(tensors) if rows is None else rows):
            _torch.copy_all(rows, self._rows(moving.borrowed[0]))
        elif moving.borrowed:
            targets, sources = [], []
            for rank, block in enumerate(moving.blocks):
                for cut, tensor, part in zip(self.cuts, tensors, self.parts_in(block, rank), strict=True):
                    for place, chosen in cut.places(tensor, rank):
                        targets.append(place)
                        sources.append(part.narrow(cut.dim, chosen.start, chosen.stop - chosen.start))
            _torch.copy_all(targets, sources)
        for buffer in moving.borrowed:
            self.workspace.give(buffer)


_CACHED = 1 << 16  # elements that stay in a core's cache between an addition and the next


def _scaled_sum(blocks: list[torch.Tensor], scale: float, out: torch.Tensor, *, own: int) -> None:
    """The sum in order, times `scale`. `out` may be the own block; others are written over.

    On a CPU so much at a time as a cache holds.
    """
    target = out if own < 2 else blocks[0]  # nothing that is read later
    if out.device.type == "cpu" and out.numel() > _CACHED:
        pieces = zip(*(tensor.split(_CACHED) for tensor in (out, target, *blocks)), strict=True)
    else:
        pieces = zip(*([tensor] for tensor in (out, target, *blocks)), strict=True)
    for result, total, so_far, *others in pieces:
        for other in others[:-1]:
            so_far = torch.add(so_far, other, out=total)
        if others:
            so_far = torch.add(so_far, others[-1], out=result)
        if scale != 1 or not others:
            torch.mul(so_far, scale, out=result)

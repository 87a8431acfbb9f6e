"""Move tensors with the same division together: reduce shards to the ranks that own them, and gather them again.

A large tensor whose shards are contiguous in memory moves unbucketed, without a copy. Small tensors are packed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch

from shardlib._plan import Movement
from shardlib.engine import _torch
from shardlib.engine.ranks.transport import Handle, Transport, Workspace
from shardlib.layout import ShardSpec

__all__ = ["Bucket"]


class Bucket:
    """Tensors of one dtype that are divided over the same ranks, and that move together.

    Args:
        specs: the division of each tensor.
        transport: the transport among these ranks.
        dtype: the dtype in which the tensors are sent.
        device: the device of all tensors.
        workspace: the buffers that movements borrow.
    """

    def __init__(
        self,
        specs: Sequence[ShardSpec],
        transport: Transport | None,
        dtype: torch.dtype,
        device: torch.device,
        workspace: Workspace,
    ) -> None:
        assert transport is not None, "a shard spec needs a transport"
        self.specs, self.transport, self.dtype, self.device, self.workspace = specs, transport, dtype, device, workspace
        self.sizes = [sum(spec.numels[rank] for spec in specs) for rank in range(transport.count)]
        self.alone = len(specs) == 1 and specs[0].in_runs and (transport.takes_uneven or specs[0].even)
        # In a packed buffer, every rank's block is as large as the largest one.
        self.block_numel = max(self.sizes)
        self.starts = (
            list(specs[0].starts) if self.alone else [rank * self.block_numel for rank in range(transport.count)]
        )
        self.total = sum(self.sizes) if self.alone else self.block_numel * transport.count
        self._rows_of: dict[int, list[torch.Tensor]] = {}  # by the address of a packed buffer

    @property
    def shard_numel(self) -> int:
        """The number of elements of this rank's shards."""
        return self.sizes[self.transport.index]

    def local_block(self, packed: torch.Tensor) -> torch.Tensor:
        """Return this rank's block of a packed buffer, or of a tensor that moves alone."""
        start = self.starts[self.transport.index]
        return packed[start : start + self.shard_numel]

    def _blocks(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return each rank's block of a packed buffer, with padding where the transport needs even blocks."""
        sizes = self.sizes if self.transport.takes_uneven else [self.block_numel] * self.transport.count
        return [packed[start : start + size] for start, size in zip(self.starts, sizes, strict=True)]

    def shards_in(self, flat: torch.Tensor, rank: int | None = None) -> list[torch.Tensor]:
        """Return the shards of one rank, by default this one, as views of a flat tensor that holds them all."""
        rank = self.transport.index if rank is None else rank
        sizes = [spec.numels[rank] for spec in self.specs]
        views = flat[: sum(sizes)].split(sizes)
        return [view.view(spec.shard_shape(rank)) for view, spec in zip(views, self.specs, strict=True)]

    @functools.cached_property
    def _in_rows(self) -> bool:
        """Whether each tensor consists of equal contiguous shards, one for each rank, and is copied in one call."""
        return all(spec.in_runs and spec.even for spec in self.specs)

    def _rows(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return views of a packed buffer, one for each tensor, of shape (ranks, elements of a shard)."""
        rows = self._rows_of.get(packed.data_ptr())
        if rows is None:
            rows, offset = [], packed.storage_offset()
            for spec in self.specs:
                rows.append(packed.as_strided((self.transport.count, spec.numels[0]), (self.block_numel, 1), offset))
                offset += spec.numels[0]
            self._rows_of = {packed.data_ptr(): rows}
        return rows

    def rows_of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return views of full tensors, of shape (ranks, elements of a shard); none if they are not contiguous."""
        fits = self._in_rows and all(tensor.is_contiguous() for tensor in tensors)
        return [tensor.view(self.transport.count, -1) for tensor in tensors] if fits else []

    def _memory_of(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the flat memory that is sent, that of the tensor where it moves alone; and what is borrowed for it."""
        if self.alone and tensors[0].dtype == self.dtype and tensors[0].is_contiguous():
            return tensors[0].view(-1), []
        packed = self.workspace.take(self.total, self.dtype, self.device)
        return packed, [packed]

    # --- summing ------------------------------------------------------------------------------------------------------

    def reduce(self, tensors: Sequence[torch.Tensor], carries: Iterable[Movement] = ()) -> Handle:
        """Begin to reduce tensors over the ranks; `sum_into` ends it and gives each rank the sum of its shards.

        A tensor that moves alone must not change until then. Other tensors are packed into a workspace buffer.
        """
        packed, borrowed = self._memory_of(tensors)
        if borrowed:
            self._pack(tensors, packed)
        moving = self.transport.reduce_scatter(self._blocks(packed), self.workspace, carries)
        moving.borrowed += borrowed
        return moving

    def _pack(self, tensors: Sequence[torch.Tensor], packed: torch.Tensor) -> None:
        if rows := self.rows_of(tensors):
            _torch.copy_all(self._rows(packed), rows)
            return
        targets, sources = [], []
        for rank, start in enumerate(self.starts):
            targets += self.shards_in(packed[start : start + self.sizes[rank]], rank)
            sources += [spec.take(tensor, rank) for spec, tensor in zip(self.specs, tensors, strict=True)]
        _torch.copy_all(targets, sources)

    def sum_into(self, moving: Handle, out: torch.Tensor, scale: float) -> None:
        """Wait, and write the sum of this rank's shards times `scale` into a flat tensor.

        Summands are added in the order of ranks, so that the result does not depend on the position of an element in a
        buffer. `out` may be this rank's block of the buffer that was sent.
        """
        moving.wait()
        if self.shard_numel:
            _scaled_sum([block[: self.shard_numel] for block in moving.blocks], scale, out, index=self.transport.index)
        for buffer in moving.borrowed:
            self.workspace.give(buffer)

    # --- gathering ----------------------------------------------------------------------------------------------------

    def gather(
        self, shards: list[torch.Tensor], tensors: Sequence[torch.Tensor], carries: Iterable[Movement] = ()
    ) -> Handle:
        """Begin to gather every rank's shards, flat and in order, into full tensors; `unpack` ends it.

        Where a tensor moves alone, its shard may be this rank's block of it.
        """
        packed, borrowed = self._memory_of(tensors)
        blocks = self._blocks(packed)
        local_block = blocks[self.transport.index]
        if self.shard_numel and local_block.data_ptr() != shards[0].data_ptr():
            torch.cat(shards, out=local_block[: self.shard_numel])
        moving = self.transport.all_gather(blocks, carries)
        moving.borrowed += borrowed
        return moving

    def unpack(self, moving: Handle, tensors: Sequence[torch.Tensor], rows: list[torch.Tensor] | None = None) -> None:
        """Wait for an all-gather, and copy the shards into the full tensors; `rows` is their `rows_of`, if known."""
        moving.wait()
        if moving.borrowed and (rows := self.rows_of(tensors) if rows is None else rows):
            _torch.copy_all(rows, self._rows(moving.borrowed[0]))
        elif moving.borrowed:
            targets, sources = [], []
            for rank, block in enumerate(moving.blocks):
                for spec, tensor, shard in zip(self.specs, tensors, self.shards_in(block, rank), strict=True):
                    for target, chosen in spec.places(tensor, rank):
                        targets.append(target)
                        sources.append(shard.narrow(spec.dim, chosen.start, chosen.stop - chosen.start))
            _torch.copy_all(targets, sources)
        for buffer in moving.borrowed:
            self.workspace.give(buffer)


_CACHED = 1 << 16  # elements that stay in a core's cache from one addition to the next


def _scaled_sum(blocks: list[torch.Tensor], scale: float, out: torch.Tensor, *, index: int) -> None:
    """Sum blocks in order, times `scale`, into `out`, which may be the block of this rank; overwrite the others.

    On a CPU, one cache-sized piece at a time.
    """
    target = out if index < 2 else blocks[0]  # a block that is not read later
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

"""Where state is split over data axes, each rank updates its own part of a parameter; then parts are gathered.

While an optimizer steps, each such parameter is represented by a plain tensor of this rank's part: a view of the
parameter where that is a run of its memory, else a copy in a bucket. After the step the buckets are gathered into the
parameters, all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardlib.engine import _torch
from shardlib.engine.exchange import Bundle, Scratch, goes_alone, in_batches
from shardlib.engine.held import Held, local_of

__all__ = ["Updates", "update_in_parts"]


def update_in_parts(held: Sequence[Held], scratch: Scratch, *, bucket_bytes: int) -> None:
    """Let optimizers step on this rank's parts of those parameters whose state is split and that are not stored so."""
    ours = [one for one in held if one.cut is not None and one.stage < 3]
    updates = Updates(ours, scratch, bucket_bytes=bucket_bytes)
    for one in ours:
        one.updates = updates


class Updates:
    """The parameters of a model whose state is split over data axes and which themselves are not.

    Args:
        held: the parameters.
        scratch: memory that gathering borrows.
        bucket_bytes: how much a bucket carries.
    """

    def __init__(self, held: Iterable[Held], scratch: Scratch, *, bucket_bytes: int) -> None:
        batches = in_batches(
            held,
            alone=lambda one: goes_alone(local_of(one.param), one.cut),
            key=lambda one: (one.axes, one.dtype),
            size=lambda one: local_of(one.param).nbytes,
            limit=bucket_bytes,
        )
        self._buckets = [_Bucket(batch, scratch) for batch in batches]
        self._home = {id(one.param): (bucket, i) for bucket in self._buckets for i, one in enumerate(bucket.held)}

    def begin(self, params: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """This rank's parts of some parameters, by the parameters' ids, to be updated in place."""
        touched = {id(self._home[id(p)][0]): self._home[id(p)][0] for p in params if id(p) in self._home}
        for bucket in touched.values():
            bucket.load()
        homes = {id(p): self._home[id(p)] for p in params if id(p) in self._home}
        return {key: bucket.parts[i] for key, (bucket, i) in homes.items()}

    def end(self, params: Sequence[torch.Tensor]) -> None:
        """Gather the updated parts into the parameters. Collective over the axes that split them."""
        touched = [b for b in self._buckets if any(id(p) in b.ids for p in params)]
        under_way = [(bucket, bucket.gather()) for bucket in touched]
        for bucket, moving in under_way:
            bucket.unpack(moving)

    def whole_gradients(self, params: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Gradients gathered for optimizers that need them whole. Collective over the axes that split them."""
        found = []
        for bucket in self._buckets:
            if any(id(p) in bucket.ids for p in params):
                found += bucket.whole_gradients()
        return found


class _Bucket:
    """Parameters that are gathered together, and this rank's parts of them."""

    def __init__(self, held: list[Held], scratch: Scratch) -> None:
        self.held, self.ids = held, {id(one.param) for one in held}
        first = local_of(held[0].param)
        cuts = [one.cut for one in held if one.cut is not None]
        self.bundle = Bundle(cuts, held[0].peers, first.dtype, first.device, scratch)
        if self.bundle.alone and first.is_contiguous():
            self.mine = self.bundle.block_of_own(first.view(-1))
        else:
            self.mine = torch.empty(self.bundle.own, dtype=first.dtype, device=first.device)
        self.parts = self.bundle.parts_in(self.mine)

    def load(self) -> None:
        """What others may have written to the parameters since (a checkpoint, an average) counts."""
        if self._is_view():
            return
        rank = self.bundle.peers.index
        sources = [cut.take(local_of(one.param), rank) for one, cut in zip(self.held, self.bundle.cuts, strict=True)]
        _torch.copy_all(self.parts, sources)

    def _is_view(self) -> bool:
        return self.mine.untyped_storage().data_ptr() == local_of(self.held[0].param).untyped_storage().data_ptr()

    def gather(self) -> Any:
        return self.bundle.gather(self.mine, self._targets())

    def unpack(self, moving: Any) -> None:
        self.bundle.unpack(moving, self._targets())

    def _targets(self) -> list[torch.Tensor]:
        return [local_of(one.param) for one in self.held]

    def whole_gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        parts = [local_of(one.param.grad) if one.param.grad is not None else None for one in self.held]
        shown = [torch.zeros_like(part) if have is None else have for have, part in zip(parts, self.parts, strict=True)]
        mine = torch.cat([part.reshape(-1) for part in shown])
        wholes = [torch.empty_like(local_of(one.param)) for one in self.held]
        self.bundle.unpack(self.bundle.gather(mine, wholes), wholes)
        return [
            (one.param, _torch.wrap(whole, _torch.spec_of(one.param)) if isinstance(one.param, DTensor) else whole)
            for one, whole, have in zip(self.held, wholes, parts, strict=True)
            if have is not None
        ]

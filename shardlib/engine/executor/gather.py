"""Local shards that are gathered together: of stored parameters before they are computed with, and of updated ones."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch.distributed.tensor import DTensor

from shardlib._plan import Movement, Purpose, unit_of
from shardlib.engine import _torch, offload
from shardlib.engine.executor import Executor
from shardlib.engine.executor.bucket import Bucket, goes_alone, in_batches
from shardlib.engine.held import Held, local_of
from shardlib.engine.transport import Handle

__all__ = ["UnshardBucket", "UpdateBucket", "unshard_buckets", "update_buckets"]


def _carries(held: Iterable[Held], purpose: Purpose) -> Iterator[Movement]:
    for one in held:
        if (movement := one.movements.get(purpose)) is not None:
            yield movement


def _bucket(executor: Executor, held: Sequence[Held], dtype: torch.dtype, device: torch.device) -> Bucket:
    return Bucket([one.cut for one in held if one.cut], held[0].transport, dtype, device, executor.workspace)


# --- stored shards, before a unit computes ----------------------------------------------------------------------------


def unshard_buckets(executor: Executor, held: Sequence[Held]) -> list[UnshardBucket]:
    """Buckets for the parameters of one unit: large ones by themselves, the others together."""
    batches = in_batches(
        held,
        alone=lambda one: goes_alone(one.memory, one.cut),
        key=lambda one: (one.axes, one.dtype, "stored" in one.hosted),
        size=lambda one: one.memory.nbytes,
        limit=math.inf,
    )
    return [UnshardBucket(executor, batch) for batch in batches]


class UnshardBucket:
    """Parameters that are stored in shards, gathered into unsharded memory."""

    def __init__(self, executor: Executor, held: list[Held]) -> None:
        self.held = held
        self._bucket = _bucket(executor, held, held[0].dtype, held[0].device)
        self._moving: Handle | None = None

    def begin(self, purpose: Purpose) -> None:
        """Ask for every rank's shards; those on the host are copied first, beside what the device computes."""
        mine = [local_of(one.param).reshape(-1) for one in self.held]
        carries = _carries(self.held, purpose)
        if "stored" not in self.held[0].hosted:
            flat = mine[0] if len(mine) == 1 else torch.cat(mine)
            self._moving = self._bucket.gather(flat, self._unsharded(), carries)
            return
        with offload.beside(self._bucket.device):
            flat = offload.joined(mine, self._bucket.device)
            self._moving = self._bucket.gather(flat, self._unsharded(), carries)

    def wait(self) -> None:
        if self._moving is not None:
            moving, self._moving = self._moving, None
            self._bucket.unpack(moving, self._unsharded())

    def _unsharded(self) -> list[torch.Tensor]:
        return [one.unsharded for one in self.held if one.unsharded is not None]


# --- updated shards, after a step -------------------------------------------------------------------------------------


def update_buckets(
    executor: Executor, held: Iterable[Held], *, bucket_bytes: int, late: Sequence[str]
) -> list[UpdateBucket]:
    """Buckets for parameters whose state is split and that are not stored so; of late modules, apart from others."""
    known = frozenset(late)
    batches = in_batches(
        [one for one in held if one.updated_in_parts],
        alone=lambda one: goes_alone(local_of(one.param), one.cut),
        key=lambda one: (one.axes, one.dtype, bool(unit_of(one.names, known))),
        size=lambda one: local_of(one.param).nbytes,
        limit=bucket_bytes,
    )
    return [UpdateBucket(executor, batch, known) for batch in batches]


class UpdateBucket:
    """Parameters of which each rank updates its own shards, which are then gathered into them.

    While an optimizer steps, each parameter is represented by a plain tensor of this rank's shard: a view of the
    parameter where that is a run of its memory, else a copy.

    Attributes:
        ids: of the parameters.
        units: modules that wait for them.
        shards: of this rank, one for each parameter.
    """

    def __init__(self, executor: Executor, held: list[Held], late: Collection[str]) -> None:
        self.held, self.ids = held, {id(one.param) for one in held}
        self.units = {unit_of(one.names, late) for one in held}
        first = local_of(held[0].param)
        self._bucket = _bucket(executor, held, first.dtype, first.device)
        if self._bucket.alone and first.is_contiguous():
            self._mine = self._bucket.block_of_own(first.view(-1))
        else:
            self._mine = torch.empty(self._bucket.own, dtype=first.dtype, device=first.device)
        self.shards = self._bucket.parts_in(self._mine)
        self._moving: Handle | None = None
        self._where: list[int] = []  # the parameters' memory, as it was when these were made:
        self._known: list[torch.Tensor] = []
        self._rows: list[torch.Tensor] = []
        self._loaded: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []

    def load(self) -> None:
        """Read what others may have written to the parameters since (a checkpoint, an average)."""
        locals_ = self._locals()
        if self._mine.untyped_storage().data_ptr() != locals_[0].untyped_storage().data_ptr():
            _torch.copy_all(self._loaded, self._sources)

    def _locals(self) -> list[torch.Tensor]:
        """Local tensors of the parameters: the same list, as long as they stay where they are."""
        where = [one.memory.data_ptr() for one in self.held]
        if where != self._where:
            self._where, self._known = where, [local_of(one.param) for one in self.held]
            self._rows = self._bucket.rows_of(self._known)
            self._loaded, self._sources = [], []
            for cut, local, shard in zip(self._bucket.cuts, self._known, self.shards, strict=True):
                for place, chosen in cut.places(local, self._bucket.transport.index):
                    self._sources.append(place)
                    self._loaded.append(shard.narrow(cut.dim, chosen.start, chosen.stop - chosen.start))
        return self._known

    def begin(self) -> None:
        carries = _carries(self.held, "updated parameters")
        self._moving = self._bucket.gather(self._mine, self._locals(), carries)

    def wait(self) -> None:
        if self._moving is not None:
            moving, self._moving = self._moving, None
            self._bucket.unpack(moving, self._locals(), self._rows)

    def full_gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each parameter that has a gradient, with all of it."""
        have = [local_of(one.param.grad) if one.param.grad is not None else None for one in self.held]
        shards = [torch.zeros_like(own) if grad is None else grad for grad, own in zip(have, self.shards, strict=True)]
        mine = torch.cat([shard.reshape(-1) for shard in shards])
        full = [torch.empty_like(local_of(one.param)) for one in self.held]
        self._bucket.unpack(self._bucket.gather(mine, full), full)
        return [
            (one.param, _torch.wrap(grad, _torch.spec_of(one.param)) if isinstance(one.param, DTensor) else grad)
            for one, grad, shard in zip(self.held, full, have, strict=True)
            if shard is not None
        ]

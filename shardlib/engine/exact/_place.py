"""Where a tensor of one rank stands in the tensor that one device would have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from shardlib.engine import _torch
from shardlib.engine.exact._held import Held, held_by

__all__ = ["Place"]


@dataclass(frozen=True)
class Place:
    """A data rank among `count`, each with `rows` examples of the batch (None: not known, or no batch at all).

    DTensors say how they lie on the model axes. On data axes tensors are local, and nothing says which dim is the
    batch. The rule: a tensor belongs to the batch if its leading dim is a multiple of `rows`, which covers
    (batch * seq, embed) and (batch * heads, seq, seq), or else if some dim equals `rows`, the first such dim. That dim
    is then the rank's block of a global one. Any other tensor, such as a mask over a weight, is drawn alike everywhere.

    The rule can be wrong where a tensor has nothing to do with the batch but has such a size: a weight with 512 rows
    and a batch of 8 looks like the batch; so does everything where the batch has one row.
    """

    index: int = 0
    count: int = 1
    rows: int | None = None

    def held(self, shape: Sequence[int]) -> Held:
        """What this rank holds of a tensor that is whole on the model axes."""
        return self._in_batch(Held.all_of(shape))

    def held_by(self, tensor: torch.Tensor) -> Held:
        """What this rank holds of a plain tensor, or of a DTensor without partial sums."""
        if not isinstance(tensor, DTensor):
            return self.held(tensor.shape)
        spec = _torch.spec_of(tensor)
        return self._in_batch(held_by(tuple(spec.shape), spec.mesh, spec.placements))

    def _in_batch(self, held: Held) -> Held:
        dim = None if self.count == 1 else self.batch_dim(held.shape)
        return held if dim is None else held.block_of(dim, self.index, self.count)

    def batch_dim(self, shape: Sequence[int]) -> int | None:
        """Which dim of a tensor of this shape is the batch.

        >>> place = Place(index=0, count=2, rows=4)
        >>> [place.batch_dim(shape) for shape in [(4, 9), (12, 9), (9, 4, 4), (9, 9), ()]]
        [0, 0, 1, None, None]
        """
        if not self.rows or not shape:
            return None
        if shape[0] and shape[0] % self.rows == 0:
            return 0
        return next((dim for dim, size in enumerate(shape) if size == self.rows), None)

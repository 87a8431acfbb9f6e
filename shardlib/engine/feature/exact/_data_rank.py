"""The elements of a single device's tensor that a data rank's tensor corresponds to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from shardlib.engine import _torch
from shardlib.engine.feature.exact._local_elements import LocalElements, local_elements

__all__ = ["DataRank"]


@dataclass(frozen=True)
class DataRank:
    """A data rank among `count`, each with `rows` examples of the batch (None: not known, or no batch at all).

    A DTensor has placements on the model axes. On data axes tensors are local, and their batch dim is not recorded: it
    is the leading dim if that is a multiple of `rows`, which covers (batch * seq, embed) and (batch * heads, seq, seq),
    or else the first dim that equals `rows`. docs/architecture.md says where this heuristic fails.
    """

    index: int = 0
    count: int = 1
    rows: int | None = None

    def elements_of_shape(self, shape: Sequence[int]) -> LocalElements:
        """Return this rank's elements of a tensor of this shape that is replicated over the model axes."""
        return self._in_batch(LocalElements.all_of(shape))

    def elements_of(self, tensor: torch.Tensor) -> LocalElements:
        """Return this rank's elements of a plain tensor, or of a DTensor without partial sums."""
        if not isinstance(tensor, DTensor):
            return self.elements_of_shape(tensor.shape)
        spec = _torch.spec_of(tensor)
        return self._in_batch(local_elements(tuple(spec.shape), spec.mesh, spec.placements))

    def _in_batch(self, elements: LocalElements) -> LocalElements:
        dim = None if self.count == 1 else self.batch_dim(elements.shape)
        return elements if dim is None else elements.block_of(dim, self.index, self.count)

    def batch_dim(self, shape: Sequence[int]) -> int | None:
        """Return the batch dim of a tensor of this shape, or None.

        >>> rank = DataRank(index=0, count=2, rows=4)
        >>> [rank.batch_dim(shape) for shape in [(4, 9), (12, 9), (9, 4, 4), (9, 9), ()]]
        [0, 0, 1, None, None]
        """
        if not self.rows or not shape:
            return None
        if shape[0] and shape[0] % self.rows == 0:
            return 0
        return next((dim for dim, size in enumerate(shape) if size == self.rows), None)

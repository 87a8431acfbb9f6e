"""Ring attention: queries, keys and values are sharded on the sequence; keys and values are passed round a ring (Liu et
al., arXiv 2310.01889).

A rank processes one block of keys after the other, and merges the results by their log-sum-exp (Milakov and Gimelshein,
arXiv 1805.02867). The kernel's backward takes the log-sum-exp of full rows, so that the gradients of blocks add up to
the gradient. Gradients of keys and values are passed on after their block, and by one more step to their own rank.

Under a causal mask a rank attends to the blocks up to its own, so that the last ranks would have most of the work.
Therefore rank r of n exchanges the later half of its queries with rank n-1-r, so that each has n + 1 halves (Brandon et
al., arXiv 2311.09431, reorder tokens for this; here only attention is concerned).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardlib.engine._torch import chunks_of
from shardlib.engine.ops._operands import arguments_by_name
from shardlib.engine.ops._rows import Here, Op

__all__ = ["Ring"]

_SEQ = 2


@dataclass(frozen=True)
class _Tile:
    """Some of this rank's queries and some keys of a block. If causal, both begin at the same position."""

    queries: slice
    keys: slice
    causal: bool = False


@dataclass(frozen=True)
class _Span:
    """Rows [at, at + count) of this rank, which are the queries from global position `first` on."""

    at: int
    first: int
    count: int


@dataclass(frozen=True)
class Ring:
    """One call on this rank: `query` and `key` are indices of operands, `here` provides their global shapes.

    Local shapes are (batch, heads, positions, head dim); log-sum-exps lack the last.
    """

    here: Here
    query: int
    key: int
    causal: bool

    def forward(self, op: Op, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the results of `op`: output and log-sum-exp of this rank's queries."""
        named = arguments_by_name(op, args, kwargs)
        queries, spans = self._balanced([named["query"]])
        rows = queries[0]
        wide = torch.promote_types(rows.dtype, torch.float32)
        out = rows.new_zeros((*rows.shape[:3], named["value"].shape[3]), dtype=wide)
        logsumexp = rows.new_full(rows.shape[:3], -torch.inf, dtype=wide)
        for source, (key, value) in self._round([named["key"], named["value"]]):
            first = self._chunk(self.key, source)[0]
            for tile in self._tiles(spans, first, key.shape[_SEQ]):
                mask = _part(named["attn_mask"], first, tile)
                found = op(
                    rows[:, :, tile.queries],
                    key[:, :, tile.keys],
                    value[:, :, tile.keys],
                    0.0,
                    tile.causal,
                    **{**kwargs, "attn_mask": mask},
                )
                _merge(out[:, :, tile.queries], logsumexp[:, :, tile.queries], found[0], found[1], mask)
        logsumexp = logsumexp.masked_fill(logsumexp == -torch.inf, 0)  # of fully masked rows, as the kernel returns it
        out, logsumexp = self._back([out.to(rows.dtype), logsumexp.unsqueeze(-1)], spans)
        return out, logsumexp.squeeze(-1)

    def backward(self, op: Op, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        """Compute the results of `op`: gradients of this rank's queries, keys and values."""
        named = arguments_by_name(op, args, kwargs)
        own = [named["query"], named["grad_out"], named["out"], named["logsumexp"].unsqueeze(-1)]
        (rows, grad, out, lse), spans = self._balanced(own)
        lse = lse.squeeze(-1)
        wide = torch.promote_types(rows.dtype, torch.float32)
        of_query = torch.zeros_like(rows, dtype=wide)
        local = [named["key"], named["value"]]
        coming: Callable[[], list[torch.Tensor]] | None = None
        for source, (key, value) in self._round(local):
            first = self._chunk(self.key, source)[0]
            sums = [torch.zeros_like(x, dtype=wide) for x in (key, value)]
            for tile in self._tiles(spans, first, key.shape[_SEQ]):
                q, k = tile.queries, tile.keys
                mask = _part(named["attn_mask"], first, tile)
                found = op(
                    grad[:, :, q],
                    rows[:, :, q],
                    key[:, :, k],
                    value[:, :, k],
                    out[:, :, q],
                    lse[:, :, q],
                    0.0,
                    tile.causal,
                    **{**kwargs, "attn_mask": mask},
                )
                of_query[:, :, q] += found[0]
                sums[0][:, :, k] += found[1]
                sums[1][:, :, k] += found[2]
            if coming is not None:
                sums = [a + b for a, b in zip(coming(), sums, strict=True)]
            coming = self._pass_on(sums, source)
        assert coming is not None
        of_query = self._back([of_query.to(rows.dtype)], spans)[0]
        return of_query, *(x.to(y.dtype) for x, y in zip(coming(), local, strict=True))

    # --- the ring ---

    @property
    def _coordinate(self) -> tuple[int, int]:
        return self.here.coordinate(self.key, _SEQ)

    def _chunk(self, operand: int, index: int) -> tuple[int, int]:
        """Return a rank's first position and number of positions, if no other axis splits the operand's sequence."""
        return chunks_of(self.here.shape(operand)[_SEQ], self._coordinate[1], index)[0]

    def _round(self, tensors: list[torch.Tensor]) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Yield each rank's index, keys and values, this rank's first. The next ones are sent meanwhile."""
        index, size = self._coordinate
        for step in range(size):
            source = (index - step) % size
            coming = self._pass_on(tensors, source) if step < size - 1 else None
            yield source, tensors
            if coming is not None:
                tensors = coming()

    def _pass_on(self, tensors: list[torch.Tensor], source: int) -> Callable[[], list[torch.Tensor]]:
        """Send the tensors of rank `source` to the next rank, and receive those of rank source - 1.

        Keys and values are one message.
        """
        index, size = self._coordinate
        count = self._chunk(self.key, (source - 1) % size)[1]
        widths = [x.shape[-1] for x in tensors]
        shape = (*tensors[0].shape[:_SEQ], count, sum(widths))
        wait = self._exchange(torch.cat(tensors, -1), (index + 1) % size, (index - 1) % size, shape)
        return lambda: list(wait().split(widths, -1))

    def _exchange(self, tensor: torch.Tensor, to: int, source: int, shape: Sequence[int]) -> Callable[[], torch.Tensor]:
        return self.here.exchange(tensor, (self.key, _SEQ), to, source, shape)

    # --- balance ---

    def _balanced(self, tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[_Span]]:
        """Return the tensors that this rank computes with, and the global positions of their rows."""
        own = (self.here.offset(self.query, _SEQ), tensors[0].shape[_SEQ])
        if not self._mirrors(own[1]):
            return tensors, [_Span(0, *own)]
        index, size = self._coordinate
        first, count = self._chunk(self.query, size - 1 - index)
        kept = _first_half(own[1])
        later = [x[:, :, kept:] for x in tensors]
        received = self._mirrored(later, count - _first_half(count))
        spans = [_Span(0, own[0], kept), _Span(kept, first + _first_half(count), count - _first_half(count))]
        return [torch.cat(pair, _SEQ) for pair in zip((x[:, :, :kept] for x in tensors), received, strict=True)], spans

    def _back(self, tensors: list[torch.Tensor], spans: list[_Span]) -> list[torch.Tensor]:
        """Apply the inverse of `_balanced`."""
        if len(spans) == 1:
            return tensors
        kept = spans[0].count
        returned = self._mirrored(
            [x[:, :, kept:] for x in tensors], self._chunk(self.query, self._coordinate[0])[1] - kept
        )
        return [torch.cat(pair, _SEQ) for pair in zip((x[:, :, :kept] for x in tensors), returned, strict=True)]

    def _mirrors(self, count: int) -> bool:
        """Return whether queries are exchanged: not where another axis splits them as well."""
        return self.causal and count == self._chunk(self.query, self._coordinate[0])[1]

    def _mirrored(self, tensors: list[torch.Tensor], count: int) -> list[torch.Tensor]:
        """Exchange tensors with the rank at the same distance from the other end, which sends `count` positions.

        There is one message for each dtype: the log-sum-exp may have another dtype than the other tensors.
        """
        index, size = self._coordinate
        mirror = size - 1 - index
        found: dict[int, torch.Tensor] = {}
        for dtype in dict.fromkeys(x.dtype for x in tensors):
            numbers = [i for i, x in enumerate(tensors) if x.dtype == dtype]
            widths = [tensors[i].shape[-1] for i in numbers]
            shape = (*tensors[0].shape[:_SEQ], count, sum(widths))
            received = self._exchange(torch.cat([tensors[i] for i in numbers], -1), mirror, mirror, shape)()
            found |= dict(zip(numbers, received.split(widths, -1), strict=True))
        return [found[i] for i in range(len(tensors))]

    def _tiles(self, spans: Sequence[_Span], first: int, count: int) -> Iterator[_Tile]:
        """Yield the tiles for the keys at [first, first + count), without fully masked ones."""
        if not self.causal:
            yield _Tile(slice(None), slice(0, count))
            return
        for span in spans:
            earlier = min(first + count, span.first) - first
            if (
                earlier > 0 and span.count
            ):  # a piece of one position has an empty later half; kernels divide by its length
                yield _Tile(slice(span.at, span.at + span.count), slice(0, earlier))
            start, end = max(first, span.first), min(first + count, span.first + span.count)
            if start < end:
                rows = slice(span.at + start - span.first, span.at + span.count)
                yield _Tile(rows, slice(start - first, end - first), causal=True)


def _first_half(count: int) -> int:
    return count - count // 2


def _part(mask: torch.Tensor | None, first: int, tile: _Tile) -> torch.Tensor | None:
    """Return the columns of a mask for a block of keys; all columns if the mask broadcasts over keys."""
    if mask is None or mask.shape[-1] == 1:
        return mask
    return mask[..., first + tile.keys.start : first + tile.keys.stop]


def _merge(
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    more: torch.Tensor,
    its_logsumexp: torch.Tensor,
    mask: torch.Tensor | None,
) -> None:
    """Merge a block's result in place: both are weighted means, and exp(log-sum-exp) is the sum of their weights.

    The kernel's log-sum-exp of fully masked rows is 0, which other rows may have too: the mask distinguishes them.
    """
    if mask is not None:
        unseen = (mask == -torch.inf).all(-1)
        its_logsumexp = its_logsumexp.masked_fill(unseen, -torch.inf)
    total = torch.logaddexp(logsumexp, its_logsumexp)
    finite = total.masked_fill(total == -torch.inf, 0)
    weights = [(part - finite).exp().unsqueeze(-1) for part in (logsumexp, its_logsumexp)]
    out.mul_(weights[0]).add_(weights[1] * more)
    logsumexp.copy_(total)

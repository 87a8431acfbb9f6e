"""Ring attention: queries, keys and values are split on the sequence; keys and values go round (Liu et al., arXiv
2310.01889).

Blocks of keys are met one after the other, and the results put together by their log-sum-exp (Milakov and Gimelshein,
arXiv 1805.02867). The kernel's backward takes the log-sum-exp of whole rows, so that the gradients of blocks add up to
the gradient. Those of keys and values go round after their block, and one step further home.

Under a causal mask the last ranks would have most of the work: a rank looks at the blocks up to its own. So rank r of
n gives the later half of its queries to rank n-1-r and takes that one's: n + 1 halves for each (the order of
tokens of Brandon et al., arXiv 2311.09431, is another way to this; here nothing outside of attention knows of it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardlib.engine.ops._operands import arguments_by_name
from shardlib.engine.ops._rows import Here, Op

__all__ = ["Ring"]

_SEQ = 2


@dataclass(frozen=True)
class _Tile:
    """Some of this rank's queries with some keys of a block. Causal: both begin at the same position."""

    queries: slice
    keys: slice
    causal: bool = False


@dataclass(frozen=True)
class _Span:
    """Rows [at, at + count) of this rank are the queries from position `first` of the global sequence on."""

    at: int
    first: int
    count: int


@dataclass(frozen=True)
class Ring:
    """One call on this rank: `query` and `key` number operands, `here` knows their global shapes.

    Local shapes are (batch, heads, positions, head dim); log-sum-exps lack the last.
    """

    here: Here
    query: int
    key: int
    causal: bool

    def forward(self, op: Op, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """What `op` returns: output and log-sum-exp of this rank's queries."""
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
        logsumexp = logsumexp.masked_fill(logsumexp == -torch.inf, 0)  # of what sees nothing, as the kernel says it
        out, logsumexp = self._back([out.to(rows.dtype), logsumexp.unsqueeze(-1)], spans)
        return out, logsumexp.squeeze(-1)

    def backward(self, op: Op, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        """What `op` returns: gradients of this rank's queries, keys and values."""
        named = arguments_by_name(op, args, kwargs)
        mine = [named["query"], named["grad_out"], named["out"], named["logsumexp"].unsqueeze(-1)]
        (rows, grad, out, lse), spans = self._balanced(mine)
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
    def _place(self) -> tuple[int, int]:
        return self.here.place(self.key, _SEQ)

    def _chunk(self, operand: int, index: int) -> tuple[int, int]:
        """First position and number of positions of a rank, where the axis alone splits an operand's sequence."""
        length = self.here.shape(operand)[_SEQ]
        step = -(-length // self._place[1])
        first = min(index * step, length)
        return first, min(step, length - first)

    def _round(self, tensors: list[torch.Tensor]) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Each rank's index, keys and values, this one's first. The next are under way meanwhile."""
        index, size = self._place
        for step in range(size):
            source = (index - step) % size
            coming = self._pass_on(tensors, source) if step < size - 1 else None
            yield source, tensors
            if coming is not None:
                tensors = coming()

    def _pass_on(self, tensors: list[torch.Tensor], source: int) -> Callable[[], list[torch.Tensor]]:
        """Give what belongs to the keys of rank `source` to the next rank; what comes belongs to those of source - 1.

        Keys and values travel in one message.
        """
        index, size = self._place
        count = self._chunk(self.key, (source - 1) % size)[1]
        widths = [x.shape[-1] for x in tensors]
        shape = (*tensors[0].shape[:_SEQ], count, sum(widths))
        wait = self._exchange(torch.cat(tensors, -1), (index + 1) % size, (index - 1) % size, shape)
        return lambda: list(wait().split(widths, -1))

    def _exchange(self, tensor: torch.Tensor, to: int, source: int, shape: Sequence[int]) -> Callable[[], torch.Tensor]:
        return self.here.exchange(tensor, (self.key, _SEQ), to, source, shape)

    # --- balance ---

    def _balanced(self, tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[_Span]]:
        """What this rank computes with, and where its rows are in the global sequence."""
        own = (self.here.offset(self.query, _SEQ), tensors[0].shape[_SEQ])
        if not self._mirrors(own[1]):
            return tensors, [_Span(0, *own)]
        index, size = self._place
        first, count = self._chunk(self.query, size - 1 - index)
        kept = _first_half(own[1])
        later = [x[:, :, kept:] for x in tensors]
        theirs = self._mirrored(later, count - _first_half(count))
        spans = [_Span(0, own[0], kept), _Span(kept, first + _first_half(count), count - _first_half(count))]
        return [torch.cat(pair, _SEQ) for pair in zip((x[:, :, :kept] for x in tensors), theirs, strict=True)], spans

    def _back(self, tensors: list[torch.Tensor], spans: list[_Span]) -> list[torch.Tensor]:
        """The inverse of `_balanced`."""
        if len(spans) == 1:
            return tensors
        kept = spans[0].count
        mine = self._mirrored([x[:, :, kept:] for x in tensors], self._chunk(self.query, self._place[0])[1] - kept)
        return [torch.cat(pair, _SEQ) for pair in zip((x[:, :, :kept] for x in tensors), mine, strict=True)]

    def _mirrors(self, count: int) -> bool:
        """Whether queries are traded: not where another axis splits them as well."""
        return self.causal and count == self._chunk(self.query, self._place[0])[1]

    def _mirrored(self, tensors: list[torch.Tensor], count: int) -> list[torch.Tensor]:
        """Trade with the rank at the same distance from the other end, which sends as much of `count` positions.

        One message for each dtype: a log-sum-exp may be of another than the rest.
        """
        index, size = self._place
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
        """What has to be computed with the keys at [first, first + count); what is masked as a whole is left out."""
        if not self.causal:
            yield _Tile(slice(None), slice(0, count))
            return
        for span in spans:
            earlier = min(first + count, span.first) - first
            if earlier > 0 and span.count:  # a piece of one position has no later half; kernels divide by its length
                yield _Tile(slice(span.at, span.at + span.count), slice(0, earlier))
            start, end = max(first, span.first), min(first + count, span.first + span.count)
            if start < end:
                rows = slice(span.at + start - span.first, span.at + span.count)
                yield _Tile(rows, slice(start - first, end - first), causal=True)


def _first_half(count: int) -> int:
    return count - count // 2


def _part(mask: torch.Tensor | None, first: int, tile: _Tile) -> torch.Tensor | None:
    """The columns of a mask for a block of keys; of one that broadcasts over keys, all."""
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
    """Add a block's result to what there is: both are means, by weights that exp(log-sum-exp) is the sum of.

    The kernel's log-sum-exp of rows that see nothing is 0, as another's may be: the mask tells them apart.
    """
    if mask is not None:
        unseen = (mask == -torch.inf).all(-1)
        its_logsumexp = its_logsumexp.masked_fill(unseen, -torch.inf)
    total = torch.logaddexp(logsumexp, its_logsumexp)
    finite = total.masked_fill(total == -torch.inf, 0)
    weights = [(part - finite).exp().unsqueeze(-1) for part in (logsumexp, its_logsumexp)]
    out.mul_(weights[0]).add_(weights[1] * more)
    logsumexp.copy_(total)

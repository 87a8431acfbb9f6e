"""Matrix products. Sharding the contracted dim gives partial sums."""

from __future__ import annotations

from collections.abc import Iterable

from torch.distributed.tensor import Placement, Shard

from shardlib.engine._torch import on_dim, schema_of
from shardlib.engine.ops._products import products
from shardlib.engine.ops._rows import Call, Meta, P, R, Row, S, aten, is_split, row, rule
from shardlib.engine.ops._rules._pointwise import aligned

__all__: list[str] = []


def _mm_rows(batch: int) -> list[Row]:
    """Return the rows of [*batch, m, k] @ [*batch, k, n]."""
    m, n = batch, batch + 1
    return [
        *(row([S(d)], [S(d), S(d)]) for d in range(batch)),
        row([S(m)], [S(m), R]),
        row([S(n)], [R, S(n)]),
        row([P], [S(n), S(m)]),
        row([P], [P, R]),
        row([P], [R, P]),
    ]


def _rows_of_product(left: Placement, right: Placement) -> list[Row]:
    """Return the rows of [m, k] @ [k, n]; where both are sharded, those of a linear layer (`_products.py`).

    No other rows: the bytes of this product alone do not determine the cheapest, since a partial sum is reduced later.
    """
    lines = products(left, _turned(right), 1) if is_split(left) and is_split(right) else ()
    return [row([_plainly(line.y)], [_plainly(line.x), _plainly(_turned(line.weight))]) for line in lines] or _mm_rows(
        0
    )


def _turned(matrix: Placement) -> Placement:
    """Return the placement of its transpose."""
    return on_dim(matrix, 1 - matrix.dim) if is_split(matrix) else matrix


def _plainly(place: Placement) -> Placement:
    """Return the plain form of a fused split, which `_choose` restores for operands with fused splits."""
    return S(place.dim) if is_split(place) else place


@rule(aten("mm"), empty=True)
def mm(call: Call) -> Iterable[Row]:
    return _rows_of_product(*call.current)


@rule(aten("bmm"), empty=True)
def bmm(call: Call) -> Iterable[Row]:
    return _mm_rows(1)


@rule(aten("addmm"), aten("addmm_"), aten("baddbmm"), aten("baddbmm_"), aten("addbmm"), empty=True)
def addmm(call: Call) -> Iterable[Row]:
    """Shard a product plus an addend that broadcasts onto the output; one rank adds it to a partial sum."""
    addend, output = call.inputs[0], call.outputs[0]
    assert output is not None
    if schema_of(call.op).name == "aten::addbmm":
        yield row([P], [P, S(0), S(0)], partition=True)
        return
    rows = _rows_of_product(*call.current[1:]) if output.ndim == 2 else _mm_rows(1)
    for product in rows:
        (out,) = product.outs
        yield row([out], [_broadcast_under(addend, out, output), *product.ins], partition=out == P)


def _broadcast_under(addend: Meta, out: Placement | None, output: Meta) -> Placement:
    """Return the addend's placement for an output placement."""
    if not isinstance(out, Shard):
        return P
    own = aligned(addend, out.dim, output.shape)
    return R if own is None else S(own)


@rule(aten("mv"), empty=True)
def mv(call: Call) -> Iterable[Row]:
    return [row([S(0)], [S(0), R]), row([P], [S(1), S(0)]), row([P], [P, R]), row([P], [R, P])]


@rule(aten("addmv"), empty=True)
def addmv(call: Call) -> Iterable[Row]:
    addend = S(0) if call.inputs[0].ndim and call.inputs[0].shape[0] > 1 else R
    yield row([S(0)], [addend, S(0), R])
    yield row([P], [P, S(1), S(0)], partition=True)
    yield row([P], [P, P, R], partition=True)
    yield row([P], [P, R, P], partition=True)


@rule(aten("dot"), aten("vdot"), empty=True)
def dot(call: Call) -> Iterable[Row]:
    return [row([P], [S(0), S(0)]), row([P], [P, R]), row([P], [R, P])]


@rule(aten("addr"), empty=True)
def addr(call: Call) -> Iterable[Row]:
    addend, output = call.inputs[0], call.outputs[0]
    assert output is not None
    yield row([S(0)], [_broadcast_under(addend, S(0), output), S(0), R])
    yield row([S(1)], [_broadcast_under(addend, S(1), output), R, S(0)])


# --- grouped products: each group of rows (or columns, or of the contracted dim) has its own matrix ----------------


@rule(aten("_grouped_mm"))
def grouped_mm(call: Call) -> Iterable[Row]:
    """Shard self, mat2, offs -> one product for each group; `offs` are the ends of groups in their common dim.

    That dim is not sharded. Strides must be multiples of 16 bytes, also in shards.
    """
    if call["offs"] is None or call["bias"] is not None:
        return
    (a, b, _), output = call.inputs, call.outputs[0]
    assert output is not None
    aligned = call.size * 16 // a.dtype.itemsize
    m, k, n, out = a.ndim - 2, a.ndim - 1, b.ndim - 1, output.ndim
    grouped_rows, grouped_columns, grouped_sum = a.ndim < b.ndim, a.ndim > b.ndim, a.ndim == b.ndim == 2
    if not grouped_rows and a.shape[m] % aligned == 0:
        yield row([S(out - 2)], [S(m), R, R])
    if not grouped_columns and b.shape[n] % aligned == 0:
        yield row([S(out - 1)], [R, S(n), R])
    if not grouped_sum and a.shape[k] % aligned == 0:
        yield row([P], [S(k), S(n - 1), R])
    yield row([P], [P, R, R])
    yield row([P], [R, P, R])


# Hugging Face's operator for dtypes and devices that the one above does not support: rows are grouped, strides free.


@rule("transformers::grouped_mm_fallback")
def grouped_mm_fallback(call: Call) -> Iterable[Row]:
    """Shard input (tokens, in), weight (experts, in, out), offs -> (tokens, out)."""
    yield row([S(1)], [R, S(2), R])
    yield row([P], [S(1), S(1), R])
    yield row([P], [P, R, R])
    yield row([P], [R, P, R])


@rule("transformers::grouped_mm_fallback_backward")
def grouped_mm_fallback_backward(call: Call) -> Iterable[Row]:
    """Shard input, weight, offs, grad -> grad of input, grad of weight."""
    yield row([P, S(2)], [R, S(2), R, S(1)])
    yield row([S(1), S(1)], [S(1), S(1), R, R])
    yield row([P, P], [R, R, R, P])

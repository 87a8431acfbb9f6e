"""Products that contract a dim. Splitting the contracted dim gives sums still to be done (Partial)."""

from __future__ import annotations

from collections.abc import Iterable

from shardlib.engine.ops._rows import Call, Meta, P, R, Row, S, aten, row, rule

__all__: list[str] = []


def _mm_rows(batch: int) -> list[Row]:
    """Rows of [*batch, m, k] @ [*batch, k, n]."""
    m, n = batch, batch + 1
    return [
        *(row([S(d)], [S(d), S(d)]) for d in range(batch)),
        row([S(m)], [S(m), R]),
        row([S(n)], [R, S(n)]),
        row([P], [S(n), S(m)]),
        row([P], [P, R]),
        row([P], [R, P]),
    ]


@rule(aten("mm"))
def mm(call: Call) -> Iterable[Row]:
    return _mm_rows(0)


@rule(aten("bmm"))
def bmm(call: Call) -> Iterable[Row]:
    return _mm_rows(1)


@rule(aten("addmm"), aten("baddbmm"), aten("addbmm"))
def addmm(call: Call) -> Iterable[Row]:
    """The product's rows with an addend that broadcasts onto the output; it joins an unfinished sum on one rank."""
    addend, output = call.inputs[0], call.outputs[0]
    assert output is not None
    if call.op._schema.name == "aten::addbmm":
        yield row([P], [P, S(0), S(0)], partition=True)
        return
    for product in _mm_rows(output.ndim - 2):
        (out,) = product.outs
        place = _broadcast_under(addend, out, output) if out is not P else P
        yield row([out], [place, *product.ins], partition=out is P)


def _broadcast_under(addend: Meta, out: object, output: Meta) -> object:
    if not hasattr(out, "dim"):
        return out
    own = out.dim - (output.ndim - addend.ndim)
    return S(own) if own >= 0 and addend.shape[own] == output.shape[out.dim] else R


@rule(aten("mv"))
def mv(call: Call) -> Iterable[Row]:
    return [row([S(0)], [S(0), R]), row([P], [S(1), S(0)]), row([P], [P, R]), row([P], [R, P])]


@rule(aten("addmv"))
def addmv(call: Call) -> Iterable[Row]:
    place = S(0) if call.inputs[0].ndim and call.inputs[0].shape[0] > 1 else R
    yield row([S(0)], [place, S(0), R])
    yield row([P], [P, S(1), S(0)], partition=True)
    yield row([P], [P, P, R], partition=True)
    yield row([P], [P, R, P], partition=True)


@rule(aten("dot"), aten("vdot"))
def dot(call: Call) -> Iterable[Row]:
    return [row([P], [S(0), S(0)]), row([P], [P, R]), row([P], [R, P])]


@rule(aten("addr"))
def addr(call: Call) -> Iterable[Row]:
    addend, output = call.inputs[0], call.outputs[0]
    assert output is not None
    yield row([S(0)], [_broadcast_under(addend, S(0), output), S(0), R])
    yield row([S(1)], [_broadcast_under(addend, S(1), output), R, S(0)])

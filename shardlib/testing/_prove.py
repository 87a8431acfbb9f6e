"""Brute-force proof of sharding rules, row by row, in one process and without communication.

A row claims: operands placed so on one mesh axis, and the op run on each rank's local tensors, give the outputs
placed so. Here the operands of a real call are cut up as the row says, the op runs once per pretended rank, and the
pieces are put together as the row says and compared with the op on full tensors.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from shardlib.engine._torch import TorchDispatchMode, _StridedShard, pytree, schema_of, seed_all, written_to
from shardlib.engine.ops._choose import _candidates, _holds
from shardlib.engine.ops._dispatch import is_random
from shardlib.engine.ops._operands import arguments_by_name
from shardlib.engine.ops._rows import ANY, RING_AXIS, Call, Local, Meta, Op, Row, rule_of

__all__ = ["AtenCall", "CallRecorder", "Claim", "calls_of", "claims", "cut", "disprove"]


@dataclass(frozen=True)
class AtenCall:
    """One call of an aten op on plain tensors, as it was before the op ran."""

    op: Op
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def fresh(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return pytree.tree_map_only(torch.Tensor, _copy, (self.args, self.kwargs))

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [x for x in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(x, torch.Tensor)]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor with its strides to storage of its own."""
    flat = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    return tensor.clone() if _overlaps(tensor) else flat.copy_(tensor.detach())


def _overlaps(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.size(), tensor.stride(), strict=True))


class CallRecorder(TorchDispatchMode):
    """Collects the aten calls made inside the block, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[AtenCall] = []

    def __torch_dispatch__(self, op: Op, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if all(x.layout == torch.strided and not x.is_quantized for x in tensors):
            copied = pytree.tree_map_only(torch.Tensor, _copy, (args, kwargs or {}))
            self.calls.append(AtenCall(op, *copied))
        return op(*args, **(kwargs or {}))


def calls_of(functions: Iterable[Callable[[], Any]]) -> Iterator[AtenCall]:
    """Return the distinct calls of functions: calls are equal in shapes, dtypes, strides and other arguments."""
    seen = set()
    for function in functions:
        with CallRecorder() as recorder:
            function()
        for call in recorder.calls:
            if (key := _key(call)) not in seen:
                seen.add(key)
                yield call


def _key(call: AtenCall) -> tuple[str, ...]:
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    return str(call.op), *(
        f"{x.shape} {x.dtype} {x.stride()}" if isinstance(x, torch.Tensor) else repr(x) for x in leaves
    )


@dataclass(frozen=True)
class Claim:
    """A row for one call, on an axis of `size` ranks."""

    call: AtenCall
    row: Row
    size: int


def claims(call: AtenCall, sizes: Sequence[int] = (2, 3)) -> Iterator[Claim]:
    """Iterate over the rows that the op's rule gives for a call, for all placements of the operands."""
    rule = rule_of(call.op)
    if rule is None or not call.tensors or is_random(call.op):
        return  # random ops are drawn for the whole tensor, without a row
    args, kwargs = call.fresh()
    described = _describe(call, _output_metas(call.op(*args, **kwargs)))
    for size in sizes:
        seen = set()
        for current in dict.fromkeys(_currents(call.tensors, size)):
            described = replace(described, current=current, size=size, axis=RING_AXIS)
            rows = [row for row in list(_candidates(rule, described))[1:] if _holds(row, described, empty=rule.empty)]
            for row in rows:
                settled = replace(row, ins=tuple(c if p is ANY else p for p, c in zip(row.ins, current, strict=True)))
                if str(settled) not in seen and _can_be_pieces(settled, call.tensors):
                    seen.add(str(settled))
                    yield Claim(call, settled, size)


def _can_be_pieces(row: Row, tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether ranks can hold a row's operands: 8-bit floats cannot be pending sums."""
    return not any(
        isinstance(place, Partial) and tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
        for place, tensor in zip(row.ins, tensors, strict=True)
    )


def _currents(tensors: list[torch.Tensor], size: int) -> Iterator[tuple[Placement, ...]]:
    """Iterate over placements of operands: all replicated, all partial, all split on a dim, fused or not."""
    yield (Replicate(),) * len(tensors)
    yield (Partial("sum"),) * len(tensors)
    for back in range(1, 1 + max((t.ndim for t in tensors), default=0)):
        for factor in (1, 2, 3, 4, 6):
            yield tuple(_split_from_end(t, back, factor, size) for t in tensors)
            yield tuple(_split_from_start(t, back - 1, factor, size) for t in tensors)


def _split_from_end(tensor: torch.Tensor, back: int, factor: int, size: int) -> Placement:
    return _split_from_start(tensor, tensor.ndim - back, factor, size)


def _split_from_start(tensor: torch.Tensor, dim: int, factor: int, size: int) -> Placement:
    if not 0 <= dim < tensor.ndim:
        return Replicate()
    if factor == 1:
        return Shard(dim)
    fits = tensor.shape[dim] % (factor * size) == 0 and tensor.shape[dim] > 0
    return _StridedShard(dim, split_factor=factor) if fits else Replicate()


def _describe(call: AtenCall, outputs: tuple[Meta | None, ...]) -> Call:
    arguments = schema_of(call.op).arguments
    values = arguments_by_name(call.op, call.args, call.kwargs)
    named = [(a.name, v) for a, v in zip(arguments, call.args, strict=False)] + list(call.kwargs.items())
    names = tuple(n for n, v in named for x in pytree.tree_leaves(v) if isinstance(x, torch.Tensor))
    return Call(call.op, values, names, tuple(map(_meta, call.tensors)), outputs)


def _output_metas(result: Any) -> tuple[Meta | None, ...]:
    flat = pytree.tree_leaves(result, is_leaf=lambda x: x is None)
    return tuple(_meta(x) if isinstance(x, torch.Tensor) else None for x in flat)


def _meta(tensor: torch.Tensor) -> Meta:
    return Meta(tuple(tensor.shape), tensor.dtype)


# --- trying a claim -----------------------------------------------------------------------------------------------


def disprove(claim: Claim) -> str | None:
    """Return why a claim is false, or None when it holds for this call."""
    seed_all(1)
    try:
        return _compare(claim, _run_ranks(claim))
    except Exception as error:
        return f"raised {type(error).__name__}: {str(error).splitlines()[0]}"


def _compare(claim: Claim, pieces: list[list[Any]]) -> str | None:
    args, kwargs = claim.call.fresh()
    wanted = _results(claim.call.op(*args, **kwargs), args, kwargs, claim.call)
    for i, (full, place) in enumerate(zip(wanted, _result_places(claim), strict=True)):
        if isinstance(full, torch.Tensor) and (wrong := _differs(full, place, [p[i] for p in pieces], claim)):
            return f"output {i}: {wrong}"
    return None


def _results(result: Any, args: Any, kwargs: Any, call: AtenCall) -> list[Any]:
    """Return the results of the op and the tensors that it wrote to."""
    return [*pytree.tree_leaves(result, is_leaf=lambda x: x is None), *written_to(call.op, args, kwargs)]


def _result_places(claim: Claim) -> list[Any]:
    args, kwargs = claim.call.args, claim.call.kwargs
    if torch.Tag.inplace_view in claim.call.op.tags:
        return [*claim.row.outs, *claim.row.outs]
    written = {id(t) for t in written_to(claim.call.op, args, kwargs)}
    places = [p for t, p in zip(claim.call.tensors, claim.row.ins, strict=True) if id(t) in written]
    return [*claim.row.outs, *places]


def _run_ranks(claim: Claim) -> list[list[Any]]:
    parts = [cut(t, p, claim.size) for t, p in zip(claim.call.tensors, claim.row.ins, strict=True)]
    meeting = _Meeting(claim.size)
    jobs = [functools.partial(_run_rank, claim, [p[r] for p in parts], meeting, r) for r in range(claim.size)]
    return [job() for job in jobs] if claim.row.compute is None else _in_threads(jobs, meeting)


def _in_threads(jobs: Sequence[Callable[[], Any]], meeting: _Meeting) -> list[Any]:
    results: list[Any] = [None] * len(jobs)
    errors: list[Exception] = []

    def work(i: int) -> None:
        try:
            with torch.no_grad():
                results[i] = jobs[i]()
        except Exception as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results


def _run_rank(claim: Claim, locals_: list[torch.Tensor], meeting: _Meeting, rank: int) -> list[Any]:
    call, rule = claim.call, rule_of(claim.call.op)
    assert rule is not None
    left = iter(locals_)
    fill = lambda x: next(left) if isinstance(x, torch.Tensor) else x  # noqa: E731
    args, kwargs = pytree.tree_map(fill, (list(call.args), call.kwargs))
    op = call.op
    split = any(isinstance(p, Shard | _StridedShard) for p in (*claim.row.ins, *claim.row.outs))
    if rule.localize is not None and split:
        op, args = rule.localize(op, args, _local(claim, locals_, rank))
    if claim.row.compute is None:
        result = op(*args, **kwargs)
    else:
        result = claim.row.compute(op, args, kwargs, _SimulatedRank(claim, meeting, rank))
    return _results(result, args, kwargs, call)


def _local(claim: Claim, locals_: list[torch.Tensor], rank: int) -> Local:
    args, kwargs = claim.call.fresh()
    wholes = pytree.tree_leaves(claim.call.op(*args, **kwargs), is_leaf=lambda x: x is None)
    outputs = [
        tuple(cut(w, p, claim.size)[rank].shape) if isinstance(w, torch.Tensor) and p is not None else None
        for w, p in zip(wholes, claim.row.outs, strict=True)
    ]
    return Local(
        tuple(tuple(t.shape) for t in claim.call.tensors), tuple(tuple(t.shape) for t in locals_), tuple(outputs)
    )


@dataclass
class _Meeting:
    """The meeting point at which the simulated ranks of one claim reduce."""

    size: int

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=20)
        self.slots: list[Any] = [None] * self.size


@dataclass
class _SimulatedRank:
    claim: Claim
    meeting: _Meeting
    rank: int

    def offset(self, operand: int, dim: int) -> int:
        place = self.claim.row.ins[operand]
        if not (isinstance(place, Shard) and place.dim == dim):
            return 0
        pieces = cut(self.claim.call.tensors[operand], place, self.claim.size)
        return sum(piece.shape[dim] for piece in pieces[: self.rank])

    def shape(self, operand: int) -> tuple[int, ...]:
        return tuple(self.claim.call.tensors[operand].shape)

    def all_reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        self.meeting.slots[self.rank] = tensor
        self.meeting.barrier.wait()
        stacked = torch.stack(list(self.meeting.slots))
        self.meeting.barrier.wait()
        reduced: torch.Tensor = getattr(stacked, op if op == "sum" else f"a{op}")(0)
        return reduced

    def coordinate(self, operand: int, dim: int) -> tuple[int, int]:
        assert self.claim.row.ins[operand] == Shard(dim)
        return self.rank, self.claim.size

    def exchange(
        self, tensor: torch.Tensor, like: tuple[int, int], to: int, source: int, shape: Sequence[int]
    ) -> Callable[[], torch.Tensor]:
        self.meeting.slots[self.rank] = (to, tensor.clone())
        self.meeting.barrier.wait()
        receiver, received = self.meeting.slots[source]
        self.meeting.barrier.wait()
        assert receiver == self.rank and tuple(received.shape) == tuple(shape)
        return lambda: received


# --- cutting up and putting together ------------------------------------------------------------------------------


def cut(tensor: torch.Tensor, place: Any, size: int) -> list[torch.Tensor]:
    """Return each rank's local tensor."""
    if isinstance(place, _StridedShard):
        parts_of_pieces = tensor.unflatten(place.dim, (place.split_factor, -1))
        return [
            piece.flatten(place.dim, place.dim + 1).clone(memory_format=torch.contiguous_format)
            for piece in parts_of_pieces.chunk(size, place.dim + 1)
        ]
    if isinstance(place, Shard):
        pieces = list(tensor.chunk(size, place.dim))
        empty = tensor.narrow(place.dim, 0, 0)
        return [piece.clone() for piece in pieces + [empty] * (size - len(pieces))]
    if isinstance(place, Partial):
        return _summands(tensor, size, place)
    return [_copy(tensor) for _ in range(size)]


def _summands(tensor: torch.Tensor, size: int, place: Partial) -> list[torch.Tensor]:
    """Return different summands of a tensor (or of its average). They are integers, so that sums are exact."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.dtype.itemsize == 1:
        return [tensor.clone()] + [torch.zeros_like(tensor)] * (size - 1)
    full = tensor * size if place.reduce_op == "avg" else tensor
    parts = [torch.randint_like(tensor.real, -4, 5).to(tensor.dtype) for _ in range(size - 1)]
    return [*parts, full - sum(parts)]


def _differs(full: torch.Tensor, place: Any, pieces: list[torch.Tensor], claim: Claim) -> str | None:
    shapes = [tuple(p.shape) for p in cut(full, place, claim.size)]
    if [tuple(p.shape) for p in pieces] != shapes:
        return f"local shapes {[tuple(p.shape) for p in pieces]}, where {place} means {shapes}"
    if any(p.dtype != full.dtype for p in pieces):
        return f"local dtypes {[p.dtype for p in pieces]}, the full tensor has {full.dtype}"
    if schema_of(claim.call.op).name.split("::")[1].rstrip("_") in _WITHOUT_VALUES:
        return None
    near = _tolerance([*claim.call.tensors, full])
    if isinstance(place, Partial):
        total = torch.stack(list(pieces)).sum(0)
        total = total / claim.size if place.reduce_op == "avg" else total
        return (
            None if _close(total.to(full.dtype), full, near) else "the local tensors do not add up to the full tensor"
        )
    for rank, (piece, wanted) in enumerate(zip(pieces, cut(full, place, claim.size), strict=True)):
        if not _close(piece, wanted, near):
            return f"rank {rank} differs from its shard of the full tensor"
    return None


_WITHOUT_VALUES = {"empty_like", "new_empty", "new_empty_strided", "empty"}


def _close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    if not (b.is_floating_point() or b.is_complex()):
        return torch.equal(a, b)
    if b.dtype.itemsize == 1:
        a, b = a.float(), b.float()
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def _tolerance(tensors: Sequence[torch.Tensor]) -> float:
    floats = [t.dtype for t in tensors if t.is_floating_point() or t.is_complex()]
    return max([1e-10, *(1e3 * torch.finfo(d).eps for d in floats if torch.finfo(d).eps > 1e-12)])

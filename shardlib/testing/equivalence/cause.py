"""Likely causes of a difference: a factor, an offset, another rank's shard, another order, a few ranks only.

Each test takes what every rank holds and should hold, and says a sentence or nothing. The first that speaks explains
the difference whole; `likely` lists them in this order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from shardlib._mesh_shape import MeshShape
from shardlib.testing.equivalence.case import Case
from shardlib.testing.equivalence.parts import RankCoordinate, local

__all__ = ["Evidence", "likely", "of_losses", "of_norm", "of_updates"]

_NEAR = 1e-6


@dataclass(frozen=True)
class Evidence:
    """One rank's local shard of a value, and the shard that a single device gives for it."""

    coordinate: dict[str, int]
    got: torch.Tensor | None
    want: torch.Tensor | None


@dataclass(frozen=True)
class _Piece:
    """The same where both are there and of one shape, as float64."""

    coordinate: dict[str, int]
    got: torch.Tensor
    want: torch.Tensor

    @property
    def wrong(self) -> bool:
        return not _near(self.got, self.want)


Pieces = Sequence[_Piece]


def likely(evidence: Sequence[Evidence], case: Case, own: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Describe the likely causes of the difference, the likeliest first.

    Args:
        evidence: the evidence of every rank, in order.
        case: the sizes of its axes, and how many passes it accumulates, are factors to look for.
        own: tensors of the module (its bias) that may be in the value too often.
    """
    pieces = [_piece(e) for e in evidence if e.got is not None and e.want is not None and e.got.shape == e.want.shape]
    if len(pieces) < len(evidence):
        return (_other_shapes(evidence),)
    infinite = [rank for rank, p in enumerate(pieces) if not torch.isfinite(p.got).all()]
    if infinite and all(torch.isfinite(p.want).all() for p in pieces):
        return (f"infinite or not a number on {_ranks(infinite)}",)
    mesh = case.mesh
    if not any(p.wrong for p in pieces):
        off = max(_off(p.got, p.want) for p in pieces)
        return (f"off by {off:.1g} of its largest value, no more: looks like rounding to a coarser dtype on the way",)
    tests = (
        lambda: _nothing(pieces),
        lambda: _missing_reduction(pieces, mesh, own),
        lambda: _factor(pieces, case),
        lambda: _offset(pieces, mesh, own),
        lambda: _other_rank(pieces),
        lambda: _other_order(pieces),
        lambda: _other_mask(pieces),
    )
    explained = next((sentence for test in tests if (sentence := test()) is not None), None)
    found = [explained, _some_ranks(pieces, mesh), _some_elements(pieces)]
    return tuple(sentence for sentence in found if sentence is not None) or ("no pattern: most elements, on all ranks",)


def _piece(evidence: Evidence) -> _Piece:
    assert evidence.got is not None and evidence.want is not None
    return _Piece(evidence.coordinate, _real(evidence.got), _real(evidence.want))


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Convert to float64; of a complex tensor, real and imaginary parts side by side in the last dim."""
    if not tensor.is_complex():
        return tensor.double()
    parts = torch.view_as_real(tensor.resolve_conj()).double()
    return parts.flatten(-2) if tensor.ndim else parts


def _near(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape:
        return False
    return not a.numel() or _off(a, b) <= _NEAR


def _off(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest difference, over the largest value of `b`."""
    return float((a - b).abs().max()) / max(float(b.abs().max()), 1e-30) if a.numel() else 0.0


def _all(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.flatten() for t in tensors])


def _subsets(mesh: MeshShape) -> Iterator[tuple[str, ...]]:
    real = [axis for axis in mesh.names if mesh[axis] > 1]
    for n in range(1, len(real) + 1):
        yield from itertools.combinations(real, n)


def _said(axes: Sequence[str]) -> str:
    return " and ".join(axes)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _other_shapes(evidence: Sequence[Evidence]) -> str:
    absent = [rank for rank, e in enumerate(evidence) if e.got is None]
    if absent:
        return f"there is none on {_ranks(absent)}, where the single device has one"
    for rank, e in enumerate(evidence):
        if e.got is not None and (e.want is None or e.got.shape != e.want.shape):
            due = (
                "no mesh shards the single device's tensor so" if e.want is None else f"expected {tuple(e.want.shape)}"
            )
            return f"rank {rank} holds local shape {tuple(e.got.shape)}; {due}"
    return "there is one where the single device has none"


def _nothing(pieces: Pieces) -> str | None:
    zero = [rank for rank, p in enumerate(pieces) if p.wrong and not p.got.abs().max()]
    if zero and len(zero) == sum(p.wrong for p in pieces):
        return f"all zeros on {_ranks(zero)}: never written, or truncated"
    return None


def _missing_reduction(pieces: Pieces, mesh: MeshShape, own: Mapping[str, torch.Tensor]) -> str | None:
    if (found := _reduced(pieces, mesh)) is not None:
        return found
    for name, value in own.items():
        v = _real(value)
        if all(p.got.ndim and p.got.shape[-1:] == v.shape for p in pieces):
            apart = [_Piece(p.coordinate, p.got - v, p.want - v) for p in pieces]
            if (found := _reduced(apart, mesh)) is not None:
                return f"without the {name}, which each rank has added, {found}"
    return None


def _reduced(pieces: Pieces, mesh: MeshShape) -> str | None:
    for axes in _subsets(mesh):
        groups = [[pieces[rank] for rank in group] for group in mesh.groups(axes)]
        if any(p.got.shape != group[0].got.shape for group in groups for p in group):
            continue
        if all(_near(p.got, group[0].got) for group in groups for p in group):
            continue
        for how, divisor in (("sum", 1), ("mean", len(groups[0]))):
            totals = [torch.stack([p.got for p in group]).sum(0) / divisor for group in groups]
            if all(_near(total, p.want) for group, total in zip(groups, totals, strict=True) for p in group):
                over = _said(axes)
                return f"the {how} of what the ranks of {over} hold is right: a reduction over {over} is missing"
    return None


def _factor(pieces: Pieces, case: Case) -> str | None:
    ratio = _ratio(pieces)
    return None if ratio is None else f"{_times(ratio)} a single device's{_known_factor(ratio, case)}"


def _ratio(pieces: Pieces) -> float | None:
    wrong = [p for p in pieces if p.wrong]
    got, want = _all(p.got for p in wrong), _all(p.want for p in wrong)
    power = float(want @ want)
    ratio = float(got @ want) / power if power else math.nan
    if not math.isfinite(ratio) or not ratio or not _near(got, ratio * want):
        return None
    return ratio


def _times(ratio: float) -> str:
    if abs(ratio - round(ratio)) < _NEAR * abs(ratio):
        return f"{round(ratio)} times"
    if abs(1 / ratio - round(1 / ratio)) < _NEAR / abs(ratio):
        return f"1/{round(1 / ratio)} of"
    return f"{ratio:.6g} times"


def _known_factor(ratio: float, case: Case) -> str:
    for axes in _subsets(case.mesh):
        n = math.prod(case.mesh[axis] for axis in axes)
        name, over = " * ".join(f"{axis}={case.mesh[axis]}" for axis in axes), _said(axes)
        if abs(ratio - n) < _NEAR * n:
            return f" ({name}): looks like a reduction over {over} that is done twice, or a sum where a mean is due"
        if abs(ratio * n - 1) < _NEAR:
            return f" ({name}): looks like a reduction over {over} that is missing, or a mean where a sum is due"
    n = case.accumulate
    if n > 1 and (abs(ratio - n) < _NEAR * n or abs(ratio * n - 1) < _NEAR):
        return f" ({n} backward passes are accumulated): looks like accumulation that averages wrongly"
    return ""


def _offset(pieces: Pieces, mesh: MeshShape, own: Mapping[str, torch.Tensor]) -> str | None:
    for name, value in own.items():
        v = _real(value)
        wrong = [p for p in pieces if p.wrong and p.got.ndim and p.got.shape[-1:] == v.shape]
        if not wrong or not v.abs().max():
            continue
        off = torch.cat([(p.got - p.want).reshape(-1, len(v)) for p in wrong])
        n = float((off * v).sum() / (v.square().sum() * len(off)))
        if n and _near(off, n * v.expand_as(off)):
            if n < 0:
                return f"{-n:.6g} of the {name} is missing from it"
            axes = [axis for axis in mesh.names if abs(mesh[axis] - 1 - n) < _NEAR]
            why = f" ({axes[0]}={mesh[axes[0]]}): it was added on every rank before the sum" if axes else ""
            return f"the {name} is in it {n + 1:.6g} times{why}"
    return None


def _other_rank(pieces: Pieces) -> str | None:
    holds = []
    for rank, p in enumerate(pieces):
        if p.wrong and p.got.numel():
            others = (r for r, o in enumerate(pieces) if r != rank and _near(p.got, o.want))
            if (other := next(others, None)) is None:
                return None
            holds.append(f"rank {rank} holds rank {other}'s")
    return f"shards in the wrong place: {', '.join(holds)}" if holds else None


def _other_mask(pieces: Pieces) -> str | None:
    """Recognise zeros at other positions than the single device's: random masks."""
    got, want = [p.got == 0 for p in pieces], [p.want == 0 for p in pieces]
    if not all(_some_zeros(mask) for mask in (*got, *want)) or all(map(torch.equal, got, want)):
        return None
    for a, b in itertools.combinations(range(len(pieces)), 2):
        if torch.equal(got[a], got[b]) and not torch.equal(want[a], want[b]):
            return f"ranks {a} and {b} drew one random mask, where a single device draws two"
    return "zeros in other places: another random mask than a single device's"


def _some_zeros(mask: torch.Tensor) -> bool:
    return mask.numel() > 0 and 0.02 < float(mask.double().mean()) < 1


def _other_order(pieces: Pieces) -> str | None:
    """Recognise rows of some dim in another order, on each rank or over all of them."""
    p = next(p for p in pieces if p.wrong)
    for dim in range(p.got.ndim):
        if p.got.shape[dim] > 1 and _same_rows(p.got, p.want, dim):
            return f"dim {dim} in another order: looks like wrong sharding of a fused or reordered dim"
    if _near(_all(p.got for p in pieces).sort().values, _all(p.want for p in pieces).sort().values):
        return "the right numbers in wrong places over all ranks: looks like wrong sharding of a fused or reordered dim"
    return None


def _same_rows(got: torch.Tensor, want: torch.Tensor, dim: int) -> bool:
    a, b = (t.movedim(dim, 0).flatten(1) if t.ndim > 1 else t[:, None] for t in (got, want))
    mark = torch.randn(a.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return _near((a @ mark).sort().values, (b @ mark).sort().values)


def _some_ranks(pieces: Pieces, mesh: MeshShape) -> str | None:
    wrong = [rank for rank, p in enumerate(pieces) if p.wrong]
    if len(wrong) == len(pieces):
        return None
    for axis in mesh.names:
        indices = {pieces[rank].coordinate[axis] for rank in wrong}
        index = min(indices)
        if len(indices) == 1 and sum(p.coordinate[axis] == index for p in pieces) == len(wrong) and mesh[axis] > 1:
            split = any(p.want.shape != pieces[0].want.shape for p in pieces)
            last = ", the last, where the shards are uneven" if split and index == mesh[axis] - 1 else ""
            return f"only the ranks at {axis}={index}{last}"
    return f"only {_ranks(wrong)}"


def _some_elements(pieces: Pieces) -> str | None:
    """Recognise a few differing indices in some dim."""
    rank, p = next((rank, p) for rank, p in enumerate(pieces) if p.wrong)
    bad = (p.got - p.want).abs() > _NEAR * max(float(p.want.abs().max()), 1e-30)
    for dim in range(bad.ndim):
        others = tuple(d for d in range(bad.ndim) if d != dim)
        at = (bad.any(dim=others) if others else bad).nonzero().flatten().tolist()
        if at and len(at) <= bad.shape[dim] // 2:
            listed = ", ".join(map(str, at[:8])) + (", ..." if len(at) > 8 else "")
            return f"on rank {rank} only at {listed} of {bad.shape[dim]} in dim {dim}"
    return None


# --- the loss -----------------------------------------------------------------------------------------------------


def of_losses(got: Sequence[float], want: float, expected: Sequence[float], mesh: MeshShape) -> tuple[str, ...]:
    """Describe the losses of ranks.

    Args:
        got: each rank's loss.
        want: the single device's, of all rows.
        expected: the single device's loss of each rank's rows.
        mesh: the sizes of its axes are factors to look for.
    """
    own = [rank for rank, (a, b) in enumerate(zip(got, expected, strict=True)) if not _close(a, b)]
    if not own:
        return (
            "each rank's loss is right for its rows, but the mean of the losses is not the loss of all rows: the loss "
            "is a sum, a mean over unequal token counts, or one that compares rows with each other; or a rank has "
            "wrong rows or labels",
        )
    for axes in _subsets(mesh):
        n = math.prod(mesh[axis] for axis in axes)
        for factor, share in ((n, f"{n} times"), (1 / n, f"1/{n} of")):
            if all(_close(a, factor * b) for a, b in zip(got, expected, strict=True)):
                return (f"{share} a single device's ({' * '.join(f'{axis}={mesh[axis]}' for axis in axes)})",)
    if len(own) < len(got):
        return (f"only {_ranks(own)}",)
    return (f"the mean over ranks is {math.fsum(got) / len(got):.6g}, where a single device has {want:.6g}",)


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_NEAR / 100)


# --- the optimizer's step -----------------------------------------------------------------------------------------


def of_updates(evidence: Sequence[Evidence], case: Case) -> tuple[str, ...]:
    """Describe the update of a parameter whose direction is right and whose length is wrong."""
    pieces = [_piece(e) for e in evidence if e.got is not None and e.want is not None and e.got.shape == e.want.shape]
    if len(pieces) < len(evidence) or not any(p.wrong for p in pieces):
        return ()
    if (ratio := _ratio(pieces)) is None:
        return ()
    return (
        f"its change in this step is {_times(ratio)} a single device's: look at the learning rate",
        *filter(None, [_some_ranks(pieces, case.mesh)]),
    )


# --- the norm -----------------------------------------------------------------------------------------------------


def of_norm(
    single: Mapping[str, torch.Tensor],
    sharded: Mapping[str, torch.Tensor],
    want: torch.Tensor | None,
    got: torch.Tensor | None,
    rank_coordinate: RankCoordinate,
) -> tuple[str, ...]:
    """Describe the gradients that a wrong norm counts more than once, or in part."""
    if want is None or got is None:
        return ()
    total, have = float(want) ** 2, float(got) ** 2
    full = {name: float(g.double().norm()) ** 2 for name, g in single.items()}
    mine = {name: float(local(g).double().norm()) ** 2 for name, g in sharded.items()}
    if math.isclose(have, sum(mine.values()), rel_tol=_NEAR):
        return ("it counts this rank's shards alone: the squares are not summed over the ranks that hold the others",)
    split = {name for name in mine if not math.isclose(mine[name], full[name], rel_tol=_NEAR)}
    kinds = {"sharded": sum(full[n] for n in split), "replicated": sum(v for n, v in full.items() if n not in split)}
    for axes in _subsets(rank_coordinate.mesh):
        n = math.prod(rank_coordinate.mesh[axis] for axis in axes)
        if math.isclose(have, n * total, rel_tol=_NEAR):
            return (
                f"its square is {n} times too large ({_said(axes)}): all gradients are counted on every rank of it",
            )
        for kind, part in kinds.items():
            if math.isclose(have, total + (n - 1) * part, rel_tol=_NEAR):
                return (f"gradients that are {kind} are counted {n} times ({_said(axes)})",)
            if math.isclose(have, total + (1 / n - 1) * part, rel_tol=_NEAR):
                return (f"gradients that are {kind} are counted 1/{n} times ({_said(axes)})",)
    return (f"its square is {have / total:.6g} times the single device's",)

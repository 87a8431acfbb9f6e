"""Are ops on DTensors right? A brute-force check over placements, forward and backward, on real ranks.

`check_function` takes a function and plain inputs, runs it once as it is and then with every input placed in every
way on a mesh, and compares outputs and gradients. The command runs it over PyTorch's own database of ops:

    python -m shardlib.testing.ops --world 2

and prints for each op whether our sharding rules carried it, whether something had to be gathered, or what was wrong.
`--form` writes in place, through views, or into `out=`; `--dtype` takes another type.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from shardlib.engine import ops
from shardlib.engine._torch import (
    _StridedShard,
    implicit_replication,
    local_of,
    op_database,
    pytree,
    seed_all,
    spec_of,
    wrap,
)
from shardlib.engine.ops._operands import in_order, redistributed, spec_like
from shardlib.testing._pool import RankError, shared_pool
from shardlib.testing._prove import cut

__all__ = [
    "FORMS",
    "Finding",
    "Sample",
    "Verdict",
    "check_function",
    "check_op",
    "database",
    "placed",
    "print_verdict",
    "samples_of",
]

Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class Sample:
    """A function with plain inputs. Float inputs that require a gradient are checked backward too."""

    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Any = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [x for x in pytree.tree_leaves((self.args, self.kwargs or {})) if isinstance(x, torch.Tensor)]

    def run(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Call the function on other tensors in the places of its own."""
        given = iter(tensors)
        fill = lambda x: next(given) if isinstance(x, torch.Tensor) else x  # noqa: E731
        args, kwargs = pytree.tree_map(fill, (self.args, self.kwargs or {}))
        return self.fn(*args, **kwargs)

    def outcome(self) -> list[Any]:
        """Return outputs, gradients and inputs after one run, forward and backward, on plain tensors."""
        return _outcome(self, [_leaf(t) for t in self.tensors], None)


@dataclass(frozen=True)
class Finding:
    """One way of placing a sample's inputs, and what came of it: "rule", "gather", "wrong" or "crashed".

    On JAX, where nothing is placed: "right", "random" (shapes and dtypes are right), "refused", "wrong" or "crashed".
    """

    kind: str
    placements: tuple[str, ...]
    detail: str = ""


# --- one sample ---------------------------------------------------------------------------------------------------


def check_function(sample: Sample, mesh: DeviceMesh, *, tries: int = 24) -> list[Finding]:
    """Run a sample in many placements on a mesh and compare with plain tensors. All ranks call it with the same
    arguments."""
    wanted = sample.outcome()
    return [_try(sample, mesh, where, wanted) for where in placements_to_try(sample.tensors, mesh, tries)]


def _try(sample: Sample, mesh: DeviceMesh, where: Sequence[Placements], wanted: list[Any]) -> Finding:
    texts = tuple(", ".join(map(str, places)) for places in where)
    try:
        with implicit_replication(), ops.record() as gathered:
            leaves = [
                placed(t, mesh, p).requires_grad_(t.requires_grad) for t, p in zip(sample.tensors, where, strict=True)
            ]
            found = [_full(x) for x in _outcome(sample, leaves, mesh)]
    except Exception as error:
        return Finding("crashed", texts, f"{type(error).__name__}: {error}")
    if (wrong := _difference(found, wanted, _tolerance(sample.tensors, wanted))) is not None:
        return Finding("wrong", texts, wrong)
    return Finding("gather" if gathered else "rule", texts, ", ".join(sorted({g.op for g in gathered})))


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _outcome(sample: Sample, leaves: list[torch.Tensor], mesh: DeviceMesh | None) -> list[Any]:
    """Return outputs, then gradients of the leaves, then the leaves' own values (an op may write to them)."""
    seed_all(0)
    outputs = pytree.tree_leaves(sample.run(leaves))
    roots = [x for x in outputs if isinstance(x, torch.Tensor) and x.requires_grad]
    if roots:
        torch.autograd.backward(roots, [_direction(x, i, mesh) for i, x in enumerate(roots)])
    return [*outputs, *(leaf.grad for leaf in leaves), *(leaf.detach() for leaf in leaves)]


def _direction(output: torch.Tensor, i: int, mesh: DeviceMesh | None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + i)
    value = torch.randn(output.shape, dtype=output.dtype, generator=generator)
    return value if mesh is None or not isinstance(output, DTensor) else placed(value, mesh, _whole(mesh))


def _full(value: Any) -> Any:
    """Gather a DTensor as a user does, which needs valid placements; by our own gather where gloo lacks the dtype."""
    if not isinstance(value, DTensor):
        return value
    detached = value.detach()
    assert isinstance(detached, DTensor)
    if value.dtype in _SENT:
        return detached.full_tensor()
    return redistributed(local_of(detached), spec_of(value), _whole(value.device_mesh))


_SENT = {torch.float32, torch.float64, torch.int32, torch.int64, torch.complex64, torch.complex128}


def _difference(found: list[Any], wanted: list[Any], tolerance: float) -> str | None:
    if len(found) != len(wanted):
        return f"{len(found)} values where plain tensors give {len(wanted)}"
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        if (why := _unlike(a, b, tolerance)) is not None:
            return f"value {i} of {len(found)}: {why}"
    return None


def _unlike(a: Any, b: Any, tolerance: float) -> str | None:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        equal = a is b or a == b or (isinstance(b, float) and abs(a - b) <= tolerance * (1 + abs(b)))
        return None if type(a) is type(b) and equal else f"{a!r}, plain: {b!r}"
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return f"{list(a.shape)} {a.dtype}, plain: {list(b.shape)} {b.dtype}"
    a, b = (_comparable(t) for t in (a, b))
    exact = not (b.is_floating_point() or b.is_complex())
    near = torch.equal(a, b) if exact else torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
    if near:
        return None
    return f"differs by {(a - b).abs().max().item():.2e}" if not exact else "other values"


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor.float() if tensor.dtype.itemsize < 4 and tensor.is_floating_point() else tensor


def _tolerance(inputs: list[torch.Tensor], outputs: list[Any]) -> float:
    """Return the tolerance: sums are reordered, which costs a few digits of the coarsest dtype.

    Types of two bytes have two or three digits: there it is a quarter (bfloat16), less than what a sum that is missing
    or done twice makes.
    """
    tensors = [*inputs, *(x for x in outputs if isinstance(x, torch.Tensor))]
    epsilons = [torch.finfo(t.dtype).eps for t in tensors if t.is_floating_point() or t.is_complex()]
    return max([1e-9, *(eps * (1e4 if eps < 1e-4 else 32) for eps in epsilons if eps > 1e-12)])


# --- placements ---------------------------------------------------------------------------------------------------


def placements_to_try(tensors: Sequence[torch.Tensor], mesh: DeviceMesh, tries: int) -> list[tuple[Placements, ...]]:
    """Return placements to try: each tensor split, summed or fused alone; all split equally; and a few at random. Equal
    on every rank."""
    options = [list(_options(t, mesh)) for t in tensors]
    whole = tuple(_whole(mesh) for _ in tensors)
    found = [whole]
    for i, choices in enumerate(options):
        found += [(*whole[:i], choice, *whole[i + 1 :]) for choice in choices]
    for back in range(1, 1 + max((t.ndim for t in tensors), default=0)):
        found.append(tuple(_split(t, t.ndim - back, mesh) for t in tensors))
        found.append(tuple(_split(t, back - 1, mesh) for t in tensors))
    draw = random.Random(len(tensors))
    found += [tuple(draw.choice([*choices, _whole(mesh)]) for choices in options) for _ in range(tries)]
    unique = list(dict.fromkeys(found))
    return unique if len(unique) <= tries else [unique[0], *draw.sample(unique[1:], tries - 1)]


def _whole(mesh: DeviceMesh) -> Placements:
    return (Replicate(),) * mesh.ndim


def _split(tensor: torch.Tensor, dim: int, mesh: DeviceMesh) -> Placements:
    place = Shard(dim) if 0 <= dim < tensor.ndim else Replicate()
    return (place,) * mesh.ndim


def _options(tensor: torch.Tensor, mesh: DeviceMesh) -> Iterator[Placements]:
    """Return all placements of a tensor on one axis; on several axes, such a choice for each axis, in turn."""
    single: list[Placement] = [Shard(d) for d in range(tensor.ndim)]
    if (tensor.is_floating_point() and tensor.dtype.itemsize > 1) or tensor.is_complex():
        single.append(Partial("sum"))
    if mesh.ndim == 1:
        yield from ((p,) for p in single)
        yield from ((_StridedShard(d, split_factor=k),) for d in range(tensor.ndim) for k in _factors(tensor, d, mesh))
        return
    for i, first in enumerate([*single, Replicate()]):
        for j, second in enumerate([Replicate(), *single]):
            if (i + j) % 2 == 0:
                yield (first, second)
    for axis in range(mesh.ndim):
        for d in range(tensor.ndim):
            yield from (_fused(tensor, d, k, axis, mesh) for k in _factors(tensor, d, mesh, axis))


def _factors(tensor: torch.Tensor, dim: int, mesh: DeviceMesh, axis: int = 0) -> list[int]:
    """Return a factor of a fused split that this dim allows, if there is one."""
    size = tensor.shape[dim]
    return [k for k in (2, 3) if size and size % (k * mesh.size(axis)) == 0][:1]


def _fused(tensor: torch.Tensor, dim: int, factor: int, axis: int, mesh: DeviceMesh) -> Placements:
    """Return a fused split on one axis; each other axis splits the next dim.

    A factor that is the size of the last axis, with a plain split there, is the order of axes (last, first).
    """
    if axis == 0 and factor == mesh.size(-1) and dim % 2 == 0:
        return (_StridedShard(dim, split_factor=factor), *[Replicate()] * (mesh.ndim - 2), Shard(dim))
    other = Shard((dim + 1) % tensor.ndim) if tensor.ndim > 1 else Replicate()
    return tuple(_StridedShard(dim, split_factor=factor) if a == axis else other for a in range(mesh.ndim))


def placed(tensor: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> DTensor:
    """Convert a plain tensor, equal on all ranks, to a DTensor. Partial placements get different summands on ranks."""
    local = whole = tensor.detach().clone()
    for axis, place in enumerate(placements):
        if isinstance(place, Partial):
            local = _summand(local, mesh, axis)
    for axis, place in enumerate(placements):
        if not isinstance(place, Partial):
            local = cut(local, place, mesh.size(axis))[mesh.get_local_rank(axis)]
    return wrap(in_order(local, whole.stride()), spec_like(mesh, placements, whole))


def _summand(tensor: torch.Tensor, mesh: DeviceMesh, axis: int) -> torch.Tensor:
    """Return a summand: 2x, -x, or zeros, which add up to x exactly in any order, where that is finite."""
    size, mine = mesh.size(axis), mesh.get_local_rank(axis)
    if size == 1:
        return tensor
    factor = 2 if mine == size - 1 else -1 if mine == 0 else 0
    alone = tensor if mine == size - 1 else torch.zeros_like(tensor)
    return torch.where((tensor * 2).isfinite(), tensor * factor, alone)


# --- the database of ops ------------------------------------------------------------------------------------------


_KINDS = ("hung", "crashed", "wrong", "refused", "gather", "rule", "random", "right")  # the worst first


@dataclass(frozen=True)
class Verdict:
    """All findings about one op."""

    name: str
    findings: tuple[Finding, ...]

    @property
    def kind(self) -> str:
        kinds = {f.kind for f in self.findings}
        return next((k for k in _KINDS if k in kinds), "no samples")


_UNFIT = (
    "hash_tensor",  # depends on the last bit of its input, which a sum done in another order changes
    "jiterator",  # compiled by an accelerator when called
    "as_strided|partial_views",  # reads memory beside its input, which a copy of the input does not have
)


def database(only: str | None = None) -> list[str]:
    """Return the names of the ops in PyTorch's database, with their variants."""
    names = [f"{i.name}|{i.variant_test_name}" for i in op_database() if i.dtypes]
    return [name for name in names if not name.startswith(_UNFIT) and (only is None or name.startswith(only))]


FORMS = ("call", "in place", "view", "out")


def samples_of(
    name: str, *, count: int = 6, form: str = "call", dtype: torch.dtype | None = None, unique: bool = False
) -> list[Sample]:
    """Return sample inputs of one op, in float64 where possible; none where the op has no such form or dtype.

    With `unique`, what torch's tests compare: of eigenvectors, for instance, what no sign or phase changes.
    """
    base, _, variant = name.partition("|")
    info = next(i for i in op_database() if i.name == base and i.variant_test_name == variant)
    fn = _formed(info, form)
    if fn is None or (dtype is not None and dtype not in info.dtypes):
        return []
    dtype = dtype or _dtype(info.dtypes)
    torch.manual_seed(0)
    random.seed(0)
    grad = form != "out" and info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    made = info.sample_inputs("cpu", dtype, requires_grad=grad)
    picked = [s for s, _ in zip(made, range(4 * count), strict=False)]
    functions = [_Then(fn, s.output_process_fn_grad) if unique else fn for s in picked]
    samples = [Sample(own, (s.input, *s.args), s.kwargs) for own, s in zip(functions, picked, strict=True)]
    usable = [s for s in samples if s.tensors and all(_plain(t) for t in s.tensors)]
    step = max(1, len(usable) // count)
    return usable[::step][:count]


def _formed(info: Any, form: str) -> Callable[..., Any] | None:
    """Return the function of an op in one of `FORMS`, if there is one."""
    if form == "call":
        return _Metadata(info.op) if info.name.startswith(_UNSET) else info.op
    if form == "out":
        return _Out(info.op) if info.supports_out and not info.name.startswith(_UNSET) else None
    assert form in FORMS, form
    written = info.inplace_variant
    if written is None or (form == "view" and info.name.startswith(_RESHAPING)):
        return None
    return _InPlace(written) if form == "in place" else _ThroughViews(written)


_RESHAPING = ("as_strided", "resize")  # what they do to a view does not show in its base


@dataclass(frozen=True)
class _InPlace:
    """The op writes to a copy, of which a view was taken before, to be used after it unless the shape changed."""

    fn: Callable[..., Any]

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        y = x.clone()
        before, strides = y[..., :1] if y.ndim else y.view(1), y.stride()
        self.fn(y, *args, **kwargs)
        if y.numel() != x.numel():
            raise ValueError("torch has resized what it should have refused: no broadcast makes an operand larger")
        return (y, before * 1) if (y.shape, y.stride()) == (x.shape, strides) else y


@dataclass(frozen=True)
class _ThroughViews:
    """The op writes through a slice of the first dim, then through one of the last: other operands are numbers."""

    fn: Callable[..., Any]

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        y = x.clone()
        self.fn(y[1:], *args, **kwargs)
        self.fn(y.transpose(0, -1)[:2], *args, **kwargs)
        return y


@dataclass(frozen=True)
class _Out:
    """The op writes into tensors that were made for its results."""

    fn: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = pytree.tree_map_only(torch.Tensor, torch.zeros_like, self.fn(*args, **kwargs))
        returned = self.fn(*args, out=out, **kwargs)
        return list(pytree.tree_leaves(out)), list(pytree.tree_leaves(returned))


@dataclass(frozen=True)
class _Then:
    """A function after the op."""

    fn: Callable[..., Any]
    then: Callable[[Any], Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.then(self.fn(*args, **kwargs))


_UNSET = ("empty", "new_empty")  # ops whose name begins so return whatever lay in memory


@dataclass(frozen=True)
class _Metadata:
    """A function of which only the shape and type of the result can be compared."""

    fn: Callable[..., torch.Tensor]

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.fn(*args, **kwargs).zero_()


def _dtype(dtypes: Any) -> torch.dtype:
    preferred = (torch.float64, torch.float32, torch.int64, torch.complex128, torch.bool)
    return next((d for d in preferred if d in dtypes), next(iter(dtypes)))


def _plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.numel() <= 20_000


def _check_op(name: str, shape: tuple[int, ...], tries: int, form: str, dtype: torch.dtype | None) -> Verdict:
    """Check one op of the database; runs on every rank."""
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b", "c")[: len(shape)])
    findings: list[Finding] = []
    with ops.restored():
        ops.enable(mesh)
        for sample in samples_of(name, form=form, dtype=dtype):
            try:
                wanted = sample.outcome()
            except Exception:
                continue  # a sample that plain tensors refuse says nothing about ours
            if all(_plain(x) for x in wanted if isinstance(x, torch.Tensor)):
                findings += check_function(sample, mesh, tries=tries)
    return Verdict(name, tuple(findings))


def check_op(
    name: str,
    shape: tuple[int, ...],
    *,
    tries: int = 16,
    form: str = "call",
    dtype: torch.dtype | None = None,
    timeout: float = 120.0,
) -> Verdict:
    """Check one op of the database, in one of `FORMS`, on a mesh of this shape, in the shared pool of ranks."""
    try:
        verdicts = shared_pool(math.prod(shape)).run(_check_op, name, shape, tries, form, dtype, timeout=timeout)
    except RankError as error:
        return Verdict(name, (Finding("hung", (), str(error)),))
    worst = [v for v in verdicts if v.kind in ("crashed", "wrong")]
    return (worst or verdicts)[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Check ops and print the table; the exit code is 1 when one is wrong, crashed or hung."""
    parser = argparse.ArgumentParser(prog="python -m shardlib.testing.ops", description=__doc__)
    parser.add_argument("--world", default="2", help='ranks, or a mesh shape such as "2x2"')
    parser.add_argument("--only", help="ops whose name begins so")
    parser.add_argument("--every", type=int, default=1, help="take one of so many ops")
    parser.add_argument("--tries", type=int, default=16, help="placements per sample")
    parser.add_argument("--form", default="call", choices=FORMS, help="how ops are called")
    parser.add_argument("--dtype", help='"float32", "bfloat16", ...; float64 where an op takes it unless given')
    parser.add_argument("--show", type=int, default=3, help="failures shown per op")
    options = parser.parse_args(argv)
    shape = tuple(int(size) for size in options.world.split("x"))
    dtype = getattr(torch, options.dtype) if options.dtype else None
    counts: dict[str, int] = {}
    for name in database(options.only)[:: options.every]:
        verdict = check_op(name, shape, tries=options.tries, form=options.form, dtype=dtype)
        counts[verdict.kind] = counts.get(verdict.kind, 0) + 1
        print_verdict(verdict, options.show)
    print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))
    return 1 if {"wrong", "crashed", "hung"} & counts.keys() else 0


def print_verdict(verdict: Verdict, show: int) -> None:
    """Print a line about an op, and its first failures."""
    gathered = sorted({op for f in verdict.findings if f.kind == "gather" for op in f.detail.split(", ")})
    good = sum(f.kind in ("rule", "right", "random") for f in verdict.findings)
    print(f"{verdict.name.rstrip('|'):48} {verdict.kind:10} {good}/{len(verdict.findings)} {' '.join(gathered)}")
    for finding in [f for f in verdict.findings if f.kind in ("wrong", "crashed", "hung", "refused")][:show]:
        where = f" at {finding.placements}" if finding.placements else ""
        print(f"    {finding.kind}{where}: {finding.detail}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

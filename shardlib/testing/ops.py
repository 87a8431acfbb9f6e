"""Are ops on DTensors right? A brute-force check over placements, forward and backward, on real ranks.

`check_function` takes a function and plain inputs, runs it once as it is and then with every input placed in every
way on a mesh, and compares outputs and gradients. The command runs it over PyTorch's own database of ops:

    python -m shardlib.testing.ops --world 2

and prints for each op whether our sharding rules carried it, whether something had to be gathered, or what was wrong.
"""

from __future__ import annotations

import argparse
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
    redistribute_local,
    spec_of,
    wrap,
)
from shardlib.engine.ops._operands import redistributed, spec_like
from shardlib.testing._pool import RankError, shared_pool

__all__ = ["Finding", "Sample", "Verdict", "check_function", "placed"]

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


@dataclass(frozen=True)
class Finding:
    """One way of placing a sample's inputs, and what came of it: "rule", "gather", "wrong" or "crashed"."""

    kind: str
    placements: tuple[str, ...]
    detail: str = ""


# --- one sample ---------------------------------------------------------------------------------------------------


def check_function(sample: Sample, mesh: DeviceMesh, *, tries: int = 24) -> list[Finding]:
    """Run a sample in many placements on a mesh and compare with plain tensors. Call it on all ranks alike."""
    wanted = _outcome(sample, [_leaf(t) for t in sample.tensors], None)
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
    """Outputs, then gradients of the leaves, then the leaves' own values (an op may write to them)."""
    torch.manual_seed(0)
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
    if not isinstance(value, DTensor):
        return value
    return redistributed(local_of(value).detach(), spec_of(value), _whole(value.device_mesh))


def _difference(found: list[Any], wanted: list[Any], tolerance: float) -> str | None:
    if len(found) != len(wanted):
        return f"{len(found)} values where plain tensors give {len(wanted)}"
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        if (why := _unlike(a, b, tolerance)) is not None:
            return f"value {i} of {len(found)}: {why}"
    return None


def _unlike(a: Any, b: Any, tolerance: float) -> str | None:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return None if type(a) is type(b) and (a == b or a is b) else f"{a!r}, plain: {b!r}"
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
    """Sums are done in another order: a few digits less than the coarsest type that takes part."""
    tensors = [*inputs, *(x for x in outputs if isinstance(x, torch.Tensor))]
    floats = [t.dtype for t in tensors if t.is_floating_point() or t.is_complex()]
    return max([1e-9, *(1e4 * torch.finfo(dtype).eps for dtype in floats if torch.finfo(dtype).eps > 1e-12)])


# --- placements ---------------------------------------------------------------------------------------------------


def placements_to_try(tensors: Sequence[torch.Tensor], mesh: DeviceMesh, tries: int) -> list[tuple[Placements, ...]]:
    """Each tensor split, summed or fused alone; all split alike; and a few at random. The same on every rank."""
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
    """On one axis everything that a tensor may be; on several, such a choice for each axis, in turn."""
    single: list[Placement] = [Shard(d) for d in range(tensor.ndim)]
    if (tensor.is_floating_point() and tensor.dtype.itemsize > 1) or tensor.is_complex():
        single.append(Partial("sum"))
    if mesh.ndim == 1:
        yield from ((p,) for p in single)
        fused = [d for d in range(tensor.ndim) if tensor.shape[d] and tensor.shape[d] % (2 * mesh.size()) == 0]
        yield from ((_StridedShard(d, split_factor=2),) for d in fused[-1:])
        return
    for i, first in enumerate([*single, Replicate()]):
        for j, second in enumerate([Replicate(), *single]):
            if (i + j) % 2 == 0:
                yield (first, second)


def placed(tensor: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> DTensor:
    """A plain tensor, the same on all ranks, as a DTensor. Sums are cut into unlike parts, one per rank."""
    spec = spec_like(mesh, _whole(mesh), tensor)
    local = tensor.detach().clone()
    for axis, place in enumerate(placements):
        if isinstance(place, Partial):
            local = _summand(local, mesh, axis)
    kept = tuple(Replicate() if isinstance(p, Partial) else p for p in placements)
    local = redistribute_local(local, spec, spec_like(mesh, kept, tensor))
    return wrap(local, spec_like(mesh, placements, tensor))


def _summand(tensor: torch.Tensor, mesh: DeviceMesh, axis: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7 + axis)
    size, mine = mesh.size(axis), mesh.get_local_rank(axis)
    # Whole numbers lose no digits: ops that ask whether a value is exactly 1 find it so.
    parts = [torch.randint(-4, 5, tensor.shape, generator=generator).to(tensor.dtype) for _ in range(size - 1)]
    return parts[mine] if mine < size - 1 else tensor - sum(parts) if parts else tensor


# --- the database of ops ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """All findings about one op."""

    name: str
    findings: tuple[Finding, ...]

    @property
    def kind(self) -> str:
        kinds = {f.kind for f in self.findings}
        return next((k for k in ("hung", "crashed", "wrong", "gather", "rule") if k in kinds), "no samples")


_BITS = {"hash_tensor"}  # depends on the last bit of its input, which a sum done in another order changes


def database(only: str | None = None) -> list[str]:
    """Names of the ops in PyTorch's database, variants told apart."""
    infos = [f"{i.name}|{i.variant_test_name}" for i in op_database() if i.dtypes and i.name not in _BITS]
    return [name for name in infos if only is None or name.startswith(only)]


def samples_of(name: str, *, count: int = 6) -> list[Sample]:
    """Sample inputs of one op, float64 where it takes that."""
    base, _, variant = name.partition("|")
    info = next(i for i in op_database() if i.name == base and i.variant_test_name == variant)
    dtype = _dtype(info.dtypes)
    torch.manual_seed(0)
    random.seed(0)
    grad = info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    made = info.sample_inputs("cpu", dtype, requires_grad=grad)
    picked = [s for s, _ in zip(made, range(4 * count), strict=False)]
    fn = _Metadata(info.op) if base.startswith(_UNSET) else info.op
    samples = [Sample(fn, (s.input, *s.args), s.kwargs) for s in picked]
    usable = [s for s in samples if s.tensors and all(_plain(t) for t in s.tensors)]
    step = max(1, len(usable) // count)
    return usable[::step][:count]


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
    return type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.numel() <= 4000


def _check_op(name: str, shape: tuple[int, ...], tries: int) -> Verdict:
    """Check one op of the database; runs on every rank."""
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b", "c")[: len(shape)])
    ops.enable(mesh)
    try:
        findings: list[Finding] = []
        for sample in samples_of(name):
            try:
                wanted = _outcome(sample, [_leaf(t) for t in sample.tensors], None)
            except Exception:
                continue  # a sample that plain tensors refuse says nothing about ours
            if all(_plain(x) for x in wanted if isinstance(x, torch.Tensor)):
                findings += check_function(sample, mesh, tries=tries)
        return Verdict(name, tuple(findings))
    finally:
        ops.disable(mesh)


def check_op(name: str, shape: tuple[int, ...], *, tries: int = 16, timeout: float = 120.0) -> Verdict:
    """Check one op of the database on a mesh of this shape, in the shared pool of ranks."""
    world = 1
    for size in shape:
        world *= size
    try:
        verdicts = shared_pool(world).run(_check_op, name, shape, tries, timeout=timeout)
    except RankError as error:
        return Verdict(name, (Finding("hung", (), str(error)),))
    worst = [v for v in verdicts if v.kind in ("crashed", "wrong")]
    return (worst or verdicts)[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Check ops and print the table; the exit code is 1 when one is wrong, crashed or hung."""
    parser = argparse.ArgumentParser(prog="python -m shardlib.testing.ops", description=__doc__)
    parser.add_argument("--world", default="2", help='ranks, or a mesh shape such as "2x2"')
    parser.add_argument("--only", help="ops whose name begins so")
    parser.add_argument("--tries", type=int, default=16, help="placements per sample")
    parser.add_argument("--show", type=int, default=3, help="failures shown per op")
    options = parser.parse_args(argv)
    shape = tuple(int(size) for size in options.world.split("x"))
    counts: dict[str, int] = {}
    for name in database(options.only):
        verdict = check_op(name, shape, tries=options.tries)
        counts[verdict.kind] = counts.get(verdict.kind, 0) + 1
        _print_verdict(verdict, options.show)
    print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))
    return 1 if {"wrong", "crashed", "hung"} & counts.keys() else 0


def _print_verdict(verdict: Verdict, show: int) -> None:
    gathered = sorted({op for f in verdict.findings if f.kind == "gather" for op in f.detail.split(", ")})
    rules = sum(f.kind == "rule" for f in verdict.findings)
    print(f"{verdict.name.rstrip('|'):48} {verdict.kind:10} {rules}/{len(verdict.findings)} {' '.join(gathered)}")
    for finding in [f for f in verdict.findings if f.kind in ("wrong", "crashed", "hung")][:show]:
        print(f"    {finding.kind} at {finding.placements}: {finding.detail}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

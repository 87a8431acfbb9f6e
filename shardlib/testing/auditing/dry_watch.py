"""Rules by which an op on local tensors passes on over which axes they differ; a step is watched op by op.

The result of an op differs over the axes over which its operands do, a collective ends or begins the difference, and a
DTensor's placements say what its local tensor is. The types of `spmd_types` (meta-pytorch) are such types too; here
they are found below autograd, in code that declares none, forward and backward alike.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate

from shardlib._plan.report import RunPhase
from shardlib.engine import _torch
from shardlib.engine.feature.recording import Call
from shardlib.testing.auditing.dry_grid import NOTHING, Grid, Part, Parts
from shardlib.testing.auditing.dry_marks import Marks, Sum

__all__ = ["Contradiction", "Misuse", "Watch", "Work"]

Place = tuple[str, RunPhase]


@dataclasses.dataclass(frozen=True)
class Contradiction:
    """A DTensor that was made with Replicate over parts of axes over which its local tensor differs."""

    over: Parts
    module: str
    phase: RunPhase


@dataclasses.dataclass(frozen=True)
class Misuse:
    """An op that uses a sum which module `left_by` left to be done over a part of an axis as if it were done."""

    over: Part
    left_by: str
    op: str
    module: str


@dataclasses.dataclass(frozen=True)
class Work:
    """A place where products were computed, and the parts of axes whose ranks all computed the same."""

    module: str
    phase: RunPhase
    alike: Parts


class Watch:
    """Follows which tensors differ over which axes. `watch(call)` is called after each op on local tensors.

    Attributes:
        marks: what is known of the tensors.
        work: floating-point operations by place.
        contradictions, misuses: what was found, each once, in order.
        unknown: numbers of ranks of collectives whose groups do not follow the mesh; their results keep their marks.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.marks = Marks()
        self.work: Counter[Work] = Counter()
        self.contradictions: dict[Contradiction, None] = {}
        self.misuses: dict[Misuse, None] = {}
        self.unknown: set[int] = set()
        self.place: Callable[[], Place] = lambda: ("", "outside")
        self._dims: dict[tuple[DeviceMesh, int], Parts] = {}

    def __call__(self, call: Call) -> None:
        self.place = call.place
        if call.op.namespace in ("prim", "profiler"):
            return
        name = _name(call.op)
        if name not in _NO_VALUES:
            self._pass_on(name, call)
        else:
            for tensor in _tensors(call.result):
                self.marks.write(tensor, NOTHING)
        if call.flops:
            read = self._read(_tensors(call.args, call.kwargs))
            self.work[Work(*call.place(), self.grid.all - read)] += call.flops

    def along(self, mesh: DeviceMesh, dim: int) -> Parts:
        """Return the parts of axes that a dim of any mesh of these ranks goes along."""
        if (mesh, dim) not in self._dims:
            self._dims[mesh, dim] = self.grid.of_ranks(tuple(dist.get_process_group_ranks(mesh.get_group(dim))))
        return self._dims[mesh, dim]

    def made(self, local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> None:
        """Compare a local tensor with the placements of the DTensor that is made of it."""
        differs, wrong = self.marks.read(local), NOTHING
        for dim, placement in enumerate(placements):
            axes = self.along(mesh, dim)
            if isinstance(placement, Replicate):
                wrong |= axes & differs
            else:
                self.marks.add_own(local, axes)
        if wrong:
            self.contradictions[Contradiction(wrong, *self.place())] = None

    def taken(self, local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> None:
        """Note the sums that are to be done, of a local tensor that `DTensor.to_local` returns."""
        module, phase = self.place()
        left = [dim for dim, placement in enumerate(placements) if isinstance(placement, Partial)]
        self.made(local, mesh, placements)
        if left and phase == "forward":
            axes = NOTHING.union(*(self.along(mesh, dim) for dim in left))
            self.marks.set_sums(local, dict.fromkeys(axes, Sum("pending", module)))

    def _read(self, tensors: Iterable[torch.Tensor]) -> Parts:
        return NOTHING.union(*map(self.marks.read, tensors))

    def _pass_on(self, name: str, call: Call) -> None:
        if call.collective is not None:
            self._collective(call)
        elif (rule := _FSDP.get(name)) is not None and call.op.namespace == "fsdp":
            rule(self.marks, call)
        else:
            self._compute(name, call)

    def _compute(self, name: str, call: Call) -> None:
        written = _torch.written_to(call.op, call.args, call.kwargs)
        given = list(_operands(name, call))
        sums = self._sums(name, call, given)
        if len(given) == len(written) == 1 and given[0] is written[0]:
            return  # each element is changed by itself
        lists = call.args[:2] if name.startswith("_foreach") else ()
        if written and len(lists) == 2 and _pairwise(*lists, len(written)):
            for target, source in zip(written, lists[1], strict=True):
                self.marks.write(target, self._read((source,) if name == "_foreach_copy_" else (target, source)))
            return
        axes = self._read(given)
        for tensor in written:
            if _keeps_order(name, given, tensor):
                self._copy(given[0], tensor, lambda own: own)
            else:
                self.marks.write(tensor, axes)
            self.marks.set_sums(tensor, sums)
        self._results(name, call, given, axes, sums)

    def _results(self, name: str, call: Call, given: list[torch.Tensor], axes: Parts, sums: Mapping[Part, Sum]) -> None:
        sources = {id(_torch.storage_of(tensor)): tensor for tensor in given}
        for tensor in _tensors(call.result):
            source = sources.get(id(_torch.storage_of(tensor)))
            if source is not None:
                self.marks.add_own(tensor, self.marks.own(source))
            elif _keeps_order(name, given, tensor):
                self._copy(given[0], tensor, lambda own: own)
            else:
                self.marks.write(tensor, axes)
            if source is None:
                self.marks.set_sums(tensor, sums)

    def _copy(self, source: torch.Tensor, target: torch.Tensor, new: Callable[[Parts], Parts]) -> None:
        """Give a target the marks of a source, element by element from its first, as `new` changes them.

        Where the target is longer, as after an all-gather, its rest has the marks of all of the source.
        """
        ranges, count = self.marks.ranges(source), min(source.numel(), target.numel())
        self.marks.write(target, new(self.marks.read(source)))
        self.marks.write_range(target, 0, count, new(NOTHING))
        for first, last, axes in ranges:
            if first < count:
                self.marks.write_range(target, first, min(last, count), new(axes))

    # --- collectives ----------------------------------------------------------------------------------------------

    def _collective(self, call: Call) -> None:
        assert call.collective is not None
        kind, axes = call.collective.kind, self.grid.of_ranks(call.ranks)
        if not axes:
            self.unknown.add(call.collective.size)
        after = functools.partial(_AFTER.get(kind, lambda before, _: before), axes=axes)
        written = _received(call)
        inputs = [each for each in _tensors(call.args, call.kwargs) if not any(each is one for one in written)]
        targets = written or list(_tensors(call.result))
        inputs = inputs or targets  # in place
        pairs = list(zip(inputs, targets, strict=True)) if len(inputs) == len(targets) else []
        sums = [self._sums_after(call, axes, source) for source, _ in pairs]
        if written and (len(pairs) == 1 or inputs is written):
            for source, target in pairs:
                self._copy(source, target, after)
        else:
            found = after(self._read(inputs))
            for target in targets:
                self.marks.write(target, found)
        for (_, target), left in zip(pairs, sums, strict=True):
            self.marks.set_sums(target, left)

    # --- sums -----------------------------------------------------------------------------------------------------

    def _sums_after(self, call: Call, axes: Parts, source: torch.Tensor) -> Mapping[Part, Sum]:
        """Return what a collective leaves of sums. What it makes alike in backward, and does not sum, is lost."""
        assert call.collective is not None
        kind, before = call.collective.kind, self.marks.sums(source)
        by = _torch.reduction_of({**_torch.named_arguments(call.op, call.args), **call.kwargs})
        if kind not in ("broadcast", "gather") and not by:
            return before
        left = {part: each for part, each in before.items() if part not in axes or each.state == "lost"}
        differs = {part for part in axes & self.marks.read(source) if part not in before or kind != "broadcast"}
        if kind == "gather" or (kind == "reduce" and by in _SUMS):
            return dict.fromkeys(differs, Sum("on one rank", kind)) | left
        if by in _SUMS or not _in_backward(call):
            return left
        how = (
            f"{kind} takes their {by}" if by else "broadcast gives all that of one rank"
        ) + "; reduce it by SUM or AVG"
        return dict.fromkeys(differs, Sum("lost", how)) | left

    def _sums(self, name: str, call: Call, given: Sequence[torch.Tensor]) -> Mapping[Part, Sum]:
        """Return what the result of an op is instead of a sum. Only linear ops may be given a pending one."""
        known = [(tensor, sums) for tensor in given if (sums := self.marks.sums(tensor))]
        if not known:
            return {}
        module, phase = call.place()
        merged = {part: each for _, sums in known for part, each in sums.items()}
        if phase == "backward":
            largest = max(tensor.numel() for tensor in given)
            is_gradient = "_backward" in name or name in ("mm", "bmm") or name in _LINEAR
            is_gradient |= name in _BILINEAR and any(tensor.numel() == largest for tensor, _ in known)  # else a scale
            return {part: each for part, each in merged.items() if each.state != "pending"} if is_gradient else {}
        if _is_linear(name, len(known), len(given)):
            return merged
        for part, each in merged.items():
            self.misuses[Misuse(part, each.by, name, module)] = None
        return {}


def _in_backward(call: Call) -> bool:
    """Tell whether a call is of backward itself, in which autograd turns gradients off; not of a recomputed forward."""
    return call.place()[1] == "backward" and not torch.is_grad_enabled()


def _is_linear(name: str, summands: int, operands: int) -> bool:
    if name in _LINEAR:
        return summands == operands
    return name in _BILINEAR and summands == 1


# fmt: off
_LINEAR = frozenset((
    "view", "_unsafe_view", "reshape", "_reshape_alias", "t", "transpose", "permute", "expand", "slice", "select",
    "split", "split_with_sizes", "unbind", "cat", "stack", "clone", "detach", "alias", "_to_copy", "sum", "mean", "neg",
    "squeeze", "unsqueeze", "copy_", "constant_pad_nd", "index_select", "as_strided", "unfold", "wait_tensor",
    "lift_fresh", "add", "add_", "sub", "sub_",
))
_BILINEAR = frozenset(("mul", "mul_", "div", "div_", "mm", "bmm"))
_SUMS = frozenset(("SUM", "AVG", "PREMUL_SUM"))

# Ops whose results do not depend on the values of their operands.
_NO_VALUES = frozenset((
    "ones_like", "zeros_like", "full_like", "empty_like", "rand_like", "randn_like", "new_zeros", "new_ones",
    "new_full", "new_empty", "new_empty_strided", "zero_", "fill_",
))
# fmt: on
# Ops that give each element of one tensor its place in another one, in order.
_SAME_ORDER = frozenset({"_to_copy", "clone", "copy_", "mul", "div"})

_AFTER: dict[str, Callable[[Parts, Parts], Parts]] = {
    "all_reduce": lambda before, axes: before - axes,
    "all_gather": lambda before, axes: before - axes,
    "broadcast": lambda before, axes: before - axes,
    "reduce_scatter": lambda before, axes: before | axes,
    "all_to_all": lambda before, axes: before | axes,
    "scatter": lambda before, axes: before | axes,
    "reduce": lambda before, axes: before | axes,
    "gather": lambda before, axes: before | axes,
    "receive": lambda before, axes: before | axes,
}


def _name(op: Any) -> str:
    return str(op.overloadpacket.__name__)


def _tensors(*values: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in _torch.leaves_of(*values) if isinstance(leaf, torch.Tensor))


def _operands(name: str, call: Call) -> Iterator[torch.Tensor]:
    """Iterate over the tensors whose values an op reads."""
    args = call.args[1:] if name == "copy_" else call.args
    return _tensors(args, {key: value for key, value in call.kwargs.items() if key != "out"})


def _keeps_order(name: str, given: Sequence[torch.Tensor], target: torch.Tensor) -> bool:
    """Tell whether each element of one operand, in order, makes the element at its place: a buffer keeps its parts."""
    alone = name in _SAME_ORDER and len(given) == 1 and given[0].numel() == target.numel()
    return alone and given[0].is_contiguous() and target.is_contiguous()


def _received(call: Call) -> list[torch.Tensor]:
    """List the tensors that a collective writes to. The ops of c10d do not declare it (2.13.0)."""
    if call.op.namespace != "c10d":
        return _torch.written_to(call.op, call.args, call.kwargs)
    named = {**_torch.named_arguments(call.op, call.args), **call.kwargs}
    outputs = [value for name, value in named.items() if name.startswith("output")]
    return list(_tensors(outputs or [named.get("tensors"), named.get("tensor")]))


def _pairwise(targets: Any, sources: Any, count: int) -> bool:
    return (
        isinstance(targets, list | tuple)
        and isinstance(sources, list | tuple)
        and len(targets) == len(sources) == count
    )


# --- the ops of fully_shard, which put the tensors of many parameters into one buffer --------------------------------


def _copy_in(marks: Marks, call: Call) -> None:
    """The shards of all parameters become one tensor, from which an all-gather sends."""
    buffer, at = call.result[0], 0
    for tensor in call.args[0]:
        count = tensor.numel() * tensor.element_size() // buffer.element_size()
        marks.write_range(buffer, at, at + count, marks.read(tensor))
        at += count


def _copy_out(marks: Marks, call: Call) -> None:
    """Each column of what was gathered is a parameter. The first row, that of the first rank, has all marks."""
    source, sizes, at = call.args[0], call.args[1], 0
    ranges = marks.ranges(source)
    for target, size in zip(call.kwargs["out"], sizes, strict=True):
        inside = (axes for first, last, axes in ranges if first < at + size and at < last)
        marks.write(target, NOTHING.union(*inside))
        at += size


def _chunk_cat(marks: Marks, call: Call) -> None:
    """Each row is what one rank will get: a part of each gradient. All rows have the same marks."""
    tensors, _, chunks, *given = call.args
    buffer, at = call.kwargs.get("out", *given[:1]), 0
    marks.write(buffer, NOTHING.union(*map(marks.read, tensors)))
    for tensor in tensors:
        rows = -(-tensor.shape[0] // chunks) if tensor.ndim else 1
        count = rows * (tensor[0].numel() if tensor.ndim else 1)
        marks.write_range(buffer, at, at + count, marks.read(tensor))
        at += count


_FSDP = {"all_gather_copy_in": _copy_in, "split_with_sizes_copy": _copy_out, "chunk_cat": _chunk_cat}

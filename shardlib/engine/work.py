"""Recording of `Work`: one pass of a model whose repeated blocks are cut to one of each kind, on fake tensors.

Blocks are of one kind if their modules, these modules' settings and the layouts of their tensors are equal. So the time
of a record does not depend on the depth of a model.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardlib._mesh_shape import MeshShape
from shardlib._plan import Kernel, Part, Pass, Plan, Recorded, Row, Work
from shardlib.engine import _torch
from shardlib.engine._torch import pytree
from shardlib.engine.apply import apply_plan, no_sync, partial_gradients
from shardlib.engine.fakes import arguments_of, fake_copy, fake_like, fake_world, refuse_sharded, run_step
from shardlib.engine.feature.recompute import modules_to_recompute
from shardlib.engine.feature.recording import Call, Recording, record_collectives
from shardlib.engine.pipeline.batch import microbatch_sizes, split
from shardlib.engine.pipeline.batch import rows as rows_of
from shardlib.errors import PlanError, ShardlibError

__all__ = ["Cut", "ModelSource", "cut_of", "record_work", "tokens_of"]

_MOST_KEPT = 8
_WAITS = ("_c10d_functional", "c10d", "_dtensor")
# They are no part of a fused kernel.
_ALONE = ("aten.cat", "aten.embedding", "aten.index_put", "aten.scatter", "aten.sort", "aten.topk", "aten.cumsum")
_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.convolution")
# They read some rows of their first operand.
_LOOKUPS = ("aten.embedding", "aten.index_select", "aten.gather", "aten.index")


@dataclass(frozen=True)
class Cut:
    """The blocks of a model that stand for all of them.

    Attributes:
        prefix: the name of the `ModuleList`; "" for a model without.
        order: the kind of each block.
        kept: the index of blocks that are kept, in order; the middle one of a kind stands for it.
    """

    prefix: str = ""
    order: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()

    @property
    def examples(self) -> tuple[int, ...]:
        """The index in the model of the block that stands for each kind."""
        by_kind: dict[int, list[int]] = {}
        for index in self.kept:
            by_kind.setdefault(self.order[index], []).append(index)
        return tuple(own[len(own) // 2] for _, own in sorted(by_kind.items()))

    def name(self, name: str) -> str | None:
        """Return the name that a module or tensor has in the model that is cut, or None."""
        if not self.prefix or not name.startswith(f"{self.prefix}."):
            return name
        number, dot, rest = name[len(self.prefix) + 1 :].partition(".")
        if not number.isdecimal() or int(number) not in self.kept:
            return None if number.isdecimal() else name
        return f"{self.prefix}.{self.kept.index(int(number))}{dot}{rest}"

    def dropped(self, model: nn.Module) -> list[nn.Module]:
        """Return the blocks that are left out."""
        blocks = [*model.get_submodule(self.prefix).children()] if self.prefix else []
        return [block for index, block in enumerate(blocks) if index not in self.kept]

    def applied(self, copied: nn.Module) -> nn.Module:
        """Take the blocks that are left out, which are empty, from the list of a copy."""
        if self.prefix:
            blocks = copied.get_submodule(self.prefix)
            assert isinstance(blocks, nn.ModuleList)
            parent, _, key = self.prefix.rpartition(".")
            setattr(copied.get_submodule(parent), key, nn.ModuleList(blocks[index] for index in self.kept))
        return copied


def cut_of(model: nn.Module, plan: Plan, *, least: int = 2) -> Cut:
    """Find which blocks stand for all: `least` of them at least."""
    blocks = plan.blocks
    if blocks is None or len(plan.mesh.pipeline_axes) > 1:
        return Cut()
    every = model.get_submodule(blocks.prefix)
    recomputed = frozenset(modules_to_recompute(model, plan.step.recompute))
    numbers: dict[Hashable, int] = {}
    own = _by_block(plan, blocks.prefix)
    order = tuple(
        numbers.setdefault(
            _signature(block, f"{blocks.prefix}.{index}", index, own.get(index, ()), recomputed), len(numbers)
        )
        for index, block in enumerate(every.children())
    )
    # One in the middle stands for others: the input of the first may need no gradient, the output of the last is kept.
    again = [index for index in range(1, len(order)) if order[index] == order[0]][:2]
    wanted = sorted({*(order.index(kind) for kind in range(len(numbers))), *again})
    kept = range(wanted[-1] + 1) if wanted[-1] < _MOST_KEPT else wanted
    if len(kept) < least:
        kept = range(min(least, len(order)))
    return Cut(blocks.prefix, order, tuple(kept))


def _by_block(plan: Plan, prefix: str) -> dict[int, list[tuple[Hashable, ...]]]:
    """Return what the plan says of each block's tensors and borders."""
    found: dict[int, list[tuple[Hashable, ...]]] = {}

    def add(name: str, *facts: Hashable) -> None:
        number, _, rest = name[len(prefix) + 1 :].partition(".")
        if name.startswith(f"{prefix}.") and number.isdecimal():
            found.setdefault(int(number), []).append((rest, *facts))

    for row in plan.rows:
        add(row.name, row.form, row.kind, row.requires_grad)
    for border in plan.borders:
        add(border.module, border.side, border.layout)
    return found


def _signature(
    block: nn.Module, name: str, index: int, facts: Collection[tuple[Hashable, ...]], recomputed: Collection[str]
) -> Hashable:
    modules = tuple(
        (child, type(module), f"{name}.{child}".rstrip(".") in recomputed, _settings(module, index))
        for child, module in block.named_modules()
    )
    return modules, tuple(facts)


def _settings(module: nn.Module, index: int) -> tuple[tuple[str, Hashable], ...]:
    """Return the numbers and words of a module, without the number of its block."""
    plain = ((key, value) for key, value in vars(module).items() if isinstance(value, bool | int | float | str | None))
    return tuple((key, value) for key, value in plain if not (_is_number(key) and value in (index, index + 1)))


def _is_number(key: str) -> bool:
    return any(part in key for part in ("idx", "index", "layer", "block", "number"))


def record_work(
    model: nn.Module,
    plan: Plan,
    example: Any,
    cut: Cut | None = None,
    partial: Mapping[str, tuple[str, ...]] | None = None,
) -> Work:
    """Record one pass of a plan's model on the rank with the largest shards.

    Args:
        model: the single-device model of the plan; its tensors have no part in it.
        plan: its plan, on any mesh. The model axes and those of experts count, and of the transforms those that change
            ops: precision, recomputation, float8, the experts' capacity.
        example: the microbatch of one data rank.
        cut: the blocks that stand for all; by default `cut_of(model, plan)`.
        partial: the model axes over which gradients are partial sums, where an earlier record has found them: one pass
            then runs in place of two.

    Raises:
        PlanError: the model is sharded, or its forward does not take the example, depends on values of tensors or
            raises an error.
    """
    refuse_sharded(model)
    given = arguments_of(model, example)
    with _explained(model, plan.mesh, given):
        return _record(model, plan, given, cut, partial)


@contextmanager
def _explained(model: nn.Module, mesh: MeshShape, given: Any) -> Iterator[None]:
    """Raise an error that names the inputs in the place of one that the model, or an op on a mesh, raises."""
    try:
        yield
    except ShardlibError:
        raise
    except Exception as error:
        tensors = (t for t in pytree.tree_leaves(given) if isinstance(t, torch.Tensor))
        shown = ", ".join(f"{'x'.join(map(str, t.shape))}:{str(t.dtype).removeprefix('torch.')}" for t in tensors)
        raise PlanError(
            f"{type(model).__name__} stops in a dry run on {mesh} with the example {shown}: {type(error).__name__}: "
            f"{error}. Give example= the shapes and dtypes that its forward takes, with a dim 0 of rows."
        ) from error


def _record(
    model: nn.Module, plan: Plan, given: Any, cut: Cut | None, partial: Mapping[str, tuple[str, ...]] | None
) -> Work:
    cut = cut_of(model, plan) if cut is None else cut
    restricted = _restricted(model, plan, cut)
    unpacked = nullcontext() if "position_ids" in given[1] else _rows_of_one_sequence()
    with unpacked, fake_world(restricted, "cpu") as mesh:
        fake = cut.applied(fake_copy(model, "cpu", without=cut.dropped(model)))
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: fake_like(t, "cpu"), given)
        apply_plan(fake, restricted, mesh, check=False)
        if partial is None:  # a pass that reduces gradients finds it
            run_step(fake, args, kwargs)
            partial = partial_gradients(fake)
        meter = _Meter(cut)
        with record_collectives(fake, mesh=mesh, watch=meter.see) as log, no_sync(fake):
            meter.log = log
            run_step(fake, args, kwargs)
            meter.close()
    kinds = tuple(meter.part(str(cut.kept.index(index))) for index in cut.examples)
    names = {cut.name(row.name) or row.name: row.name for row in plan.rows}
    return Work(
        before=meter.part("before"),
        after=meter.part("after"),
        kinds=kinds,
        order=cut.order,
        partial=tuple((names.get(name, name), axes) for name, axes in partial.items() if axes),
        boundary=meter.boundary,
        tokens=tokens_of(given),
    )


@contextmanager
def _rows_of_one_sequence() -> Iterator[None]:
    """Let transformers take each row for one sequence, as it finds in a real run by reading the positions.

    Positions without values could be those of packed sequences, for which it makes a mask of all pairs of tokens.
    """
    module: Any = sys.modules.get("transformers.masking_utils")
    find = getattr(module, "find_packed_sequence_indices", None)
    if find is None:
        yield
        return
    module.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        module.find_packed_sequence_indices = find


class ModelSource:
    """Records the work of a plan's model, which it keeps alive. A copy of it, as in a pickled plan, has no model."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = model

    def __call__(self, plan: Plan, example: Any) -> tuple[Work, tuple[int, ...]]:
        """Return the record, and the index of the block that stands for each kind.

        Raises:
            PlanError: there is no model, it is sharded, or it cannot run without values.
        """
        model = self._model
        if model is None:
            raise PlanError("This plan is a copy without its model. Make it again with sl.plan(model, mesh, rules).")
        if axes := plan.mesh.pipeline_axes:
            count, total = plan.step.microbatches or 2 * plan.mesh.only(axes).world_size, rows_of(example)
            example = split(example, microbatch_sizes(total, min(count, total)))[0]
        cut = cut_of(model, plan)
        return record_work(model, plan, example, cut), cut.examples

    def __reduce__(self) -> Any:
        return ModelSource, ()


def tokens_of(given: Any) -> int:
    """Return the elements of the first tensor of integers with rows and positions."""
    ids = (
        t for t in pytree.tree_leaves(given) if isinstance(t, torch.Tensor) and t.dtype == torch.int64 and t.ndim == 2
    )
    return next((t.numel() for t in ids), 0)


def _restricted(model: nn.Module, plan: Plan, cut: Cut) -> Plan:
    """Return the plan of the cut model on the axes that change ops."""
    axes = (*plan.mesh.model_axes, *plan.mesh.expert_axes)
    mesh = plan.mesh.only(axes) if axes else MeshShape("dp=1")
    recompute = modules_to_recompute(model, plan.step.recompute)
    borders = ((border, cut.name(border.module)) for border in plan.borders)
    return plan.replace(
        mesh=mesh,
        rows=tuple(_row(row, cut) for row in plan.rows if cut.name(row.name) is not None),
        borders=tuple(dataclasses.replace(border, module=name) for border, name in borders if name is not None),
        rules=None,
        blocks=None,
        report=None,
        units=_renamed(plan.units, cut),
        repeated=_renamed(plan.repeated, cut),
        stages=(),
        step=plan.step.replace(
            accumulate=1,
            schedule="",
            microbatches=0,
            overlap=False,
            scaler=None,
            recompute=tuple(f"^{name}" for name in _renamed(recompute, cut)),
        ),
    )


def _renamed(names: Sequence[str], cut: Cut) -> tuple[str, ...]:
    return tuple(new for name in names if (new := cut.name(name)) is not None)


def _row(row: Row, cut: Cut) -> Row:
    """Return a row whose phases are all split as in computation, on the device."""
    names = _renamed(row.tied, cut)
    phases = {
        phase: dataclasses.replace(layout.with_axes_dropped(row.added(phase)), memory="device")
        for phase, layout in row.layouts.items()
    }
    return row.replace(name=names[0], tied=names, partial=(), **phases)


@dataclass
class _Seen:
    """The record of one region, which grows."""

    kernels: list[Kernel] = field(default_factory=list)
    fused: list[Kernel] = field(default_factory=list)
    collectives: list[Recorded] = field(default_factory=list)
    left: int = 0
    peak: int = 0

    def frozen(self) -> Pass:
        return Pass(tuple(self.kernels), tuple(self.fused), tuple(self.collectives), self.left, self.peak)


class _Fusion:
    """Ops that follow each other, as one kernel in the list `into`."""

    def __init__(self, into: list[Kernel]) -> None:
        self.into = into
        self._read: dict[int, int] = {}
        self._made: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._dtype = ""

    def add(self, kernel: Kernel, operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """Add an op."""
        for tensor in operands:
            storage = tensor.untyped_storage()
            if id(storage) not in self._made:
                self._read[id(storage)] = max(self._read.get(id(storage), 0), _size(tensor))
        for tensor in results:
            storage = tensor.untyped_storage()
            self._made[id(storage)] = weakref.ref(storage), _size(tensor)
        self._dtype = kernel.dtype

    def end(self) -> None:
        """Write the kernel: its results that nothing has freed are written to memory."""
        written = sum(size for storage, size in self._made.values() if storage() is not None)
        self.into.append(Kernel("fused", 0, sum(self._read.values()) + written, self._dtype))


class _Meter:
    """Divides what a recording sees into regions: before the blocks, each block, and after them; forward and backward.

    Ops between two blocks belong to the one that ran before.
    """

    log: Recording

    def __init__(self, cut: Cut) -> None:
        self._prefix = f"{cut.prefix}." if cut.prefix else ""
        self._found: dict[tuple[str, bool], _Seen] = {}
        self._last = len(cut.kept) - 1
        self._block: dict[bool, int | None] = {False: None, True: None}
        self._at: tuple[str, bool] | None = None
        self._began = 0
        self._fusion: _Fusion | None = None
        self.boundary = 0

    def part(self, region: str) -> Part:
        """Return the record of a region."""
        forward, backward = (self._found.get((region, back), _Seen()).frozen() for back in (False, True))
        return Part(forward, backward)

    def see(self, call: Call) -> None:
        """Note one op."""
        module, phase = call.place()
        backward = phase == "backward" or (phase == "outside" and any(back for _, back in self._found))
        results = [leaf for leaf in _torch.leaves_of(call.result) if isinstance(leaf, torch.Tensor)]
        operands = [leaf for leaf in _torch.leaves_of(call.args, call.kwargs) if isinstance(leaf, torch.Tensor)]
        known = {id(t.untyped_storage()) for t in operands}
        new = {id(s): s.nbytes() for s in (t.untyped_storage() for t in results) if id(s) not in known}
        now = self.log.live.now
        region = (self._region(module, backward), backward)
        if region != self._at:
            self._enter(region, now - sum(new.values()), operands)
        seen = self._found[region]
        seen.peak = max(seen.peak, now - self._began)
        if call.collective is not None:
            seen.collectives.append(call.collective)
            self._end_fusion()
        elif results and not call.ranks and not str(call.op).startswith(_WAITS) and (new or not _is_view(call.op)):
            name = str(call.op).rpartition(".")[0]
            _check_product(name, operands)
            dtype = str(results[0].dtype).removeprefix("torch.")
            kernel = Kernel(name, call.flops, _bytes(name, operands, results), dtype)
            if kernel.flops or kernel.bytes:
                seen.kernels.append(kernel)
                self._fuse(seen, kernel, operands, results)

    def _fuse(
        self, seen: _Seen, kernel: Kernel, operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
    ) -> None:
        """Add an op to the kernel that a compiler would make of it and those before it."""
        if kernel.flops or kernel.op in _LOOKUPS or kernel.op.startswith(_ALONE):
            self._end_fusion()
            seen.fused.append(kernel)
            return
        if self._fusion is None or self._fusion.into is not seen.fused:
            self._end_fusion()
            self._fusion = _Fusion(seen.fused)
        self._fusion.add(kernel, operands, results)

    def _end_fusion(self) -> None:
        if self._fusion is not None:
            self._fusion.end()
            self._fusion = None

    def close(self) -> None:
        """End the last region."""
        self._end_fusion()
        self._leave(self.log.live.now)

    def _region(self, module: str, backward: bool) -> str:
        number = module[len(self._prefix) :].partition(".")[0] if module.startswith(self._prefix) else ""
        if self._prefix and number.isdecimal():
            self._block[backward] = int(number)
            return number
        running, last = self._block[backward], 0 if backward else self._last
        if running is None or running == last:
            return "after" if (running is None) == backward or not self._prefix else "before"
        return str(running)

    def _enter(self, region: tuple[str, bool], live: int, operands: Sequence[torch.Tensor]) -> None:
        self._leave(live)
        self._at, self._began = region, live - self._found.get(region, _Seen()).left
        self._found.setdefault(region, _Seen())
        if region[0].isdecimal() and not region[1] and operands:
            self.boundary = max(t.numel() * t.element_size() for t in operands)

    def _leave(self, live: int) -> None:
        if self._at is not None:
            self._found[self._at].left = live - self._began


def _check_product(name: str, operands: Sequence[torch.Tensor]) -> None:
    """Check what fake tensors do not: that the operands of a product have one dtype."""
    if name.startswith(_PRODUCTS) and len(dtypes := {str(t.dtype).removeprefix("torch.") for t in operands}) > 1:
        raise TypeError(f"{name} got operands of {' and '.join(sorted(dtypes))}")


def _is_view(op: Any) -> bool:
    return bool(getattr(op, "is_view", False)) or str(op).startswith(("aten.detach", "aten.alias", "aten._unsafe_view"))


def _bytes(name: str, operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> int:
    """Return the bytes that an op reads and writes; a look-up reads as much of its table as it writes."""
    if name.startswith(("aten.empty", "aten.new_empty")):
        return 0
    written = sum(map(_size, results))
    read = sum(map(_size, operands[1:])) + written if name in _LOOKUPS else sum(map(_size, operands))
    return read + written


def _size(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements in memory; expanded ones count once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())

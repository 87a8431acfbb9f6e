"""The dispatch policy for ops on DTensors of an enabled mesh.

DTensor propagates an op's sharding only on a miss of its C++ cache, so that the policy does not run for cached calls.
It executes some ops itself and does not cache them: ops that are gathered, rows with a computation of their own, ops
that may change data of which other DTensors are copies, and writes into a tensor that may be plain in the next call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from shardlib.engine._torch import (
    DTensorSpec,
    OpInfo,
    OpSchema,
    OutputSharding,
    RuntimeSchemaInfo,
    TensorMeta,
    _StridedShard,
    dispatcher,
    exchanged,
    forget_fake_results,
    forget_with_meshes,
    global_metas,
    is_composite,
    is_view,
    local_of,
    local_shape_and_offset,
    pytree,
    redistribute_local,
    schema_of,
    set_local,
    splits,
    wrap,
)
from shardlib.engine.ops import _alias
from shardlib.engine.ops._choose import Choice, choose
from shardlib.engine.ops._foreach import foreach, is_foreach
from shardlib.engine.ops._gather import draw_replicated, gather, note, with_aliases
from shardlib.engine.ops._operands import (
    Operands,
    arguments_by_name,
    has_order,
    in_order,
    meta_of,
    replicated,
    spec_like,
)
from shardlib.engine.ops._rows import Call, Local, Meta, Op, Rule, is_split, rule_of
from shardlib.engine.ranks.lost import naming_lost_ranks_in_operations
from shardlib.errors import ShardingError

__all__ = ["drawing_by", "drawn", "forget_decisions", "forget_statics", "is_random", "policy", "remember_statics"]

_PLACEMENTS = (Replicate, Partial, Shard, _StridedShard)
_ONE_VALUE = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default}


def policy(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], info: OpInfo) -> Any:
    """Return an `OutputSharding` that DTensor caches and executes, or the result itself."""
    if "nested" in op.name():
        raise ShardingError(
            f"{op} makes a nested tensor of tensors that are sharded over a model axis, which have no nested form. Pad "
            'the sequences and use a mask; or replicate the parameters of the modules around it ("replicate"), so that '
            "it is given plain tensors."
        )
    if (tensor := _written_replicated(op, args, kwargs)) is not None:
        return tensor
    first_time = remember_statics(op)
    if not rule_of(op) and is_composite(op):
        return op.decompose(*args, **kwargs)
    operands = Operands.of(op, args, kwargs, info.compute_mesh)
    assert info.schema is not None
    for tensor in filter(_alias.watched, operands.tensors):
        _alias.catch_up(tensor)
    if torch.Tag.inplace_view not in op.tags:
        for tensor in filter(_alias.watched, [operands.tensors[i] for i in operands.written]):
            _alias.refuse_write(tensor)
    if is_random(op):
        return made if (made := drawn(op, args, kwargs)) is not NotImplemented else draw_replicated(operands)
    if is_foreach(operands) and not operands.all_replicated:
        return foreach(operands)
    if (reason := _never_sharded(operands)) is not None:
        return gather(operands, reason)
    schema, key = info.schema, (operands.specs, operands.others)
    decision = _remembered(_DECISIONS, key, lambda: _new_decision(operands, schema))
    if isinstance(decision, str):
        return gather(operands, decision)
    if decision.choice.gathered:
        note(operands, "no row of its sharding rule accepts these placements")
    if first_time or decision.in_order is not True or not _cacheable(operands, decision):
        return _carry_out(operands, decision)
    return _output_sharding(operands, decision, schema)


def _written_replicated(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carry out an op in place on replicated DTensors, and return what it has written; None for other ops.

    In the cache of DTensor, a plain tensor has the key of a replicated one. After a cached call, one that writes into
    a plain tensor ends in an AssertionError (2.13.0).
    """
    if not _may_write_plain(op) or not isinstance(args[0], torch.Tensor):
        return None
    dtensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)]
    if any(not p.is_replicate() for tensor in dtensors for p in tensor.placements) or any(
        map(_alias.watched, dtensors)
    ):
        return None
    local_args, local_kwargs = pytree.tree_map_only(DTensor, local_of, (args, kwargs))
    op(*local_args, **local_kwargs)
    return args[0]


@functools.cache
def _may_write_plain(op: Op) -> bool:
    """Tell whether an op writes new values into its first argument, and can meet a DTensor in another one."""
    in_place = op.name().partition(".")[0].endswith("_") and torch.Tag.inplace_view not in op.tags
    return in_place and not is_random(op) and sum("Tensor" in str(a.type) for a in schema_of(op).arguments) > 1


_draw_by: ContextVar[Callable[..., Any] | None] = ContextVar("_draw_by", default=None)


@contextmanager
def drawing_by(draw: Callable[..., Any]) -> Iterator[None]:
    """Call `draw(op, args, kwargs)` for random ops in this thread inside the block, unless it returns NotImplemented.

    Those on DTensors are passed on by the policy, and those on plain tensors by who calls `drawn`.
    """
    token = _draw_by.set(draw)
    try:
        yield
    finally:
        _draw_by.reset(token)


def drawn(op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what the `drawing_by` around this call draws for a random op, or NotImplemented."""
    draw = _draw_by.get()
    return NotImplemented if draw is None else draw(op, args, kwargs)


def is_random(op: Op) -> bool:
    """Return whether an op draws random numbers; attention, which may have dropout, has its own rows."""
    return torch.Tag.nondeterministic_seeded in op.tags and "scaled_dot_product" not in op.name()


def _never_sharded(operands: Operands) -> str | None:
    """Return the reason why a call has to be gathered whatever its rule, or None."""
    if operands.op in _ONE_VALUE and not operands.all_replicated:
        return "it gives every rank one value"
    if any(argument.is_out for argument in schema_of(operands.op).arguments):
        return "it writes into out="
    if any(type(p) not in _PLACEMENTS for spec in operands.specs for p in spec.placements):
        return "an operand has a placement of an unknown class"
    if rule_of(operands.op) is None and not operands.all_replicated:
        return "it has no sharding rule"
    return None


# --- deciding -----------------------------------------------------------------------------------------------------


@dataclass
class _Decision:
    """The decision for a call: the chosen rows, and the specs of outputs in the structure of the result.

    `in_order`: the kernel gives its local results in the memory order of the specs. It is learned from the first call;
    DTensor, which does not look at strides, executes a call only if it is True.
    """

    choice: Choice
    outputs: Any
    rule: Rule | None
    in_order: bool | None = None


_DECISIONS: dict[Any, _Decision | str] = {}
_METAS: dict[Any, Any] = {}  # its keys contain no mesh and outlive meshes
_MOST = 1 << 14  # bounds memory under varying shapes; a full table is cleared


@forget_with_meshes
def forget_decisions() -> None:
    _DECISIONS.clear()


def _remembered(table: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    try:
        known = table.get(key)
    except TypeError:  # symbolic sizes, while tracing, cannot be hashed
        return make()
    if known is None:
        if len(table) >= _MOST:
            table.clear()
            forget_fake_results()  # which torch keeps for as many shapes
        known = table[key] = make()
    return known


def _new_decision(operands: Operands, schema: OpSchema) -> _Decision | str:
    rule = rule_of(operands.op)
    try:
        metas = _metas(operands, schema)
    except Exception as error:
        return f"its output shapes are not known beforehand ({type(error).__name__})"
    flat, tree = pytree.tree_flatten(metas, is_leaf=lambda m: m is None or isinstance(m, TensorMeta))
    args, kwargs = operands.rebuilt(operands.specs)
    call = Call(
        operands.op,
        arguments_by_name(operands.op, args, kwargs),
        operands.names,
        tuple(Meta.of(meta_of(spec)) for spec in operands.specs),
        tuple(None if meta is None else Meta.of(meta) for meta in flat),
    )
    placements, mesh = [spec.placements for spec in operands.specs], operands.mesh
    choice = choose(rule, call, placements, mesh.shape, axes=mesh.mesh_dim_names or (), fixed=operands.written)
    if choice is None:
        return "it writes to an operand whose placement no row of its sharding rule accepts"
    specs = [
        None if meta is None or placements is None else DTensorSpec(operands.mesh, placements, tensor_meta=meta)
        for meta, placements in zip(flat, choice.outputs, strict=True)
    ]
    return _Decision(choice, pytree.tree_unflatten(specs, tree), rule)


def _metas(operands: Operands, schema: OpSchema) -> Any:
    """Return `global_metas`, cached because it takes a millisecond."""
    inputs = tuple(map(meta_of, operands.specs))
    key = (inputs, operands.others, operands.mesh.device_type, torch.get_default_dtype())
    return _remembered(_METAS, key, lambda: global_metas(schema))


# --- by DTensor ---------------------------------------------------------------------------------------------------


def _cacheable(operands: Operands, decision: _Decision) -> bool:
    """Return whether DTensor itself can execute a decision, now and from its cache.

    It cannot redistribute an operand: it redistributes positional operands only, without the order of the global
    strides, and treats a view of a redistributed operand as a view. Written operands must be DTensors of unchanged
    shape, and watched tensors are always handled by the policy.
    """
    if decision.choice.compute is not None or _redistributes(operands, decision) or _guesses_order(operands):
        return False
    if any(not isinstance(operands.tensors[i], DTensor) for i in operands.written):
        return False
    if torch.Tag.inplace_view in operands.op.tags or _number_decides_dtype(operands):
        return False
    return not any(map(_alias.watched, operands.tensors))


def _redistributes(operands: Operands, decision: _Decision) -> bool:
    return any(spec.placements != want for spec, want in zip(operands.specs, decision.choice.inputs, strict=True))


def _guesses_order(operands: Operands) -> bool:
    """Return whether a kernel may infer another memory format from local strides than from global ones.

    `cat` and others recognise channels-last images by their strides. Where the innermost dim has a local size of 1, any
    transposed tensor may look like one.
    """
    if torch.Tag.pointwise in operands.op.tags or operands.viewed:
        return False
    return any(map(_has_ambiguous_strides, operands.specs))


def _has_ambiguous_strides(spec: DTensorSpec) -> bool:
    """Return whether the innermost dim of a 4D or 5D tensor is larger than 1 globally and 1 locally."""
    shape, strides = meta_of(spec).shape, meta_of(spec).stride
    if len(shape) not in (4, 5):
        return False
    innermost = min(range(len(shape)), key=lambda dim: (strides[dim], -dim))
    return shape[innermost] > 1 and _local_shape(spec)[innermost] == 1


def _output_sharding(operands: Operands, decision: _Decision, schema: OpSchema) -> OutputSharding:
    args, kwargs = operands.rebuilt(operands.specs)
    op, local_args = _localized(operands.op, args, decision, operands.specs)
    if local_args is args:
        return OutputSharding(decision.outputs)
    if schema.schema_info is not None and schema.schema_info.needs_pytree:
        local_args = pytree.tree_leaves(local_args)
    # A "redistribution" to the current placements is DTensor's way to replace arguments.
    wanted = OpSchema(op, tuple(local_args), kwargs)
    return OutputSharding(decision.outputs, wanted, needs_redistribute=True, use_val_from_redistribute_schema=True)


def _targets(operands: Operands, decision: _Decision) -> list[DTensorSpec]:
    return [
        DTensorSpec(operands.mesh, want, tensor_meta=spec.tensor_meta)
        for spec, want in zip(operands.specs, decision.choice.inputs, strict=True)
    ]


def _localized(op: Op, args: list[Any], decision: _Decision, inputs: Sequence[DTensorSpec]) -> tuple[Op, list[Any]]:
    """Return op and args for local tensors; `args` itself where nothing changes."""
    choice, rule = decision.choice, decision.rule
    split = any(is_split(p) for each in (*choice.inputs, *choice.outputs) if each for p in each)
    if rule is None or rule.localize is None or not split:
        return op, args
    outputs = pytree.tree_leaves(decision.outputs, is_leaf=lambda x: x is None or isinstance(x, DTensorSpec))
    local = Local(
        tuple(tuple(meta_of(s).shape) for s in inputs),
        tuple(_local_shape(s) for s in inputs),
        tuple(None if s is None else _local_shape(s) for s in outputs),
    )
    return rule.localize(op, list(args), local)


def _local_shape(spec: DTensorSpec) -> tuple[int, ...]:
    return local_shape_and_offset(meta_of(spec).shape, spec.mesh, spec.placements)[0]


# --- by ourselves -------------------------------------------------------------------------------------------------


def _carry_out(operands: Operands, decision: _Decision) -> Any:
    """Redistribute, compute on local tensors, wrap."""
    choice, targets = decision.choice, _targets(operands, decision)
    op, spec_args = _localized(operands.op, operands.rebuilt(targets)[0], decision, targets)
    locals_ = operands.local(choice.inputs)
    args, kwargs = _with_locals(spec_args, locals_), operands.rebuilt(locals_)[1]
    if choice.compute is None:
        result = op(*args, **kwargs)
    else:
        result = choice.compute(op, args, kwargs, _Rank(operands.mesh, tuple(targets), choice.compute_axes))
    reshaped = operands.tensors[0]
    if torch.Tag.inplace_view in operands.op.tags and isinstance(reshaped, DTensor):
        set_local(reshaped, locals_[0], decision.outputs)
    if decision.in_order is None:
        decision.in_order = is_view(op) or bool(operands.written) or _in_memory_order(result, decision.outputs)
    ordered = decision.in_order is False or choice.compute is not None or _guesses_order(operands)
    wrapped = _wrapped(result, decision.outputs, ordered=ordered)
    return with_aliases(operands, wrapped, redistributed=_redistributes(operands, decision))


def _in_memory_order(result: Any, specs: Any) -> bool | None:
    """Return whether local results have the memory order of their specs; None where they are fake, as in a graph.

    Shape functions tell an order that some kernels do not keep: on a transposed input that of batch norm does.
    """
    leaves = zip(pytree.tree_leaves(result), pytree.tree_leaves(specs, is_leaf=lambda x: x is None), strict=True)
    pairs = [(x, spec) for x, spec in leaves if isinstance(x, torch.Tensor) and spec is not None]
    if any(type(x) is not torch.Tensor for x, _ in pairs):
        return None
    return all(has_order(x, meta_of(spec).stride) for x, spec in pairs)


def _with_locals(spec_args: Sequence[Any], locals_: Sequence[torch.Tensor]) -> list[Any]:
    """Return args with local tensors in place of specs."""
    tensors = iter(locals_)
    is_spec = lambda x: isinstance(x, DTensorSpec)  # noqa: E731
    return pytree.tree_map(lambda x: next(tensors) if is_spec(x) else x, list(spec_args), is_leaf=is_spec)


def _wrapped(result: Any, specs: Any, *, ordered: bool) -> Any:
    """Wrap local results as DTensors in the structure of the op's result.

    `ordered`: give them the stride order of the global results. A result without a spec was not requested: in float32
    the backward of a convolution returns the gradient of a frozen weight along with that of its bias.
    """
    if isinstance(result, torch.Tensor):
        return None if specs is None else wrap(in_order(result, meta_of(specs).stride) if ordered else result, specs)
    if isinstance(result, list | tuple):
        return type(result)(_wrapped(r, s, ordered=ordered) for r, s in zip(result, specs, strict=True))
    return result


@dataclass(frozen=True)
class _Rank:
    """Implementation of `Here` on a mesh: the operands' specs after redistribution, the axes that chose the row."""

    mesh: DeviceMesh
    inputs: tuple[DTensorSpec, ...]
    axes: tuple[int, ...]

    def offset(self, operand: int, dim: int) -> int:
        spec = self.inputs[operand]
        return local_shape_and_offset(meta_of(spec).shape, self.mesh, spec.placements)[1][dim]

    def shape(self, operand: int) -> tuple[int, ...]:
        return tuple(meta_of(self.inputs[operand]).shape)

    @naming_lost_ranks_in_operations
    def all_reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        pending = tuple(Partial(op) if axis in self.axes else Replicate() for axis in range(self.mesh.ndim))
        source = spec_like(self.mesh, pending, tensor)
        return redistribute_local(tensor, source, spec_like(self.mesh, replicated(self.mesh), tensor))

    def coordinate(self, operand: int, dim: int) -> tuple[int, int]:
        axis = self._splitting(operand, dim)
        return self.mesh.get_local_rank(axis), self.mesh.size(axis)

    def exchange(
        self, tensor: torch.Tensor, like: tuple[int, int], to: int, source: int, shape: Sequence[int]
    ) -> Callable[[], torch.Tensor]:
        return exchanged(tensor, self.mesh.get_group(self._splitting(*like)), to, source, shape)

    def _splitting(self, operand: int, dim: int) -> int:
        [axis] = [i for i in self.axes if splits(self.inputs[operand].placements[i], dim)]
        return axis


# --- keys of DTensor's caches ---------------------------------------------------------------------------------------

_STATIC_OPS: dict[Op, Any] = {}  # with the schema info that each had before


def remember_statics(op: Op) -> bool:
    """Include an op's non-tensor arguments in DTensor's cache keys. Return True for the first call.

    The first call's key was computed before, so that it must not be cached.
    """
    if op in _STATIC_OPS:
        return False
    propagator = dispatcher().sharding_propagator
    _STATIC_OPS[op] = propagator.op_to_schema_info.get(op)
    known = propagator.op_to_schema_info.get(op) or propagator.op_to_schema_info_for_single_dim_strategy.get(op)
    propagator.op_to_schema_info[op] = _schema_info(op, needs_pytree=known is not None and known.needs_pytree)
    return True


def forget_statics() -> None:
    """Give DTensor's cache the keys that it had."""
    infos = dispatcher().sharding_propagator.op_to_schema_info
    while _STATIC_OPS:
        op, before = _STATIC_OPS.popitem()
        if before is None:
            del infos[op]
        else:
            infos[op] = before


@functools.cache
def _schema_info(op: Op, *, needs_pytree: bool) -> RuntimeSchemaInfo:
    """Return a schema info whose static arguments are all but numbers.

    Numbers may be complex, which the C++ cache cannot hash, and change every step in an optimizer. A rule must not read
    them (except for a plain `float` of an op without writes, which is static).
    """
    arguments = schema_of(op).arguments
    loose = _NUMBERS | _FLOATS if schema_of(op).is_mutable else _NUMBERS
    statics = ["Tensor" not in str(a.type) and str(a.type) not in loose for a in arguments]
    positional = [i for i, a in enumerate(arguments) if not a.kwarg_only and statics[i]]
    names = [a.name for a, static in zip(arguments, statics, strict=True) if static]
    lists = any(str(a.type).startswith("List") and "Tensor" in str(a.type) for a in arguments)
    return RuntimeSchemaInfo(positional[0] if positional else 100, names, needs_pytree=needs_pytree or lists)


_NUMBERS = {"number", "Optional[number]", "List[number]"}
_FLOATS = {"float", "Optional[float]", "List[float]"}


def _number_decides_dtype(operands: Operands) -> bool:
    """Return whether a number, which is not part of the cache key, may promote the result to another dtype."""
    if not any(str(argument.type) in _NUMBERS for argument in schema_of(operands.op).arguments):
        return False
    complex_number = any(isinstance(leaf, complex) for leaf in operands.leaves)
    return complex_number or not all(meta_of(s).dtype.is_floating_point for s in operands.specs)

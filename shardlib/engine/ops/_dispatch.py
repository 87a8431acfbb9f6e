"""The policy: what happens to each op on a DTensor whose mesh was enabled.

DTensor asks for an op's sharding only when its C++ cache does not know the call, so nothing here runs again for a
call that has been seen, unless it must: ops that are gathered, that compute something of their own, or that may
change data which other DTensors hold a copy of, are carried out here and never cached.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.utils import _pytree as pytree

from shardlib.engine._torch import (
    DTensorSpec,
    OpInfo,
    OpSchema,
    OutputSharding,
    RuntimeSchemaInfo,
    TensorMeta,
    dispatcher,
    global_metas,
    local_shape_and_offset,
    redistribute_local,
    return_and_correct_aliasing,
)
from shardlib.engine.ops._choose import Choice, Pending, choose, is_split
from shardlib.engine.ops._record import GatheredOp, note_gather
from shardlib.engine.ops._rows import Local, Meta, Op, Rule, rule_of
from shardlib.errors import ShardingError

__all__ = ["Operands", "carry_out", "decide", "policy"]

R = Replicate()


# --- one call, taken apart ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operands:
    """The tensors of one call, flat, and the way back to args and kwargs."""

    op: Op
    leaves: tuple[Any, ...]
    tree: Any
    at: tuple[int, ...]  # positions of tensors among the leaves
    specs: tuple[DTensorSpec, ...]  # one per tensor; plain tensors count as replicated
    positional: int  # how many of the tensors are positional arguments

    @classmethod
    def of(cls, op: Op, args: Sequence[Any], kwargs: dict[str, Any], mesh: DeviceMesh) -> Operands:
        leaves, tree = pytree.tree_flatten((tuple(args), kwargs))
        at = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        specs = tuple(_spec(leaves[i], mesh, op) for i in at)
        in_kwargs = sum(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(kwargs))
        return cls(op, tuple(leaves), tree, at, specs, len(at) - in_kwargs)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(self.leaves[i] for i in self.at)

    def rebuilt(self, tensors: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Args and kwargs with other values in the places of the tensors."""
        leaves = list(self.leaves)
        for i, tensor in zip(self.at, tensors, strict=True):
            leaves[i] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        return list(args), kwargs

    def local(self, placements: Sequence[tuple[Placement, ...]]) -> list[torch.Tensor]:
        """The local tensors, redistributed."""
        return [
            _to_local(tensor, spec, want)
            for tensor, spec, want in zip(self.tensors, self.specs, placements, strict=True)
        ]

    @property
    def names(self) -> tuple[str, ...]:
        """Which schema argument each tensor belongs to."""
        args, kwargs = pytree.tree_unflatten(list(range(len(self.leaves))), self.tree)
        named = [(a.name, value) for a, value in zip(self.op._schema.arguments, args, strict=False)]
        owner = {leaf: name for name, value in (*named, *kwargs.items()) for leaf in pytree.tree_leaves(value)}
        return tuple(owner[i] for i in self.at)

    @functools.cached_property
    def written(self) -> frozenset[int]:
        """Which tensors the op writes to."""
        return frozenset(self.at.index(i) for i in _written_leaves(self))


def _spec(tensor: torch.Tensor, mesh: DeviceMesh, op: Op) -> DTensorSpec:
    if not isinstance(tensor, DTensor):
        return _make_spec(mesh, (R,) * mesh.ndim, tensor)
    if tensor.device_mesh != mesh:
        raise ShardingError(
            f"{op} was given DTensors on two meshes, {mesh} and {tensor.device_mesh}; an op works on one mesh. "
            "Redistribute one of them, or take its full_tensor()."
        )
    return tensor._spec


def _make_spec(mesh: DeviceMesh, placements: tuple[Placement, ...], like: Any) -> DTensorSpec:
    stride = like.stride() if isinstance(like, torch.Tensor) else like.stride
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(like.shape), tuple(stride), like.dtype))


def _to_local(tensor: torch.Tensor, spec: DTensorSpec, want: tuple[Placement, ...]) -> torch.Tensor:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return redistribute_local(local, spec, DTensorSpec(spec.mesh, want, tensor_meta=spec.tensor_meta))


def _written_leaves(operands: Operands) -> list[int]:
    args, kwargs = pytree.tree_unflatten(list(range(len(operands.leaves))), operands.tree)
    tensors = set(operands.at)
    found: list[int] = []
    for i, argument in enumerate(operands.op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in pytree.tree_leaves(value) if leaf in tensors]
    return found


def _values(op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by their schema names, defaults filled in."""
    return {
        argument.name: args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
        for i, argument in enumerate(op._schema.arguments)
    }


# --- deciding ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decision:
    """How one call will be carried out: a choice of rows and the global metadata of the outputs."""

    choice: Choice
    outputs: Any  # DTensorSpecs in the structure of the op's result
    rule: Rule | None


def decide(operands: Operands, schema: OpSchema, mesh: DeviceMesh) -> Decision | str:
    """Rows and output specs for a call, or the reason why it must be gathered."""
    rule = rule_of(operands.op)
    if rule is None and not _all_whole(operands):
        return "it has no sharding rule"
    if any(type(p) not in _KNOWN for spec in operands.specs for p in spec.placements):
        return "an operand has a placement that only its maker understands"
    try:
        metas = global_metas(schema)
    except Exception as error:
        return f"its output shapes are not known beforehand ({type(error).__name__})"
    flat, tree = pytree.tree_flatten(metas, is_leaf=lambda m: m is None or isinstance(m, TensorMeta))
    args, kwargs = operands.rebuilt(operands.specs)
    choice = choose(
        rule,
        Pending(
            op=operands.op,
            values=_values(operands.op, args, kwargs),
            names=operands.names,
            inputs=tuple(_meta(spec.tensor_meta) for spec in operands.specs),
            outputs=tuple(None if meta is None else _meta(meta) for meta in flat),
            placements=tuple(spec.placements for spec in operands.specs),
            sizes=tuple(mesh.shape),
            fixed=operands.written,
        ),
    )
    if choice is None:
        return "it writes to an operand whose placement fits no row of its rule"
    specs = [
        None if meta is None or where is None else DTensorSpec(mesh, where, tensor_meta=meta)
        for meta, where in zip(flat, choice.outputs, strict=True)
    ]
    return Decision(choice, pytree.tree_unflatten(specs, tree), rule)


def _all_whole(operands: Operands) -> bool:
    return all(isinstance(p, Replicate) for spec in operands.specs for p in spec.placements)


def _meta(meta: TensorMeta) -> Meta:
    return Meta(tuple(meta.shape), meta.dtype)


# --- the entry ----------------------------------------------------------------------------------------------------


def policy(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], info: OpInfo) -> Any:
    """An `OutputSharding` that DTensor caches and carries out, or the result itself."""
    mesh = info.compute_mesh
    first = remember_statics(op)
    if not rule_of(op) and _is_composite(op):
        return op.decompose(*args, **kwargs)
    operands = Operands.of(op, args, kwargs, mesh)
    if op in _SCALAR_OPS and not _all_whole(operands):
        return gather(operands, args, kwargs, mesh, reason="it gives every rank one value", loud=False)
    if _is_out_variant(op):
        return gather(operands, args, kwargs, mesh, reason="it writes into out=", loud=not _all_whole(operands))
    assert info.schema is not None
    found = decide(operands, info.schema, mesh)
    if isinstance(found, str):
        return gather(operands, args, kwargs, mesh, reason=found)
    if found.choice.gathered:
        _note(operands, "no row of its rule fits these placements")
    if first or not _cacheable(operands, found):
        return carry_out(operands, args, kwargs, mesh, found)
    return _output_sharding(operands, found, info.schema, mesh)


_SCALAR_OPS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default}


def _is_composite(op: Op) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), torch._C.DispatchKey.CompositeImplicitAutograd)


def _is_out_variant(op: Op) -> bool:
    return any(argument.is_out for argument in op._schema.arguments)


def _cacheable(operands: Operands, decision: Decision) -> bool:
    """Whether DTensor itself can carry the decision out: it redistributes positional operands only, and a view
    of a redistributed operand is a copy that must be known as such."""
    if decision.choice.compute is not None:
        return False
    moved = [i for i, spec in enumerate(operands.specs) if spec.placements != decision.choice.inputs[i]]
    if any(i >= operands.positional for i in moved):
        return False
    return not (moved and operands.op._schema._is_view_op())


def _output_sharding(operands: Operands, decision: Decision, schema: OpSchema, mesh: DeviceMesh) -> OutputSharding:
    targets = [
        DTensorSpec(mesh, want, tensor_meta=spec.tensor_meta)
        for spec, want in zip(operands.specs, decision.choice.inputs, strict=True)
    ]
    moved = any(spec.placements != target.placements for spec, target in zip(operands.specs, targets, strict=True))
    args, kwargs = operands.rebuilt(targets)
    op, local_args = _localized(operands.op, args, decision, mesh)
    rewritten = op is not operands.op or local_args is not args
    if not moved and not rewritten:
        return OutputSharding(decision.outputs)
    if schema.schema_info is not None and schema.schema_info.needs_pytree:
        local_args = pytree.tree_leaves(local_args)
    wanted = OpSchema(op, tuple(local_args), kwargs)
    return OutputSharding(decision.outputs, wanted, needs_redistribute=True, use_val_from_redistribute_schema=rewritten)


def _localized(op: Op, args: list[Any], decision: Decision, mesh: DeviceMesh) -> tuple[Op, list[Any]]:
    choice = decision.choice
    split = any(is_split(p) for places in (*choice.inputs, *choice.outputs) if places for p in places)
    if decision.rule is None or decision.rule.localize is None or not split:
        return op, args
    specs = pytree.tree_leaves(args, is_leaf=lambda x: isinstance(x, DTensorSpec))
    inputs = tuple(_local_shape(s) for s in specs if isinstance(s, DTensorSpec))
    outputs = pytree.tree_leaves(decision.outputs, is_leaf=lambda x: x is None or isinstance(x, DTensorSpec))
    local = Local(inputs, tuple(None if s is None else _local_shape(s) for s in outputs))
    return decision.rule.localize(op, list(args), local)


def _local_shape(spec: DTensorSpec) -> tuple[int, ...]:
    return local_shape_and_offset(spec.tensor_meta.shape, spec.mesh, spec.placements)[0]


# --- carrying out -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Here:
    """`Here` for one decision: the mesh, the operands' specs after redistribution, the axes that chose the row."""

    mesh: DeviceMesh
    inputs: tuple[DTensorSpec, ...]
    axes: tuple[int, ...]

    def offset(self, operand: int, dim: int) -> int:
        spec = self.inputs[operand]
        return local_shape_and_offset(spec.tensor_meta.shape, self.mesh, spec.placements)[1][dim]

    def shape(self, operand: int) -> tuple[int, ...]:
        return tuple(self.inputs[operand].tensor_meta.shape)

    def all_reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        pending = tuple(Partial(op) if axis in self.axes else R for axis in range(self.mesh.ndim))
        source = _make_spec(self.mesh, pending, tensor)
        return redistribute_local(tensor, source, _make_spec(self.mesh, (R,) * self.mesh.ndim, tensor))


def carry_out(operands: Operands, args: Any, kwargs: Any, mesh: DeviceMesh, decision: Decision) -> Any:
    """Run one decided call in Python: redistribute, compute on local tensors, wrap."""
    locals_ = operands.local(decision.choice.inputs)
    targets = [
        DTensorSpec(mesh, want, tensor_meta=spec.tensor_meta)
        for spec, want in zip(operands.specs, decision.choice.inputs, strict=True)
    ]
    op, spec_args = _localized(operands.op, operands.rebuilt(targets)[0], decision, mesh)
    local_args, local_kwargs = _filled(spec_args, operands, locals_)
    if decision.choice.compute is not None:
        here = _Here(mesh, tuple(targets), decision.choice.compute_axes)
        result = decision.choice.compute(op, local_args, local_kwargs, here)
    else:
        result = op(*local_args, **local_kwargs)
    wrapped = _wrapped(result, decision.outputs)
    return _returned(operands, args, kwargs, wrapped)


def _filled(spec_args: Sequence[Any], operands: Operands, locals_: Sequence[torch.Tensor]) -> tuple[list[Any], Any]:
    """Local args: the rewritten ones, with local tensors where they hold specs."""
    tensors = iter(locals_)
    is_spec = lambda x: isinstance(x, DTensorSpec)  # noqa: E731
    args = pytree.tree_map(lambda x: next(tensors) if is_spec(x) else x, list(spec_args), is_leaf=is_spec)
    return args, operands.rebuilt(locals_)[1]


def _wrapped(result: Any, specs: Any) -> Any:
    """DTensors in the structure of the op's result."""
    if isinstance(result, torch.Tensor):
        return DTensor(result, _true_dtype(specs, result), requires_grad=False)
    if isinstance(result, list | tuple):
        return type(result)(_wrapped(r, s) for r, s in zip(result, specs, strict=True))
    return result


def _true_dtype(spec: DTensorSpec, local: torch.Tensor) -> DTensorSpec:
    meta = spec.tensor_meta
    if meta.dtype == local.dtype:
        return spec
    return DTensorSpec(spec.mesh, spec.placements, tensor_meta=TensorMeta(meta.shape, meta.stride, local.dtype))


def _returned(operands: Operands, args: Any, kwargs: Any, result: Any) -> Any:
    """The result as the op's schema has it: written operands themselves, and views that know their base."""
    op = operands.op
    written = [r for r in op._schema.returns if r.alias_info is not None and r.alias_info.is_write]
    if written:
        return _written_results(op, args, kwargs, result)
    if op._schema._is_view_op():
        return return_and_correct_aliasing(op, args, kwargs, result)
    return result


def _written_results(op: Op, args: Any, kwargs: Any, result: Any) -> Any:
    values = _values(op, args, kwargs)
    by_alias = {
        alias: values[argument.name]
        for argument in op._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for alias in argument.alias_info.before_set
    }
    results = list(result) if len(op._schema.returns) > 1 else [result]
    for i, returned in enumerate(op._schema.returns):
        if returned.alias_info is not None and returned.alias_info.is_write:
            results[i] = by_alias[next(iter(returned.alias_info.before_set))]
    return tuple(results) if len(op._schema.returns) > 1 else results[0]


# --- gathering ----------------------------------------------------------------------------------------------------


def gather(operands: Operands, args: Any, kwargs: Any, mesh: DeviceMesh, *, reason: str, loud: bool = True) -> Any:
    """Compute a call whole on every rank. Operands it writes to keep their placements."""
    if loud:
        _note(operands, reason)
    whole = [(R,) * mesh.ndim] * len(operands.specs)
    fulls = operands.local(whole)
    # A replicated operand's local tensor is the operand itself: an op that writes to it has then done its work.
    full_args, full_kwargs = operands.rebuilt(fulls)
    result = operands.op(*full_args, **full_kwargs)
    for i in operands.written:
        _write_back(operands.tensors[i], operands.specs[i], fulls[i])
    wrapped = pytree.tree_map_only(
        torch.Tensor, lambda t: DTensor(t, _make_spec(mesh, whole[0], t), requires_grad=False), result
    )
    return _returned(operands, args, kwargs, wrapped)


def _write_back(tensor: torch.Tensor, spec: DTensorSpec, full: torch.Tensor) -> None:
    if not isinstance(tensor, DTensor) or full is tensor._local_tensor:
        return
    source = _make_spec(spec.mesh, (R,) * spec.mesh.ndim, full)
    target = _make_spec(spec.mesh, spec.placements, full)
    local = redistribute_local(full, source, target)
    if tuple(full.shape) == tuple(spec.tensor_meta.shape):
        tensor._local_tensor.copy_(local)
    else:
        tensor._local_tensor.resize_(local.shape).copy_(local)
        tensor._spec = target


def _note(operands: Operands, reason: str) -> None:
    places = tuple(_text(spec.placements) for spec in operands.specs)
    shapes = tuple(tuple(spec.tensor_meta.shape) for spec in operands.specs)
    split = any(is_split(p) for spec in operands.specs for p in spec.placements)
    first = operands.specs[0].mesh.get_coordinate() if operands.specs else None
    note_gather(GatheredOp(str(operands.op), reason, places, shapes), loud=split and not any(first or ()))


def _text(placements: Sequence[Placement]) -> str:
    return ", ".join(str(p) for p in placements)


# --- what the caches look at --------------------------------------------------------------------------------------

_STATICS: set[Op] = set()


def remember_statics(op: Op) -> bool:
    """Have DTensor's caches tell calls apart by their non-tensor arguments. True when it was not so until now."""
    if op in _STATICS:
        return False
    _STATICS.add(op)
    propagator = dispatcher().sharding_propagator
    known = propagator.op_to_schema_info.get(op) or propagator.op_to_schema_info_for_single_dim_strategy.get(op)
    info = _schema_info(op, needs_pytree=known is not None and known.needs_pytree)
    propagator.op_to_schema_info[op] = info
    return True


def _schema_info(op: Op, *, needs_pytree: bool) -> RuntimeSchemaInfo:
    """Everything but numbers that cannot change the metadata and do change from step to step (an optimizer's)."""
    arguments = op._schema.arguments
    loose = op._schema.is_mutable
    statics = [not _is_tensor(a.type) and not (loose and _is_number(a.type)) for a in arguments]
    positional = [i for i, a in enumerate(arguments) if not a.kwarg_only and statics[i]]
    names = [a.name for a, static in zip(arguments, statics, strict=True) if static and not _is_number(a.type)]
    lists = any("List[Tensor" in str(a.type) or "List[Optional[Tensor" in str(a.type) for a in arguments)
    return RuntimeSchemaInfo(positional[0] if positional else 100, names, needs_pytree=needs_pytree or lists)


def _is_tensor(kind: Any) -> bool:
    return "Tensor" in str(kind)


def _is_number(kind: Any) -> bool:
    return str(kind) in {"number", "float", "Optional[number]", "Optional[float]", "List[number]", "List[float]"}


_KNOWN: set[type] = {Replicate, Partial}


def _known_placements() -> None:
    from torch.distributed.tensor import Shard

    from shardlib.engine._torch import _StridedShard

    _KNOWN.update({Shard, _StridedShard})


_known_placements()

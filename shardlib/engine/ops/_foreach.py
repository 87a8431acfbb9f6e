"""Ops on lists of tensors: the tensors at each index of the lists are the operands of one pointwise op.

Scaled gradients, which `torch.amp.GradScaler` gives as a list too, may lie differently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardlib.engine._torch import DTensorSpec, Op, TensorMeta, schema_of, wrap
from shardlib.engine.ops._choose import Choice, Placements, choose
from shardlib.engine.ops._gather import gather, with_aliases
from shardlib.engine.ops._operands import Operands, meta_of, replicated
from shardlib.engine.ops._rows import Call, Meta, Rule
from shardlib.engine.ops._rules._pointwise import pointwise_rows

__all__ = ["UNSCALE", "foreach", "is_foreach", "unscale"]

_REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "aten::_foreach_norm": lambda x, ord=2, dtype=None: torch.linalg.vector_norm(x, ord, dtype=dtype),
    "aten::_foreach_max": torch.max,
}
_PREFIXES = ("aten::_foreach_", "aten::_fused_ad", "aten::_fused_sgd")
_POINTWISE = Rule(pointwise_rows, empty=True)


def is_foreach(operands: Operands) -> bool:
    arguments = schema_of(operands.op).arguments
    return schema_of(operands.op).name.startswith(_PREFIXES) and not any(argument.is_out for argument in arguments)


def foreach(operands: Operands) -> Any:
    """Run a list op once on local lists; tensors at the same index have the same placements."""
    reduction = _REDUCTIONS.get(schema_of(operands.op).name)
    if reduction is not None:
        return [reduction(x, *operands.args[1:], **operands.kwargs) for x in operands.args[0]]
    wanted: list[Placements] = [replicated(operands.mesh)] * len(operands.specs)
    outputs: list[DTensorSpec] = []
    for group in _groups(operands):
        choice = _choose(operands, group)
        if choice is None:
            return gather(operands, "it writes to an operand whose placement no row of its sharding rule accepts")
        for tensor, placements in zip(group, choice.inputs, strict=True):
            wanted[tensor] = placements
        assert choice.outputs[0] is not None
        outputs.append(_spec(operands, group, choice.outputs[0]))
    args, kwargs = operands.rebuilt(operands.local(wanted))
    result = operands.op(*args, **kwargs)
    return with_aliases(operands, _wrapped(result, outputs), redistributed=False)


def _groups(operands: Operands) -> list[list[int]]:
    """Return the tensors at each index of the lists; a tensor outside of lists belongs to every index."""
    args, kwargs = operands.numbered()
    values = [*args, *kwargs.values()]
    lists = [value for value in values if isinstance(value, list | tuple) and value]
    tensor_lists = [[operands.at.index(leaf) for leaf in v] for v in lists if all(leaf in operands.at for leaf in v)]
    alone = [operands.at.index(value) for value in values if value in operands.at]
    return [[*together, *alone] for together in zip(*tensor_lists, strict=True)]


def _choose(operands: Operands, group: list[int]) -> Choice | None:
    specs = [operands.specs[i] for i in group]
    call = Call(
        operands.op,
        {},
        tuple(f"operand {i}" for i in range(len(group))),
        tuple(Meta.of(meta_of(spec)) for spec in specs),
        (Meta(_shape(specs), meta_of(specs[0]).dtype),),
    )
    fixed = frozenset(i for i, tensor in enumerate(group) if tensor in operands.written)
    return choose(_POINTWISE, call, [spec.placements for spec in specs], operands.mesh.shape, fixed=fixed)


def _shape(specs: list[DTensorSpec]) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*(meta_of(s).shape for s in specs)))


def _spec(operands: Operands, group: list[int], placements: Placements) -> DTensorSpec:
    specs = [operands.specs[i] for i in group]
    shape = torch.Size(_shape(specs))
    like = next((meta_of(s).stride for s in specs if meta_of(s).shape == shape), None)
    stride = torch.empty(shape, device="meta").stride() if like is None else like
    return DTensorSpec(operands.mesh, placements, tensor_meta=TensorMeta(shape, stride, meta_of(specs[0]).dtype))


def _wrapped(result: Any, specs: list[DTensorSpec]) -> Any:
    if not isinstance(result, list | tuple):
        return result
    return [wrap(local, spec) for local, spec in zip(result, specs, strict=True)]


# --- gradients of a scaled loss ------------------------------------------------------------------------------------

UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


def unscale(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Divide gradients, of which some may be plain, and let all ranks know that one holds a number that is not finite.

    Torch's own asks the first gradient how all of them lie: where it is replicated and another is split, ranks take
    different scales from then on (2.13.0).
    """
    grads, found, inverse = args
    op([grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads], found, inverse, **kwargs)
    for mesh, dim in _axes(grads):
        sent = found.to(mesh.device_type)  # from host memory, if gradients are offloaded
        dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=mesh.get_group(dim))
        found.copy_(sent)


def _axes(grads: Sequence[torch.Tensor]) -> dict[tuple[DeviceMesh, int], None]:
    """Return the axes over which some gradient is split or a partial sum, in the same order on every rank."""
    return {
        (grad.device_mesh, dim): None
        for grad in grads
        if isinstance(grad, DTensor)
        for dim, placement in enumerate(grad.placements)
        if not placement.is_replicate() and grad.device_mesh.size(dim) > 1
    }

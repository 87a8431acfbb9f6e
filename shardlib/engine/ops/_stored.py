"""Plain tensors beside shards over data axes: activations, of which each rank has others, and full parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardlib.engine._torch import Op, pytree, written_to
from shardlib.engine.full_tensor import to_full_tensor
from shardlib.errors import ShardingError

__all__ = ["refuse_local_tensors", "written_whole"]

_aten = torch.ops.aten
_PRODUCTS = {
    op
    for packet in (_aten.mm, _aten.addmm, _aten.bmm, _aten.mv, _aten.dot, _aten.convolution, _aten.embedding)
    for op in (getattr(packet, name) for name in packet.overloads())
}


def written_whole(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Carry out a call that writes DTensors into a plain tensor, as `p -= lr * p.grad` where only gradients are split.

    All are gathered. Returns NotImplemented for any other call.
    """
    written = written_to(op, args, kwargs)
    if not written or any(isinstance(tensor, DTensor) for tensor in written):
        return NotImplemented
    return op(*pytree.tree_map_only(DTensor, to_full_tensor, tuple(args)), **kwargs)


def refuse_local_tensors(op: Op, args: Sequence[Any]) -> None:
    """Refuse a call that would count this data rank's activations as a shard's counterpart.

    A plain tensor beside DTensors counts as replicated. Beside a weight that is stored in shards over data axes it is
    likely a batch, of which each data rank has another. A value, or a tensor of the weight's own global shape, as a
    mask or another model's weight, passes.

    Raises:
        ShardingError: the call is a product, or the plain tensor has another shape.
    """
    shards = [x for x in args if isinstance(x, DTensor)]
    plain = [x for x in args if isinstance(x, torch.Tensor) and not isinstance(x, DTensor) and x.dim() > 0]
    if not shards or not plain or all(p.is_replicate() for shard in shards for p in shard.placements):
        return
    shape = tuple(shards[0].shape)
    other = next((x for x in plain if op in _PRODUCTS or tuple(x.shape) != shape), None)
    if other is not None:
        raise ShardingError(
            f"{op} was given a parameter of global shape {shape} that is stored in shards, and a plain tensor of shape "
            f"{tuple(other.shape)}, of which each data rank may have another. Outside of the forward of its unit a "
            "parameter is this rank's shard: call the model, or the unit that plan_of(model).units names, or compute "
            "with weight.full_tensor()."
        )

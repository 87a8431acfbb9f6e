"""`stream_weights`: full tensors of a model, group by group, for whoever eats them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import nn

from shardlib._mesh_shape import MeshShape
from shardlib._plan.moves import Laid, Moves, Names, Pair, renamed
from shardlib.checkpoint._peers import peers
from shardlib.errors import InputError
from shardlib.layout import Layout
from shardlib.weights._carry import carry
from shardlib.weights._lying import check_sizes, everywhere, items_of, local_of, refuse_in_backward

__all__ = ["stream_weights"]


def stream_weights(
    model: nn.Module,
    *,
    ranks: Sequence[int] | None = None,
    names: Names | None = None,
    dtype: torch.dtype | None = None,
    group_mb: float = 256.0,
    node: int = 8,
    timeout: float | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the full tensors of a model's state dict, by name, in bounded memory. Collective over the job: every
    rank runs the loop to its end.

    An inference engine, a server or another program can eat them: `engine.load_weights(stream_weights(model))`. Tied
    tensors come once, under their first name. The tensors are on the device of the model, and the loop's own.

    Args:
        model: a model, sharded by `shard_model` or by others (then it has DTensors); the same on all ranks.
        ranks: the ranks that get the tensors; all by default. On the others the loop has no turns.
        names: other names for tensors: a mapping or a function; None leaves a tensor out.
        dtype: what floating-point tensors are converted to, before they are sent.
        group_mb: most megabytes of full tensors that are gathered together; a larger tensor is gathered alone.
        node: the number of ranks that share a node: among ranks that hold the same element, one of the same node sends.
        timeout: seconds that ranks wait for each other; by default those of the job's process group.

    Raises:
        InputError: ranks that the job does not have, or no megabytes.
        ShardingError: a backward pass is running.
        CheckpointError: ranks gave different arguments, or one is lost.

    Example:
        >>> import shardlib as sl
        >>> model = sl.shard_model(nn.Linear(4, 8), "dp=1,tp=1", {"**": "colwise"})
        >>> {name: tuple(tensor.shape) for name, tensor in stream_weights(model, dtype=torch.bfloat16)}
        {'weight': (8, 4), 'bias': (8,)}
    """
    everyone = peers("sl.stream_weights", "streaming weights", timeout)
    to = tuple(range(everyone.size)) if ranks is None else tuple(ranks)
    everyone.run("check arguments", lambda: _check(model, to, everyone.size, group_mb, node))
    everyone.compare(ranks=to, dtype=dtype, group_mb=group_mb, node=node)
    items = everyone.run("look at the model", lambda: items_of(model, tuple(range(everyone.size)), everyone.size))
    name_of, limit = renamed(names), int(group_mb * 2**20)
    device = next((item.local.device for item in items.values()), torch.device("cpu"))
    pairs = [
        Pair(laid, _whole(laid, new, dtype, to))
        for laid in everywhere(everyone, "tell of the model", model, items)
        if (new := name_of(laid.name)) is not None
    ]
    for group in _groups(pairs, limit):
        mine = everyone.rank in to
        full = {p.target.name: torch.empty(p.target.shape, dtype=p.target.dtype, device=device) for p in group if mine}
        carry(
            everyone, "send", Moves(tuple(group), node), partial(local_of, items), full.__getitem__, bucket_bytes=limit
        )
        while full:
            name = next(iter(full))
            yield name, full.pop(name)


def _check(model: nn.Module, ranks: Sequence[int], size: int, group_mb: float, node: int) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"stream_weights() was given a {type(model).__name__}; give a module.")
    if strange := [rank for rank in ranks if not 0 <= rank < size]:
        raise InputError(
            f"stream_weights(ranks={list(ranks)}) was given in a job of {size}; it has no rank {strange[0]}."
        )
    check_sizes("stream_weights", node, group_mb=group_mb)
    refuse_in_backward("stream_weights", model)


def _whole(laid: Laid, name: str, dtype: torch.dtype | None, ranks: Sequence[int]) -> Laid:
    """Return the tensor as all of it lies on each of some ranks."""
    kept = laid.dtype if dtype is None or not laid.dtype.is_floating_point else dtype
    mesh = MeshShape(dp=max(1, len(ranks)))
    return Laid((name,), laid.shape, kept, Layout.replicate(len(laid.shape)), mesh, tuple(enumerate(ranks)))


def _groups(pairs: Sequence[Pair], limit: int) -> Iterator[list[Pair]]:
    group, size = list[Pair](), 0
    for pair in pairs:
        each = math.prod(pair.target.shape) * pair.target.dtype.itemsize
        if group and size + each > limit:
            yield group
            group, size = [], 0
        group.append(pair)
        size += each
    if group:
        yield group

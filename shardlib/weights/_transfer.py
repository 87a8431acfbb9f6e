"""`transfer`: copy the weights of one sharded model into another one of the same job."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from shardlib._plan.moves import Laid, Moves, Names, matched
from shardlib.checkpoint._items import Item
from shardlib.checkpoint._peers import peers
from shardlib.engine import _torch
from shardlib.engine.torn import refuse_torn, torn
from shardlib.errors import InputError, short_traceback
from shardlib.weights._carry import carry
from shardlib.weights._lying import check_sizes, everywhere, items_of, local_of, refuse_in_backward

__all__ = ["transfer"]


@short_traceback
def transfer(
    source: nn.Module | None,
    target: nn.Module | None,
    *,
    names: Names | None = None,
    padded: Iterable[str] = (),
    bucket_mb: float = 25.0,
    node: int = 8,
    timeout: float | None = None,
) -> Moves:
    """Copy the parameters and buffers in a model's state dict into another one, whichever plans and ranks they have.
    Collective over the job.

    Each rank is sent the elements that it lacks, once, by the nearest rank that holds them; no rank ever has a full
    model. The models may be on the same ranks, on some of the same, or on different ones. Both may be sharded by
    `shard_model`, by PyTorch's own functions (then they have DTensors), or not at all (then every rank that has one has
    all of it).

    Args:
        source: the model that is copied; None on ranks that have no part of it. Tensors that several ranks hold are
            taken from any of them.
        target: the model that is overwritten; None on ranks that have no part of it.
        names: the target's names for tensors of the source that differ: a mapping or a function, as for `load`.
        padded: names of tensors that are longer in one of the models; the rows that only one has are not moved.
        bucket_mb: most megabytes that a rank sends, and that it receives, at a time.
        node: the number of ranks that share a node.
        timeout: seconds that ranks wait for each other in each phase; by default those of the job's process group.

    Returns:
        What was moved: `Moves`, equal on all ranks.

    Raises:
        InputError, PlanError: no such models, models of other names, shapes or kinds of numbers, or a target with
            memory of other tensors of the source; before anything is changed.
        ShardingError: a backward pass is running.
        CheckpointError: a rank is lost. A target that has got a part of the weights refuses forward until a transfer
            into it has ended.

    Example:
        >>> import torch
        >>> first, second = nn.Linear(4, 8), nn.Linear(4, 8, dtype=torch.bfloat16)
        >>> moves = transfer(first, second)
        >>> torch.equal(second.weight, first.weight.to(torch.bfloat16)), moves.bytes
        (True, 0)
    """
    everyone = peers("sl.transfer", "transferring weights", timeout, keeps_kinds=True)
    everyone.compare(padded=sorted(padded), bucket_mb=bucket_mb, node=node)
    everyone.run("check arguments", lambda: _check(source, target, bucket_mb, node))
    has = everyone.gather("count ranks", lambda: [source is not None, target is not None])
    having = [tuple(rank for rank, told in enumerate(has) if told[side]) for side in (0, 1)]
    here, there = everyone.run(
        "look at the models",
        lambda: [items_of(m, ranks, everyone.size) for m, ranks in zip((source, target), having, strict=True)],
    )
    have, want = (
        everywhere(everyone, f"tell of the {what}", model, items)
        for what, model, items in (("source", source, here), ("target", target, there))
    )
    moves = everyone.run("compute moves", lambda: _moves(have, want, names, padded, node))
    everyone.run("look for shared memory", lambda: _refuse_shared(moves, here, there))
    give, take = partial(local_of, here), partial(local_of, there)
    with torn(target, "transfer"):
        carry(everyone, "send", moves, give, take, bucket_bytes=int(bucket_mb * 2**20))
    return moves


def _refuse_shared(moves: Moves, here: Mapping[str, Item], there: Mapping[str, Item]) -> None:
    """Refuse a target that has memory of other tensors of the source: these would be overwritten before they are read.

    Raises:
        InputError: such a target.
    """
    sources = {pair.target.name: pair.source.name for pair in moves.pairs}
    lying: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for name, item in here.items():
        lying[_torch.memory_of(item.local)].append((*_extent(item.local), name))
    for name, item in there.items():
        begin, end = _extent(item.local)
        for low, high, other in lying[_torch.memory_of(item.local)]:
            if max(begin, low) < min(end, high) and not (other == sources.get(name) and (low, high) == (begin, end)):
                raise InputError(
                    f'"{name}" of the target has memory of "{other}" of the source, which would be overwritten before '
                    "it is read. Give a target with memory of its own, such as a deep copy."
                )


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the bytes of its memory that a tensor reaches, as the first one and the one behind the last one."""
    begin = int(tensor.storage_offset()) * tensor.itemsize
    if not tensor.numel():
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (int(last) + 1) * tensor.itemsize


def _check(source: Any, target: Any, bucket_mb: float, node: int) -> None:
    for what, model in (("source", source), ("target", target)):
        if model is not None and not isinstance(model, nn.Module):
            raise InputError(f"transfer({what}=...) was given a {type(model).__name__}; give a module, or None.")
        refuse_in_backward("transfer", model, f" of the {what}")
    check_sizes("transfer", node, bucket_mb=bucket_mb)
    refuse_torn("transfer", source)
    refuse_torn("transfer", target, unless="transfer")


def _moves(
    source: Sequence[Laid], target: Sequence[Laid], names: Names | None, padded: Iterable[str], node: int
) -> Moves:
    for what, tensors in (("source", source), ("target", target)):
        if not tensors:
            raise InputError(
                f"transfer({what}=None) was given on every rank; the ranks of the {what} give their model."
            )
    return Moves(matched(source, target, names=names, padded=padded), node)

"""`stream_weights`: full tensors of a model, group by group, for whoever eats them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from shardlib._plan.moves import Laid, Names
from shardlib.checkpoint._items import Item
from shardlib.checkpoint._peers import Peers, peers
from shardlib.engine.torn import refuse_torn
from shardlib.errors import InputError
from shardlib.layout._boxes import full_box
from shardlib.weights._feed import arriving
from shardlib.weights._lying import check_sizes, everywhere, items_of, refuse_in_backward
from shardlib.weights._names import adapters_merged, saved_names
from shardlib.weights._views import View, in_groups, on_meta, views_of

__all__ = ["stream_weights", "streamed"]


def stream_weights(
    model: nn.Module,
    *,
    ranks: Sequence[int] | None = None,
    names: Names | Literal["huggingface"] | None = None,
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
        names: other names for tensors: a mapping or a function, in which None leaves a tensor out. "huggingface": the
            tensors that `save_pretrained` of the model writes, with their names: experts come one by one, and adapters
            of peft are merged while the loop runs.
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
    everyone = peers("sl.stream_weights", "streaming weights", timeout, keeps_kinds=True)
    to = tuple(range(everyone.size)) if ranks is None else tuple(ranks) if isinstance(ranks, Iterable) else (ranks,)
    everyone.run("check arguments", lambda: _check(model, to, dtype, everyone.size, group_mb, node))
    everyone.compare(ranks=to, dtype=dtype, group_mb=group_mb, node=node)
    items, sources, wanted = _look(everyone, model, names, dtype, to)
    limit = int(group_mb * 2**20)
    device = next((item.local.device for item in items.values()), torch.device("cpu"))
    with adapters_merged(model if names == "huggingface" else None):
        mine = {view.name for view, _ in wanted} if everyone.rank in to else set()
        yield from arriving(everyone, in_groups(wanted, sources, limit, node), items, mine, device, limit)


def streamed(
    model: nn.Module, *, names: Names | Literal["huggingface"] | None = None, dtype: torch.dtype | None = None
) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """Return the name, global shape and dtype of what `stream_weights` gives, in its order. Collective over the job."""
    _, _, wanted = _look(peers("sl.stream_weights", "describing weights", None), model, names, dtype, (0,))
    return [(view.name, view.shape, kept.dtype) for view, kept in wanted]


def _look(
    everyone: Peers,
    model: nn.Module,
    names: Names | Literal["huggingface"] | None,
    dtype: torch.dtype | None,
    ranks: Sequence[int],
) -> tuple[dict[str, Item], dict[str, Laid], list[tuple[View, Laid]]]:
    """Return this rank's tensors of a model, how all of its tensors lie, and what comes out on some ranks."""
    items = everyone.run("look at the model", lambda: items_of(model, tuple(range(everyone.size)), everyone.size))
    sources = {laid.name: laid for laid in everywhere(everyone, "tell of the model", model, items)}
    wanted = everyone.run("name the tensors", lambda: _wanted(model, sources, names, dtype, ranks))
    return items, sources, wanted


def _check(model: nn.Module, ranks: Sequence[int], dtype: Any, size: int, group_mb: float, node: int) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"stream_weights() was given a {type(model).__name__}; give a module.")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InputError(f"stream_weights(dtype={dtype!r}) was given; give a floating-point dtype, as torch.bfloat16.")
    if strange := [rank for rank in ranks if not 0 <= rank < size]:
        raise InputError(
            f"stream_weights(ranks={list(ranks)}) was given in a job of {size}; it has no rank {strange[0]}."
        )
    check_sizes("stream_weights", node, group_mb=group_mb)
    refuse_torn("stream_weights", model)
    refuse_in_backward("stream_weights", model)


def _wanted(
    model: nn.Module,
    sources: Mapping[str, Laid],
    names: Names | Literal["huggingface"] | None,
    dtype: torch.dtype | None,
    ranks: Sequence[int],
) -> list[tuple[View, Laid]]:
    """Return the tensors that come out, as all of each lies on some ranks."""
    plain = {name: on_meta(laid.shape, laid.dtype) for name, laid in sources.items()}
    found = []
    for view in views_of(saved_names(model, names), plain):
        source = sources[view.source]
        kept = source.dtype if dtype is None or not source.dtype.is_floating_point else dtype
        found.append((view, view.laid(source, {rank: [full_box(view.shape)] for rank in ranks}, kept)))
    return found

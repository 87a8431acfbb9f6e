"""Describes how tensors of models lie on the ranks of a job, for every rank to compute the same moves."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shardlib._dtypes import name_of
from shardlib._mesh_shape import MeshShape
from shardlib._plan.moves import Laid, check_node
from shardlib.checkpoint._items import Item, RankMesh, first_names, item_of, model_items, rank_mesh_of_model, tied_names
from shardlib.checkpoint._peers import Peers
from shardlib.engine.ranks import agree
from shardlib.engine.sharded import is_sharded, record_of
from shardlib.errors import InputError, ShardingError
from shardlib.layout import Layout

__all__ = ["all_items_of", "check_sizes", "everywhere", "items_of", "local_of", "refuse_in_backward"]


def items_of(model: nn.Module | None, ranks: tuple[int, ...], size: int) -> dict[str, Item]:
    """Return the tensors of a model on this rank, by their names in the full model.

    Args:
        model: the model, or None where this rank has no part of it.
        ranks: the ranks that have a part of it: all of them hold its plain tensors.
        size: the number of ranks of the job.
    """
    if model is None:
        return {}
    job, here = RankMesh.everywhere(size), RankMesh(MeshShape(dp=len(ranks)), ranks)
    items = (dataclasses.replace(i, rank_mesh=here) if i.rank_mesh == job else i for i in model_items(model, size))
    return {item.name: item for item in items}


def all_items_of(model: nn.Module, size: int) -> dict[str, Item]:
    """Return all parameters and buffers of a sharded model on this rank, those too that a state dict leaves out."""
    job, first = rank_mesh_of_model(model, size), first_names(model)
    named = {first.get(name, name): tensor for name, tensor in agree.named_tensors(model).items()}
    return {name: item_of("model", name, tensor, job) for name, tensor in named.items()}


def refuse_in_backward(call: str, model: nn.Module | None, what: str = "") -> None:
    """Raise an error while a backward pass of a model that `shard_model` has sharded is running."""
    if model is not None and is_sharded(model) and record_of(model).reducer.is_running:
        raise ShardingError(f"{call}() was called during backward{what}. Call it between two steps.")


def check_sizes(call: str, node: int, **megabytes: float) -> None:
    """Check the sizes of a call that moves weights."""
    check_node(node)
    for name, value in megabytes.items():
        if not value > 0:
            raise InputError(f"{call}({name}={value!r}) was given; give megabytes above zero.")


def local_of(items: Mapping[str, Item], name: str) -> torch.Tensor:
    """Return this rank's local tensor."""
    return items[name].local


def everywhere(everyone: Peers, phase: str, model: nn.Module | None, items: Mapping[str, Item]) -> list[Laid]:
    """Return how all tensors of a model lie, those of other stages too. Collective.

    The first rank that holds a tensor together with others tells of it.
    """
    tied = {} if model is None else {names[0]: names for names in tied_names(model)}
    mine = [item for item in items.values() if item.rank_mesh.ranks[0] == everyone.rank]
    told = everyone.gather(phase, lambda: [_told(item, tied.get(item.name, (item.name,))) for item in mine])
    found: dict[str, list[Laid]] = defaultdict(list)
    for laid in map(_read, _in_order(told)):
        found[laid.name].append(laid)
    return [_joined(several) for several in found.values()]


def _in_order(told: Iterable[list[Any]]) -> Iterator[Any]:
    for of_rank in told:
        yield from of_rank


def _told(item: Item, names: Iterable[str]) -> list[Any]:
    text = item.layout.text
    return [list(names), item.shape, name_of(item.dtype), text, str(item.rank_mesh.mesh), item.rank_mesh.ranks]


def _read(told: list[Any]) -> Laid:
    names, shape, dtype, text, mesh, ranks = told
    return Laid(
        tuple(names), tuple(shape), getattr(torch, dtype), Layout.parse(text), MeshShape(mesh), tuple(enumerate(ranks))
    )


def _joined(several: list[Laid]) -> Laid:
    """Return a tensor that several stages hold."""
    first = several[0]
    for other in several[1:]:
        if (other.shape, other.layout, other.mesh) != (first.shape, first.layout, first.mesh):
            raise InputError(
                f'Ranks hold "{first.name}" in different ways: "{first.layout}" of {first.shape} on "{first.mesh}", '
                f'and "{other.layout}" of {other.shape} on "{other.mesh}". Shard the model alike on all ranks.'
            )
    ranks = tuple(place for laid in several for place in laid.ranks)
    return Laid(first.names, first.shape, first.dtype, first.layout, first.mesh, ranks)

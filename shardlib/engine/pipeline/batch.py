"""Splitting a batch into microbatches, and joining the outputs of microbatches."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from shardlib.engine import _torch
from shardlib.engine._torch import pytree
from shardlib.errors import InputError

__all__ = [
    "Call",
    "as_call",
    "as_given",
    "coincidences",
    "joined",
    "key_of",
    "microbatch_sizes",
    "places_of",
    "refuse_unfit",
    "rows",
    "shown",
    "split",
    "tensors_by_place",
]

Call = tuple[tuple[Any, ...], dict[str, Any]]


def as_call(batch: Any) -> Call:
    """Return the positional and keyword arguments of a batch: a mapping, a tuple, or (tuple, mapping) for both."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple) and len(batch) == 2 and isinstance(batch[0], tuple) and isinstance(batch[1], Mapping):
        return batch[0], dict(batch[1])
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,), {}


def refuse_unfit(forward: Callable[..., Any], name: str, call: Call) -> None:
    """Check that forward takes the arguments of a batch.

    Raises:
        InputError: it does not.

    >>> refuse_unfit(lambda x, labels=None: x, "Net", ((1,), {"labels": 2}))
    """
    taken = inspect.signature(forward)
    try:
        taken.bind(*call[0], **call[1])
    except TypeError as fault:
        given = [f"{len(call[0])} by position"] if call[0] else []
        given += [f"{', '.join(call[1])} by name"] if call[1] else []
        raise InputError(
            f"{name}.forward{taken} does not take what the batch holds, {' and '.join(given)} ({fault}). A tuple is "
            "positional arguments, a mapping keyword arguments. What only the criterion reads goes through forward "
            "too: give it an argument that it leaves alone, such as labels=None."
        ) from None


def as_given(call: Call, batch: Any) -> Any:
    """Return the arguments of a call in the form of the given batch.

    >>> as_given(((), {"ids": 1}), {"ids": 2}), as_given(((1, 2), {}), (3, 4)), as_given(((1,), {}), 2)
    ({'ids': 1}, (1, 2), 1)
    """
    args, kwargs = call
    if isinstance(batch, Mapping):
        return kwargs
    if isinstance(batch, tuple | list):
        pair = len(batch) == 2 and isinstance(batch[0], tuple) and isinstance(batch[1], Mapping)
        return call if pair else args
    return args[0]


def places_of(forward: Callable[..., Any], call: Call, replicate: Iterable[str | int]) -> frozenset[str]:
    """Return the places in a call of the arguments that go with every microbatch, as `tensors_by_place` writes them.

    An argument is given by its name, or its position; a value in a mapping or sequence by `name.key`.

    Raises:
        InputError: the call has no such argument.

    >>> sorted(places_of(lambda x, mask, other=None: x, ((1, 2), {"other": {"w": 3}}), ["mask", "other.w"]))
    ['.0.1', '.1.other.w']
    """
    positional = list(inspect.signature(forward).parameters)
    tops = {name: f".0.{i}" for i, name in enumerate(positional[: len(call[0])])}
    tops |= {str(i): f".0.{i}" for i in range(len(call[0]))} | {name: f".1.{name}" for name in call[1]}
    found = set[str]()
    for key in map(str, replicate):
        first, dot, rest = key.partition(".")
        place = f"{tops.get(first)}{dot}{rest}"
        if not any(each == place or each.startswith(f"{place}.") for each in _places(call)):
            raise InputError(
                f"replicate={key!r} names no argument of the batch, which has {', '.join(tops) or 'none'}. Give names "
                "of arguments of forward, or positions; a value in a mapping by name.key."
            )
        found.add(place)
    return frozenset(found)


def _places(value: Any, place: str = "") -> Iterator[str]:
    yield place
    for key, each in _items(value):
        yield from _places(each, f"{place}.{key}")


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    if type(value) in (tuple, list):
        return enumerate(value)
    return value.items() if type(value) is dict else ()


def tensors_by_place(value: Any, replicated: Collection[str] = (), place: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over the tensors of a call that have dims, without replicated ones, by their place.

    >>> [place for place, _ in tensors_by_place(((torch.ones(1), 2), {"m": [torch.ones(1)]}))]
    ['.0.0', '.1.m.0']
    """
    if place in replicated:
        return
    if type(value) in (tuple, list, dict):
        for key, each in _items(value):
            yield from tensors_by_place(each, replicated, f"{place}.{key}")
        return
    for leaf in _torch.leaves_of(value):
        if isinstance(leaf, torch.Tensor) and leaf.ndim:
            yield place, leaf


def coincidences(tensors: Sequence[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor, str]]:
    """Iterate over the tensors that a batch's number of rows may split by coincidence, each with the reason.

    The number of rows is the leading dim of the first tensor. It says nothing where it is the size of another dim too.
    """
    first = tensors[0][1]
    count = len(first)
    other = next((place for place, tensor in tensors if count in tensor.shape[1:]), None)
    for place, tensor in tensors[1:] if other is not None else ():
        if len(tensor) == count and (tensor.shape, tensor.dtype) != (first.shape, first.dtype):
            yield place, tensor, f'{count} is also the size of another dim of "{shown(other or "")}"'


def shown(place: str) -> str:
    """Return a place in a call as the user writes it.

    >>> shown(".1.mask"), shown(".0.2.w")
    ('mask', '2.w')
    """
    return place[3:]


def rows(batch: Any) -> int:
    """Return the number of examples of a batch: the size of the leading dim of its first tensor that has dims.

    Raises:
        InputError: the batch has no such tensor.
    """
    for leaf in _torch.leaves_of(batch):
        if isinstance(leaf, torch.Tensor) and leaf.ndim:
            return len(leaf)
    raise InputError(
        f"The batch is {type(batch).__name__} without a tensor of at least one dim; give a tensor, a tuple of "
        "positional arguments, a mapping of keyword arguments, or (tuple, mapping)."
    )


def microbatch_sizes(count: int, microbatches: int | None, size: int | None = None) -> list[int]:
    """Return the rows of each microbatch: `size` each, or sizes that differ by at most one, larger ones first.

    Raises:
        InputError: there are fewer rows than microbatches, or neither number nor size is given, or both.

    >>> microbatch_sizes(5, 2), microbatch_sizes(5, None, 2)
    ([3, 2], [2, 2, 1])
    """
    if (microbatches is None) == (size is None):
        raise InputError(
            "Give the number of microbatches of a batch, microbatches=8, or the rows of each, microbatch_size=4; one "
            'of the two. pipeline("1f1b", microbatches=8) among the transforms sets it for all calls.'
        )
    for name, given in (("microbatches", microbatches), ("microbatch_size", size)):
        if given is not None and (type(given) is not int or given < 1):
            raise InputError(f"{name}={given!r} was given; give an integer from 1 up.")
    parts = microbatches if microbatches is not None else math.ceil(count / (size or 1))
    if parts > count:
        raise InputError(
            f"The batch has {count} rows, which cannot be split into {parts} microbatches. Give a larger batch, or "
            "fewer microbatches."
        )
    if size is not None:
        return [size] * (count // size) + ([count % size] if count % size else [])
    return [count // parts + (i < count % parts) for i in range(parts)]


def split(batch: Any, sizes: Sequence[int], replicated: Collection[str] = ()) -> list[Any]:
    """Split a batch into microbatches of these sizes.

    Tensors whose leading dim is the batch's are split; all other values go with every microbatch, and so do those at
    `replicated` places.

    >>> [part["x"].tolist() for part in split({"x": torch.arange(5), "y": 1}, [3, 2])]
    [[0, 1, 2], [3, 4]]
    """
    return [*_split(batch, sizes, sum(sizes), replicated)]


def _split(
    value: Any, sizes: Sequence[int], count: int, replicated: Collection[str] = (), place: str = ""
) -> Iterable[Any]:
    """Split one value. Plain containers are handled without `pytree`, which takes several times as long."""
    if place in replicated:
        return [value] * len(sizes)
    if isinstance(value, torch.Tensor):
        return value.split(sizes) if value.ndim and len(value) == count else [value] * len(sizes)
    if type(value) in (tuple, list, dict):
        columns = [_split(each, sizes, count, replicated, f"{place}.{key}") for key, each in _items(value)]
        parts = zip(*columns, strict=True) if columns else [()] * len(sizes)
        return (dict(zip(value, part, strict=True)) if type(value) is dict else type(value)(part) for part in parts)
    if pytree.tree_is_leaf(value):
        return [value] * len(sizes)
    leaves, spec = pytree.tree_flatten(value)
    parts = zip(*(_split(leaf, sizes, count) for leaf in leaves), strict=True) if leaves else [()] * len(sizes)
    return (pytree.tree_unflatten(part, spec) for part in parts)


def key_of(value: Any) -> Hashable:
    """Return a key that is equal for microbatches of the same shapes, dtypes and values that are not tensors."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), str(value.dtype)
    if isinstance(value, bool | int | float | str | type(None)):
        return repr(value)
    if type(value) in (tuple, list):
        return (type(value).__name__, *map(key_of, value))
    if type(value) is dict:
        ordered = sorted(value.items(), key=lambda item: repr(item[0]))
        return ("dict", *(name for name, _ in ordered), *(key_of(each) for _, each in ordered))
    if pytree.tree_is_leaf(value):
        return type(value).__qualname__
    leaves, spec = pytree.tree_flatten(value)
    return (str(spec), *map(key_of, leaves))


def joined(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Join the outputs of microbatches: concatenate rows, average scalars over rows, and take all else from the first.

    >>> joined([(torch.tensor(1.0), torch.ones(1)), (torch.tensor(4.0), torch.zeros(2))], [1, 2])
    (tensor(3.), tensor([1., 0., 0.]))
    """
    leaves = [pytree.tree_flatten(output) for output in outputs]
    spec = leaves[0][1]
    if any(other != spec for _, other in leaves):
        return list(outputs)
    return pytree.tree_unflatten([_one(each, sizes) for each in zip(*(flat for flat, _ in leaves), strict=True)], spec)


def _one(leaves: Sequence[Any], sizes: Sequence[int]) -> Any:
    first = leaves[0]
    if not isinstance(first, torch.Tensor):
        return first
    if not first.ndim:
        share = [leaf * (size / sum(sizes)) for leaf, size in zip(leaves, sizes, strict=True)]
        return torch.stack(share).sum() if first.is_floating_point() else first
    if [len(leaf) for leaf in leaves] == list(sizes) and len({leaf.shape[1:] for leaf in leaves}) == 1:
        return torch.cat(list(leaves))
    return list(leaves)

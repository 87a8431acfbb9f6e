"""Splitting a batch into microbatches, and joining the outputs of microbatches."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch

from shardlib.engine import _torch
from shardlib.engine._torch import pytree
from shardlib.errors import InputError

__all__ = ["Call", "as_call", "as_given", "joined", "key_of", "microbatch_sizes", "refuse_unfit", "rows", "split"]

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


def split(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Split a batch into microbatches of these sizes.

    Tensors whose leading dim is the batch's are split; all other values go with every microbatch.

    >>> [part["x"].tolist() for part in split({"x": torch.arange(5), "y": 1}, [3, 2])]
    [[0, 1, 2], [3, 4]]
    """
    return [*_split(batch, sizes, sum(sizes))]


def _split(value: Any, sizes: Sequence[int], count: int) -> Iterable[Any]:
    """Split one value. Plain containers are handled without `pytree`, which takes several times as long."""
    if isinstance(value, torch.Tensor):
        return value.split(sizes) if value.ndim and len(value) == count else [value] * len(sizes)
    if type(value) in (tuple, list):
        columns = [_split(each, sizes, count) for each in value]
        return map(type(value), zip(*columns, strict=True) if columns else [()] * len(sizes))
    if type(value) is dict:
        return (dict(zip(value, part, strict=True)) for part in _split([*value.values()], sizes, count))
    if pytree.tree_is_leaf(value):
        return [value] * len(sizes)
    leaves, spec = pytree.tree_flatten(value)
    return (pytree.tree_unflatten(part, spec) for part in _split(leaves, sizes, count))


def key_of(value: Any) -> Hashable:
    """Return a key that is equal for microbatches of the same shapes, dtypes and values that are not tensors."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), str(value.dtype)
    if isinstance(value, bool | int | float | str | type(None)):
        return repr(value)
    if type(value) in (tuple, list):
        return (type(value).__name__, *map(key_of, value))
    if type(value) is dict:
        return ("dict", *value, *map(key_of, value.values()))
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

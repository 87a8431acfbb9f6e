"""Python values as JSON and tensors, and back: the kinds that JSON has, and a few others, which are listed here.

Nothing is looked up, imported or called by what a file says. What does not fit is refused with its place.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from shardlib.errors import CheckpointError

__all__ = ["decode", "encode"]

TAG = "~"
Put = Callable[[str, torch.Tensor], None]
Get = Callable[[str], torch.Tensor]


def encode(value: Any, where: str, put: Put) -> Any:
    """Convert a value to JSON; `put` stores its tensors under names, which replace them.

    >>> encode({"lr": (0.1, float("inf"))}, "scheduler", lambda name, tensor: None)
    {'lr': {'~': 'tuple', 'of': [0.1, {'~': 'float', 'of': 'inf'}]}}
    """
    if value is None or isinstance(value, bool | str):
        return value
    if type(value) in (int, float) or isinstance(value, np.integer | np.floating):
        return _number(value.item() if isinstance(value, np.generic) else value)
    if isinstance(value, torch.Tensor):
        put(where, value.detach())
        return {TAG: "tensor", "of": where}
    if type(value) in (tuple, list):
        items = [encode(item, f"{where}.{i}", put) for i, item in enumerate(value)]
        return items if type(value) is list else {TAG: "tuple", "of": items}
    if type(value) in _MAPPINGS:
        return _mapping(value, where, put)
    raise CheckpointError(
        f'"{where}" is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved: a checkpoint '
        "holds numbers, text, None, tuples, lists, dicts and tensors, and nothing that would have to be unpickled. "
        "Give its state in these, for example by a state_dict() of your own."
    )


_MAPPINGS: dict[type, str] = {dict: "dict", collections.OrderedDict: "dict", collections.Counter: "counter"}


def _number(value: int | float) -> Any:
    return value if isinstance(value, int) or math.isfinite(value) else {TAG: "float", "of": repr(value)}


def _mapping(value: Mapping[Any, Any], where: str, put: Put) -> Any:
    if type(value) is not collections.Counter and all(isinstance(key, str) for key in value) and TAG not in value:
        return {key: encode(item, f"{where}.{key}", put) for key, item in value.items()}
    pairs = [[encode(key, f"{where} key", put), encode(item, f"{where}.{key}", put)] for key, item in value.items()]
    return {TAG: _MAPPINGS[type(value)], "of": pairs}


def decode(value: Any, get: Get) -> Any:
    """Convert the result of `encode` back; tensors come from `get`.

    Raises:
        CheckpointError: not a result of `encode`.

    >>> decode(encode({1: (2.0, None)}, "", lambda name, tensor: None), lambda name: None)
    {1: (2.0, None)}
    """
    if isinstance(value, list):
        return [decode(item, get) for item in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: decode(item, get) for key, item in value.items()}
    if set(value) != {TAG, "of"}:
        raise CheckpointError(
            f"a saved value has the keys {sorted(map(str, value))[:5]}, which this version cannot read"
        )
    return _tagged(value[TAG], value["of"], get)


def _tagged(tag: Any, of: Any, get: Get) -> Any:
    if tag == "tensor" and isinstance(of, str):
        return get(of)
    if tag == "float" and of in ("inf", "-inf", "nan"):
        return float(of)
    if tag == "tuple" and isinstance(of, list):
        return tuple(decode(item, get) for item in of)
    if tag in _MAPPINGS.values() and isinstance(of, list) and all(isinstance(p, list) and len(p) == 2 for p in of):
        keys = [decode(key, get) for key, _ in of]
        if all(isinstance(key, bool | int | float | str | None | tuple) for key in keys) and all(map(_hashable, keys)):
            pairs = dict(zip(keys, (decode(item, get) for _, item in of), strict=True))
            return pairs if tag == "dict" else _counter(pairs)
    raise CheckpointError(f"a saved value of kind {str(tag)[:40]!r} cannot be read")


def _counter(pairs: dict[Any, Any]) -> collections.Counter[Any]:
    if not all(isinstance(count, int) for count in pairs.values()):
        raise CheckpointError("a saved counter has a value that is not an integer")
    return collections.Counter(pairs)


def _hashable(key: Any) -> bool:
    return all(map(_hashable, key)) if isinstance(key, tuple) else not isinstance(key, list | dict | torch.Tensor)

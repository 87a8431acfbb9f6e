"""Units: the modules whose parameters are unsharded together where they are stored in shards."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import TYPE_CHECKING

from shardlib.rules._model import is_layer

if TYPE_CHECKING:
    from torch import nn

__all__ = ["find_repeated", "find_units", "join_small", "unit_of"]


def find_repeated(model: nn.Module) -> tuple[str, ...]:
    """Return the repeated blocks: the elements of every outermost `ModuleList` with at least two that have parameters.

    A module with several names is listed under the first.

    >>> find_repeated(nn.ModuleDict({"h": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), "head": nn.Linear(2, 2)}))
    ('h.0', 'h.1')
    """
    found: dict[str, None] = {}
    for name, module in model.named_modules():
        blocks = _blocks(module) if is_layer(module, "ModuleList") else []
        if len(blocks) > 1 and unit_of([name], found) == "":
            found |= dict.fromkeys(f"{name}.{index}".lstrip(".") for index in blocks)
    return tuple(found)


def find_units(model: nn.Module) -> tuple[str, ...]:
    """Return the repeated blocks and, outside of them, every module with parameters of its own and none in its
    children.

    Units are in the model's order. A tensor of several units belongs to none, as do the own tensors of a module whose
    children have parameters too, and those of a model that is one layer. A module whose tensors are all tied to others
    is not a unit, nor is one without a forward.

    >>> find_units(nn.ModuleDict({"h": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), "head": nn.Linear(2, 2)}))
    ('h.0', 'h.1', 'head')
    """
    repeated = set(find_repeated(model))
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    found: dict[str, None] = {}
    for name, module in model.named_modules():
        if name in repeated or (unit_of([name], found) == "" and _is_owner(name, module, names)):
            found[name] = None
    return tuple(found)


def unit_of(names: Iterable[str], units: Container[str]) -> str:
    """Return the unit that contains all of a tensor's names, or "" for the root unit.

    Asked for each tensor of a model, it wants `units` as a set.

    >>> unit_of(["h.1.w"], ("h.0", "h.1")), unit_of(["h.1.w", "head.w"], ("h.0", "h.1")), unit_of(["h.10.w"], ("h.1",))
    ('h.1', '', '')
    """
    found = {_innermost(name, units) for name in names}
    return found.pop() if len(found) == 1 else ""


def join_small(sizes: Mapping[str, int], key: Callable[[str], object], limit: int) -> list[tuple[str, ...]]:
    """Join consecutive small units, which are then gathered together, until they are large enough.

    Args:
        sizes: bytes of each unit, in the model's order.
        key: neighbours are joined only if they have the same key.
        limit: bytes from which units are not joined: `Step.joined_bytes`.

    >>> join_small({"a": 10, "b": 10, "c": 90, "d": 90, "e": 5}, lambda unit: None, 100)
    [('a', 'b', 'c'), ('d', 'e')]
    """
    joined: list[list[str]] = []
    filled = 0
    for unit, size in sizes.items():
        if joined and filled < limit and key(joined[-1][0]) == key(unit):
            joined[-1].append(unit)
            filled += size
        else:
            joined.append([unit])
            filled = size
    return list(map(tuple, joined))


def _blocks(modules: nn.ModuleList) -> list[str]:
    """Return the indices of the elements that have parameters, each module once."""
    return [index for index, module in modules.named_children() if any(True for _ in module.parameters())]


def _is_owner(name: str, module: nn.Module, names: Mapping[int, list[str]]) -> bool:
    """Return whether a module other than the root has parameters that no other module has, and its children have none.

    A module without a forward, such as a `ParameterList`, is not an owner: other modules compute with its parameters.
    """
    own = list(module.parameters(recurse=False))
    alone = any(len(names[id(param)]) == 1 for param in own)
    forward = getattr(module, "forward", None)  # of the object: a class of TorchScript has none
    called = forward is not None and getattr(forward, "__name__", None) != "_forward_unimplemented"
    return name != "" and called and alone and len(own) == len(list(module.parameters()))


def _innermost(name: str, units: Container[str]) -> str:
    """Return the first of a name and the modules that contain it, innermost first, that is a unit, or ""."""
    while name and name not in units:
        name = name.rpartition(".")[0]
    return name

"""Facts about a model for rules: its tensors with the names of their dims, its borders, by name or by pattern."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from shardlib.engine._torch import pytree, seed_all
from shardlib.rules.dims import ModuleDims, dims_of
from shardlib.rules.patterns import compile_pattern
from shardlib.testing.equivalence.case import as_call

__all__ = ["Facts", "Unit", "facts", "facts_of"]


@dataclass(frozen=True)
class TensorFacts:
    """A parameter or buffer that a rule can name, or several of one shape in repeated blocks."""

    key: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]


@dataclass(frozen=True)
class Unit:
    """A module's own tensors, or those of all blocks' modules of that name.

    Attributes:
        key: names the modules; "" where no rule about them as modules says one clear thing.
        tensors: the first is the module's primary tensor.
        roles: names of roles that the module knows.
    """

    key: str
    tensors: tuple[TensorFacts, ...]
    roles: tuple[str, ...]


@dataclass(frozen=True)
class Borders:
    """Module borders that a layout can be given to: key of a rule to the global shape of the activation."""

    shapes: Mapping[str, tuple[int, ...]]

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self.shapes)


@dataclass(frozen=True)
class Facts:
    """The targets of rules, by patterns over repeated blocks (True), or by single names (False)."""

    units: Mapping[bool, tuple[Unit, ...]]
    borders: Mapping[bool, Borders]
    parameters: tuple[str, ...] = ()


def facts_of(model: nn.Module, batch: Any) -> Facts:
    seen = {} if batch is None else _activations(model, batch)
    return Facts(
        {by_pattern: tuple(_units(model, by_pattern)) for by_pattern in (True, False)},
        {by_pattern: Borders(dict(_borders(model, seen, by_pattern))) for by_pattern in (True, False)},
        tuple(name for name, _ in model.named_parameters()),
    )


@lru_cache(maxsize=256)
def facts(model: Callable[[], nn.Module], batch: Callable[[int], Any]) -> Facts:
    with torch.random.fork_rng(devices=[]):
        seed_all(0)
        return facts_of(model(), batch(0))


def _units(model: nn.Module, by_pattern: bool) -> Iterator[Unit]:
    modules = dict(model.named_modules())
    tensors = dict([*model.named_parameters(), *model.named_buffers()])  # each once, under its first name
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    names = {id(t): [n for n, other in every if other is t] for t in tensors.values()}
    known = [name for name, _ in every] + [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for group in _groups(modules, by_pattern):
        if by_pattern and len(group) > 1 and not _alike(group, modules, tensors, names, known):
            yield from (u for name in group for u in _unit([name], modules, tensors, names))
        else:
            yield from _unit(group, modules, tensors, names)


def _groups(modules: Iterable[str], by_pattern: bool) -> list[list[str]]:
    groups: dict[str, list[str]] = {}
    for name in modules:
        groups.setdefault(_by_pattern(name) if by_pattern else name, []).append(name)
    return list(groups.values())


def _by_pattern(name: str) -> str:
    """Return a name for the modules like it in all blocks; the first number counts blocks."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name, count=1)


def _own(name: str, module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a module's tensors that no module before it has, by attribute."""
    prefix = f"{name}." if name else ""
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return {attr: t for attr, t in own if f"{prefix}{attr}" in tensors}


def _alike(
    group: Sequence[str],
    modules: Mapping[str, nn.Module],
    tensors: Mapping[str, torch.Tensor],
    names: Mapping[int, Sequence[str]],
    known: Sequence[str],
) -> bool:
    """Return whether a pattern can stand for modules: their tensors have the same shapes and are not tied, and it
    matches nothing else."""
    own = [_own(name, modules[name], tensors) for name in group]
    shapes = {tuple((attr, tuple(t.shape)) for attr, t in each.items()) for each in own}
    if len(shapes) > 1 or any(len(names[id(t)]) > 1 for each in own for t in each.values()):
        return False
    found = {name for name in known if compile_pattern(f"^{_by_pattern(group[0])}").matches(name)}
    found |= {
        name
        for attr in own[0]
        for name in known
        if compile_pattern(f"^{_by_pattern(f'{group[0]}.{attr}')}").matches(name)
    }
    return found == set(group) | {f"{name}.{attr}" for name in group for attr in own[0]}


def _unit(
    group: Sequence[str],
    modules: Mapping[str, nn.Module],
    tensors: Mapping[str, torch.Tensor],
    names: Mapping[int, Sequence[str]],
) -> Iterator[Unit]:
    module = modules[group[0]]
    own = _own(group[0], module, tensors)
    if not own:
        return
    key = "^" + (_by_pattern(group[0]) if len(group) > 1 else group[0])
    registered = dims_of(module)
    prefix = f"{key}." if group[0] else "^"
    named = {attr: registered and registered.dims(attr, t.ndim) for attr, t in own.items()}

    def dims(attr: str, tensor: torch.Tensor) -> tuple[str, ...]:
        return tuple(name if name.isidentifier() else "_" for name in named[attr] or ("_",) * tensor.ndim)

    found = [TensorFacts(f"{prefix}{attr}", tuple(t.shape), dims(attr, t)) for attr, t in own.items()]
    every = {*dict(module.named_parameters(recurse=False)), *dict(module.named_buffers(recurse=False))}
    tied = every != set(own) or any(len(names[id(t)]) > 1 for t in own.values())
    as_module = registered is not None and bool(group[0]) and not tied
    if registered is None or not as_module or not any(named.values()):
        yield Unit("", tuple(found), ())
        return
    primary = next(attr for attr in registered.tensors if named.get(attr))
    found.sort(key=lambda tensor: not tensor.key.endswith(f".{primary}"))
    yield Unit(key, tuple(found), _roles(registered, named[primary] or ()))


def _roles(registered: ModuleDims, primary: Sequence[str]) -> tuple[str, ...]:
    """Return roles that split a plain dim; one that splits a factor of a fused dim is refused where it does not
    divide."""
    plain = registered.output in primary, len(registered.contracted) == 1 and registered.contracted[0] in primary
    return ("colwise",) * plain[0] + ("rowwise",) * plain[1]


def _activations(model: nn.Module, batch: Any) -> dict[tuple[str, str], set[tuple[int, ...]]]:
    """Return the shapes of the first floating-point tensor that crosses each border of each module, over all calls."""
    seen: dict[tuple[str, str], set[tuple[int, ...]]] = {}

    def note(name: str, side: str, tree: Any) -> None:
        floats = [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        if floats:
            seen.setdefault((name, side), set()).add(tuple(floats[0].shape))

    def watch(name: str, module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda _, args, kwargs: note(name, "input", (args, kwargs)), with_kwargs=True)
        module.register_forward_hook(lambda _, args, output: note(name, "output", output))

    for name, module in model.named_modules():
        watch(name, module)
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))

    def fitted(x: torch.Tensor) -> torch.Tensor:
        return x.to(device=like.device, dtype=like.dtype if x.is_floating_point() else None)

    args, kwargs = pytree.tree_map_only(torch.Tensor, fitted, as_call(batch))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        model(*args, **kwargs)
    return seen


def _borders(
    model: nn.Module, seen: Mapping[tuple[str, str], set[tuple[int, ...]]], by_pattern: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Iterate over borders whose activation has one number of dims, at least one."""
    modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for group, side in itertools.product(
        _groups((n for n, _ in model.named_modules()), by_pattern), ("input", "output")
    ):
        found = set().union(*(seen.get((name, side), set()) for name in group))
        if len({len(shape) for shape in found}) != 1 or not all(seen.get((name, side)) for name in group):
            continue
        pattern = f"^{_by_pattern(group[0])}" if len(group) > 1 else f"^{group[0]}"
        if len(group) > 1 and [n for n in modules if compile_pattern(pattern).matches(n)] != list(group):
            continue
        shape = tuple(math.gcd(*sizes) for sizes in zip(*found, strict=True))  # what divides it divides each of them
        if shape:
            yield f"{pattern}.{side}" if group[0] else f"^{side}", shape

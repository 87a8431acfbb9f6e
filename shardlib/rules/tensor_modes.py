"""Tensor modes by name: a change of rules, the mesh axes that it needs, and the transforms that go with it.

2D, 2.5D and 3D tensor parallelism are the files `layouts/modes/*.toml`, which `shardlib.layouts` registers here; user
modes are registered in the same way.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from shardlib._again import is_again
from shardlib._mesh_shape import MeshShape
from shardlib.errors import MeshError, RuleError, nearest
from shardlib.rules._rule_set import RuleSet

__all__ = ["TensorMode", "register_tensor_mode", "registered_tensor_modes", "tensor_mode"]

Change = Callable[[Any], Any]  # from Rules to Rules
R = TypeVar("R", bound=RuleSet)

_PART = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*(\d+|[A-Za-z_]\w*)\s*")
_REGISTERED: dict[str, TensorMode] = {}


@dataclass(frozen=True)
class TensorMode:
    """A way to shard a model over mesh axes of its own.

    Attributes:
        name: its name in configurations and in `Rules.mode`.
        change: the function that changes the rules of a model.
        axes: its mesh axes, outermost first, as in "row=q,col=q": a number, or a letter for a size that follows from
            the number of ranks; the same letter is the same size.
        transforms: transforms of the plan, applied before the user's own.
        description: one line.
    """

    name: str
    change: Change = field(repr=False)
    axes: str = "tp=n"
    transforms: tuple[Any, ...] = ()
    description: str = ""

    def rules(self, rules: R) -> R:
        """Return the rules in this mode.

        Raises:
            RuleError: the mode cannot change these rules, or its function does not return rules.
        """
        try:
            made = self.change(rules)
        except RuleError as fault:
            raise RuleError(f'Tensor mode "{self.name}": {fault}') from None
        if type(made) is not type(rules):
            raise RuleError(
                f'Tensor mode "{self.name}" made {type(made).__name__} of the rules; its function takes a Rules and '
                "returns a Rules."
            )
        return made

    def mesh_shape(self, ranks: int, **sizes: int) -> MeshShape:
        """Return the axes for a number of ranks.

        Args:
            ranks: the number of ranks for one copy of the model.
            **sizes: sizes of axes that do not follow from it, by name.

        Raises:
            MeshError: the axes cannot have so many ranks.

        >>> tensor_mode("2d").mesh_shape(9), tensor_mode("2.5d").mesh_shape(8, depth=2)
        (MeshShape("row=3,col=3"), MeshShape("depth=2,row=2,col=2"))
        """
        parts = _read_axes(self.name, self.axes)
        for axis in sizes:
            if axis not in parts:
                raise MeshError(
                    f'Tensor mode "{self.name}" was given a size for axis "{axis}"; its axes are "{self.axes}".'
                    f"{nearest(axis, parts)}"
                )
        known = {letter: sizes[axis] for axis, letter in parts.items() if axis in sizes}
        known |= {letter: int(letter) for letter in parts.values() if letter.isdigit()}
        open_letters = dict.fromkeys(letter for letter in parts.values() if letter not in known)
        if len(open_letters) > 1:
            free = next(axis for axis, letter in parts.items() if letter in open_letters)
            raise MeshError(
                f'Tensor mode "{self.name}" has the axes "{self.axes}": {ranks} ranks alone do not say how long each '
                f"is. Give the size of one, as in {free}=2."
            )
        for letter in open_letters:
            rest = ranks // math.prod(known.get(each, 1) for each in parts.values())
            known[letter] = round(rest ** (1 / list(parts.values()).count(letter)))
        found = {axis: known[letter] for axis, letter in parts.items()}
        if math.prod(found.values()) != ranks or any(found[axis] != size for axis, size in sizes.items()):
            given = "".join(f", {axis}={size}" for axis, size in sizes.items())
            raise MeshError(
                f'Tensor mode "{self.name}" has the axes "{self.axes}", and {ranks} ranks{given} do not make them up; '
                f"{_some_that_do(parts, sizes)} would."
            )
        return MeshShape(found)


def register_tensor_mode(
    name: str, *, axes: str = "tp=n", transforms: Iterable[Any] = (), description: str = ""
) -> Callable[[Change], Change]:
    """Register a tensor mode: decorates the function that changes a model's rules. The name is then available to
    `Rules.mode`, `layouts.load(..., mode=)`, the command line, `HybridParallelPlugin(tensor_mode=)` and
    `parallel=dict(tensor=dict(mode=...))` of a configuration.

    Args:
        name: the name of the mode, which must be new.
        axes: see `TensorMode`.
        transforms: see `TensorMode`. `Rules.mode` returns rules only, and refuses a mode with transforms;
            `tensor_mode(name)` has both.
        description: one line.

    Raises:
        RuleError: the name is taken, or the axes cannot be read.

    >>> from shardlib.rules import Rules
    >>> @register_tensor_mode("tall", axes="row=n")
    ... def tall(rules):
    ...     return Rules(rules.rules, axis="row")
    >>> Rules({"up": "colwise"}).mode("tall")
    Rules({"up": "colwise"}, axis='row')
    """
    _read_axes(name, axes)

    def register(change: Change) -> Change:
        if name in _REGISTERED and not is_again(_REGISTERED[name].change, change):
            raise RuleError(f'A tensor mode "{name}" is registered already; use another name.')
        _REGISTERED[name] = TensorMode(name, change, axes, tuple(transforms), description)
        return change

    return register


def tensor_mode(name: str) -> TensorMode:
    """Return a registered tensor mode.

    Raises:
        RuleError: no mode of that name is registered.

    >>> tensor_mode("3d").axes
    'depth=q,row=q,col=q'
    """
    if name not in _REGISTERED:
        raise RuleError(
            f'No tensor mode is called "{name}"; there are {", ".join(map(repr, _REGISTERED))}. Register one with '
            f"@shardlib.rules.register_tensor_mode({name!r}), in a module that is imported before."
            f"{nearest(name, _REGISTERED)}"
        )
    return _REGISTERED[name]


def registered_tensor_modes() -> Mapping[str, TensorMode]:
    """Return all registered tensor modes by name."""
    return dict(_REGISTERED)


def _read_axes(name: str, text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None or match[1] in found:
            raise RuleError(
                f'Tensor mode "{name}": the axes are "{text}"; give each once with a number, or a letter for a size '
                'that follows from the number of ranks, as in "row=q,col=q".'
            )
        found[match[1]] = match[2]
    return found


def _some_that_do(parts: Mapping[str, str], sizes: Mapping[str, int]) -> str:
    """Return numbers of ranks that fit, for a message."""
    counts = []
    for q in (1, 2, 3):
        letters = {letter: q for letter in parts.values() if not letter.isdigit()}
        letters |= {parts[axis]: size for axis, size in sizes.items()}
        counts.append(math.prod(int(letter) if letter.isdigit() else letters[letter] for letter in parts.values()))
    return " or ".join(map(str, dict.fromkeys(counts)))

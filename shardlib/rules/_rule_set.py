"""The rules as a value: keys, layouts and options, checked as far as possible without a model."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

from shardlib.errors import RuleError, nearest
from shardlib.layout import Dim
from shardlib.rules._claims import axes_named
from shardlib.rules._layouts import AxisUse, axis_use
from shardlib.rules._match import Entry, border_key
from shardlib.rules._values import Text, Value, read_value, spelled
from shardlib.rules.patterns import compile_pattern
from shardlib.rules.stages import StagesLike, read_stages

__all__ = ["RuleSet"]

_NAME = re.compile(r"[A-Za-z_]\w*")
AxisNames = str | Iterable[str] | None


@dataclass(frozen=True, repr=False)
class RuleSet:
    """The fields of `Rules`, which has their description, and what follows from them alone."""

    rules: Mapping[str, Any] = field(default_factory=dict)
    activations: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    axes: Mapping[str, AxisNames] = field(default_factory=dict, kw_only=True)
    sizes: Mapping[str, int | str] = field(default_factory=dict, kw_only=True)
    unmatched: Literal["error", "replicate"] = field(default="error", kw_only=True)
    optional: tuple[str, ...] = field(default=(), kw_only=True)
    override: tuple[str, ...] = field(default=(), kw_only=True)
    axis: str = field(default="tp", kw_only=True)
    stages: StagesLike = field(default=None, kw_only=True)
    modes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, kw_only=True)
    description: str = field(default="", kw_only=True)
    models: tuple[str, ...] = field(default=(), kw_only=True)
    notes: Mapping[str, str] = field(default_factory=dict, kw_only=True, compare=False)

    def __post_init__(self) -> None:
        for name in ("rules", "activations"):
            self._set(name, {key: read_value(key, given) for key, given in _mapping(name, getattr(self, name)).items()})
        for name in ("axes", "sizes", "notes"):
            self._set(name, dict(_mapping(name, getattr(self, name))))
        self._set("axes", {name: _axis_names(name, given) for name, given in self.axes.items()})
        for name in ("optional", "override", "models"):
            self._set(name, _strings(name, getattr(self, name)))
        self._set("stages", read_stages(self.stages))
        self._check_keys()
        self._check_options()
        self._set(
            "modes", {name: dict(_mapping(f'mode "{name}"', m)) for name, m in _mapping("modes", self.modes).items()}
        )

    def __hash__(self) -> int:
        """Hash keys and names alone: values may be dicts and lists."""
        keys = (frozenset(each) for each in (self.rules, self.activations, self.axes, self.sizes, self.modes))
        return hash((*keys, self.optional, self.override, self.models, self.axis, self.unmatched))

    def __repr__(self) -> str:
        """
        >>> RuleSet({"mlp.up": "colwise"}, optional=["mlp.up"])
        RuleSet({"mlp.up": "colwise"}, optional=('mlp.up',))
        """
        options = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("rules", "notes")}
        options["modes"] = tuple(self.modes)
        shown = [_shown(self.rules)]
        shown += [f"activations={_shown(options.pop('activations'))}"] if self.activations else []
        default = {"unmatched": "error", "axis": "tp"}
        shown += [f"{name}={value!r}" for name, value in options.items() if value and value != default.get(name)]
        return f"{type(self).__name__}({', '.join(shown)})"

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """The rules one by one, in order."""
        return (
            *(Entry(key, value) for key, value in self.rules.items()),
            *(Entry(key, value, "activations") for key, value in self.activations.items()),
        )

    @cached_property
    def axis_uses(self) -> dict[str, AxisUse]:
        """The parsed `axes`."""
        return {name: axis_use(given) for name, given in self.axes.items()}

    @cached_property
    def axis_names(self) -> tuple[str, ...]:
        """The mesh axes that these rules name, in order.

        >>> RuleSet({"up": "colwise", "down": "out in@model"}).axis_names
        ('tp', 'model')
        """
        each = (axes_named(entry, self.axis_uses, self.axis) for entry in self.entries)
        return tuple(dict.fromkeys(itertools.chain.from_iterable(each)))

    @cached_property
    def dim_names(self) -> dict[str, None]:
        """The names of dims and factors that layouts of these rules mention, in order."""
        return dict.fromkeys(name for entry in self.entries for name in _words(entry.value))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_keys(self) -> None:
        for key in (*self.rules, *self.activations):
            compile_pattern(key)
        for key, value in self.activations.items():
            if border_key(key) is None:
                raise RuleError(
                    f'Rule "{key}": {spelled(value)} is in activations and does not name the input or output of a '
                    'module. End the key in ".input" or ".output", or move the rule to the parameters.'
                )
        keys = (*self.rules, *self.activations)
        if twice := [key for key in self.activations if key in self.rules]:
            raise RuleError(f'Rule "{twice[0]}" stands in rules and in activations. Keep one of them.')
        for option in ("optional", "override"):
            for key in getattr(self, option):
                if key not in keys:
                    raise RuleError(
                        f'{option} names "{key}", which is not a key of the rules; they have {_listed(keys)}. Write '
                        f"the key as it stands in the rules.{nearest(key, keys)}"
                    )

    def _check_names(self) -> None:
        """Refuse a name in `axes` or `sizes` that no layout mentions, since a misspelt one would split nothing."""
        used = self.dim_names
        for option in ("axes", "sizes"):
            for name in getattr(self, option):
                if name not in used:
                    raise RuleError(
                        f'{option} names "{name}", which no layout of these rules mentions; they mention '
                        f"{_listed(used) or 'none'}. Correct the name, or leave it out.{nearest(name, used)}"
                    )

    def _check_options(self) -> None:
        if self.unmatched not in ("error", "replicate"):
            raise RuleError(f'unmatched is {self.unmatched!r}; give "error" or "replicate".')
        self._check_names()
        for name, use in self.axis_uses.items():
            if wrong := [axis for axis in use.axes if not (isinstance(axis, str) and _NAME.fullmatch(axis))]:
                raise RuleError(
                    f'axes gives dim "{name}" the axis {wrong[0]!r}, which is not an axis name. Give one, as in "tp" '
                    '(or "tp?" to shard only where it divides), or several, as in ("fsdp", "tp").'
                )
        for name, size in self.sizes.items():
            if not _is_size(size):
                raise RuleError(
                    f'sizes gives "{name}" the size {size!r}. Give a positive number, or the path of an attribute of '
                    'the model, as in "config.n_head".'
                )


def _shown(rules: Mapping[str, Value]) -> str:
    return "{" + ", ".join(f'"{key}": {spelled(value)}' for key, value in rules.items()) + "}"


def _words(value: Value) -> Iterable[str]:
    """Iterate over the names of dims and factors that a value mentions."""
    dims = value.layout.dims if isinstance(value, Text) else ()
    return (factor.name for dim in dims if isinstance(dim, Dim) for factor in dim.factors)


def _is_size(given: Any) -> bool:
    return bool(given) if isinstance(given, str) else type(given) is int and given > 0


def _mapping(name: str, given: Any) -> Mapping[str, Any]:
    if isinstance(given, Mapping) and all(isinstance(key, str) for key in given):
        return given
    raise RuleError(
        f"{name} was given as {type(given).__name__} {given!r}; give a mapping with text as keys, as in "
        'Rules({"mlp.up": "colwise"}).'
    )


def _axis_names(name: str, given: Any) -> str | tuple[str, ...]:
    if given is None or isinstance(given, str):
        return given or ()
    if isinstance(given, Iterable):
        return tuple(given)
    raise RuleError(f'axes gives dim "{name}" {given!r}; give an axis, as in "tp", or several, as in ("fsdp", "tp").')


def _strings(name: str, given: Any) -> tuple[str, ...]:
    if not isinstance(given, str) and isinstance(given, Iterable):
        strings = tuple(given)
        if all(isinstance(each, str) for each in strings):
            return strings
    raise RuleError(f'{name} was given as {given!r}; give a list of texts, as in {name}=("lm_head",).')


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)

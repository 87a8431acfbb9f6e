"""The rule set: patterns and layouts as a value, checked as far as possible without a model."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch import nn

from shardlib._mesh import MeshLike, MeshShape
from shardlib.errors import RuleError, nearest
from shardlib.layout import Dim
from shardlib.rules import _report, foreign, logical, toml
from shardlib.rules._claims import axes_named
from shardlib.rules._layouts import AxisUse, axis_use
from shardlib.rules._match import Entry, border_key
from shardlib.rules._modes import changes_of, check_modes
from shardlib.rules._resolution import Resolution
from shardlib.rules._resolve import Resolver
from shardlib.rules._values import Text, Value, read_value, spelled
from shardlib.rules.patterns import compile_pattern
from shardlib.rules.stages import StagesLike, read_stages
from shardlib.rules.tensor_modes import registered_tensor_modes, tensor_mode

__all__ = ["Rules"]

_NAME = re.compile(r"[A-Za-z_]\w*")
AxisNames = str | Iterable[str] | None


@dataclass(frozen=True, repr=False)
class Rules:
    """Layouts for the tensors of a model on a mesh, by patterns of names.

    Args:
        rules: pattern to layout. A pattern names a module, a parameter, a buffer, or (ending in `.input` or `.output`)
            an activation (a module's input or output); see `shardlib.rules.patterns`. A layout is text ("vocab@tp
            embed"; one name alone means the output features of a module, and weight and bias both follow), a role
            ("colwise", "rowwise", "replicate"), a torch placement (dim of the module's weight, on the default axis),
            `{axis: placement}`, one placement per mesh axis, a `Layout`, or None to replicate.
        activations: rules that can only mean a module's input or output.
        axes: dim name to the mesh axis (or axes, outermost first; "tp?" where it divides) that shards it wherever it is
            named without "@". An axis named here may be missing from a mesh; the dim is then not sharded.
        sizes: sizes of the factors of fused dims: numbers, or attribute paths ("config.n_head") looked up on the module
            and then on the modules around it.
        unmatched: the treatment of a parameter that no rule matches: "error" or "replicate".
        optional: keys of rules that may match nothing.
        override: keys of rules that take precedence over earlier ones.
        axis: the mesh axis of roles and bare placements.
        stages: the modules on each stage of a pipeline axis: names, with bars between stages, as in
            "embed, blocks.0-3 | blocks.4-7, norm, head", or `Balanced(...)`; see `shardlib.rules.stages`. They are
            not used on a mesh without such an axis.
        modes: name to the changes that `mode(name)` applies: `rules`, which override those that are there,
            `activations`, `axes`, `sizes` and `optional`, each as above.
        description: the purpose of the rules, in one line.
        models: qualified names of the model classes that the rules are for, as in "transformers.GPT2LMHeadModel".
        notes: key to a comment, kept in the file form; not part of the value.

    Raises:
        RuleError: a key, a value or an option cannot be read.

    >>> rules = Rules({"0": "colwise", "2": "rowwise"})
    >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    >>> for tensor in rules.resolve(model, "tp=4").tensors.values():
    ...     print(f"{tensor.name:9} {str(tensor.layout):12} {tensor.note}")
    0.weight  out@tp in    column-parallel (out dim)
    0.bias    out@tp       column-parallel (out dim)
    2.weight  out in@tp    row-parallel (in dim)
    2.bias    out          replicated; added once after the reduction
    """

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
        check_modes(self)

    def __hash__(self) -> int:
        """Hash keys and names alone: values may be dicts and lists."""
        keys = (frozenset(each) for each in (self.rules, self.activations, self.axes, self.sizes, self.modes))
        return hash((*keys, self.optional, self.override, self.models, self.axis, self.unmatched))

    def __repr__(self) -> str:
        """
        >>> Rules({"mlp.up": "colwise"}, optional=["mlp.up"])
        Rules({"mlp.up": "colwise"}, optional=('mlp.up',))
        """
        options = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("rules", "notes")}
        options["modes"] = tuple(self.modes)
        shown = [_shown(self.rules)]
        shown += [f"activations={_shown(options.pop('activations'))}"] if self.activations else []
        default = {"unmatched": "error", "axis": "tp"}
        shown += [f"{name}={value!r}" for name, value in options.items() if value and value != default.get(name)]
        return f"Rules({', '.join(shown)})"

    @classmethod
    def of(cls, rules: Rules | Mapping[str, Any]) -> Rules:
        """Return `rules` as `Rules`; a plain mapping is wrapped."""
        return rules if isinstance(rules, Rules) else cls(rules)

    @classmethod
    def from_toml(cls, source: str | Path) -> Rules:
        """Read rules from the text of a layout file or from a path (a `Path`, or text that ends in ".toml").

        Raises:
            RuleError: the file is not TOML (with its line), or says something that rules do not know.

        >>> Rules.from_toml('[params]\\n"mlp.up" = "colwise"').rules
        {'mlp.up': Role(name='colwise')}
        """
        where, arguments = toml.read(source)
        try:
            return cls(**arguments)
        except RuleError as fault:
            raise RuleError(f"{where}: {fault}") from None

    def to_toml(self) -> str:
        """Return the text of a layout file; `Rules.from_toml(rules.to_toml()) == rules`."""
        return toml.write(self)

    @classmethod
    def from_tp_plan(cls, model: nn.Module, *, axis: str = "tp") -> Rules:
        """Convert the `tp_plan` that a Hugging Face model carries; see `shardlib.rules.foreign`."""
        return cls(**foreign.read_tp_plan(model, axis))

    @classmethod
    def from_parallelize_plan(cls, plan: Mapping[str, Any], *, axis: str = "tp") -> Rules:
        """Convert a plan for torch's `parallelize_module`; see `shardlib.rules.foreign`."""
        return cls(**foreign.read_parallelize_plan(plan, axis))

    @classmethod
    def from_logical_axes(cls, names: Any, rules: Iterable[logical.LogicalRule]) -> Rules:
        """Convert logical axes of flax, t5x and MaxText, as `flax.linen.logical_to_mesh_axes` reads them.

        The pairs stand in order of precedence: each gives its mesh axes to the dim of that name, unless the dim has
        axes already, or a pair with None, or another dim of the tensor has one of them. Names without a pair are not
        split. Names of dims become those of the layouts, paths in the tree those of tensors: `layers.0.kernel`.

        Args:
            names: a tree of dicts and lists whose leaves name the dims of a parameter: a tuple with a
                name, or None, for each; a `PartitionSpec` of names, as `nn.get_partition_spec` makes them; a box of
                flax (`nn.LogicallyPartitioned`), with or without a value. An array without a box is not sharded.
            rules: pairs of a logical name and a mesh axis, several of them, or None.

        Raises:
            RuleError: a leaf without names, or with one name twice; a malformed pair.

        >>> names = {"dense": {"kernel": ("embed", "mlp"), "bias": ("mlp",)}}
        >>> Rules.from_logical_axes(names, [("mlp", "tp"), ("embed", ("tp", "fsdp")), ("embed", "fsdp")])
        Rules({"^dense.kernel": "embed@fsdp mlp@tp", "^dense.bias": "mlp@tp"})
        """
        return cls(**logical.read_logical_axes(names, rules))

    def to_logical_axes(self, model: nn.Module, mesh: MeshLike) -> logical.LogicalAxes:
        """Return the layouts of a model's parameters and buffers as logical axes; the inverse of `from_logical_axes`.

        A logical name is the dim's name, where that has the same mesh axes in all tensors. Activations are not
        included: flax models constrain activations inside (`nn.with_logical_constraint`).

        Raises:
            RuleError: as `resolve`; a sharded factor of a fused dim.

        >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        >>> axes = Rules({"0": "colwise", "2": "rowwise"}).to_logical_axes(model, "tp=4")
        >>> axes.names["0"], axes.names["2"]
        ({'weight': ('out', 'in'), 'bias': ('out',)}, {'weight': (None, 'in_tp'), 'bias': (None,)})
        >>> axes.rules
        [('out', 'tp'), ('in', None), ('in_tp', 'tp')]
        """
        return logical.write_logical_axes(self.resolve(model, mesh))

    def with_stages(self, stages: StagesLike) -> Rules:
        """Return the same rules with other stages, as for those of a layout file.

        >>> Rules({"head": None}).with_stages("embed | head").stages
        'embed | head'
        """
        return replace(self, stages=stages)

    def mode(self, *names: str) -> Rules:
        """Return the rules with these modes applied: modes of the rules, or registered tensor modes such as "2d".

        Raises:
            RuleError: there is no such mode; a tensor mode that brings transforms, which rules cannot hold.

        >>> rules = Rules({"up": "colwise"}, modes={"split": {"activations": {"up.output": "... ff@tp"}}})
        >>> rules.mode("split")
        Rules({"up": "colwise"}, activations={"up.output": "... ff@tp"})
        """
        if not names:
            return self
        if any(name not in self.modes and name in registered_tensor_modes() for name in names):
            return functools.reduce(Rules._in_one_mode, names, self)
        changes = changes_of(self, names)
        given = {option: changes.pop(option) for option in ("axes", "sizes")}
        made = replace(self, **changes, axes={}, sizes={}, modes={})
        for option, by_name in given.items():  # rules that the mode replaced may have named others
            stated = {name for mode in names for name in self.modes[mode].get(option, ())}
            given[option] = {name: each for name, each in by_name.items() if name in stated or name in made.dim_names}
        return replace(made, **given)

    def _in_one_mode(self, name: str) -> Rules:
        if name in self.modes or name not in registered_tensor_modes():
            return self.mode(name)
        mode = tensor_mode(name)
        if mode.transforms:
            raise RuleError(
                f'Tensor mode "{name}" brings the transforms {mode.transforms}, which rules cannot hold. Take both '
                f"from shardlib.rules.tensor_mode({name!r}): its rules(...) and its transforms."
            )
        return mode.rules(self)

    def resolve(self, model: nn.Module, mesh: MeshLike) -> Resolution:
        """Resolve a layout for every parameter and buffer of a model, and for the activations that need one.

        Pure: no process group and no device; the model may be on `meta`.

        Raises:
            RuleError: a rule matches nothing, two rules disagree, a parameter has no rule, an axis is unknown or used
                twice, a layout does not fit its tensor, tied parameters get two layouts.
        """
        return Resolver(self, model, MeshShape.of(mesh)).resolution()

    def explain(self, name: str, model: nn.Module | None = None, mesh: MeshLike | None = None) -> str:
        """List the rules that match a name; with a model the layout that they give, and with a mesh the local shape.

        >>> print(Rules({"attn.qkv": "colwise"}).explain("blocks.0.attn.qkv.weight"))
        "blocks.0.attn.qkv.weight"
          rule "attn.qkv": "colwise" names its module "blocks.0.attn.qkv"
        """
        return _report.explain(self, name, model, None if mesh is None else MeshShape.of(mesh))

    def coverage(self, model: nn.Module, mesh: MeshLike | None = None) -> _report.Coverage:
        """Count the tensors and bytes that each rule covers; prints as a table. Unmatched rules and parameters are
        listed, not refused."""
        return _report.coverage(self, model, None if mesh is None else MeshShape.of(mesh))

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

        >>> Rules({"up": "colwise", "down": "out in@model"}).axis_names
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

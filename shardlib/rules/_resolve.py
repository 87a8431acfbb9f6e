"""Rules, a model and a mesh: one layout for every tensor and every border, or an error that says which is unclear."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import Replicate

from shardlib._mesh import MeshShape
from shardlib.errors import RuleError, nearest
from shardlib.layout import Dim, Layout
from shardlib.rules._layouts import AxisUse, LayoutMaker
from shardlib.rules._match import Entry, Match, Matcher, border_key
from shardlib.rules._model import Leaf, ModelIndex, readable_bytes, summary
from shardlib.rules._resolution import Border, Resolution, Side, TensorLayout
from shardlib.rules._values import Placed, Role, Text
from shardlib.rules.dims import ModuleDims, dims_of

if TYPE_CHECKING:
    from shardlib.rules._rules import Rules

__all__ = ["Resolver", "axes_mentioned"]


@dataclass(frozen=True)
class Claim:
    """What one rule says about one tensor, under one of its names."""

    entry: Entry
    name: str
    layout: Layout


class Resolver:
    """One resolution; its steps are kept so that `explain` and `coverage` can show them.

    With `strict=False` rules that match nothing and parameters without a rule are recorded, not refused.
    """

    def __init__(self, rules: Rules, model: nn.Module, mesh: MeshShape, *, strict: bool = True) -> None:
        self.rules, self.mesh, self.strict = rules, mesh, strict
        _check_axes(rules, mesh)
        self.index = ModelIndex(model)
        self.matcher = Matcher(self.index)
        self.maker = LayoutMaker(self.index, mesh, rules.axis_uses, rules.sizes, rules.axis, {})
        self.matches = {entry: self.matcher.match(entry) for entry in rules.entries}
        if strict:
            self._check_matches()
        self.claims = self._claims()

    def resolution(self) -> Resolution:
        tensors = {leaf.name: self._tensor(leaf) for leaf in self.index.leaves}
        resolution = Resolution(self.mesh, tensors, self._borders(tensors))
        if self.strict and self.rules.unmatched == "error" and resolution.unmatched:
            raise _unmatched(resolution.unmatched)
        return resolution

    def _claims(self) -> dict[int, list[Claim]]:
        """What the rules say about each tensor (by the id of its leaf), in the order of the rules."""
        claims: dict[int, list[Claim]] = {}
        for entry, match in self.matches.items():
            for name, layout in self._laid_out(entry, match):
                claims.setdefault(id(self.index.leaf[name]), []).append(Claim(entry, name, layout))
        return claims

    def _laid_out(self, entry: Entry, match: Match) -> Iterator[tuple[str, Layout]]:
        # A pattern such as "attn.**" finds a module and its parameters; what it says by name is more precise.
        by_name = set(match.tensors)
        for name in match.tensors:
            yield name, self.maker.for_tensor(entry, name)
        for module_name in match.modules:
            own = self.index.own[module_name]
            if all(name in by_name for name in own.values()):
                continue
            for attribute, layout in self.maker.for_module(entry, module_name).items():
                if own[attribute] not in by_name:
                    yield own[attribute], layout

    def _tensor(self, leaf: Leaf) -> TensorLayout:
        claim = self._decide(leaf, self.claims.get(id(leaf), []))
        shape = tuple(leaf.tensor.shape)
        layout = claim.layout if claim else Layout.replicate(len(shape))
        return TensorLayout(
            name=leaf.name,
            kind=leaf.kind,
            global_shape=shape,
            dtype=leaf.tensor.dtype,
            requires_grad=leaf.tensor.requires_grad,
            persistent=leaf.persistent,
            tied=leaf.names,
            layout=layout,
            rule=claim.entry.key if claim else None,
            note=self._note(leaf, claim),
        )

    def _decide(self, leaf: Leaf, claims: list[Claim]) -> Claim | None:
        chosen: Claim | None = None
        for claim in claims:
            wins = chosen is None or (claim.entry.key in self.rules.override and claim.entry != chosen.entry)
            if chosen is not None and not wins and _cuts(chosen.layout) != _cuts(claim.layout):
                raise _told_twice(leaf, chosen, claim)
            chosen = claim if wins else chosen
        return chosen

    # What it means, in words.

    def _note(self, leaf: Leaf, claim: Claim | None) -> str:
        if claim is None:
            return "replicated: buffer" if leaf.kind == "buffer" else "replicated: unmatched"
        shape = tuple(leaf.tensor.shape)
        if not claim.layout.axes:
            return self._why_whole(claim)
        note = self._parallel(claim, shape)
        return f"{note}; uneven" if _uneven(claim.layout, shape, self.mesh) else note

    def _parallel(self, claim: Claim, shape: tuple[int, ...]) -> str:
        _, module, attribute = self.index.owner(claim.name)
        registered = dims_of(module)
        named = registered.dims(attribute, len(shape)) if registered else None
        split = [at for at in range(len(shape)) if claim.layout.axes_of(at)]
        if registered is None or named is None:
            return "split (" + ", ".join(f"dim {at}" for at in split) + ")"
        return ", ".join(_role_of(registered, named[at], at) for at in split)

    def _why_whole(self, claim: Claim) -> str:
        absent = [axis for axis in axes_mentioned(claim.entry, self.rules) if axis not in self.mesh]
        if absent:
            return f"replicated: the mesh has no {', '.join(absent)}"
        if self._follows_a_sum(claim.name):
            return "replicated; added once after the reduction"
        if "?" in (claim.entry.value.text if isinstance(claim.entry.value, Text) else ""):
            return "replicated: does not divide"
        return "replicated"

    def _follows_a_sum(self, name: str) -> bool:
        """Whether the tensor is added to a result that a sibling's split leaves partial: a row-parallel bias."""
        module_name, module, attribute = self.index.owner(name)
        registered = dims_of(module)
        if registered is None or attribute not in registered.tensors:
            return False
        own = self.index.own[module_name]
        return any(
            self._contracted_axes(registered, other, self.index.leaf[full])
            for other, full in own.items()
            if other != attribute
        )

    def _contracted_axes(self, registered: ModuleDims, attribute: str, leaf: Leaf) -> tuple[str, ...]:
        claim = self._decide(leaf, self.claims.get(id(leaf), []))
        named = registered.dims(attribute, leaf.tensor.ndim)
        if claim is None or named is None:
            return ()
        return tuple(
            axis
            for at, name in enumerate(named)
            if name in registered.contracted
            for axis in claim.layout.axes_of(at)
            if self.mesh.kind(axis) == "model" and self.mesh[axis] > 1
        )

    # Borders.

    def _borders(self, tensors: Mapping[str, TensorLayout]) -> dict[tuple[str, Side], Border]:
        asked = self._asked_for()
        borders: dict[tuple[str, Side], Border] = {}
        for name in dict.fromkeys(map(self.index.module_name, self.index.modules.values())):
            found = asked.get((name, "input")), asked.get((name, "output")) or self._derived(name, tensors)
            borders |= {(name, border.side): border for border in found if border is not None}
        return borders

    def _asked_for(self) -> dict[tuple[str, Side], Border]:
        borders: dict[tuple[str, Side], Border] = {}
        for entry, match in self.matches.items():
            for module_name, side in match.borders:
                layout = self.maker.for_border(entry, module_name)
                border = Border(module_name, side, layout, entry.key, "asked for")
                before = borders.get((module_name, side), border)
                if before.layout != layout and entry.key not in self.rules.override:
                    raise _border_told_twice(before, border)
                borders[module_name, side] = border
        return borders

    def _derived(self, module_name: str, tensors: Mapping[str, TensorLayout]) -> Border | None:
        """The output border that follows from the layouts of a module's own parameters."""
        live = [axis for axis in self.mesh.model_axes if self.mesh[axis] > 1]
        leaves = {attr: self.index.leaf[full] for attr, full in self.index.own[module_name].items()}
        parameters = [leaf for leaf in leaves.values() if leaf.kind == "parameter"]
        if not (live and parameters):
            return None
        registered = dims_of(self.index.modules[module_name])
        summed = dict.fromkeys(
            axis
            for attr, leaf in leaves.items()
            if registered is not None
            for axis in self._contracted_axes(registered, attr, leaf)
        )
        if summed:
            reason = f"sum over {', '.join(summed)} of a row-parallel output"
            return Border(module_name, "output", Layout.parse("..."), None, reason)
        if all(tensors[leaf.name].layout.axes.isdisjoint(live) for leaf in parameters):
            return Border(module_name, "output", None, None, "gradient border")
        return None

    # Rules that say nothing.

    def _check_matches(self) -> None:
        for entry, match in self.matches.items():
            if match.empty and match.containers:
                raise self._only_containers(entry, match.containers)
            if match.empty and entry.key not in self.rules.optional:
                raise self._matches_nothing(entry)

    def _only_containers(self, entry: Entry, containers: tuple[str, ...]) -> RuleError:
        inside = f"{containers[0]}." if containers[0] else ""
        shapes = {name: tuple(t.tensor.shape) for name, t in self.index.leaf.items() if name.startswith(inside)}
        within = f"; inside it are {summary(shapes)}" if shapes else ""
        return RuleError(
            f'Rule {entry} names module "{containers[0]}" ({type(self.index.modules[containers[0]]).__qualname__}), '
            f'which has no parameters of its own{within}. Name what is inside; "{entry.key}.**" names all of it.'
        )

    def _matches_nothing(self, entry: Entry) -> RuleError:
        shapes = {name: tuple(leaf.tensor.shape) for name, leaf in self.index.leaf.items()}
        sides = " A key that ends in .input or .output names a border of a module." if border_key(entry.key) else ""
        return RuleError(
            f"Rule {entry} matches nothing in {type(self.index.model).__qualname__}, which has {summary(shapes)}."
            f"{sides} Correct the pattern, remove the rule, or list it in optional=(...)."
            f"{self._nearest(entry.key)}"
        )

    def _nearest(self, key: str) -> str:
        if key.startswith("re:"):
            return ""
        border = border_key(key)
        base, side = (str(border[0]), f".{border[1]}") if border else (key, "")
        length = base.count(".") + 1
        endings = dict.fromkeys(".".join(name.split(".")[-length:]) + side for name in self.matcher.nearest_names())
        return nearest(base.removeprefix("^") + side, endings)


def axes_mentioned(entry: Entry, rules: Rules) -> tuple[str, ...]:
    """The axes that a rule names, itself or through the rule set's `axes`; the default axis only where it is used."""
    match entry.value:
        case Text(_, layout):
            factors = [factor for dim in layout.dims if isinstance(dim, Dim) for factor in dim.factors]
            used = [axis for f in factors for axis in f.axes or rules.axis_uses.get(f.name, AxisUse(())).axes]
            return tuple(dict.fromkeys(used))
        case Placed(by_axis):
            return tuple(axis or rules.axis for axis, placement in by_axis if not isinstance(placement, Replicate))
        case Role("colwise" | "rowwise"):
            return (rules.axis,)
    return ()


def _check_axes(rules: Rules, mesh: MeshShape) -> None:
    declared = tuple(dict.fromkeys((*(axis for use in rules.axis_uses.values() for axis in use.axes), rules.axis)))
    for entry in rules.entries:
        for axis in axes_mentioned(entry, rules):
            if axis in mesh and mesh.kind(axis) == "pipeline":
                raise RuleError(
                    f'Rule {entry}: "{axis}" is a pipeline axis, which splits the list of modules and no tensor. Use '
                    f"one of {_quoted((*mesh.data_axes, *mesh.model_axes))}."
                )
            if axis not in mesh and axis not in declared:
                raise RuleError(
                    f'Rule {entry}: axis "{axis}" is neither on the mesh, which has {_quoted(mesh.names)}, nor '
                    f"declared by the rules, which have {_quoted(declared)}. Correct the name; if a mesh may lack the "
                    "axis, declare it, as in "
                    f'axes={{"name of a dim": "{axis}"}}.{nearest(axis, (*mesh.names, *declared))}'
                )


def _cuts(layout: Layout) -> tuple[Any, ...]:
    """What a layout does to each dim, whatever the names: each split factor and how many pieces lie outside of it."""
    return tuple(tuple(_cuts_of(dim)) for dim in layout.dims if isinstance(dim, Dim))


def _cuts_of(dim: Dim) -> Iterator[tuple[int, tuple[str, ...]]]:
    outside = 1
    for factor in dim.factors:
        if factor.axes:
            yield outside, factor.axes
        outside *= factor.size or 1


def _uneven(layout: Layout, shape: tuple[int, ...], mesh: MeshShape) -> bool:
    return any(size % math.prod(mesh[axis] for axis in layout.axes_of(at)) for at, size in enumerate(shape))


def _role_of(registered: ModuleDims, name: str, at: int) -> str:
    words = name.strip("()").split()
    what = f"dim {at}" if name == "_" else f"{name} dim" if len(words) == 1 else f"{name}"
    if registered.output in words:
        return f"column-parallel ({what})"
    return f"row-parallel ({what})" if name in registered.contracted else f"split ({what})"


def _told_twice(leaf: Leaf, first: Claim, second: Claim) -> RuleError:
    shape = tuple(leaf.tensor.shape)
    said = f'rule {first.entry} says "{first.layout}"', f'rule {second.entry} says "{second.layout}"'
    if first.name != second.name:
        return RuleError(
            f'"{first.name}" and "{second.name}" are tied: one tensor, global shape {shape}, told two layouts. For the '
            f"first {said[0]}, for the second {said[1]}. Give both the same layout, or give a rule to one of them only."
        )
    return RuleError(
        f'"{leaf.name}", global shape {shape}, is told two layouts: {said[0]}; {said[1]}. Narrow one of the patterns, '
        f'or let the later rule win with override=("{second.entry.key}",).'
    )


def _border_told_twice(first: Border, second: Border) -> RuleError:
    return RuleError(
        f'The {first.side} of module "{first.module}" is told two layouts: rule "{first.rule}" says "{first.layout}"; '
        f'rule "{second.rule}" says "{second.layout}". Narrow one of the patterns, or let the later rule win with '
        f'override=("{second.rule}",).'
    )


def _unmatched(tensors: Iterable[TensorLayout]) -> RuleError:
    left = {each.name: each.global_shape for each in tensors}
    total = readable_bytes(sum(each.global_bytes for each in tensors))
    return RuleError(
        f"{len(left)} parameter{'s' * (len(left) > 1)} ({total}) match no rule: {summary(left)}. Give each a rule "
        '("replicate" keeps it whole on every rank), or pass unmatched="replicate".'
    )


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)

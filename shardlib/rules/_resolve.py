"""Resolution of rules on a model and a mesh: one layout for every tensor and every border, or an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardlib._mesh_shape import MeshShape
from shardlib.layout import Layout
from shardlib.rules import _refusals
from shardlib.rules._adapters import following, has_adapters
from shardlib.rules._claims import Claim, axes_named, may_replicate, same_cuts
from shardlib.rules._layouts import LayoutMaker
from shardlib.rules._match import Entry, Match, Matcher
from shardlib.rules._meaning import contracted_axes, replicated_note, split_note
from shardlib.rules._model import Leaf, ModelIndex
from shardlib.rules._resolution import Border, Resolution, Side, TensorLayout
from shardlib.rules._rule_set import RuleSet
from shardlib.rules._sizes import SizeFinder
from shardlib.rules._tree_node import TreeNode
from shardlib.rules.dims import ModuleDims, dims_of

__all__ = ["Resolver"]

# A replicated activation, of any number of dims.
_REPLICATED = Layout.parse("...")


class Resolver:
    """One resolution; its steps are kept so that `explain` and `coverage` can show them.

    With `strict=False`, rules that match nothing and parameters without a rule are recorded and do not raise.
    """

    def __init__(self, rules: RuleSet, model: Any, mesh: MeshShape, *, strict: bool = True) -> None:
        self.rules, self.mesh, self.strict = rules, mesh, strict
        self._check_axes()
        self.index = model if isinstance(model, ModelIndex) else ModelIndex(model)
        sizes = SizeFinder(self.index, rules.sizes)
        self.maker = LayoutMaker(self.index, mesh, rules.axis_uses, sizes, rules.axis)
        matcher = Matcher(self.index)
        self.matches = {entry: matcher.match(entry) for entry in rules.entries}
        self._check_matches()
        self.claims = self._claims()
        self.chosen = {leaf.name: self._choose(leaf) for leaf in self.index.leaves}

    def resolution(self) -> Resolution:
        """Return the chosen layouts and the borders that follow from them."""
        tensors = {leaf.name: self._tensor(leaf) for leaf in self.index.leaves}
        resolution = Resolution(self.mesh, tensors, self._borders(tensors))
        if self.strict and self.rules.unmatched == "error" and resolution.unmatched:
            raise _refusals.unmatched(resolution.unmatched)
        return resolution

    # Checks.

    def _check_axes(self) -> None:
        uses = self.rules.axis_uses
        declared = tuple(dict.fromkeys((*(axis for use in uses.values() for axis in use.axes), self.rules.axis)))
        for entry in self.rules.entries:
            for axis in axes_named(entry, uses, self.rules.axis):
                if refusal := _refusals.axis_refused(entry, axis, self.mesh, declared):
                    raise refusal

    def _check_matches(self) -> None:
        for entry, match in self.matches.items() if self.strict else ():
            optional = entry.key in self.rules.optional
            if refusal := _refusals.match_refused(entry, match, self.index, optional=optional):
                raise refusal

    # Tensors.

    def _claims(self) -> dict[str, list[Claim]]:
        """Return the claims on each tensor, by its canonical name and in the order of the rules."""
        claims: dict[str, list[Claim]] = {leaf.name: [] for leaf in self.index.leaves}
        for entry, match in self.matches.items():
            for name, layout in self._laid_out(entry, match):
                claims[self.index.leaf[name].name].append(Claim(entry, name, layout))
        return self._with_adapters(claims) if has_adapters(self.index.model) else claims

    def _with_adapters(self, claims: dict[str, list[Claim]]) -> dict[str, list[Claim]]:
        """Add claims on adapters that no rule names, which follow from the claims on their layer's weight."""
        made = {name: list(given) for name, given in claims.items()}
        for claim in (claim for given in claims.values() for claim in given):
            for name, layout in following(self.index, claim.name, claim.layout, self.mesh):
                leaf = self.index.leaf[name].name
                if not claims[leaf]:
                    made[leaf].append(Claim(claim.entry, name, layout))
        return made

    def _laid_out(self, entry: Entry, match: Match) -> Iterator[tuple[str, Layout]]:
        # A pattern such as "attn.**" finds a module and its parameters; what it says by name is more precise.
        by_name = set(match.tensors)
        for name in match.tensors:
            yield name, self.maker.for_tensor(entry, name)
        for module_name in match.modules:
            own = self.index.own[module_name]
            if by_name.issuperset(own.values()):
                continue
            for attribute, layout in self.maker.for_module(entry, module_name).items():
                if own[attribute] not in by_name:
                    yield own[attribute], layout

    def _choose(self, leaf: Leaf) -> Claim | None:
        """Return the last claim of a rule that overrides, else the claim that all others agree with."""
        chosen: Claim | None = None
        for claim in self._not_overridden(self.claims[leaf.name]):
            if chosen is not None and not same_cuts(chosen.layout, claim.layout):
                raise _refusals.conflicting_layouts(leaf.name, tuple(leaf.tensor.shape), chosen, claim)
            chosen = chosen or claim
        return chosen

    def _not_overridden(self, claims: list[Claim]) -> list[Claim]:
        """Return the claims without those that a later rule overrides."""
        overriding = [i for i, claim in enumerate(claims) if claim.entry.key in self.rules.override]
        if not overriding:
            return claims
        last = claims[overriding[-1]].entry
        return [claim for i, claim in enumerate(claims) if claim.entry == last or i > overriding[-1]]

    def _tensor(self, leaf: Leaf) -> TensorLayout:
        claim = self.chosen[leaf.name]
        shape = tuple(leaf.tensor.shape)
        return TensorLayout(
            name=leaf.name,
            kind=leaf.kind,
            global_shape=shape,
            dtype=leaf.tensor.dtype,
            requires_grad=leaf.tensor.requires_grad,
            persistent=leaf.persistent,
            tied=leaf.names,
            layout=claim.layout if claim else Layout.replicate(len(shape)),
            rule=claim.entry.key if claim else None,
            note=self._note(leaf, claim),
        )

    def _note(self, leaf: Leaf, claim: Claim | None) -> str:
        if claim is None:
            return "replicated: buffer" if leaf.kind == "buffer" else "replicated: unmatched"
        module_name, module, attribute = self.index.owner(claim.name)
        registered = dims_of(module)
        if claim.layout.axes:
            return split_note(claim.layout, leaf.tensor.shape, registered, attribute, self.mesh)
        named = axes_named(claim.entry, self.rules.axis_uses, self.rules.axis)
        known = registered is not None and attribute in registered.tensors
        return replicated_note(
            absent=() if any(axis in self.mesh for axis in named) else named,
            added_to_a_sum=known and bool(self._summed(module_name, registered)),
            optional=may_replicate(claim.entry, self.rules.axis_uses),
        )

    # Borders.

    def _borders(self, tensors: Mapping[str, TensorLayout]) -> dict[tuple[str, Side], Border]:
        asked = self._asked_for()
        if isinstance(self.index.model, TreeNode):
            if self.strict and asked:
                raise _refusals.no_activations(next(iter(asked.values())))
            return {}
        borders: dict[tuple[str, Side], Border] = {}
        for name in dict.fromkeys(map(self.index.module_name, self.index.modules.values())):
            found = asked.get((name, "input")), asked.get((name, "output")) or self._derived(name, tensors)
            borders |= {(name, border.side): border for border in found if border is not None}
        return borders

    def _asked_for(self) -> dict[tuple[str, Side], Border]:
        borders: dict[tuple[str, Side], Border] = {}
        for entry, match in self.matches.items():
            for module_name, side in match.borders:
                border = Border(
                    module_name, side, self.maker.for_border(entry, module_name), entry.key, "set by the rule"
                )
                before = borders.get((module_name, side), border)
                if before.layout != border.layout and entry.key not in self.rules.override:
                    raise _refusals.conflicting_borders(before, border)
                borders[module_name, side] = border
        return borders

    def _derived(self, module_name: str, tensors: Mapping[str, TensorLayout]) -> Border | None:
        """Return the output border that follows from the layouts of a module's own parameters."""
        live = [axis for axis in self.mesh.model_axes if self.mesh[axis] > 1]
        leaves = [self.index.leaf[full] for full in self.index.own[module_name].values()]
        parameters = [tensors[leaf.name] for leaf in leaves if leaf.kind == "parameter"]
        if not (live and parameters):
            return None
        if summed := self._summed(module_name, dims_of(self.index.modules[module_name])):
            reason = f"sum over {', '.join(summed)} of a row-parallel output"
            return Border(module_name, "output", _REPLICATED, None, reason)
        if all(each.layout.axes.isdisjoint(live) for each in parameters):
            return Border(module_name, "output", None, None, "its gradient is reduced here")
        return None

    def _summed(self, module_name: str, registered: ModuleDims | None) -> list[str]:
        """Return the axes over which a module's output is a pending sum, because they split a dim that it contracts."""
        if registered is None:
            return []
        chosen = {attr: self.chosen[self.index.leaf[name].name] for attr, name in self.index.own[module_name].items()}
        return list(
            dict.fromkeys(
                axis
                for attribute, claim in chosen.items()
                if claim is not None
                for axis in contracted_axes(claim.layout, registered, attribute, self.mesh)
            )
        )

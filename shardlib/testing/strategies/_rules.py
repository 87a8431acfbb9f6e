"""Rules for any model."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st
from torch import nn

from shardlib._mesh_shape import MeshLike, MeshShape
from shardlib.errors import InputError
from shardlib.rules import Rules
from shardlib.testing.strategies._draws import among, often
from shardlib.testing.strategies._facts import Facts, Unit, facts_of
from shardlib.testing.strategies._layouts import draw_layout

__all__ = ["draw_rules", "rule_sets"]


def rule_sets(model: nn.Module, mesh: MeshLike, batch: Any = None) -> st.SearchStrategy[Rules]:
    """Generate rules for a model on a mesh: any valid assignment of its model axes to dims, sensible or not.

    For each module a role, a text about its dims, or a layout for each parameter and buffer by itself; for module
    borders a layout of the activation. Repeated blocks have rules by patterns, or each its own. Left out is what
    shardlib refuses: two layouts for tied parameters, a fused dim sharded over two axes (until torch gathers it right),
    an uneven dim whose axes stand in another order than the mesh's.

    Shrinks towards no rule at all, every tensor replicated.

    Args:
        model: any module; looked at, not changed.
        mesh: the mesh, or its text.
        batch: an example of what the model is called with. With it the model is run once, to see which activations
            enter and leave which modules; without it activations get no rules.

    Raises:
        InputError: the model is not a module.

    >>> from hypothesis import find
    >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    >>> find(rule_sets(model, "tp=2"), lambda rules: True)
    Rules({}, unmatched='replicate')
    >>> find(rule_sets(model, "tp=2"), lambda rules: rules.resolve(model, "tp=2").tensors["2.bias"].layout.axes)
    Rules({"^2": "colwise"}, unmatched='replicate')
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"rule_sets() was given a {type(model).__name__}; give a torch.nn.Module.")
    return draw_rules(facts_of(copy.deepcopy(model), batch), MeshShape.of(mesh))


@st.composite
def draw_rules(draw: st.DrawFn, facts: Facts, mesh: MeshShape) -> Rules:
    axes = mesh.model_axes
    # Drawn where it decides nothing, too: hypothesis takes what needs fewer draws for simpler, and a mesh without model
    # axes is not simpler than one with nothing split.
    if not (draw(often) and axes):
        return Rules({}, unmatched="replicate")
    by_pattern = not draw(st.booleans())
    rules: dict[str, str] = {}
    for unit in facts.units[by_pattern]:
        rules |= _unit_rules(draw, unit, mesh)
    borders = facts.borders[by_pattern]
    activations = {}
    if draw(st.booleans()) if borders.keys else False:
        for key in draw(st.lists(among(borders.keys), min_size=1, max_size=2, unique=True)):
            shape = borders.shapes[key]
            activations[key] = draw_layout(draw, shape, mesh, axes, ("_",) * len(shape), shared=mesh.data_ranks).text
    # Roles speak of one axis.
    axis = draw(among(axes)) if set(rules.values()) & {"colwise", "rowwise"} else axes[0]
    return Rules(rules, activations=activations, unmatched="replicate", axis=axis)


def _unit_rules(draw: st.DrawFn, unit: Unit, mesh: MeshShape) -> dict[str, str]:
    kind = draw(among(("whole", *["module"] * bool(unit.key), *unit.roles, "tensors")))
    if kind == "whole":
        return {}
    if kind in unit.roles:
        return {unit.key: kind}
    tensors = unit.tensors if kind == "tensors" else unit.tensors[:1]
    drawn = {t.key: draw_layout(draw, t.shape, mesh, mesh.model_axes, t.dims, fused=1, shared=1) for t in tensors}
    if kind == "module":
        drawn = {unit.key: drawn[tensors[0].key]}
    return {key: layout.text for key, layout in drawn.items() if layout.axes}

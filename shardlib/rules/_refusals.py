"""Errors for rules that do not give a model one unambiguous layout."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from shardlib._mesh_shape import MeshShape
from shardlib.errors import RuleError, nearest
from shardlib.rules._claims import Claim
from shardlib.rules._match import Entry, Match, Matcher, border_key
from shardlib.rules._model import ModelIndex, called, readable_bytes, summary
from shardlib.rules._resolution import Border, TensorLayout
from shardlib.rules._tree_node import TreeNode
from shardlib.rules.trees import dotted_path

__all__ = ["axis_refused", "conflicting_borders", "conflicting_layouts", "match_refused", "no_activations", "unmatched"]


def axis_refused(entry: Entry, axis: str, mesh: MeshShape, declared: Sequence[str]) -> RuleError | None:
    """Return the error for a rule that splits over an axis it may not use; None when it may."""
    if axis in mesh and mesh.kind(axis) == "pipeline":
        return RuleError(
            f'Rule {entry}: "{axis}" is a pipeline axis, which divides the list of modules, not a tensor. Use one of '
            f"{_quoted((*mesh.data_axes, *mesh.model_axes))}."
        )
    if axis in mesh or axis in declared:
        return None
    return RuleError(
        f'Rule {entry}: axis "{axis}" is neither on the mesh, which has {_quoted(mesh.names)}, nor declared by the '
        f"rules, which have {_quoted(declared)}. Correct the name; if a mesh may lack the axis, declare it, as in "
        f'axes={{"name of a dim": "{axis}"}}.{nearest(axis, (*mesh.names, *declared))}'
    )


def match_refused(entry: Entry, match: Match, index: ModelIndex, *, optional: bool) -> RuleError | None:
    """Return the error for a rule that matches too little; None when it matches enough."""
    if match.empty and match.containers:
        return _only_containers(entry, match.containers[0], index)
    if match.empty and not optional:
        return _matches_nothing(entry, index)
    return None


def conflicting_layouts(name: str, global_shape: tuple[int, ...], first: Claim, second: Claim) -> RuleError:
    """Return the error for two rules that disagree on one tensor, or on tied ones."""
    claims = f'rule {first.entry} gives "{first.layout}"', f'rule {second.entry} gives "{second.layout}"'
    if first.name != second.name:
        return RuleError(
            f'"{first.name}" and "{second.name}" are tied: one tensor, global shape {global_shape}, given two layouts. '
            f"For the first, {claims[0]}; for the second, {claims[1]}. Give both the same layout, or give a rule to "
            "one of them only."
        )
    key = second.entry.key
    advice = f'Narrow one of the patterns, or let the later rule win with override=("{key}",).'
    if key in ("*", "**") and not second.layout.axes:  # it would win everywhere
        advice = (
            f'"{key}" matches every tensor: leave it out, and replicate what no rule matches by '
            'Rules(..., unmatched="replicate").'
        )
    return RuleError(f'"{name}", global shape {global_shape}, is given two layouts: {claims[0]}; {claims[1]}. {advice}')


def conflicting_borders(first: Border, second: Border) -> RuleError:
    """Return the error for two rules that disagree on one module border."""
    return RuleError(
        f'The {first.side} of module "{first.module}" is given two layouts: rule "{first.rule}" gives '
        f'"{first.layout}"; rule "{second.rule}" gives "{second.layout}". Narrow one of the patterns, or let the '
        f'later rule win with override=("{second.rule}",).'
    )


def no_activations(border: Border) -> RuleError:
    """Return the error for a rule that lays out an activation of a tree of arrays."""
    return RuleError(
        f'Rule "{border.rule}" lays out the {border.side} of "{border.module}", and a tree of arrays has no '
        "activations. Leave the rule out; inside the model, jax.lax.with_sharding_constraint does this."
    )


def unmatched(tensors: Sequence[TensorLayout]) -> RuleError:
    """Return the error for parameters without a rule, where each needs one."""
    left = {each.name: each.global_shape for each in tensors}
    total = readable_bytes(sum(each.global_bytes for each in tensors))
    return RuleError(
        f"{len(left)} parameter{'s' * (len(left) > 1)} ({total}) match no rule: {summary(left)}. Give each a rule "
        '("replicate" keeps a full copy on every rank), or pass Rules(..., unmatched="replicate").'
    )


def _only_containers(entry: Entry, container: str, index: ModelIndex) -> RuleError:
    inside = f"{container}." if container else ""
    shapes = {name: shape for name, shape in _shapes(index).items() if name.startswith(inside)}
    within = f"; inside it are {summary(shapes)}" if shapes else ""
    return RuleError(
        f'Rule {entry} names module "{container}" ({called(index.modules[container])}), which has no '
        f'parameters of its own{within}. Name what is inside; "{entry.key}.**" names all of it.'
    )


def _matches_nothing(entry: Entry, index: ModelIndex) -> RuleError:
    sides = " A key that ends in .input or .output names an activation of a module." if border_key(entry.key) else ""
    return RuleError(
        f"Rule {entry} matches nothing in {called(index.model)}, which has "
        f"{summary(_shapes(index))}.{sides} Correct the pattern, remove the rule, or list it in "
        f"optional=(...).{_nearest(entry.key, index)}"
    )


def _nearest(key: str, index: ModelIndex) -> str:
    if "/" in key and isinstance(index.model, TreeNode):
        written = "" if key.startswith(("re:", "tensor re:")) else f': write "{dotted_path(key)}"'
        return f" Names of a tree have dots where keys of haiku have slashes{written}."
    if key.startswith(("re:", "tensor re:")):
        return ""
    border = border_key(key)
    base, side = (str(border[0]), f".{border[1]}") if border else (key, "")
    length = base.count(".") + 1
    names = Matcher(index).readable_names()
    if any(f".{name}".endswith(f".{key.removeprefix('^')}") for name in names):
        return f' The name has characters that a pattern reads otherwise; write "tensor re:.*{re.escape(key)}".'
    return nearest(base.removeprefix("^") + side, {".".join(name.split(".")[-length:]) + side for name in names})


def _shapes(index: ModelIndex) -> dict[str, tuple[int, ...]]:
    return {name: tuple(leaf.tensor.shape) for name, leaf in index.leaf.items()}


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)

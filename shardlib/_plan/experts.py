"""Experts that a rule splits over an expert axis: their modules, and the rules that are refused."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from shardlib._mesh_shape import MeshShape
from shardlib._plan.rows import Row
from shardlib.errors import PlanError
from shardlib.layout import Dim
from shardlib.rules import Border
from shardlib.rules._adapters import adapts_parameters

if TYPE_CHECKING:
    from torch import nn

__all__ = ["check_experts", "expert_axis", "expert_notes", "expert_rows", "stacked_experts"]


def expert_rows(rows: Iterable[Row], mesh: MeshShape) -> dict[str, list[Row]]:
    """Return the rows that an expert axis splits, by their module.

    >>> from shardlib.layout import Layout
    >>> shape, layout = (4, 2, 2), Layout.parse("expert@ep a b")
    >>> row = Row("mlp.up", "parameter", shape, None, True, True, ("mlp.up",), layout, layout, layout, layout)
    >>> list(expert_rows([row], MeshShape("ep=2")))
    ['mlp']
    """
    found: dict[str, list[Row]] = {}
    for row in rows if mesh.expert_axes else ():
        if _axes(row, mesh):
            found.setdefault(row.name.rpartition(".")[0], []).append(row)
    return found


def expert_axis(row: Row, mesh: MeshShape) -> str:
    """Return the expert axis that splits a row of `expert_rows`."""
    (axis,) = _axes(row, mesh)
    return axis


def stacked_experts(module: nn.Module) -> int | None:
    """Return the number of experts that a module holds, or None if it is not a module of experts.

    A module of experts has the signature of experts, and no parameters but its own, whose first dim counts experts.
    """
    params = dict(module.named_parameters())
    counts = {param.shape[0] if param.ndim > 1 else 0 for param in params.values()}
    is_own = not any("." in name for name in params)
    return counts.pop() or None if len(counts) == 1 and is_own and _takes_tokens(module) else None


def expert_notes(rows: Iterable[Row], mesh: MeshShape) -> tuple[str, ...]:
    """Return a note on the messages of experts, which depend on the routing of tokens."""
    spread = expert_rows(rows, mesh)
    if not spread:
        return ()
    (axis,) = {axis for own in spread.values() for row in own for axis in _axes(row, mesh)}
    count = f"each of the {len(spread)} modules of experts" if len(spread) > 1 else "the module of experts"
    others = mesh[axis] - 1
    return (
        f'Over "{axis}" forward sends tokens to the ranks of their experts and results back, and backward sends their '
        f"gradients: {count} sends a token once to each other rank that has experts of it, which are at most {others} "
        f"{'ranks' if others > 1 else 'rank'}, and no more than the experts that the token chooses.",
    )


def check_experts(model: nn.Module, rows: Sequence[Row], borders: Iterable[Border], mesh: MeshShape) -> None:
    """Refuse rules that shard anything other than experts over an expert axis.

    Raises:
        PlanError: an axis shards another dim than the first, or not all parameters of a module in the same way; the
            module does not have the signature of experts; an activation would be sharded.
    """
    for border in borders:
        if border.layout is not None and (axes := border.layout.axes & {*mesh.expert_axes}):
            raise PlanError(
                f'The {border.side} of "{border.module}" has the layout "{border.layout}", and "{min(axes)}" carries '
                "different tokens on each of its ranks, as data axes do: only experts are sharded over it. Take the "
                "axis out of the rule."
            )
    for name, own in expert_rows(rows, mesh).items():
        for row in own:
            _refuse_row(row, mesh)
        if adapts_parameters(model, name):
            raise PlanError(
                f'"{own[0].name}" is sharded over "{_axes(own[0], mesh)[0]}", and peft adapts it by target_parameters: '
                "it adds to the parameters of all experts, and each rank would hold some of them. Shard the experts "
                "over a tensor-parallel axis, or adapt other layers."
            )
        _refuse_module(name, model.get_submodule(name), own, rows, mesh)


def _axes(row: Row, mesh: MeshShape) -> list[str]:
    return [axis for axis in mesh.expert_axes if axis in row.compute.axes and mesh[axis] > 1]


def _refuse_row(row: Row, mesh: MeshShape) -> None:
    axes, first = _axes(row, mesh), row.compute.dims[0]
    whole_dim = isinstance(first, Dim) and not first.fused and list(row.compute.axes_of(0)) == axes
    if row.kind != "parameter" or len(row.global_shape) < 2 or len(axes) != 1 or not whole_dim:
        raise PlanError(
            f'"{row.name}", a {row.kind} of global shape {row.global_shape}, has the layout "{row.compute}". Only the '
            f'dim that counts experts can be sharded over "{axes[0]}": write this axis, and no other one, at the first '
            'dim of a parameter of experts, as in "expert@ep out in". Other tensors are replicated over it, as over '
            "data axes."
        )
    if len(row.tied) > 1:
        raise PlanError(
            f'"{row.name}" is tied to "{row.tied[1]}", and experts that are sharded over "{axes[0]}" belong to one '
            "module. Untie them, or take the axis out of the rule."
        )
    if row.global_shape[0] < mesh[axes[0]]:
        raise PlanError(
            f'"{row.name}" has {row.global_shape[0]} experts, fewer than the {mesh[axes[0]]} ranks of "{axes[0]}". '
            "Make the axis smaller, and a data axis larger."
        )


def _refuse_module(name: str, module: nn.Module, own: list[Row], rows: Sequence[Row], mesh: MeshShape) -> None:
    if not _takes_tokens(module):
        raise PlanError(
            f'"{name}" ({type(module).__name__}) has its experts sharded over "{_axes(own[0], mesh)[0]}", but its '
            "forward cannot be given the tokens that other ranks send. Write forward(self, tokens, numbers, weights): "
            "tokens (token, embed), the numbers of their experts and the weights of these (token, choice); it returns "
            "(token, embed)."
        )
    prefix = f"{name}." if name else ""
    count, layouts = own[0].global_shape[0], {(row.global_shape[0], *row.compute.axes_of(0)) for row in own}
    here = [row for row in rows if row.name.startswith(prefix) and row.kind == "parameter" and row not in own]
    left = [row for row in here if row.global_shape[:1] == (count,)]
    if left or len(layouts) > 1:
        other = left[0] if left else next(row for row in own if row.global_shape[0] != count)
        raise PlanError(
            f'"{own[0].name}" has the layout "{own[0].compute}", and "{other.name}", of the same module and of global '
            f'shape {other.global_shape}, has "{other.compute}". All experts of a module go to the same ranks: give '
            "both the same axis at their first dim."
        )
    if here:
        raise PlanError(
            f'"{here[0].name}" of global shape {here[0].global_shape} belongs to all experts of "{name}", which are '
            f'sharded over "{_axes(own[0], mesh)[0]}": each rank would have the gradient of other tokens. Put it into '
            "a module outside of the experts'."
        )


def _takes_tokens(module: nn.Module) -> bool:
    """Return whether a forward takes three tensors, which may have defaults, and has no other required argument."""
    try:
        given = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [p for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    return len(required) == 3 or len(required) < 3 == len(positional)

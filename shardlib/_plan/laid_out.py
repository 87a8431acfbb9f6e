"""The rows of a plan and the repeated part of its model, from the layouts that rules gave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardlib._mesh_shape import MeshShape
from shardlib._plan.memory import Blocks
from shardlib._plan.rows import Row
from shardlib._plan.units import unit_of
from shardlib.rules import Resolution, TensorLayout
from shardlib.rules._model import is_layer

if TYPE_CHECKING:
    from torch import nn

__all__ = ["find_blocks", "rows_of"]


def rows_of(resolution: Resolution, shape: MeshShape, units: Sequence[str]) -> tuple[Row, ...]:
    """Return a row for each tensor. Data axes but those of experts do not split it in computation."""
    known, gathered = frozenset(units), frozenset(shape.data_axes).difference(shape.expert_axes)
    return tuple(_row(tensor, gathered, known) for tensor in resolution.tensors.values())


def _row(tensor: TensorLayout, gathered: frozenset[str], units: frozenset[str]) -> Row:
    """Return the row of a tensor; the axes `gathered` do not split it in computation."""
    layout = tensor.layout
    trained = tensor.kind == "parameter" and tensor.requires_grad
    return Row(
        name=tensor.name,
        kind=tensor.kind,
        global_shape=tuple(tensor.global_shape),
        dtype=tensor.dtype,
        requires_grad=tensor.requires_grad,
        persistent=tensor.persistent,
        tied=tensor.tied,
        stored=layout,
        compute=layout.with_axes_dropped(gathered),
        grad=layout if trained else None,
        state=layout if trained else None,
        rule=tensor.rule,
        note=_note(tensor),
        reshard=layout.axes.isdisjoint(gathered) or unit_of(tensor.tied, units) != "",
    )


def _note(tensor: TensorLayout) -> str:
    words = [
        tensor.note,
        f"also {', '.join(tensor.tied[1:])}" if tensor.tied[1:] else "",
        "frozen" if tensor.kind == "parameter" and not tensor.requires_grad else "",
    ]
    return "; ".join(word for word in words if word)


def find_blocks(model: nn.Module) -> Blocks | None:
    """Return the `ModuleList` with most parameters, if there is one with at least two blocks."""
    lists = {name: m for name, m in model.named_modules() if is_layer(m, "ModuleList") and len(m) > 1}
    if not lists:
        return None
    prefix, module = max(lists.items(), key=lambda item: sum(p.numel() for p in item[1].parameters()))
    names = [name for name, _ in _named_tensors(model)]
    inside = [i for i, name in enumerate(names) if name.startswith(f"{prefix}.")]
    return Blocks(prefix, len(module), tuple(names[inside[-1] + 1 :]) if inside else ())


def _named_tensors(model: nn.Module) -> Any:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)

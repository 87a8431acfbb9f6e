"""Records of ops that ran on all-gathered operands, and one warning for each op."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shardlib.errors import warn

__all__ = ["GatheredOp", "ShardlibGatherWarning", "note_gather", "record"]


class ShardlibGatherWarning(UserWarning):
    """An op had no sharding rule for its operands' placements, so every rank all-gathered them and repeated the
    work."""


@dataclass(frozen=True)
class GatheredOp:
    """One op that every rank computed on all-gathered operands.

    Attributes:
        op: its name, as in "aten.nonzero.default".
        reason: the reason why no rule applied.
        placements: each tensor operand's placements, as text.
        shapes: each tensor operand's global shape.
    """

    op: str
    reason: str
    placements: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


_LISTENERS: dict[int, list[GatheredOp]] = {}  # by identity, since two empty lists are equal
_WARNED: set[str] = set()


@contextmanager
def record() -> Iterator[list[GatheredOp]]:
    """Collect every op inside the block that ran on all-gathered operands, in order, repeats included.

    Example:
        >>> with record() as gathered:
        ...     pass
        >>> gathered
        []
    """
    listener: list[GatheredOp] = []
    _LISTENERS[id(listener)] = listener
    try:
        yield listener
    finally:
        del _LISTENERS[id(listener)]


def note_gather(op: GatheredOp, *, loud: bool) -> None:
    for listener in _LISTENERS.values():
        listener.append(op)
    if loud and op.op not in _WARNED:
        _WARNED.add(op.op)
        operands = ", ".join(f"{list(shape)} {where}" for shape, where in zip(op.shapes, op.placements, strict=True))
        warn(
            f"{op.op} ran on all-gathered operands, so that every rank holds them in full and repeats the work, "
            f"because {op.reason} (operands: {operands}). The numbers are right. To make it fast, redistribute before "
            "the op, or register a rule with shardlib.engine.ops.rule. Each op is named once.",
            ShardlibGatherWarning,
        )

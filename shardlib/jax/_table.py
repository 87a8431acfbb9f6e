"""The table of lowerings: for each op of a `torch.export` graph, a function on JAX arrays. Open to users."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from shardlib.engine._torch import Op
from shardlib.errors import InputError

__all__ = ["Lowering", "find_lowering", "known_ops", "lowering"]

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Lowering:
    """An entry of the table.

    Attributes:
        function: on arrays and Python values, with the op's own arguments.
        elementwise: each element of the result depends on the same element of the operands alone, broadcasting aside.
        random: whether it draws, and takes a JAX key as the keyword `key`.
        constrained: whether it takes the `Constraints` of its mesh as the keyword `constraints`.
    """

    function: Callable[..., Any]
    elementwise: bool = False
    random: bool = False
    constrained: bool = False


_TABLE: dict[str, Lowering] = {}


def lowering(*ops: Any, elementwise: bool = False, random: bool = False, constrained: bool = False) -> Callable[[F], F]:
    """Register the lowering of a torch op to JAX; a later registration replaces an earlier one.

    The function is given the op's arguments in the op's order, with `jax.Array`s in place of tensors, and returns an
    array, or a tuple where the op has several results. The result is cast to the dtype that torch gives it. In-place
    ops and ops on views do not arrive here: the graph has them as functions already.

    Args:
        *ops: `torch.ops.library.op.overload`, or the text "library::op.overload" for an op that may not be loaded.
        elementwise: see `Lowering`; values of fused layouts then pass through unharmed.
        random: the function takes `key=`, one for each call of the op and step.
        constrained: the function takes `constraints=`, for an op that XLA's partitioner must not split in every way.

    Raises:
        InputError: something that is not an op.

    >>> @lowering("mine::twice.default", elementwise=True)
    ... def twice(x):
    ...     return x + x
    >>> "mine::twice.default" in known_ops()
    True
    """
    names = [_name(op) for op in ops]

    def register(function: F) -> F:
        for name in names:
            _TABLE[name] = Lowering(function, elementwise, random, constrained)
        return function

    return register


def find_lowering(op: Any) -> Lowering | None:
    """Return the table's lowering of an op, or None."""
    return _TABLE.get(_name(op))


def known_ops() -> tuple[str, ...]:
    """Return the ops of the table, sorted.

    >>> "aten::linear.default" in known_ops()
    True
    """
    return tuple(sorted(_TABLE))


def _name(op: Any) -> str:
    if isinstance(op, str) and "::" in op:
        return op if "." in op.partition("::")[2] else f"{op}.default"
    if isinstance(op, Op):
        return f"{op.namespace}::{op.__name__}"
    raise InputError(
        f"lowering() was given {op!r}; give an op with its overload, such as torch.ops.aten.relu.default, or its name "
        'as text, such as "aten::relu.default".'
    )

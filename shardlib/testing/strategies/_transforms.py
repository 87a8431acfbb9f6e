"""Functions from plan to plan; the place where new kinds are registered."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st

from shardlib._plan import Plan
from shardlib.errors import InputError
from shardlib.transforms import fsdp, offload, zero

__all__ = ["KINDS", "Transform", "register_transforms", "transforms"]

Transform = Callable[[Plan], Plan]


def identity(plan: Plan) -> Plan:
    """Return the plan unchanged."""
    return plan


# One strategy for each kind of transform: of those that `shardlib.transforms` offers, the ones that mean something for
# every model, mesh and dtype. What it gains is registered here, or with `register_transforms` from a package of one's
# own, and is then part of every case.
KINDS: list[st.SearchStrategy[Transform]] = [
    st.just(identity),
    st.builds(zero, st.integers(1, 3)),
    st.builds(fsdp, reshard_after_forward=st.sampled_from([None, True, False])),
    st.builds(offload, st.sampled_from(["state", "params", "grads", "all"]), fraction=st.sampled_from([1.0, 0.5])),
]


def register_transforms(strategy: st.SearchStrategy[Transform]) -> None:
    """Register a strategy of functions from plan to plan, for `transforms` and `cases` to draw from.

    The functions travel to other processes: they must be importable there, or be values that can be pickled.

    Raises:
        InputError: it is not a strategy.

    >>> register_transforms(3)
    Traceback (most recent call last):
    shardlib.errors.InputError: register_transforms(3): give a hypothesis strategy of functions from plan to plan.
    """
    if not isinstance(strategy, st.SearchStrategy):
        raise InputError(
            f"register_transforms({strategy!r}): give a hypothesis strategy of functions from plan to plan."
        )
    if strategy not in KINDS:
        KINDS.append(strategy)


def transforms(max_size: int = 2) -> st.SearchStrategy[tuple[Transform, ...]]:
    """Generate transforms to apply in order. Shrinks towards none.

    >>> from hypothesis import find
    >>> find(transforms(), lambda drawn: True)
    ()
    """
    # Asked for at each draw, so that what is registered later counts too.
    return st.deferred(lambda: st.lists(st.one_of(KINDS), max_size=max_size).map(tuple))

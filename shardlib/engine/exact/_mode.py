"""When random calls are exact: inside `exact_random`, and in the forward of a model sharded with `rng="exact"`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardlib.engine import _torch
from shardlib.engine.exact._calls import RANDOM, Caller
from shardlib.engine.exact._place import Place

__all__ = ["ExactMode", "bound", "current", "exact_random", "is_exact", "rows"]


class ExactMode(_torch.TorchDispatchMode):
    """Random ops are drawn by global element index; all others pass."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.caller = Caller(place)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op in RANDOM and (drawn := self.caller(op, args, kwargs)) is not NotImplemented:
            return drawn
        if torch.is_inference_mode_enabled() and _torch.is_composite(op):
            with self:  # autograd would have taken it apart
                return op.decompose(*args, **kwargs)
        return op(*args, **kwargs)

    def __enter__(self) -> ExactMode:
        _active().append(self)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        _active().pop()


# Without the guard that keeps dynamo from tracing it, which costs as much as the rest: dynamo leaves alone what runs
# under a mode.
_unguarded = getattr(ExactMode.__torch_dispatch__, "__wrapped__", ExactMode.__torch_dispatch__)
ExactMode.__torch_dispatch__ = _unguarded  # type: ignore[method-assign]

_thread = threading.local()


def _active() -> list[ExactMode]:
    if not hasattr(_thread, "modes"):
        _thread.modes = []
    return _thread.modes


def current() -> ExactMode | None:
    """The innermost mode that is on in this thread."""
    return _active()[-1] if _active() else None


def is_exact() -> bool:
    """Whether random calls are exact here."""
    return current() is not None


def rows() -> int | None:
    """How many examples this rank's batch has, where random calls are exact in this thread."""
    mode = current()
    return None if mode is None else mode.caller.place.rows


@contextmanager
def exact_random(seed: int | None = None) -> Iterator[None]:
    """Draw random numbers by global element index, so that they do not depend on the mesh.

    Inside, PyTorch's random calls draw one key each from the default CPU generator, and each element's value comes from
    the key and the element's place in the global tensor. A DTensor gets its part of what one device draws, whatever its
    placements, without communication; a plain tensor counts as whole. Use it for initialisation, and for the forward of
    a model on one device that a model with `rng="exact"` is compared with (a sharded one needs it not).

    Calls with a `generator=` of their own are left alone.

    Args:
        seed: what the default CPU generator is seeded with inside; after the block it stands where it stood before.
            By default, keys go on from where the generator stands, which has to be the same on every rank.

    Raises:
        ShardingError: a random op that cannot be drawn by element, such as `torch.multinomial`.

    Example:
        >>> with exact_random(0):
        ...     weight = torch.nn.init.normal_(torch.empty(4, 4))
        >>> with exact_random(0):
        ...     bool((torch.nn.init.normal_(torch.empty(4, 4)) == weight).all())
        True
    """
    _torch.rebind_checkpointed(bound)
    before = torch.get_rng_state()
    try:
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        with ExactMode(Place()):
            yield
    finally:
        if seed is not None:
            torch.set_rng_state(before)


def bound(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that draws, whenever it is called, as it would here and now."""
    mode = current()
    if mode is None:
        return fn

    def again(*args: Any, **kwargs: Any) -> Any:
        if current() is not None:
            return fn(*args, **kwargs)
        with ExactMode(mode.caller.place):
            return fn(*args, **kwargs)

    return again

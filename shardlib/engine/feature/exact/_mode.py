"""The dispatch mode of exact random numbers: in `exact_random`, and in the forward of a model with `rng="exact"`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardlib.engine import _torch
from shardlib.engine.feature.exact._calls import RANDOM, Caller
from shardlib.engine.feature.exact._data_rank import DataRank

__all__ = ["ExactMode", "bound", "current", "exact_random", "is_exact", "rows"]


class ExactMode(_torch.TorchDispatchMode):
    """Dispatch mode that draws random ops by global element index and leaves all other ops alone.

    `model`: the one whose forward it is on for, if any; `outermost`: the module of it whose call turned it on, and
    `depth`: how many calls of that module are inside of that call.
    """

    def __init__(self, data_rank: DataRank, model: nn.Module | None = None, outermost: nn.Module | None = None) -> None:
        super().__init__()
        self.caller, self.model, self.outermost, self.depth = Caller(data_rank), model, outermost, 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op in RANDOM and (drawn := self.caller(op, args, kwargs)) is not NotImplemented:
            return drawn
        if torch.is_inference_mode_enabled() and _torch.is_composite(op):
            with self:  # autograd would have decomposed it
                return op.decompose(*args, **kwargs)
        return op(*args, **kwargs)

    def __enter__(self) -> ExactMode:
        _active().append(self)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        _active().pop()


# The guard that keeps dynamo from tracing `__torch_dispatch__` is removed: it doubles the cost, and dynamo does not
# trace under a mode.
_unguarded = getattr(ExactMode.__torch_dispatch__, "__wrapped__", ExactMode.__torch_dispatch__)
ExactMode.__torch_dispatch__ = _unguarded  # type: ignore[method-assign]

_thread = threading.local()


def _active() -> list[ExactMode]:
    if not hasattr(_thread, "modes"):
        _thread.modes = []
    return _thread.modes


def current() -> ExactMode | None:
    """Return the innermost active mode of this thread."""
    return _active()[-1] if _active() else None


def is_exact() -> bool:
    """Return whether random calls are exact here."""
    return current() is not None


def rows() -> int | None:
    """Return the number of examples of this rank's batch, where random calls are exact in this thread."""
    mode = current()
    return None if mode is None else mode.caller.data_rank.rows


@contextmanager
def exact_random(seed: int | None = None) -> Iterator[None]:
    """Draw random numbers by global element index, so that they do not depend on the mesh.

    Inside, each of PyTorch's random calls draws one key from the default CPU generator, and an element's value is a
    function of the key and of the element's index in the global tensor. A DTensor gets its shard of the values that one
    device draws, whatever its placements, without communication; a plain tensor counts as replicated. Use it for
    initialisation, and for the forward of a single-device model that is compared with a model with `rng="exact"` (the
    sharded model does not need it).

    Calls with a `generator=` are not affected.

    Args:
        seed: seed of the default CPU generator inside; after the block its state is restored. By default, keys continue
            from the generator's current state, which has to be the same on every rank.

    Raises:
        ShardingError: a random op that cannot be drawn by element, such as `torch.multinomial`.

    Example:
        >>> with exact_random(0):
        ...     weight = torch.nn.init.normal_(torch.empty(4, 4))
        >>> with exact_random(0):
        ...     bool((torch.nn.init.normal_(torch.empty(4, 4)) == weight).all())
        True
    """
    before = torch.get_rng_state()
    try:
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        with _torch.holding_patches(), ExactMode(DataRank()):
            _torch.rebind_checkpointed(bound)
            yield
    finally:
        if seed is not None:
            torch.set_rng_state(before)


def bound(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Bind a function to the current mode: it draws, whenever it is called, as it would if called here."""
    mode = current()
    if mode is None:
        return fn

    def again(*args: Any, **kwargs: Any) -> Any:
        if current() is not None:
            return fn(*args, **kwargs)
        with ExactMode(mode.caller.data_rank, mode.model):
            return fn(*args, **kwargs)

    return again

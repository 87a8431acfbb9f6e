"""Models that have a part of the weights that they were to get: they refuse to compute, and to be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.utils.hooks import RemovableHandle

from shardlib.engine import _torch
from shardlib.errors import ShardingError

__all__ = ["mend", "refuse_torn", "torn"]

_REMEDY = {
    "transfer": "Transfer into it again, or load a checkpoint into it by shardlib.load.",
    "send_weights": "Send the weights again, by a new connection where that has ended.",
    "reshard": "Build a new one, shard it, and load a checkpoint by shardlib.load; or transfer the weights of another.",
}
_MARK = "_shardlib_torn"  # an attribute: a copy of a torn model is torn too
_HOOKS: WeakKeyDictionary[nn.Module, RemovableHandle] = WeakKeyDictionary()


@contextmanager
def torn(model: nn.Module | None, by: str) -> Iterator[None]:
    """Let a model that gets weights refuse to compute from here on, until the block ends without an error.

    Args:
        model: the model; None where this rank has no part of it.
        by: the call, "transfer" or "send_weights", after which the model can get all weights again, or "reshard", after
            which it cannot.
    """
    if model is None:
        yield
        return
    mend(model)
    setattr(model, _MARK, by)
    _HOOKS[model] = model.register_forward_pre_hook(_refuse_forward, prepend=True)
    yield
    mend(model)


def mend(model: nn.Module) -> None:
    """Let a model that has got all of its weights compute again."""
    model = _torch.without_compiled_wrapper(model)
    if hasattr(model, _MARK):
        delattr(model, _MARK)
    if (hook := _HOOKS.pop(model, None)) is not None:
        hook.remove()


def refuse_torn(call: str, model: Any, *, unless: str = "") -> None:
    """Refuse a call that would use the weights of a torn model.

    Args:
        call: the name of the call, for the message.
        model: a module; anything else is passed over.
        unless: what may have torn it all the same: "transfer", for a call that overwrites all of its weights.

    Raises:
        ShardingError: the model is torn.
    """
    by = getattr(_torch.without_compiled_wrapper(model), _MARK, None) if isinstance(model, nn.Module) else None
    if by is not None and by != unless:
        raise ShardingError(
            f"{call}() was given a {type(model).__name__} that has a part of the weights that it was to get: "
            f"{by}() has failed. {_REMEDY[by]}"
        )


def _refuse_forward(model: nn.Module, _args: Any) -> None:
    refuse_torn("forward", model)

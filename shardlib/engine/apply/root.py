"""Hooks of the root of a sharded model: what happens when its forward begins and ends, and when backward begins."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardlib.engine import _torch
from shardlib.engine._torch import pytree
from shardlib.engine.data.gradients import GradientReducer, begin_hook
from shardlib.engine.data.units import Units, read_sentinel
from shardlib.engine.model.casting import Casting
from shardlib.engine.model.lazy_full_tensor import LazyFullTensor
from shardlib.engine.model.region import unwrap_dtensor

__all__ = ["Root"]

Check = Callable[[nn.Module | None, tuple[Any, ...], dict[str, Any]], None]


class Root:
    """Hooks on the root of a sharded model: they check inputs, cast dtypes and detect the start of backward.

    From sharding on, implicit replication is enabled in this thread, and in every thread that calls the model, with the
    backward passes that it starts: a plain tensor among DTensors counts as replicated. Autograd restores the thread's
    state for every node, so if it were enabled in forward only, ops on masks and positions that a model creates itself
    would fail in backward. It also allows `torch.nn.utils.clip_grad_norm_` and similar functions to take parameters of
    both kinds.

    Args:
        reducer: notified when a backward pass begins.
        check: checks the inputs first, and raises `InputError`.
        units: unsharded while the model runs.
        casting: the dtypes of inputs, forward and outputs.
    """

    def __init__(self, reducer: GradientReducer, check: Check, units: Units | None, casting: Casting) -> None:
        self.reducer, self.check, self.units, self.casting = reducer, check, units, casting
        self._autocasts: list[Any] = []
        self._left = False
        self._running = 0  # forwards of the model, and of modules that were called in its place

    def install(self, model: nn.Module) -> list[Any]:
        _torch.replicate_plain_tensors()
        return [
            model.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._leave),
            model.register_forward_hook(self._abandon, always_call=True),
        ]

    def call(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a module that a user may call in the place of the model: where no forward of the model
        runs, its inputs are checked and dtypes are cast as those of the model are."""
        if self._running:
            return inner(*args, **kwargs)
        self._running += 1
        try:
            self.check(None, args, kwargs)
            args, kwargs = self.casting.cast_inputs(args, kwargs)
            with self.casting.autocasting():
                output = inner(*args, **kwargs)
        finally:
            self._running -= 1
        return self.casting.cast_output(output)

    def _enter(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._running += 1
        self.check(model, args, kwargs)
        _torch.set_implicit_replication(True)
        if self.units is not None:
            self.units.enter_model()
        if self.casting.autocast is not None:
            self._autocasts.append(self.casting.autocasting())
            self._autocasts[-1].__enter__()
        return self.casting.cast_inputs(args, kwargs)

    def _abandon(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Clean up after a forward that raised, for which `_leave` was not called. Runs after every forward."""
        self._running -= 1
        if self._left:
            self._left = False
            return
        if self._autocasts:
            self._autocasts.pop().__exit__(None, None, None)
        if self.units is not None:
            self.units.abandon()

    def _leave(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self._autocasts:
            self._autocasts.pop().__exit__(None, None, None)
        output = self.casting.cast_output(output)
        leaves = list(_torch.leaves_of(output))
        if any(type(leaf) is not torch.Tensor and isinstance(leaf, torch.Tensor) for leaf in leaves):
            output = _torch.map_tensors(_plain, output)
            leaves = pytree.tree_leaves(output)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not leaf.is_leaf:
                leaf.register_hook(begin_hook(weakref.ref(self.reducer)))
        output = output if self.units is None else self.units.leave_model(output)
        self._left = True
        return output


def _plain(output: torch.Tensor) -> torch.Tensor:
    found = read_sentinel(output)
    return unwrap_dtensor(found) if isinstance(found, LazyFullTensor | DTensor) else found

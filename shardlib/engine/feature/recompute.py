"""Activation checkpointing: some modules recompute their forward in backward instead of saving activations.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, by `torch.utils.checkpoint`. The wrapper is the
outermost one around a module's call: a recomputed module passes its regions, its compiled graph and its unit as in
forward. Units that it is a part of are unsharded again (`units.py`), as they are for the model's own checkpointing.
Names, hooks and state dicts do not change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from shardlib.engine import _torch
from shardlib.errors import PlanError, nearest
from shardlib.rules.patterns import compile_pattern

__all__ = ["modules_to_recompute", "recompute_in"]


def modules_to_recompute(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return a name of each module that patterns match, in the model's order; a module may have several names.

    Raises:
        PlanError: a pattern matches no module.

    >>> modules_to_recompute(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), ["^0"])
    ('0',)
    """
    names = {name: one for name, one in model.named_modules(remove_duplicate=False) if name} if patterns else {}
    compiled = {text: compile_pattern(text) for text in patterns}
    for text, pattern in compiled.items():
        if not any(map(pattern.matches, names)):
            raise PlanError(
                f'checkpoint_activations("{text}"): the pattern matches none of the {len(names)} modules; patterns are '
                f"written as in rules.{nearest(text, names)}"
            )
    found: dict[nn.Module, str] = {}
    for name, module in names.items():
        if any(pattern.matches(name) for pattern in compiled.values()):
            found.setdefault(module, name)
    return tuple(found.values())


def recompute_in(module: nn.Module) -> Callable[..., Any]:
    """Return the function that calls a module's forward, and calls it again in backward instead of saving activations.

    The second call ends where it has made all tensors that backward needs. torch takes the noise of `nn.RReLU` before
    the op has drawn it, so a call that ends there goes back with memory that nothing was written into: a module that
    has one is called to its end. A buffer that forward changes, as BatchNorm its statistics, changes once: the second
    call begins with the values of the first, in memory that is dropped. A tensor that is given twice is one tensor in
    the second call too: `nn.MultiheadAttention` asks whether its query is its key.
    """
    to_end = any(isinstance(child, nn.RReLU) for child in module.modules())
    return functools.partial(_recompute, _Buffers(module), stop=not to_end)


def _recompute(buffers: _Buffers, inner: Callable[..., Any], *args: Any, stop: bool, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return inner(*args, **kwargs)
    before: list[_Buffer] | None = None
    each = {id(arg): arg for arg in args}
    places = [[*each].index(id(arg)) for arg in args]

    def run(*each: Any, **kwargs: Any) -> Any:
        nonlocal before
        args = [each[place] for place in places]
        if before is None:
            before = buffers.kept()
            output = inner(*args, **kwargs)
            before = buffers.changed(before)
            return output
        with _in_place(before):
            return inner(*args, **kwargs)

    call = functools.partial(checkpoint, functools.partial(run, **kwargs), *each.values(), use_reentrant=False)
    if stop:
        return call()
    with set_checkpoint_early_stop(False):
        return call()


class _Buffer(NamedTuple):
    """A buffer before forward: where it is, the tensor, its version and its values."""

    own: dict[str, Any]
    key: str
    tensor: torch.Tensor
    version: int
    values: torch.Tensor

    @property
    def has_changed(self) -> bool:
        return self.own.get(self.key) is not self.tensor or self.tensor._version != self.version


class _Buffers:
    """The buffers of a module and of those in it, of which a forward changes some.

    The first forward in which all of these modules train tells which; later ones copy no others.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = [*module.modules()]
        self._places = [(own, key) for own in (_torch.own_tensors(child)[1] for child in self._modules) for key in own]

    def kept(self) -> list[_Buffer]:
        """Copy the buffers, before a forward."""
        present = ((own, key, own.get(key)) for own, key in self._places)
        return [_Buffer(own, key, t, t._version, t.detach().clone()) for own, key, t in present if t is not None]

    def changed(self, before: list[_Buffer]) -> list[_Buffer]:
        """Return those that a forward has changed."""
        found = [one for one in before if one.has_changed]
        if all(child.training for child in self._modules):
            self._places = [(one.own, one.key) for one in found]
        return found


@contextmanager
def _in_place(before: list[_Buffer]) -> Iterator[None]:
    """Let a forward begin with the values that buffers had, and change copies of them."""
    after = [one.own.get(one.key) for one in before]
    for one in before:
        one.own[one.key] = one.values.clone()
    try:
        yield
    finally:
        for one, tensor in zip(before, after, strict=True):
            one.own[one.key] = tensor

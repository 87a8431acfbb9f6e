"""Traces of the inputs and outputs of every module of a model, forward and backward, by hooks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from shardlib.engine._torch import flatten_with_path, pytree

__all__ = ["Call", "Side", "Trace", "Where", "clean", "tracing"]

# Wrappers of PyTorch that put a name between a model and its parameters.
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def clean(name: str) -> str:
    """Return a parameter's or module's name without the prefixes of PyTorch's wrappers.

    >>> clean("module.blocks.0._orig_mod.attn.weight")
    'blocks.0.attn.weight'
    """
    dotted = f"{name}."
    for wrapper in _WRAPPERS[1:]:
        dotted = dotted.replace(wrapper, "")
    return dotted.removeprefix(_WRAPPERS[0]).removesuffix(".")


Side = Literal["input", "output"]


@dataclass(frozen=True)
class Where:
    """One tensor at a module's border: of which call of which module, on which side, the how many-th."""

    module: str
    call: int
    side: Side
    position: str


@dataclass(eq=False)
class Call:
    """One call of a module: its inputs and outputs, and who called it."""

    module: str
    index: int
    parent: Call | None
    inputs: list[Where] = field(default_factory=list)
    outputs: list[Where] = field(default_factory=list)


@dataclass(eq=False)
class Trace:
    """Calls in the order in which they began and in which they ended, values and gradients by place."""

    begun: list[Call] = field(default_factory=list)
    ended: list[Call] = field(default_factory=list)
    values: dict[Where, torch.Tensor] = field(default_factory=dict)
    gradients: dict[Where, torch.Tensor] = field(default_factory=dict)


@contextmanager
def tracing(
    model: nn.Module, *, into: Trace | None = None, probes: Sequence[torch.Tensor] | None = None
) -> Iterator[Trace]:
    """Record inside the block, gradients by hooks; or add one of `probes`, in place of that, to each value.

    Hooks stand outside of those that shard the model: values are what neighbours see."""
    trace = Trace() if into is None else into
    recorder = _Recorder(trace, None if probes is None else iter(probes))
    handles = []
    for name, module in model.named_modules():
        enter, leave = recorder.hooks(clean(name))
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
        handles.append(module.register_forward_hook(leave))
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()


class _Recorder:
    def __init__(self, trace: Trace, probes: Iterator[torch.Tensor] | None) -> None:
        self.trace, self.probes = trace, probes
        self.open: list[Call] = []
        self.counts: dict[str, int] = defaultdict(int)

    def hooks(self, name: str) -> tuple[Any, Any]:
        def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            call = Call(name, self.counts[name], self.open[-1] if self.open else None)
            self.counts[name] += 1
            self.open.append(call)
            self.trace.begun.append(call)
            return self._watched(call, "input", (args, kwargs))

        def leave(_module: nn.Module, _args: Any, output: Any) -> Any:
            call = self.open.pop()
            while call.module != name:  # a call that ended early: activation checkpointing stops when it has enough
                call = self.open.pop()
            self.trace.ended.append(call)
            return self._watched(call, "output", output)

        return enter, leave

    def _watched(self, call: Call, side: Side, tree: Any) -> Any:
        flat, spec = flatten_with_path(tree)
        leaves = [self._watch(call, side, pytree.keystr(path), leaf) for path, leaf in flat]
        return pytree.tree_unflatten(leaves, spec)

    def _watch(self, call: Call, side: Side, position: str, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        where = Where(call.module, call.index, side, position)
        (call.inputs if side == "input" else call.outputs).append(where)
        self.trace.values[where] = leaf.detach().clone()
        if self.probes is not None:
            return leaf + next(self.probes) if leaf.is_floating_point() else leaf
        if not (leaf.requires_grad and torch.is_grad_enabled()):
            return leaf
        # An input may have other readers: an alias of it gets the gradient of this module alone.
        seen = torch.ops.aten.alias(leaf) if side == "input" else leaf
        seen.register_hook(lambda grad: self.trace.gradients.__setitem__(where, grad.detach().clone()))
        return seen

"""Autograd: nodes and hooks of a backward pass, and recomputation by activation checkpointing."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils import checkpoint

from shardlib.engine._torch._private import private, private_when_used
from shardlib.engine._torch.patches import patch

private(
    "torch.autograd.Variable._execution_engine",
    why="to finish gradients before backward() returns",
    without="the last bucket of gradients would not be waited for",
)
private(
    "torch._C._current_graph_task_id",
    why="to tell one backward pass from the next, and from none",
    without="a parameter that is unsharded for one pass would not be resharded for the next",
)
private(
    "torch._C._will_engine_execute_node",
    why="to tell a pass that adds to a parameter's gradient from one that autograd.grad reads",
    without="autograd.grad could return a shard before its reduction has finished",
)
private(
    "torch.Tensor._backward_hooks",
    "torch.Tensor._post_accumulate_grad_hooks",
    why="to finish a reduction at once where a hook reads the gradient",
    without="a hook could read a shard before its reduction has finished",
)
private(
    "torch.autograd._get_sequence_nr",
    "torch._C._current_autograd_node",
    "torch.autograd.graph.Node._sequence_nr",
    why="to put collectives of a backward pass down to the modules whose forward they belong to",
    without="a recorded step would not name the modules of its backward",
)
private(
    "torch.utils.checkpoint.CheckpointFunction",
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator",
    why="to draw the dropout of a checkpointed function again as it was drawn in forward",
    without="recomputed activations would have another dropout, and gradients would be wrong",
)
private(
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator_impl",
    why="to do the same where torch calls this one",
    without="torch is taken to call _checkpoint_without_reentrant_generator",
    optional=True,
)
private(
    "torch._C._are_functorch_transforms_active",
    why="to call an autograd function without the Python that serves transforms of torch.func",
    without="a small linear layer would take noticeably longer",
)
_pipelining = private_when_used(
    "torch.distributed.pipelining._backward.stage_backward_input",
    "torch.distributed.pipelining._backward.stage_backward_weight",
    why="to split the backward of a pipeline stage into that of inputs and that of weights",
    without="schedules with split backward passes, as ZBV, do not run",
)

H = TypeVar("H", bound=Callable[..., Any])

__all__ = [
    "accumulation_of",
    "asks_for_gradient",
    "backward_id",
    "backward_of_inputs",
    "backward_of_weights",
    "direct_apply",
    "has_gradient_hooks",
    "has_hook",
    "is_checkpointing",
    "is_transformed",
    "next_node_number",
    "own_hook",
    "pop_gradient",
    "rebind_checkpointed",
    "require_gradient",
    "run_at_end_of_backward",
    "running_node",
]


def is_checkpointing() -> bool:
    """Tell whether `torch.utils.checkpoint` has called the function that is running; the stack tells."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename == checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


def run_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward pass in progress has finished, before `backward()` returns."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# Returns a number for the backward pass in progress, or -1 outside of one.
backward_id = torch._C._current_graph_task_id
# Tells whether the function that runs is being transformed by `torch.func`, as by `grad` or `vmap`.
is_transformed = torch._C._are_functorch_transforms_active
# Returns the number that autograd will give to the next node that it records in this thread.
next_node_number = torch.autograd._get_sequence_nr


def accumulation_of(param: torch.Tensor) -> Any:
    """Return the AccumulateGrad node of a parameter; None while `torch.func.grad` runs, for which there is none."""
    if is_transformed() and param.view_as(param).grad_fn is None:
        return None
    return torch.autograd.graph.get_gradient_edge(param).node


def asks_for_gradient(node: Any) -> bool | None:
    """Tell whether the backward pass in progress adds a gradient to the parameter of an AccumulateGrad node.

    Returns None where the pass gives the gradient to the caller of `autograd.grad` instead.
    """
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return None


def own_hook(hook: H) -> H:
    """Mark a hook on a gradient as one of shardlib's own, which pickle leaves out without a warning."""
    hook.of_shardlib = True  # type: ignore[attr-defined]
    return torch.utils.hooks.unserializable_hook(hook)


def has_gradient_hooks(param: torch.Tensor) -> bool:
    """Tell whether the user has registered hooks on a parameter's gradient."""
    before = (param._backward_hooks or {}).values()
    return bool(param._post_accumulate_grad_hooks) or any(not hasattr(hook, "of_shardlib") for hook in before)  # type: ignore[attr-defined]


def has_hook(tensor: torch.Tensor, hook: Callable[..., Any]) -> bool:
    """Tell whether a hook is registered on a tensor's gradient."""
    return hook in (tensor._backward_hooks or {}).values()


def require_gradient(leaf: torch.Tensor, take: Callable[[torch.Tensor], None] | None) -> None:
    """Let a leaf, of any subclass, require a gradient, and call `take` when backward has made it; or require none."""
    with torch._C.DisableTorchFunctionSubclass():
        leaf.requires_grad_(take is not None)
        if take is not None and not leaf._post_accumulate_grad_hooks:
            leaf.register_post_accumulate_grad_hook(take)


def pop_gradient(leaf: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a leaf, of any subclass, and clear it."""
    with torch._C.DisableTorchFunctionSubclass():
        grad, leaf.grad = leaf.grad, None
    assert grad is not None
    return grad


def running_node() -> int:
    """Return the number of the node that backward runs now.

    Between nodes, or at a leaf, it is a number that no node of a forward has.
    """
    node: Any = torch._C._current_autograd_node()
    return node._sequence_nr() if node is not None else -1


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return `function.apply` without the Python that serves transforms of torch.func, which refuse these functions."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def applied(*args: Any) -> Any:
        return function.apply(*args) if is_transformed() else apply(*args)

    return applied


def backward_of_inputs(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
) -> tuple[tuple[torch.Tensor | None, ...], Any]:
    """Run the half of a backward pass that another stage waits for, as `torch.distributed.pipelining` does (2.13.0).

    Returns the gradients of the inputs, and what `backward_of_weights` continues from.
    """
    _pipelining()
    from torch.distributed.pipelining import _backward

    return _backward.stage_backward_input(list(outputs), list(gradients), list(inputs), iter(weights))  # type: ignore[arg-type]


def backward_of_weights(weights: Sequence[torch.Tensor], rest: Any) -> None:
    """Run the other half: add gradients to those of the weights."""
    _pipelining()
    from torch.distributed.pipelining import _backward

    _backward.stage_backward_weight(iter(weights), rest)  # type: ignore[arg-type]


def rebind_checkpointed(bind: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have activation checkpointing compute again what `bind(function)` computes, in the place of the function.

    `bind` is called in forward. Both kinds of checkpointing keep the function for backward, where no mode of the
    forward is on any more.
    """
    patch((rebind_checkpointed, bind), functools.partial(_rebind, bind))


def _rebind(bind: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    # Torch 2.14 has both and calls the first.
    names = "_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator"
    name = next(name for name in names if hasattr(checkpoint, name))
    before, otherwise = vars(checkpoint.CheckpointFunction)["forward"], getattr(checkpoint, name)
    reentrant = before.__func__

    def forward(ctx: Any, function: Any, *args: Any) -> Any:
        return reentrant(ctx, bind(function), *args)

    def without_reentrant(function: Any, *args: Any, **kwargs: Any) -> Any:
        return otherwise(bind(function), *args, **kwargs)

    checkpoint.CheckpointFunction.forward = staticmethod(forward)  # type: ignore[method-assign]
    setattr(checkpoint, name, without_reentrant)

    def undo() -> None:
        checkpoint.CheckpointFunction.forward = before  # type: ignore[method-assign]
        setattr(checkpoint, name, otherwise)

    return undo

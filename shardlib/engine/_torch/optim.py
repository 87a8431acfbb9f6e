"""Optimizers: their hooks, steps inside of steps, and a step without hooks."""

from __future__ import annotations

import collections
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from shardlib.engine._torch._private import private
from shardlib.engine._torch.patches import patch

private(
    "torch.optim.Optimizer._optimizer_step_pre_hooks",
    "torch.optim.Optimizer._optimizer_step_post_hooks",
    "torch.optim.Optimizer._optimizer_state_dict_pre_hooks",
    "torch.optim.Optimizer._optimizer_state_dict_post_hooks",
    "torch.optim.Optimizer._optimizer_load_state_dict_pre_hooks",
    "torch.optim.Optimizer._optimizer_load_state_dict_post_hooks",
    why="to run the hooks that users register on an OptimizerWrapper, and to be the first hook after a step",
    without="register_step_pre_hook and its like raise on a wrapper, and users' hooks see local shards",
)

private(
    "torch.optim.Optimizer.profile_hook_step",
    why="to replace parameters by local shards around the step that torch defines, inside of a subclass's own step",
    without="an optimizer that edits gradients and calls super().step() loses its edits",
)

__all__ = [
    "calls_step_of_base",
    "depth_of_step",
    "hook_around_step",
    "hooks_of",
    "is_hooked",
    "make_hooks",
    "step_without_hooks",
]


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Run an optimizer's own step, which `Optimizer.profile_hook_step` has wrapped (2.13.0)."""
    type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]


_HOOKED_STEP = torch.optim.Optimizer.profile_hook_step(lambda self: None).__code__  # type: ignore[attr-defined]


def depth_of_step(optimizer: torch.optim.Optimizer) -> int:
    """Count the calls of an optimizer's step that are running, those of its base classes included; hooks ask.

    The stack tells, since a step that raises calls no hook. All steps share the code of `profile_hook_step`.
    """
    frame = inspect.currentframe()
    depth = 0
    while frame is not None:
        if frame.f_code is _HOOKED_STEP and frame.f_locals.get("self") is optimizer:
            depth += 1
        frame = frame.f_back
    return depth


def is_hooked(optimizer: torch.optim.Optimizer, before: Callable[..., Any]) -> bool:
    """Tell whether `hook_around_step` has registered a hook before the steps of an optimizer."""
    return before in optimizer._optimizer_step_pre_hooks  # type: ignore[comparison-overlap]


def hook_around_step(optimizer: torch.optim.Optimizer, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """Let hooks be the last before and the first after each step that runs, those of base classes included.

    They are registered once, under a key of their own, and move past hooks that a user has added since. torch lets a
    class call hooks when the first optimizer of exactly that class is made.
    """
    hooks_before: Any = optimizer._optimizer_step_pre_hooks
    hooks_after: Any = optimizer._optimizer_step_post_hooks
    hooks_before[before], hooks_after[after] = before, after
    hooks_before.move_to_end(before)
    hooks_after.move_to_end(after, last=False)
    for kind in type(optimizer).__mro__:
        step = vars(kind).get("step")
        if step is not None and kind is not torch.optim.Optimizer and not hasattr(step, "hooked"):
            patch((kind, "step"), functools.partial(_hooked, kind, step))


def _hooked(kind: Any, step: Callable[..., Any]) -> Callable[[], None]:
    """Let the step of a class call hooks, as torch does for the class of each optimizer that it makes."""
    kind.step = torch.optim.Optimizer.profile_hook_step(step)  # type: ignore[attr-defined]
    kind.step.hooked = True
    return functools.partial(setattr, kind, "step", step)


@functools.cache
def calls_step_of_base(kind: type) -> bool:
    """Tell whether the code of a class's step calls that of a base class, as far as its names say."""
    code = getattr(inspect.unwrap(vars(kind)["step"]), "__code__", None)
    return code is not None and ("__class__" in code.co_freevars or "step" in code.co_names)


_HOOKS = {
    "step_pre": "_optimizer_step_pre_hooks",
    "step_post": "_optimizer_step_post_hooks",
    "state_dict_pre": "_optimizer_state_dict_pre_hooks",
    "state_dict_post": "_optimizer_state_dict_post_hooks",
    "load_state_dict_pre": "_optimizer_load_state_dict_pre_hooks",
    "load_state_dict_post": "_optimizer_load_state_dict_post_hooks",
}


def make_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Make the dicts that `Optimizer.register_..._hook` fill, for a subclass that does not call `__init__`."""
    for name in _HOOKS.values():
        setattr(optimizer, name, collections.OrderedDict())


def hooks_of(optimizer: torch.optim.Optimizer, when: str) -> list[Callable[..., Any]]:
    """List the hooks that a user has registered, in order: those of "step_pre" and so on."""
    return list(getattr(optimizer, _HOOKS[when]).values())

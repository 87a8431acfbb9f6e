"""Optimizers: their hooks, the class whose step runs, and a step without hooks."""

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
    "class_of_step",
    "classes_with_step",
    "hook_around_step",
    "hooks_of",
    "is_hooked",
    "make_hooks",
    "step_without_hooks",
]


_running: dict[int, list[type]] = {}  # by the id of an optimizer: the classes whose steps run, as they were called


def class_of_step(optimizer: torch.optim.Optimizer) -> type:
    """Return the class whose step of an optimizer runs: the first that defines one, or a base whose step it calls."""
    running = _running.get(id(optimizer))
    return running[-1] if running else classes_with_step(type(optimizer))[0]


def classes_with_step(kind: type) -> list[type]:
    """List the classes that define a step of their own, a class before its bases."""
    return [each for each in kind.__mro__ if "step" in vars(each)]


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Run an optimizer's own step, which `Optimizer.profile_hook_step` has wrapped (2.13.0)."""
    step: Any = type(optimizer).step
    getattr(step, "named", step).__wrapped__(optimizer)


def is_hooked(optimizer: torch.optim.Optimizer, before: Callable[..., Any]) -> bool:
    """Tell whether `hook_around_step` has registered a hook before the steps of an optimizer."""
    return before in optimizer._optimizer_step_pre_hooks  # type: ignore[comparison-overlap]


def hook_around_step(optimizer: torch.optim.Optimizer, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """Let hooks be the last before and the first after each step that runs, those of base classes included.

    They are registered once, under a key of their own, and move past hooks that a user has added since. torch lets a
    class call hooks when the first optimizer of exactly that class is made; base classes call them from here on.
    """
    hooks_before: Any = optimizer._optimizer_step_pre_hooks
    hooks_after: Any = optimizer._optimizer_step_post_hooks
    hooks_before[before], hooks_after[after] = before, after
    hooks_before.move_to_end(before)
    hooks_after.move_to_end(after, last=False)
    for kind in classes_with_step(type(optimizer))[1:]:
        if kind is not torch.optim.Optimizer and not hasattr(vars(kind)["step"], "named"):
            patch((kind, "step"), functools.partial(_name_step, kind, vars(kind)["step"]))


def _name_step(kind: Any, step: Any) -> Callable[[], None]:
    """Let the step of a base class call hooks, as that of each optimizer's class does, and say that it runs."""
    hooked = step if hasattr(step, "hooked") else torch.optim.Optimizer.profile_hook_step(step)  # type: ignore[attr-defined]

    @functools.wraps(hooked)
    def named(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        running = _running.setdefault(id(optimizer), [])
        running.append(kind)
        try:
            return hooked(optimizer, *args, **kwargs)
        finally:
            running.pop()
            if not running:
                del _running[id(optimizer)]

    kind.step = named
    kind.step.hooked, kind.step.named = True, hooked
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

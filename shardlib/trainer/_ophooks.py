"""Hooks around the forward and backward of every module that has parameters of its own."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["BaseOpHook", "install"]


class BaseOpHook:
    """The base of hooks for `Engine.add_hook`: override the methods that you need.

    >>> class Names(BaseOpHook):
    ...     def pre_fwd_exec(self, module, *args):
    ...         print(type(module).__name__)
    >>> model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    >>> handles = install(Names(), model)
    >>> _ = model(nn.Parameter(nn.init.ones_(model[0].weight.data)))
    Linear
    """

    def pre_fwd_exec(self, module: nn.Module, *args: Any) -> None:
        """Run before a module's forward, with its arguments."""

    def post_fwd_exec(self, module: nn.Module, *args: Any) -> None:
        """Run after a module's forward, with the same arguments."""

    def pre_bwd_exec(self, module: nn.Module, input: Any, output: Any) -> None:
        """Run before a module's backward; `output` are gradients of its outputs, `input` is None."""

    def post_bwd_exec(self, module: nn.Module, input: Any) -> None:
        """Run after a module's backward, with the gradients of its inputs."""

    def post_iter(self) -> None:
        """Run after `Engine.step`."""


def install(hook: BaseOpHook, model: nn.Module) -> list[RemovableHandle]:
    """Install what the hook overrides; the handles remove it."""
    kind, handles = type(hook), list[RemovableHandle]()
    for module in model.modules():
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        if kind.pre_fwd_exec is not BaseOpHook.pre_fwd_exec:
            handles.append(module.register_forward_pre_hook(lambda module, args: hook.pre_fwd_exec(module, *args)))
        if kind.post_fwd_exec is not BaseOpHook.post_fwd_exec:
            handles.append(module.register_forward_hook(lambda module, args, _: hook.post_fwd_exec(module, *args)))
        if kind.pre_bwd_exec is not BaseOpHook.pre_bwd_exec:
            handles.append(
                module.register_full_backward_pre_hook(lambda module, grads: hook.pre_bwd_exec(module, None, grads))
            )
        if kind.post_bwd_exec is not BaseOpHook.post_bwd_exec:
            handles.append(module.register_full_backward_hook(lambda module, into, _: hook.post_bwd_exec(module, into)))
    return handles

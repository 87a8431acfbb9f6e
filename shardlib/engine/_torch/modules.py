"""Modules: wrappers around their calls, the tensors that they hold, hooks on what is registered; tensor subclasses."""

from __future__ import annotations

import copy
import functools
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

import torch

from shardlib.engine._torch._private import private

private(
    "torch.nn.Module._parameters",
    "torch.nn.Module._buffers",
    why="to put a sharded tensor in the place of a module's own, where setattr would register it anew",
    without="a module cannot be sharded in place",
)
private(
    "torch.nn.Module._compiled_call_impl",
    "torch.nn.Module._call_impl",
    why="to go around a module's call with its hooks, compiled or not",
    without="units would not be unsharded before their hooks run, and compiled blocks could not fall back to eager",
)
private(
    "torch._dynamo.eval_frame.OptimizedModule._orig_mod",
    why="to take what torch.compile(model) returns for the model",
    without="a sharded model is unknown once torch.compile has wrapped it",
    optional=True,
)
private(
    "torch.nn.Module._apply",
    why="to take part in to(), half() and their like",
    without="converting a sharded model would leave its shards behind",
)
private(
    "torch.nn.modules.batchnorm._BatchNorm",
    why="to find every BatchNorm",
    without="statistics would be those of one rank's examples",
)
private(
    "torch.distributed._composable.contract.REGISTRY_KEY",
    why="to let fully_shard and replicate ask before they change a sharded model",
    without="they would shard it a second time, without an error on some meshes",
    optional=True,
)
private(
    "torch.Tensor._make_wrapper_subclass",
    "torch._C._disabled_torch_function_impl",
    why="to return an output that is all-gathered when it is read",
    without="every output of a region would be all-gathered, read or not",
)
private(
    "torch.nn.Module._forward_pre_hooks",
    why="to see where a hook computes a weight before each call",
    without="a compiled block with a pruned layer would raise in backward",
)
private(
    "torch.nn.modules.module._global_forward_hooks",
    "torch.optim.optimizer._global_optimizer_pre_hooks",
    why="to take hooks off every module and optimizer between two tests on the same ranks",
    without="hooks of one test would run in the next",
)

__all__ = [
    "BatchNorm",
    "as_kind",
    "call_eagerly",
    "compiled_call",
    "computed_before_calls",
    "copied",
    "copied_with",
    "find_weights_again",
    "forget_global_hooks",
    "go_around",
    "go_through",
    "no_torch_function",
    "own_tensors",
    "refuse_composition",
    "registered_tensors",
    "replace_conversion",
    "set_compiled_call",
    "watch_copies",
    "watch_new_buffers",
    "watch_new_modules",
    "watch_new_parameters",
    "without_compiled_wrapper",
    "wrapper_subclass",
]

BatchNorm = torch.nn.modules.batchnorm._BatchNorm
try:
    from torch.distributed._composable.contract import REGISTRY_KEY as _REGISTRY
except ImportError:
    _REGISTRY = ""
no_torch_function: Any = torch._C._disabled_torch_function_impl
wrapper_subclass: Any = torch.Tensor._make_wrapper_subclass
M = TypeVar("M", bound=torch.nn.Module)

# Each takes a hook, which gets a module, a name, and the tensor or module that it takes in.
watch_new_parameters = torch.nn.modules.module.register_module_parameter_registration_hook
watch_new_modules = torch.nn.modules.module.register_module_module_registration_hook
watch_new_buffers = torch.nn.modules.module.register_module_buffer_registration_hook


class _Applied(dict[str, Any]):
    """torch's registry of what was applied to a module: `fully_shard` and `replicate` look for "fully_shard" in it."""

    def __init__(self, refuse: Callable[[str], None]) -> None:
        super().__init__()
        self._refuse = refuse

    def __contains__(self, name: object) -> bool:
        if name == "fully_shard":
            self._refuse("fully_shard (or replicate)")
        return super().__contains__(name)


def refuse_composition(module: torch.nn.Module, refuse: Callable[[str], None]) -> Callable[[], None]:
    """Let `fully_shard(module)` and `replicate(module)` call `refuse`, which raises; return the undo."""
    if _REGISTRY:
        vars(module)[_REGISTRY] = _Applied(refuse)
    return functools.partial(vars(module).pop, _REGISTRY, None)


def watch_copies(hook: Callable[[torch.nn.Module], None]) -> Callable[[], None]:
    """Call `hook` with each module that a copy or a pickle makes, which registers nothing; return the undo."""
    restore = torch.nn.Module.__setstate__

    def note(module: torch.nn.Module, state: Any) -> None:
        restore(module, state)
        hook(module)

    torch.nn.Module.__setstate__ = note  # type: ignore[method-assign]

    def undo() -> None:
        torch.nn.Module.__setstate__ = restore  # type: ignore[method-assign]

    return undo


def computed_before_calls(modules: Iterable[torch.nn.Module]) -> tuple[torch.nn.Module, str] | None:
    """Return a module, and the name of its tensor, that a hook may assign before each call, as pruning does."""
    for module in modules:
        if module._forward_pre_hooks:
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor):
                    return module, name
    return None


def own_tensors(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the dicts that hold a module's own parameters and buffers."""
    return module._parameters, module._buffers


def registered_tensors(module: torch.nn.Module) -> list[tuple[dict[str, Any], str, Any]]:
    """List the parameters and buffers that are registered on a module, each with its dict and its key there."""
    return [(own, key, tensor) for own in own_tensors(module) for key, tensor in own.items() if tensor is not None]


def copied(module: M) -> M:
    """Return a deep copy of a module, also of one with a weight that `torch.nn.utils.weight_norm` computed. Parameters
    keep their attributes, by which libraries mark them."""
    made = copy.deepcopy(module, {id(tensor): tensor.detach().clone() for tensor in _computed(module.modules())})
    for before, after in zip(module.parameters(), made.parameters(), strict=True):
        after.__dict__.update(before.__dict__)
    return made


def copied_with(
    module: M, new: Callable[[torch.Tensor], torch.Tensor], *, without: Collection[torch.nn.Module] = ()
) -> M:
    """Return a deep copy of a module that has `new(tensor)` in the place of each tensor, of which none is copied.

    Parameters stay parameters, and require gradients as before. Each module in `without` becomes an empty one.
    """
    memo: dict[int, Any] = {id(each): torch.nn.Identity() for each in without}
    inside = {child for each in without for child in each.modules()}
    own = [each for each in module.modules() if each not in inside]
    tensors = [t for each in own for t in (*each.parameters(recurse=False), *each.buffers(recurse=False))]
    memo |= {id(tensor): as_kind(new(tensor), tensor) for tensor in (*tensors, *_computed(own))}
    return copy.deepcopy(module, memo)


def as_kind(made: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `made` as a parameter, if `like` is one."""
    return torch.nn.Parameter(made, like.requires_grad) if isinstance(like, torch.nn.Parameter) else made


def _computed(modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """Return what autograd computed and an attribute holds, which torch does not copy: `weight` of the old
    `weight_norm` and of `prune`, which make it anew before each call."""
    attributes = [x for each in modules for x in vars(each).values() if isinstance(x, torch.Tensor)]
    return [x for x in attributes if not x.is_leaf]


def find_weights_again(module: torch.nn.Module) -> None:
    """Bring the list of weights up to date that a recurrent module keeps beside its parameters."""
    if isinstance(module, torch.nn.RNNBase):
        for name, weight in module.named_parameters(recurse=False, remove_duplicate=False):
            setattr(module, name, weight)


def compiled_call(module: torch.nn.Module) -> Any:
    """Return what `module.compile()` made its calls go through, or None."""
    return module._compiled_call_impl


def set_compiled_call(module: torch.nn.Module, call: Any) -> None:
    """Let calls of a module go through `call`; None for its own forward and hooks."""
    module._compiled_call_impl = call


def without_compiled_wrapper(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that `torch.compile(module)` was given, or the module itself."""
    return getattr(module, "_orig_mod", module)


def call_eagerly(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module with its hooks, past what `compile` put before it."""
    return module._call_impl(*args, **kwargs)


def go_through(
    module: torch.nn.Module, *wrappers: Callable[..., Any], compile_: Callable[..., None] | None = None
) -> Callable[[], None]:
    """Let calls of a module, compiled or not, go through each `wrapper(call, *args, **kwargs)`; the first is innermost.

    `module.compile()` compiles what is inside of them, before and after; or it is `compile_()`, and the module is not
    compiled. Returns what undoes it.
    """
    before, there = module._compiled_call_impl, weakref.ref(module)
    plain = functools.partial(_call_if_there, there)

    def go(call: Any) -> None:
        for wrapper in wrappers:
            call = functools.partial(wrapper, call)
        set_compiled_call(_held(there), call)

    def compile_inside(*args: Any, **kwargs: Any) -> None:
        go(torch.compile(plain, *args, **kwargs))

    go(plain if before is None or compile_ is not None else before)
    module.__dict__["compile"] = compile_inside if compile_ is None else compile_

    def undo() -> None:
        set_compiled_call(module, before)
        module.__dict__.pop("compile", None)

    return undo


def _held(module: weakref.ref[torch.nn.Module]) -> torch.nn.Module:
    here = module()
    assert here is not None, "who calls it holds it"
    return here


def _call_if_there(module: weakref.ref[torch.nn.Module], *args: Any, **kwargs: Any) -> Any:
    return call_eagerly(_held(module), *args, **kwargs)


def go_around(module: torch.nn.Module, wrapper: Callable[..., Any]) -> Callable[[], None]:
    """Let calls of a module go through `wrapper`, around all that its class does in `__call__`.

    There the layers of transformers wrap themselves in activation checkpointing, which keeps the arguments that it is
    given. Such a module gets a class of the same name. Returns a function that undoes it.
    """
    kind = type(module)
    if kind.__call__ is torch.nn.Module.__call__:
        return go_through(module, wrapper)
    module.__dict__[_AROUND] = functools.partial(wrapper, functools.partial(_call_as, kind, weakref.ref(module)))
    module.__class__ = _calling(kind)  # type: ignore[arg-type]

    def undo() -> None:
        module.__class__ = kind
        module.__dict__.pop(_AROUND, None)

    return undo


_AROUND = "_shardlib_around"


def _call_as(kind: Any, module: weakref.ref[torch.nn.Module], *args: Any, **kwargs: Any) -> Any:
    return kind.__call__(module(), *args, **kwargs)


@functools.cache
def _calling(kind: Any) -> type:
    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        around = self.__dict__.get(_AROUND)
        return kind.__call__(self, *args, **kwargs) if around is None else around(*args, **kwargs)  # type: ignore[operator]

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {**names, "__call__": call})


def replace_conversion(module: torch.nn.Module, convert: Callable[..., torch.nn.Module]) -> Callable[[], None]:
    """Let `convert(module, function, recurse)` map `function` over the tensors of a module (2.13.0).

    `to`, `cpu`, `half` and their like ask it of a module, and of the modules that hold it. Returns a function that
    undoes it.
    """
    module._apply = types.MethodType(convert, module)  # type: ignore[method-assign]
    return functools.partial(module.__dict__.pop, "_apply", None)


def forget_global_hooks() -> None:
    """Remove the hooks that run for every module and every optimizer of the process."""
    for home in ("torch.nn.modules.module", "torch.optim.optimizer"):
        for name, hooks in vars(sys.modules[home]).items():
            if name.startswith("_global_") and isinstance(hooks, dict):
                hooks.clear()

"""Torch's compiler: its backends, its settings and its errors."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch

from shardlib.engine._torch._private import private, private_when_used
from shardlib.engine._torch.ops import Op
from shardlib.engine._torch.patches import patch

private(
    "torch.compiler.assume_constant_result",
    why="to put the plan of a linear layer into graphs as a constant; calling it would import the compiler",
    without="blocks with sharded linear layers cannot be compiled; pass compile=None to shard_model",
    marks=("_dynamo_marked_constant",),
)
_graphs = private_when_used(
    "torch._dynamo.backends.common.aot_autograd",
    "torch._dynamo.backends.debugging.boxed_nop",
    "torch._C._AutoDispatchBelowAutograd",
    "torch._functorch.config.donated_buffer",
    why="to run the traced graphs of a block below autograd",
    without='compile="aot_eager" does not work; pass compile="inductor" or None to shard_model',
)
_inductor = private_when_used(
    "torch._inductor.compile_fx.compile_fx",
    "torch._inductor.decomposition.select_decomp_table",
    why="to give inductor decompositions that draw random numbers by element",
    without='compile="inductor" does not work with exact_random; pass compile="aot_eager" or None to shard_model',
)
_dynamo = private_when_used(
    "torch._dynamo.trace_rules.add",
    "torch._dynamo.exc.TorchDynamoException",
    "torch._dynamo.exc.FailOnRecompileLimitHit",
    "torch._dynamo.error_on_graph_break",
    "torch._dynamo.config.skip_nnmodule_hook_guards",
    why="to keep the compiler out of sharding decisions, and to run a block eagerly that it cannot compile",
    without="blocks cannot be compiled; pass compile=None to shard_model",
)

__all__ = [
    "compile_again_for_new_hooks",
    "compile_errors",
    "compiler_is_off",
    "constant_in_graphs",
    "failed_to_trace_subclass",
    "graph_backend",
    "graph_breaks_raise",
    "inductor_backend",
    "keep_compiler_out_of",
    "keep_memory_of_graphs",
    "raised_by_torch",
]


P = ParamSpec("P")
R = TypeVar("R")


def graph_backend(decompositions: Mapping[Op, Callable[..., Any]] | None = None) -> Any:
    """Make the backend "aot_eager" for `torch.compile`: the traced graphs run op by op, in Python, below autograd.

    Autograd has no part in the graphs. Its kernels, and the Python that stands in their place for collectives, cost
    more than the ops of a small model. `decompositions` replace their ops in the graph.
    """
    _graphs()
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Callable[[list[Any]], Any]:
        call = boxed_nop(graph, inputs)

        @functools.wraps(call)  # and so marked as one that empties the list of its arguments
        def run(args: list[Any]) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return call(args)

        return run

    return aot_autograd(
        fw_compiler=keep,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
        decompositions=dict(decompositions or {}),
    )


def inductor_backend(decompositions: Mapping[Op, Callable[..., Any]]) -> Any:
    """Make the backend "inductor" for `torch.compile`, with other decompositions for some ops."""
    _inductor()

    def compile_graph(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx
        from torch._inductor.decomposition import select_decomp_table

        return compile_fx(graph, inputs, decompositions={**select_decomp_table(), **decompositions})

    return compile_graph


def constant_in_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Have dynamo call a function of constants while it traces, and put the result into the graph.

    `torch.compiler.assume_constant_result` does the same, and would import the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def compile_again_for_new_hooks() -> None:
    """Let dynamo notice hooks that a module gets after its first call. Torch 2.13 runs the old graph, without them."""
    _dynamo()
    patch(compile_again_for_new_hooks, lambda: _set(torch._dynamo.config, "skip_nnmodule_hook_guards"))


def keep_memory_of_graphs() -> None:
    """Let a graph that was traced from now on keep its memory: `retain_graph=True` asks for it when backward runs."""
    _graphs()
    patch(keep_memory_of_graphs, lambda: _set(torch._functorch.config, "donated_buffer"))


def _set(config: Any, name: str) -> Callable[[], None]:
    before = getattr(config, name)
    setattr(config, name, False)
    return functools.partial(setattr, config, name, before)


@functools.cache
def keep_compiler_out_of(package: str) -> None:
    """Keep dynamo from compiling the functions of a package by themselves, where a model calls them eagerly."""
    _dynamo()
    torch._dynamo.trace_rules.add(package)


def compile_errors() -> tuple[type[Exception], ...]:
    """Return what dynamo raises when it or its backend cannot compile. This imports the compiler."""
    _dynamo()
    return (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit)


def failed_to_trace_subclass(error: Exception) -> bool:
    """Tell whether torch could not trace a function, or run a higher-order op, because of a subclass of tensors."""
    text = str(error)
    if isinstance(error, NotImplementedError) and "registered for HOP" in text:
        return True
    compiler = sys.modules.get("torch._dynamo.exc")
    if compiler is None or not isinstance(error, compiler.TorchDynamoException):
        return False
    return "DTensor" in text or "subclass" in text


def raised_by_torch(error: BaseException) -> bool:
    """Tell whether an error was raised in a file of torch, or in a function that torch has made of text."""
    entry = error.__traceback__
    while entry is not None and entry.tb_next is not None:
        entry = entry.tb_next
    name = "" if entry is None else str(entry.tb_frame.f_globals.get("__name__"))
    return name.partition(".")[0] == "torch"


def compiler_is_off() -> bool:
    """Tell whether the environment switches `torch.compile` off.

    Dynamo reads TORCHDYNAMO_DISABLE when it is called and TORCH_COMPILE_DISABLE when it is imported (2.13, 2.14).
    """
    return any(os.environ.get(name) == "1" for name in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"))


def graph_breaks_raise() -> Any:
    """Make a context in which what dynamo cannot trace raises, where it would otherwise run between two graphs.

    `fullgraph=True` would raise too where dynamo leaves a block alone, as under a mode of dispatch (2.13.0).
    """
    _dynamo()
    return torch._dynamo.error_on_graph_break(True)

"""Repeated blocks are compiled once and reused; a block that cannot be compiled runs eagerly, and says why.

DTensor decides layouts in Python; compiling a block traces these decisions away, so that what runs is the local
program with its collectives.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardlib.engine import _torch
from shardlib.engine._torch import pytree
from shardlib.errors import ShardingError

__all__ = ["MODES", "CompileReport", "compile_blocks", "repeated_blocks"]

MODES = ("auto", "aot_eager", "inductor")


@dataclass
class CompileReport:
    """Which modules are compiled with which backend, and which of them fell back to eager, with the reason."""

    backend: str | None
    blocks: list[str] = field(default_factory=list)
    eager: dict[str, str] = field(default_factory=dict)

    def notes(self) -> tuple[str, ...]:
        """The report in sentences, for the plan."""
        compiled = [name for name in self.blocks if name not in self.eager]
        said = (f"Compiled with {self.backend}: {', '.join(compiled)}.",) if compiled else ()
        return said + tuple(f"{name} runs eagerly: {reason}" for name, reason in self.eager.items())


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost modules that stand more than once, with the same class, in one container.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(3)))
    >>> list(repeated_blocks(net))
    ['1.0', '1.1', '1.2']
    """
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{block}.") for block in found)
        if isinstance(module, nn.ModuleList) and not inside:
            found |= {f"{name}.{key}" if name else key: child for key, child in _alike(module)}
    return found


def _alike(container: nn.Module) -> list[tuple[str, nn.Module]]:
    children = list(container.named_children())
    classes = [type(child) for _, child in children]
    return [(key, child) for key, child in children if classes.count(type(child)) > 1 and list(child.parameters())]


def compile_blocks(model: nn.Module, backend: str | None) -> tuple[CompileReport, Callable[[], None]]:
    """Compile the repeated blocks of a model in place; returns a report that fills as blocks run, and what undoes it.

    Raises:
        ShardingError: an unknown backend.
    """
    if backend is not None and backend not in MODES:
        raise ShardingError(
            f"compile={backend!r} was given; give " + ", ".join(f'"{mode}"' for mode in MODES) + ", or None for eager."
        )
    backend = "aot_eager" if backend == "auto" else backend
    report = CompileReport(backend)
    blocks = repeated_blocks(model) if backend else {}
    compiler = _torch.graph_backend() if blocks and backend == "aot_eager" else backend
    for name, block in blocks.items():
        # One graph for each shape: layouts are decided by sizes, which a graph for all shapes leaves open.
        block.compile(backend=compiler, dynamic=False)
        _torch.set_compiled_call(block, _or_eager(name, block, _torch.compiled_call(block), report))
        report.blocks.append(name)
    return report, lambda: _undo(blocks)


def _undo(blocks: dict[str, nn.Module]) -> None:
    for block in blocks.values():
        _torch.set_compiled_call(block, None)


def _or_eager(name: str, block: nn.Module, compiled: Callable[..., Any], report: CompileReport) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if keeper := _keeper(args, kwargs):
            _tell_of_keeper(name, keeper, report)
            return _torch.call_eagerly(block, *args, **kwargs)
        try:
            return compiled(*args, **kwargs)
        except (_torch.compile_error(), AssertionError) as error:
            # Of an AssertionError: activation checkpointing around DTensors fails one of torch's own, on 2.13.0.
            report.eager[name] = reason = _reason(error)
            _torch.set_compiled_call(block, None)
            warnings.warn(f'"{name}" cannot be compiled and runs eagerly: {reason}', stacklevel=2)
            return block(*args, **kwargs)

    return call


def _reason(error: Exception) -> str:
    """The first line of an error that says something; a backend's error begins with the backend's name alone."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[1] if lines[0].endswith("raised:") and len(lines) > 1 else lines[0]


def _keeper(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The class of an argument in which a block can leave tensors behind, such as a cache of keys and values.

    What is left there has another length at each call, and where it asks for a gradient but gets none, the compiled
    backward raises: it is handed plain zeros in the place of DTensors. Such calls run eagerly.
    """
    for given in (*args, *kwargs.values()):
        for leaf in () if isinstance(given, _VALUES) else pytree.tree_leaves(given):
            if not isinstance(leaf, _VALUES):
                return type(leaf).__name__
    return None


_VALUES = (torch.Tensor, bool, int, float, complex, str, torch.dtype, torch.device, torch.Generator, type(None))


def _tell_of_keeper(name: str, keeper: str, report: CompileReport) -> None:
    if not torch.is_grad_enabled() or name in report.eager:
        return
    reason = f"it was given a {keeper}, in which it can leave tensors behind"
    if reason not in report.eager.values():
        warnings.warn(
            f'"{name}" and blocks like it run eagerly: {reason}. Call the model without it to train compiled blocks '
            "(use_cache=False for models of Hugging Face), or pass compile=None to shard_model.",
            stacklevel=4,
        )
    report.eager[name] = reason

"""Repeated blocks are compiled once and reused; a block that cannot be compiled runs eagerly, and says why.

DTensor decides layouts in Python; compiling a block traces these decisions away, so that what runs is the local
program with its collectives.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardlib.engine import _torch, exact
from shardlib.engine._torch import pytree
from shardlib.engine.plain import plain
from shardlib.errors import ShardingError

__all__ = ["MODES", "CompileReport", "check_backend", "compile_blocks", "repeated_blocks"]

MODES = ("auto", "aot_eager", "inductor")
MAX_SHAPES = 4  # of inputs, for which blocks of one class are compiled; dynamo allows eight graphs in all


@dataclass
class CompileReport:
    """Which modules are compiled with which backend, and which of them fell back to eager, with the reason.

    `shapes`: by class of blocks, the shapes of inputs that they were compiled for; `varied`: what to say of those
    that met more. `rows`: how many examples the batch had, where random numbers depend on that. `stopped`: blocks that
    cannot be compiled and are not tried again.
    """

    backend: str | None
    blocks: list[str] = field(default_factory=list)
    eager: dict[str, str] = field(default_factory=dict)
    shapes: dict[type[nn.Module], set[tuple[torch.Size, ...]]] = field(default_factory=dict)
    rows: dict[tuple[torch.Size, ...], int | None] = field(default_factory=dict)
    varied: dict[type[nn.Module], str] = field(default_factory=dict)
    stopped: set[str] = field(default_factory=set)

    def notes(self) -> tuple[str, ...]:
        """The report in sentences, for the plan."""
        compiled = [name for name in self.blocks if name not in self.eager]
        said = (f"Compiled with {self.backend}: {', '.join(compiled)}.",) if compiled else ()
        eager = tuple(f"{name} runs eagerly: {reason}" for name, reason in self.eager.items())
        return (*said, *self.varied.values(), *eager)


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


def check_backend(backend: str | None) -> None:
    """Refuse a way to compile that is none.

    Raises:
        ShardingError: an unknown backend.
    """
    if backend is not None and backend not in MODES:
        raise ShardingError(
            f"compile={backend!r} was given; give " + ", ".join(f'"{mode}"' for mode in MODES) + ", or None for eager."
        )


def compile_blocks(
    model: nn.Module, backend: str | None, place: exact.Place | None = None, *, eager: Mapping[str, str] | None = None
) -> tuple[CompileReport, Callable[[], None]]:
    """Compile the repeated blocks of a model in place; returns a report that fills as blocks run, and what undoes it.

    `place`: where this rank stands, if random numbers are to be drawn by element. `eager`: modules in which something
    cannot be compiled, and why; the blocks around them are left alone.

    Nothing is compiled where torch's compiler is switched off (TORCHDYNAMO_DISABLE=1 or TORCH_COMPILE_DISABLE=1).

    Raises:
        ShardingError: an unknown backend.
    """
    check_backend(backend)
    if backend is not None and _torch.compiler_is_off():
        backend = None
    backend = "aot_eager" if backend == "auto" else backend
    report = CompileReport(backend)
    blocks = repeated_blocks(model) if backend else {}
    for module, reason in (eager or {}).items():
        report.eager |= {name: reason for name in blocks if module == name or module.startswith(f"{name}.")}
    blocks = {name: block for name, block in blocks.items() if name not in report.eager}
    if blocks:
        _torch.give_fused_splits_real_offsets()
        _torch.keep_compiler_out_of("shardlib.engine.ops")
    compiler = _compiler(backend, place) if blocks and backend is not None else backend
    for name, block in blocks.items():
        # One graph for each shape: layouts are decided by sizes, which a graph for all shapes leaves open.
        block.compile(backend=compiler, dynamic=False)
        _torch.set_compiled_call(block, _Call(name, blocks, _torch.compiled_call(block), report))
        report.blocks.append(name)
    return report, lambda: _undo(blocks.values())


@functools.cache
def _compiler(backend: str, place: exact.Place | None) -> Any:
    """One object for all models that are compiled alike: dynamo keeps graphs by it.

    Where a rank stands is written into the graphs of random calls.
    """
    if backend == "aot_eager":
        return _torch.graph_backend(None if place is None else exact.DECOMPOSITIONS)
    return backend if place is None else _torch.inductor_backend(exact.DECOMPOSITIONS)


def _undo(blocks: Iterable[nn.Module]) -> None:
    for block in blocks:
        _torch.set_compiled_call(block, None)


class _Call:
    """A call of one block: compiled where it can be, else eager."""

    def __init__(
        self, name: str, blocks: dict[str, nn.Module], compiled: Callable[..., Any], report: CompileReport
    ) -> None:
        self.name, self.block, self.compiled, self.report = name, blocks[name], compiled, report
        self.alike = {n: block for n, block in blocks.items() if type(block) is type(self.block)}
        # An AssertionError: activation checkpointing around DTensors fails one of torch's own, on 2.13.0.
        self.failures: tuple[type[Exception], ...] = (*_torch.compile_errors(), AssertionError)
        self.in_one_graph = _torch.graph_breaks_raise()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.name in self.report.stopped:
            return _torch.call_eagerly(self.block, *args, **kwargs)
        if keeper := _keeper(args, kwargs):
            _tell_of_keeper(self.name, keeper, self.report)
            return _torch.call_eagerly(self.block, *args, **kwargs)
        if not self._knows(args, kwargs):
            return _torch.call_eagerly(self.block, *args, **kwargs)
        try:
            # Or none: what runs eagerly in the middle of a block would be told to nobody.
            with self.in_one_graph, exact.traced():
                return _with_plain_gradients(self.compiled(*args, **kwargs))
        except self.failures as error:
            _give_up(self.name, self.alike, _reason(error), self.report)
            return _torch.call_eagerly(self.block, *args, **kwargs)

    def _knows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether blocks like this one are compiled for inputs of these shapes, or will be now.

        All ranks of the model axes see the same shapes, so that they decide alike.
        """
        seen = self.report.shapes.setdefault(type(self.block), set())
        key = tuple(leaf.shape for leaf in (*args, *kwargs.values()) if isinstance(leaf, torch.Tensor))
        if self.report.rows.setdefault(key, exact.rows()) != exact.rows():
            return False  # which of its tensors belong to the batch is written into a graph
        if key in seen:
            return True
        if len(seen) < MAX_SHAPES:
            seen.add(key)
            return True
        if type(self.block) not in self.report.varied:
            said = f"{_and_alike(self.name, self.alike)} are compiled for {MAX_SHAPES} shapes of inputs"
            self.report.varied[type(self.block)] = f"{said} and run eagerly on others."
            warnings.warn(
                f"{said}, and run eagerly on others. Pad batches to few lengths, or pass compile=None to shard_model.",
                stacklevel=4,
            )
        return False


def _with_plain_gradients(output: Any) -> Any:
    """What a compiled block returned. Its backward was traced for plain gradients of plain tensors, but behind it a
    split parameter may be read outside of its region, and make DTensors of them."""
    for leaf in _torch.leaves_of(output):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not isinstance(leaf, DTensor):
            leaf.register_hook(plain)
    return output


def _and_alike(name: str, alike: dict[str, nn.Module]) -> str:
    return f'"{name}" and the {len(alike) - 1} blocks like it'


def _give_up(name: str, alike: dict[str, nn.Module], reason: str, report: CompileReport) -> None:
    """What stops one block stops those of its class; trying each would cost the time of a compilation each."""
    report.stopped.update(alike)
    report.eager.update(dict.fromkeys(alike, reason))
    warnings.warn(f"{_and_alike(name, alike)} cannot be compiled and run eagerly: {reason}", stacklevel=3)


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

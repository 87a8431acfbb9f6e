"""Compilation of repeated blocks, once per class; a block that cannot be compiled runs eagerly and reports the reason.

DTensor decides layouts in Python. Tracing a block removes these decisions: the graph contains only local operations and
collectives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardlib._log import timed
from shardlib._progress import Progress
from shardlib.engine import _torch
from shardlib.engine.feature import exact
from shardlib.engine.feature.randomness import random_states, set_random_states
from shardlib.engine.ops.redistribute import to_full_tensor
from shardlib.errors import ShardingError, warn

__all__ = ["MODES", "CompileReport", "check_backend", "compile_blocks", "repeated_blocks"]

MODES = ("auto", "aot_eager", "inductor")
MAX_SHAPES = 4  # of inputs, for which blocks of one class are compiled; dynamo allows eight graphs in all


@dataclass
class CompileReport:
    """The modules that are compiled, the backend, and the modules that fell back to eager with the reason.

    `shapes`: by class of blocks, the input shapes that they were compiled for; `varied`: messages for classes that met
    more shapes. `rows`: the number of examples of the batch, where random numbers depend on it. `stopped`: blocks that
    failed to compile and are not tried again. `called`: how blocks of each class were called: another way compiles
    another graph.
    """

    backend: str | None
    blocks: list[str] = field(default_factory=list)
    eager: dict[str, str] = field(default_factory=dict)
    shapes: dict[type[nn.Module], set[tuple[torch.Size, ...]]] = field(default_factory=dict)
    rows: dict[tuple[torch.Size, ...], int | None] = field(default_factory=dict)
    varied: dict[type[nn.Module], str] = field(default_factory=dict)
    stopped: set[str] = field(default_factory=set)
    called: set[tuple[Any, ...]] = field(default_factory=set)

    def notes(self) -> tuple[str, ...]:
        """Format the report as sentences, for the plan."""
        compiled = [name for name in self.blocks if name not in self.eager]
        head = (f"Compiled with {self.backend}: {', '.join(compiled)}.",) if compiled else ()
        eager = tuple(f"{name} runs eagerly: {reason}" for name, reason in self.eager.items())
        return (*head, *self.varied.values(), *eager)


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules that share their class with another module of the same `ModuleList`.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(3)))
    >>> list(repeated_blocks(net))
    ['1.0', '1.1', '1.2']
    """
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{block}.") for block in found)
        if isinstance(module, nn.ModuleList) and not inside:
            found |= {f"{name}.{key}" if name else key: child for key, child in _children_of_one_class(module)}
    return found


def _children_of_one_class(container: nn.Module) -> list[tuple[str, nn.Module]]:
    children = list(container.named_children())
    classes = [type(child) for _, child in children]
    return [(key, child) for key, child in children if classes.count(type(child)) > 1 and list(child.parameters())]


def check_backend(backend: str | None) -> None:
    """Refuse an unknown backend.

    Raises:
        ShardingError: an unknown backend.
    """
    if backend is not None and backend not in MODES:
        raise ShardingError(
            f"compile={backend!r} was given; give " + ", ".join(f'"{mode}"' for mode in MODES) + ", or None for eager."
        )


def compile_blocks(
    model: nn.Module,
    backend: str | None,
    data_rank: exact.DataRank | None = None,
    *,
    eager: Mapping[str, str] | None = None,
) -> tuple[CompileReport, Callable[[], None]]:
    """Compile the repeated blocks of a model in place. Return a report that fills as blocks run, and an undo function.

    `data_rank`: this rank's part of the batch, if random numbers are exact. `eager`: modules that cannot be compiled,
    with the reason; the blocks that contain them are not compiled.

    Nothing is compiled where torch's compiler is disabled (TORCHDYNAMO_DISABLE=1 or TORCH_COMPILE_DISABLE=1).
    """
    _torch.pickle_meshes_without_hash()
    if backend is not None and _torch.compiler_is_off():
        backend = None
    backend = "aot_eager" if backend == "auto" else backend
    report = CompileReport(backend)
    blocks = repeated_blocks(model) if backend else {}
    for module, reason in (eager or {}).items():
        report.eager |= {name: reason for name in blocks if module == name or module.startswith(f"{name}.")}
    blocks = {name: block for name, block in blocks.items() if name not in report.eager}
    if blocks:
        _torch.compile_again_for_new_hooks()
        if backend == "aot_eager":
            _torch.keep_memory_of_graphs()
        _torch.give_fused_splits_real_offsets()
        _torch.keep_compiler_out_of("shardlib.engine.ops")
    compiler = _compiler(backend, data_rank) if blocks and backend is not None else backend
    for name, block in blocks.items():
        # One graph for each shape: layouts depend on sizes, which are symbolic in a graph for all shapes.
        block.compile(backend=compiler, dynamic=False)
        call = _Call(name, blocks, _torch.compiled_call(block), report)
        _torch.set_compiled_call(block, call if data_rank is None else _Exactly(call, model, data_rank))
        report.blocks.append(name)

    def undo() -> None:
        for block in blocks.values():
            _torch.set_compiled_call(block, None)

    return report, undo


@functools.cache
def _compiler(backend: str, data_rank: exact.DataRank | None) -> Any:
    """Return one object for all models with these options: dynamo caches graphs by the identity of the backend.

    The graphs of random calls contain the rank's data coordinate.
    """
    if backend == "aot_eager":
        return _torch.graph_backend(None if data_rank is None else exact.DECOMPOSITIONS)
    return backend if data_rank is None else _torch.inductor_backend(exact.DECOMPOSITIONS)


_NO_GRAPH = "whose parameters are sharded, and a graph cannot hold them"


def run_eagerly(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a module whose parameters are sharded, eagerly where its caller is compiled.

    Blocks that are compiled by themselves stay so.

    Raises:
        ShardingError: a transform of `torch.func` calls it, or `torch.jit.trace`; or its forward compiles a function of
            sharded tensors, as torch's higher-order ops do.
    """
    if torch.compiler.is_compiling():
        return torch.compiler.disable(_run_with_warning, reason=_NO_GRAPH)(call, *args, **kwargs)
    if torch.jit.is_tracing():
        raise ShardingError(
            "torch.jit.trace calls a model whose parameters are sharded, and TorchScript cannot hold them. Trace the "
            "unsharded model, with the values of shardlib.full_state_dict(model)."
        )
    if _torch.is_transformed():
        raise ShardingError(
            "A transform of torch.func, such as vmap, grad or jvp, calls a model whose parameters are sharded, and its "
            "tensors do not go into DTensors. Take gradients by torch.autograd.grad, one call for each example or "
            "output; or transform the unsharded model."
        )
    try:
        return call(*args, **kwargs)
    except Exception as error:
        if _torch.failed_to_trace_subclass(error):
            raise ShardingError(
                "The forward compiles a function, or calls an op that takes functions, such as flex_attention, "
                "torch.cond or scan, with tensors that are sharded over a model axis, and torch cannot trace these: "
                f"{_reason(error).rstrip('.')}. Use ops of single tensors in its place, as "
                "F.scaled_dot_product_attention; or replicate the parameters of the modules around it "
                '("replicate"), so that it is given plain tensors.'
            ) from error
        raise


def _run_with_warning(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    warn_of_no_effect()
    return call(*args, **kwargs)


def warn_of_no_effect(*_args: Any, **_options: Any) -> None:
    """Warn that `torch.compile` of a whole model has no effect; stands for its `compile` method."""
    warn(
        f"torch.compile was given a model {_NO_GRAPH}: it runs eagerly. "
        'Compile its blocks: each by its own compile(), or repeated ones by shard_model(compile="inductor") where the '
        "mesh has a model axis.",
    )


class _Exactly:
    """The call of one block with exact random numbers, which are turned on outside of its graph."""

    def __init__(self, call: _Call, model: nn.Module, data_rank: exact.DataRank) -> None:
        self.call, self.model, self.data_rank = call, model, data_rank

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        exact.enter_exact(self.call.block, self.model, self.data_rank, args, kwargs)
        try:
            return self.call(*args, **kwargs)
        finally:
            exact.leave_exact(self.call.block)


class _Call:
    """The call of one block: compiled where possible, else eager."""

    def __init__(
        self, name: str, blocks: dict[str, nn.Module], compiled: Callable[..., Any], report: CompileReport
    ) -> None:
        self.name, self.block, self.compiled, self.report = name, blocks[name], compiled, report
        self.modules = tuple(self.block.modules())
        self.same_class = {n: block for n, block in blocks.items() if type(block) is type(self.block)}
        # AssertionError: activation checkpointing around DTensors fails an assertion inside torch 2.13.0.
        self.failures: tuple[type[Exception], ...] = (*_torch.compile_errors(), AssertionError)
        self.in_one_graph = _torch.graph_breaks_raise()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        shapes = tuple(leaf.shape for leaf in given if isinstance(leaf, torch.Tensor))
        if self.name in self.report.stopped or not self._fits_in_graph(given) or not self._has_graph(shapes):
            return _torch.call_eagerly(self.block, *args, **kwargs)
        how = type(self.block), shapes, self.block.training, torch.is_grad_enabled()
        is_first = how not in self.report.called
        arguments = [leaf for leaf in _torch.leaves_of(given) if isinstance(leaf, torch.Tensor)] if is_first else []
        before = [_Before(each, each.detach().clone(), each.grad_fn) for each in arguments]
        restore = self._restoring(before, buffers=is_first)
        try:
            # Graph breaks raise: eager code in the middle of a block would not appear in the report.
            with self.in_one_graph, exact.traced():
                output = self._compile(how, *args, **kwargs) if is_first else self.compiled(*args, **kwargs)
            if not torch.is_grad_enabled() or not any(one.is_written_apart() for one in before):
                return _with_plain_gradients(output)
            self._stop("it writes into a tensor that it is given, whose gradient a graph would lose")
            restore()
            return _torch.call_eagerly(self.block, *args, **kwargs)
        except self.failures as error:
            if isinstance(error, AssertionError) and not _torch.raised_by_torch(error):
                raise  # the block's own
            self._stop(_reason(error))
            restore()
            return _torch.call_eagerly(self.block, *args, **kwargs)

    def _restoring(self, arguments: list[_Before], *, buffers: bool) -> Callable[[], None]:
        """Return a function that undoes what a failed call has drawn, and what it has written.

        Torch's assertion about checkpointed DTensors fails after the forward of a new graph has run.
        """
        states = random_states()
        own = self.block.buffers() if buffers else ()
        before = [*arguments, *(_Before(buffer, buffer.detach().clone(), None) for buffer in own)]

        def restore() -> None:
            set_random_states(states)
            for one in before:
                one.restore()

        return restore

    def _fits_in_graph(self, given: tuple[Any, ...]) -> bool:
        """Tell whether a graph can hold a call with these arguments; report why not."""
        if (found := self._derived_weight() or _mutable_argument(given)) is not None:
            self._report_eager(*found)
            return False
        return True

    def _stop(self, reason: str) -> None:
        """Run all blocks of the class eagerly from now on: trying the others would cost a compilation each."""
        self.report.stopped.update(self.same_class)
        self.report.eager.update(dict.fromkeys(self.same_class, reason))
        warn(f"{self._all_of_class} cannot be compiled and run eagerly: {reason}")

    def _report_eager(self, reason: str, advice: str) -> None:
        """Report calls that run eagerly, and warn the first time."""
        if torch.is_grad_enabled() and self.name not in self.report.eager:
            if reason not in self.report.eager.values():
                warn(
                    f'"{self.name}" and blocks like it run eagerly: {reason}. {advice}, or pass compile=None to '
                    "shard_model."
                )
            self.report.eager[self.name] = reason

    @property
    def _all_of_class(self) -> str:
        return f'"{self.name}" and the {len(self.same_class) - 1} blocks like it'

    def _derived_weight(self) -> tuple[str, str] | None:
        """Return why the call cannot be compiled, and advice, if a hook assigns a tensor to a module before each call.

        So do pruning and the old `weight_norm` and `spectral_norm`: autograd then gives a graph plain zeros in place of
        gradients of DTensors, and the compiled backward raises.
        """
        found = _torch.computed_before_calls(self.modules)
        if found is None:
            return None
        module, name = found
        reason = f"a hook of a {type(module).__name__} computes its {name} before each call"
        return reason, "Use torch.nn.utils.parametrizations before shard_model"

    def _compile(self, how: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
        """Run the first call of this kind of a class, which compiles, with its progress."""
        self.report.called.add(how)
        what = f'compiling "{self.name}"'
        with timed(what), Progress(what, unit="blocks"):
            return self.compiled(*args, **kwargs)

    def _has_graph(self, key: tuple[torch.Size, ...]) -> bool:
        """Return whether blocks of this class are compiled for inputs of these shapes, or will be by this call.

        All ranks of the model axes see the same shapes and reach the same decision.
        """
        seen = self.report.shapes.setdefault(type(self.block), set())
        if self.report.rows.setdefault(key, exact.rows()) != exact.rows():
            return False  # a graph contains which tensors belong to the batch
        if key in seen:
            return True
        if len(seen) < MAX_SHAPES:
            seen.add(key)
            return True
        if type(self.block) not in self.report.varied:
            limit = f"{self._all_of_class} are compiled for {MAX_SHAPES} shapes of inputs"
            self.report.varied[type(self.block)] = f"{limit} and run eagerly on others."
            warn(
                f"{limit}, and run eagerly on others. Pad batches to few lengths, or pass compile=None to shard_model.",
            )
        return False


@dataclass(frozen=True)
class _Before:
    """A tensor before a call, with its value and its node of autograd then."""

    tensor: torch.Tensor
    value: torch.Tensor
    grad_fn: Any

    @property
    def _is_as_before(self) -> bool:
        same = (self.tensor.detach().nan_to_num() == self.value.nan_to_num()).all()
        return bool(to_full_tensor(same))  # of a split tensor, the same answer on all ranks

    def is_written_apart(self) -> bool:
        """Tell whether the call has written into the tensor, and autograd does not know."""
        return self.tensor.grad_fn is self.grad_fn and not self._is_as_before

    def restore(self) -> None:
        if not self._is_as_before:
            self.tensor.detach().copy_(self.value)


def _with_plain_gradients(output: Any) -> Any:
    """Convert gradients of a compiled block's outputs to plain tensors, and return the outputs.

    Its backward was traced for plain gradients; they are DTensors where a later module reads a sharded parameter
    outside of its region.
    """
    for leaf in _torch.leaves_of(output):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not isinstance(leaf, DTensor):
            leaf.register_hook(_plain_gradient)
    return output


def _plain_gradient(grad: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled():
        raise ShardingError(
            "A backward with create_graph=True goes through a compiled block, of whose graph torch has no second "
            "derivative. Pass compile=None to shard_model."
        )
    return to_full_tensor(grad)


def _reason(error: Exception) -> str:
    r"""Return the first informative line of an error.

    A backend's error begins with a line that only names it; a class of exception may stand on a line of its own.

    >>> _reason(RuntimeError("backend='x' raised:\nNotImplementedError: \nno such kernel\nmore"))
    'NotImplementedError: no such kernel'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if lines[0].endswith("raised:") and len(lines) > 1:
        del lines[0]
    return " ".join(lines[:2]) if lines[0].endswith("Error:") else lines[0]


def _mutable_argument(given: tuple[Any, ...]) -> tuple[str, str] | None:
    """Return why a call cannot be compiled, and advice, if a block can store tensors in an argument, as in a cache.

    Stored tensors differ in length at each call. Where one requires a gradient and receives none, autograd passes plain
    zeros instead of DTensors, and the compiled backward raises. A graph has copies of lists and dicts: what a block
    stores there would be lost. Lists of numbers are none of these.
    """
    for each in given:
        found = _mutable(each)
        if found is not None:
            reason = f"it was given a {type(found).__name__}, in which it can leave tensors behind"
            return reason, "Call the model without it (use_cache=False for models of Hugging Face)"
    return None


def _mutable(value: Any) -> Any:
    """Return what tensors can be stored in, of a value; None if there is nothing."""
    if isinstance(value, _VALUES):
        return None
    if isinstance(value, list) and value and all(isinstance(each, _NUMBERS) for each in value):
        return None
    if isinstance(value, tuple):
        return next((found for each in value if (found := _mutable(each)) is not None), None)
    return value


_NUMBERS = (bool, int, float, complex, str)
_VALUES = (*_NUMBERS, torch.Tensor, torch.dtype, torch.device, torch.Generator, type(None))

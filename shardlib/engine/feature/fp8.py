"""Linear modules that multiply in float8: e4m3 in forward, e5m2 for gradients in backward.

Micikevicius et al., "FP8 Formats for Deep Learning", 2022. A tensor is multiplied by a scale that brings its largest
magnitude to the format's range, and rounded. Products accumulate in float32 and are divided by the scales:

    y          = x @ w.T      e4m3 @ e4m3
    grad of x  = g @ w        e5m2 @ e4m3
    grad of w  = g.T @ x      e5m2 @ e4m3

Results, weights and their gradients are bfloat16; the bias and its gradient are never in float8.

Scales are **powers of two**: by default current scales, the largest that keep the tensor in range. The rounded value of
a normal number then depends neither on the scale nor on the other elements of the rank: each data rank scales its own
activations without communication, and still rounds to the same bits as one device. The scale matters only for numbers
so much smaller than the largest (2**13 times in e4m3, 2**28 in e5m2) that they may become subnormal, and a rank's own
scale is never worse than that of all ranks. Powers of two cost at most one factor of two of range, and no precision.

Delayed scales keep in range the largest magnitudes of some earlier steps, on any rank, so that a kernel need not read a
tensor before it rounds it; larger values are clamped to the largest number of the format (section 3.1 of the paper;
docs.nvidia.com/deeplearning/transformer-engine, "DelayedScaling" with "max"). Ranks must then agree on scales, since
scales decide which values are clamped: one all-reduce after each step takes the maximum of all magnitudes over ranks.

Weights are unsharded whenever they are multiplied here, even if they are stored in shards; their scales are the same on
all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from shardlib._plan import Plan, Row, rows_by_name
from shardlib.engine import _torch
from shardlib.engine.model.choose_regions import inside
from shardlib.errors import CheckpointError, PlanError, nearest, warn
from shardlib.rules.patterns import compile_pattern

__all__ = ["E4M3", "E5M2", "History", "Linears", "Rounded", "choose", "install", "rounded"]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # of features: required by the CUDA kernels


class Rounded(NamedTuple):
    """A tensor in float8. Its value is `values * unit`; the unit is a power of two in float32."""

    values: torch.Tensor
    unit: torch.Tensor


@dataclass(frozen=True)
class Linears:
    """Names of the modules that multiply in float8; and, by reason, of requested modules that do not.

    `history` is that of their magnitudes, for delayed scales.
    """

    names: tuple[str, ...] = ()
    spared: tuple[tuple[str, tuple[str, ...]], ...] = ()
    history: History | None = None

    def notes(self) -> tuple[str, ...]:
        """Format the choice as sentences, for the plan."""
        return ((f"Multiply in float8: {_listed(self.names)}.",) if self.names else ()) + self.reasons()

    def reasons(self) -> tuple[str, ...]:
        return tuple(f"Not in float8, {reason}: {_listed(names)}." for reason, names in self.spared)

    @property
    def stateful(self) -> dict[str, History]:
        """The state that is saved with the optimizer, by name."""
        return {} if self.history is None else {"fp8_history": self.history}

    def end_step(self, group: dist.ProcessGroup | None) -> Callable[[], None] | None:
        """Return what ends a step on the ranks of the group; None if nothing is kept between steps."""
        return None if self.history is None else functools.partial(self.history.end_step, group)


def choose(model: nn.Module, plan: Plan, device: torch.device, regions: Collection[str]) -> Linears:
    """Choose the linear modules that multiply in float8 according to a plan. A warning names the excluded modules.

    The plan's step has patterns of linear modules, or of modules that contain them. `model` is not sharded yet, and
    `regions` are modules that compute on DTensors.

    Raises:
        PlanError: a pattern that matches no linear module.
    """
    names: list[str] = []
    spared: dict[str, list[str]] = {}
    rows = rows_by_name(plan.rows)
    for name in _matched(model, plan.step.fp8):
        reason = _unsuitable(model, name, rows, plan.step.autocast, regions) or _unsupported(device)
        (names if reason is None else spared.setdefault(reason, [])).append(name)
    steps = plan.step.fp8_history
    history = History(tuple(names), steps, device) if steps and names else None
    made = Linears(tuple(names), tuple((reason, tuple(which)) for reason, which in spared.items()), history)
    if spared:
        warn(" ".join(made.reasons()))
    return made


class History:
    """The largest magnitudes of earlier steps: of the input, the weight and the gradient of each module.

    The same on all ranks. In the first step, a tensor is scaled by its own largest magnitude.

    Attributes:
        largest: the maximum over the history, (modules, 3); zero where it is empty.
        now: the maximum of the current step on this rank.
    """

    def __init__(self, names: tuple[str, ...], steps: int, device: torch.device) -> None:
        self.names, self._next = names, 0
        self._steps = torch.zeros(steps, len(self.names), 3, device=device)
        self.largest, self.now = torch.zeros_like(self._steps[0]), torch.zeros_like(self._steps[0])

    def end_step(self, group: dist.ProcessGroup | None) -> None:
        """Add the current step's maxima over the ranks of the group to the history. Collective over the group."""
        if group is not None:
            dist.all_reduce(self.now, op=dist.ReduceOp.MAX, group=group)
        self._steps[self._next].copy_(self.now)
        self._next = (self._next + 1) % len(self._steps)
        self.largest.copy_(self._steps.amax(0))
        self.now.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return the history, the oldest step first."""
        return {"names": list(self.names), "steps": self._steps.roll(-self._next, 0)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict` for the same modules; the last steps if its history has another length."""
        if list(state["names"]) != list(self.names):
            unlike = sorted({*state["names"]} ^ {*self.names})
            raise CheckpointError(
                f"The state is of a model that multiplies in float8 in {len(state['names'])} modules, and this one in "
                f"{len(self.names)}. In one of them only: {_listed(unlike[:5])}. Choose the same linears=."
            )
        last = state["steps"][-len(self._steps) :].to(self._steps)
        self._steps.zero_()
        self._steps[len(self._steps) - len(last) :].copy_(last)
        self._next = 0
        self.largest.copy_(self._steps.amax(0))


def install(model: nn.Module, linears: Linears) -> Callable[[], None]:
    """Let these modules multiply in float8, scaled by a history or by each tensor itself; return an undo function."""
    modules, history = [model.get_submodule(name) for name in linears.names], linears.history
    for index, module in enumerate(modules):
        assert isinstance(module, nn.Linear)
        scaling = _Scaling() if history is None else _Scaling(history.largest[index], history.now[index])
        module.forward = _forward(module, scaling)  # type: ignore[method-assign,assignment]

    def undo() -> None:
        for module in modules:
            del module.forward

    return undo


def _matched(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the names of linear modules that patterns match, directly or by a module that contains them."""
    modules = model.named_modules() if patterns else ()
    linears = [name for name, module in modules if isinstance(module, nn.Linear)]
    compiled = {text: compile_pattern(text) for text in patterns}
    for text, pattern in compiled.items():
        if not any(pattern.matches(part) for name in linears for part in _modules_around(name)):
            raise PlanError(
                f'precision("fp8", linears="{text}"): the pattern matches none of the {len(linears)} linear modules of '
                f"this {type(model).__name__}, nor a module that one is in; patterns are written as in rules. Name "
                f'nn.Linear modules, or choose precision("bf16").{nearest(text, linears)}'
            )
    return [n for n in linears if any(p.matches(part) for p in compiled.values() for part in _modules_around(n))]


def _modules_around(name: str) -> Iterator[str]:
    """Yield the names of the modules that contain a module, and its own name."""
    parts = name.split(".")
    yield from (".".join(parts[:count]) for count in range(len(parts) + 1))


def _unsuitable(
    model: nn.Module, name: str, rows: Mapping[str, Row], autocast: torch.dtype | None, regions: Collection[str]
) -> str | None:
    """Return the reason why a linear module cannot multiply in float8, as text, or None."""
    module, row = model.get_submodule(name), rows.get(f"{name}.weight".lstrip("."))
    assert isinstance(module, nn.Linear)
    dtype = module.weight.dtype if row is None else row.compute.dtype or row.dtype
    owners = [name] if row is None else [tied.rpartition(".")[0] for tied in row.tied]
    if type(module).forward is not nn.Linear.forward or "forward" in module.__dict__:
        return f"since {type(module).__name__} has a forward of its own"
    if isinstance(model.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention):
        return "since nn.MultiheadAttention reads its weight without calling it"
    if (autocast or dtype) != torch.bfloat16:
        what = "its weight is" if autocast is None else "autocast is to"
        return f"since {what} {str(autocast or dtype).removeprefix('torch.')}, not bfloat16"
    if module.in_features % MULTIPLE or module.out_features % MULTIPLE:
        return f"since its features are not multiples of {MULTIPLE}"
    if any(inside(owner, regions) for owner in owners):
        return "since it computes on DTensors, in a region of a model axis"
    return None


def _unsupported(device: torch.device) -> str | None:
    """Return the reason why a device cannot multiply in float8, as text, or None."""
    if device.type == "cpu":
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        return f"which shardlib does on CPU and on NVIDIA's GPUs only, not on {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        return f"which takes a GPU of compute capability 8.9, not {capability[0]}.{capability[1]}"
    return None


def _listed(names: Sequence[str]) -> str:
    return ", ".join(name or "the model itself" for name in names)


_FORMATS = (E4M3, E4M3, E5M2)


@dataclass(frozen=True, eq=False)
class _Scaling:
    """Rounding of a module's input (0), weight (1) and gradient (2), by its own largest magnitude or by earlier ones.

    Attributes:
        largest: the magnitudes of earlier steps, a module's row of `History`; None to scale each tensor by its own.
        now: the row where the current magnitudes are recorded for later steps; None without grad mode.
    """

    largest: torch.Tensor | None = None
    now: torch.Tensor | None = None

    def round(self, which: int, tensor: torch.Tensor) -> Rounded:
        if self.largest is None:
            return rounded(tensor, _FORMATS[which])
        largest = _largest(tensor)
        if self.now is not None:
            finite = torch.where(largest.isfinite(), largest, 0)
            self.now[which].copy_(torch.maximum(self.now[which], finite))
        before = self.largest[which]
        return rounded(tensor, _FORMATS[which], largest, torch.where(before > 0, before, largest))


def _forward(module: nn.Linear, scaling: _Scaling) -> Callable[[torch.Tensor], torch.Tensor]:
    """Make the forward of a module. It reads the weight at each call, since it may be unsharded only then."""

    def forward(input: torch.Tensor) -> torch.Tensor:
        weight, bias = module.weight, module.bias
        low = _dtype(input, weight)
        if low is None or not input.numel() or isinstance(input, DTensor) or isinstance(weight, DTensor):
            return F.linear(input, weight, bias)
        rows = input.reshape(-1, input.shape[-1]).to(low)
        rounding = scaling if torch.is_grad_enabled() else _Scaling(scaling.largest)
        out = _Linear.apply(rows, weight.to(low), None if bias is None else bias.to(low), rounding)
        return out.view(*input.shape[:-1], -1)

    return forward


def _dtype(input: torch.Tensor, weight: torch.Tensor) -> torch.dtype | None:
    """Return bfloat16 if `F.linear` would compute in it, else None: a model may disable autocast, or use float16."""
    kind = input.device.type
    autocast = torch.is_autocast_enabled(kind)
    taken = {torch.get_autocast_dtype(kind)} if autocast else {input.dtype, weight.dtype}
    return torch.bfloat16 if taken == {torch.bfloat16} else None


class _Linear(torch.autograd.Function):
    """Linear layer in float8.

    Forward saves its input in float8, half the size of bfloat16. It saves no copy of the weight, so that a resharded
    weight costs no memory between forward and backward; backward rounds it again, to the same bits.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scaling: _Scaling
    ) -> torch.Tensor:
        low = scaling.round(0, x)
        ctx.scaling = scaling
        ctx.save_for_backward(*(low if ctx.needs_input_grad[1] else (None, None)), weight)
        return _product(low, scaling.round(1, weight), x.dtype, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, unit, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        low = ctx.scaling.round(2, grad)
        weight_t = _transposed(ctx.scaling.round(1, weight)) if needs_x else None
        return (
            _product(low, weight_t, grad.dtype) if weight_t is not None else None,
            _product(_transposed(low), _transposed(Rounded(values, unit)), weight.dtype) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
            None,
        )


def _largest(tensor: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(tensor, float("inf"), dtype=torch.float32)


def rounded(
    tensor: torch.Tensor, dtype: torch.dtype, largest: torch.Tensor | None = None, kept: torch.Tensor | None = None
) -> Rounded:
    """Round a tensor to float8, scaled by the largest power of two that keeps it in range; all nan if not finite.

    Args:
        tensor: of any floating dtype.
        dtype: a float8 dtype.
        largest: the largest magnitude of the tensor, if known.
        kept: a magnitude to keep in range instead. Larger values are clamped.

    The difference of the bit patterns of two positive floats, shifted right by the mantissa bits, is the difference of
    their exponents, less one if the subtrahend has the larger mantissa: exactly the exponent of the scale, without a
    device synchronisation. Multiplying by the scale is exact too, so that no element is out of range afterwards.

    >>> values, unit = rounded(torch.tensor([3.0, -100.0, 0.26]), E4M3)  # 400 is in range, 800 is not
    >>> values.float() * unit, 1 / unit
    (tensor([  3.0000, -96.0000,   0.2500]), tensor(4.))
    """
    largest = _largest(tensor) if largest is None else largest
    most = torch.finfo(dtype).max
    limit, bound = torch.full_like(largest, most), largest if kept is None else kept
    exponent = ((limit.view(torch.int32) - bound.view(torch.int32)) >> 23).clamp(-126, 126)
    scale, unit = (((sign * exponent + 127) << 23).view(torch.float32) for sign in (1, -1))
    values = tensor * scale.to(tensor.dtype)
    values = values if kept is None else values.clamp(-most, most)
    values = values.to(dtype, memory_format=torch.contiguous_format)
    return Rounded(values, torch.where(largest.isfinite(), unit, torch.nan))


def _product(a: Rounded, b: Rounded, dtype: torch.dtype, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `a @ b.T + bias`, for contiguous a (m, k) and b (n, k): the one form that all hardware supports."""
    return _torch.scaled_product(a.values, b.values.t(), a.unit, b.unit, bias, dtype)


def _transposed(matrix: Rounded) -> Rounded:
    """Return the contiguous transpose, padded with columns of zeros to a multiple of 16."""
    rows = len(matrix.values)
    transposed = matrix.values.view(torch.uint8).t()  # zero bits are the number zero
    transposed = F.pad(transposed, (0, -rows % MULTIPLE)) if rows % MULTIPLE else transposed.contiguous()
    return Rounded(transposed.view(matrix.values.dtype), matrix.unit)

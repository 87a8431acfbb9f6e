"""Linear modules that multiply in float8: forward in e4m3, in backward the gradient in e5m2.

Micikevicius et al., "FP8 Formats for Deep Learning", 2022. A tensor is multiplied by a scale that brings its largest
magnitude to the format's range, rounded, multiplied with another in float32, and the scales are divided out:

    y          = x @ w.T      e4m3 @ e4m3
    grad of x  = g @ w        e5m2 @ e4m3
    grad of w  = g.T @ x      e5m2 @ e4m3

Results, weights and their gradients are bfloat16; the bias and its gradient never are in float8.

Scales are current ones, of the tensor as it is, and **powers of two**: the largest that keeps the tensor in range.
What a normal number is rounded to then does not depend on the scale at all, and so not on which other elements are on
the rank: each data rank scales its own activations and nothing is sent, and yet rounds what one device would round, to
the same bits. Only where a number is so much smaller than the largest (2**13 times in e4m3, 2**28 in e5m2) that it may
become subnormal does the scale matter, and a rank's own is never worse than that of all ranks. It costs at most one of
these powers of two of range, and no precision.

Weights are whole wherever they are multiplied here, those stored in parts too; their scales are alike on all ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from shardlib._plan import Plan, Row
from shardlib.engine import _torch
from shardlib.engine.regions import inside
from shardlib.errors import PlanError, nearest
from shardlib.rules.patterns import compile_pattern

__all__ = ["E4M3", "E5M2", "Linears", "Rounded", "choose", "install", "rounded"]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # of features: what the kernels of CUDA take


class Rounded(NamedTuple):
    """A tensor in float8: what it stands for is `values * unit`, the unit a power of two in float32."""

    values: torch.Tensor
    unit: torch.Tensor


@dataclass(frozen=True)
class Linears:
    """Names of the modules that multiply in float8; and by the reason, of those that were asked for and do not."""

    names: tuple[str, ...] = ()
    spared: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def notes(self) -> tuple[str, ...]:
        """The same in sentences, for the plan."""
        return ((f"Multiply in float8: {_listed(self.names)}.",) if self.names else ()) + self.reasons()

    def reasons(self) -> tuple[str, ...]:
        return tuple(f"Not in float8, {reason}: {_listed(names)}." for reason, names in self.spared)


def choose(model: nn.Module, plan: Plan, device: torch.device, regions: Collection[str]) -> Linears:
    """Which linear modules a plan has multiply in float8. What stands in the way of others is told and warned of.

    Args:
        model: as it is before it is sharded.
        plan: whose step has patterns of linear modules, or of modules that they are in.
        device: that the model will be on.
        regions: modules that compute on DTensors.

    Raises:
        PlanError: a pattern that matches no linear module.
    """
    names: list[str] = []
    spared: dict[str, list[str]] = {}
    rows = {name: row for row in plan.rows for name in (row.name, *row.tied)}
    for name in _matched(model, plan.step.fp8):
        reason = _hindrance(model, name, rows, plan.step.autocast, regions) or _lack(device)
        (names if reason is None else spared.setdefault(reason, [])).append(name)
    made = Linears(tuple(names), tuple((reason, tuple(which)) for reason, which in spared.items()))
    if spared:
        warnings.warn(" ".join(made.reasons()), stacklevel=4)
    return made


def install(model: nn.Module, linears: Linears) -> Callable[[], None]:
    """Let these modules multiply in float8; returns what undoes it."""
    modules = [model.get_submodule(name) for name in linears.names]
    for module in modules:
        assert isinstance(module, nn.Linear)
        module.forward = _forward(module)  # type: ignore[method-assign,assignment]

    def undo() -> None:
        for module in modules:
            del module.forward

    return undo


def _matched(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Names of linear modules that patterns match, or match a module that they are in."""
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
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
    """A module's name, and those of the modules that it is in."""
    parts = name.split(".")
    yield from (".".join(parts[:count]) for count in range(len(parts) + 1))


def _hindrance(
    model: nn.Module, name: str, rows: Mapping[str, Row], autocast: torch.dtype | None, regions: Collection[str]
) -> str | None:
    """Why a linear module cannot multiply in float8, in words."""
    module, row = model.get_submodule(name), rows.get(f"{name}.weight".lstrip("."))
    assert isinstance(module, nn.Linear)
    dtype = module.weight.dtype if row is None else row.compute.dtype or row.dtype
    owners = [name] if row is None else [tied.rpartition(".")[0] for tied in row.tied or (row.name,)]
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


def _lack(device: torch.device) -> str | None:
    """What a device lacks to multiply in float8, in words."""
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


def _forward(module: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    """The weight is read at each call: one that is stored in parts is whole only then."""

    def forward(input: torch.Tensor) -> torch.Tensor:
        weight, bias = module.weight, module.bias
        low = _dtype(input, weight)
        if low is None or not input.numel() or isinstance(input, DTensor) or isinstance(weight, DTensor):
            return F.linear(input, weight, bias)
        rows = input.reshape(-1, input.shape[-1]).to(low)
        out = _Linear.apply(rows, weight.to(low), None if bias is None else bias.to(low))
        return out.view(*input.shape[:-1], -1)

    return forward


def _dtype(input: torch.Tensor, weight: torch.Tensor) -> torch.dtype | None:
    """bfloat16 if `F.linear` would take and make that, else None: a model may switch autocast off, or to float16."""
    kind = input.device.type
    autocast = torch.is_autocast_enabled(kind)
    taken = {torch.get_autocast_dtype(kind)} if autocast else {input.dtype, weight.dtype}
    return torch.bfloat16 if taken == {torch.bfloat16} else None


class _Linear(torch.autograd.Function):
    """Forward keeps its input in float8, half of bfloat16. Of the weight it keeps no copy, so that one stored in parts
    costs nothing between forward and backward; it is rounded again, to the same bits."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:  # type: ignore[override]
        low = rounded(x, E4M3)
        ctx.save_for_backward(*(low if ctx.needs_input_grad[1] else (None, None)), weight)
        return _product(low, rounded(weight, E4M3), x.dtype, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, unit, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        low = rounded(grad, E5M2)
        turned = _turned(rounded(weight, E4M3)) if needs_x else None
        return (
            _product(low, turned, grad.dtype) if turned is not None else None,
            _product(_turned(low), _turned(Rounded(values, unit)), weight.dtype) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
        )


def rounded(tensor: torch.Tensor, dtype: torch.dtype) -> Rounded:
    """A tensor in float8, by the largest power of two that keeps it in range. One that is not finite makes it all nan.

    The bits of two positive floats differ by the difference of their exponents, and one less where the mantissa is
    the larger: shifted right, that is the exponent wanted, exactly and without waiting for the device. Multiplying by
    it is exact too, so that no element is out of range afterwards.

    >>> values, unit = rounded(torch.tensor([3.0, -100.0, 0.26]), E4M3)  # 400 is in range, 800 is not
    >>> values.float() * unit, 1 / unit
    (tensor([  3.0000, -96.0000,   0.2500]), tensor(4.))
    """
    largest = torch.linalg.vector_norm(tensor, float("inf"), dtype=torch.float32)
    limit = torch.full_like(largest, torch.finfo(dtype).max)
    exponent = ((limit.view(torch.int32) - largest.view(torch.int32)) >> 23).clamp(-126, 126)
    scale, unit = (((sign * exponent + 127) << 23).view(torch.float32) for sign in (1, -1))
    values = (tensor * scale.to(tensor.dtype)).to(dtype, memory_format=torch.contiguous_format)
    return Rounded(values, torch.where(largest.isfinite(), unit, torch.nan))


def _product(a: Rounded, b: Rounded, dtype: torch.dtype, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`a @ b.T + bias`, for a of (m, k) and b of (n, k), both contiguous: the one form that all hardware has."""
    return _torch.scaled_product(a.values, b.values.t(), a.unit, b.unit, bias, dtype)


def _turned(matrix: Rounded) -> Rounded:
    """Its transpose, contiguous, with columns of zeros that make them a multiple of 16 and add nothing to a product."""
    rows = len(matrix.values)
    turned = matrix.values.view(torch.uint8).t()  # zero bits are the number zero
    turned = F.pad(turned, (0, -rows % MULTIPLE)) if rows % MULTIPLE else turned.contiguous()
    return Rounded(turned.view(matrix.values.dtype), matrix.unit)

"""Pointwise ops, with broadcasting.

Rows: every dim of the output may be sharded, together with the same dim of each operand that has it. Partial sums pass
through where the op is linear in them: y = f(x1 + x2) = f(x1) + f(x2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from shardlib.engine._torch import op_names
from shardlib.engine.ops._rows import Call, Meta, Op, P, R, Row, S, aten, row, rule

__all__: list[str] = []

# Linear in all tensor operands together.
_ADDITIVE = (
    "add.Tensor",
    "sub.Tensor",
    "neg",
    "positive",
    "clone",
    "_conj_physical",
    "conj_physical",
    "rad2deg",
    "deg2rad",
)
# Linear in each of the first two operands while the other is replicated.
_BILINEAR = ("mul.Tensor",)
# Linear in the first operand while the others are replicated.
_LINEAR_IN_FIRST = (
    "div.Tensor",
    "mul.Scalar",
    "div.Scalar",
    "native_dropout_backward",
    "gelu_backward",
    "silu_backward",
    "sigmoid_backward",
    "tanh_backward",
    "threshold_backward",
    "hardtanh_backward",
    "hardsigmoid_backward",
    "hardswish_backward",
    "leaky_relu_backward",
    "elu_backward",
    "softplus_backward",
    "softshrink_backward",
    "hardshrink_backward",
    "mish_backward",
    "log_sigmoid_backward",
    "logit_backward",
)
# Pointwise, but it or its in-place form is neither tagged so by torch nor linear.
_UNTAGGED = (
    "floor_divide",
    "floor_divide_.Tensor",
    "log_sigmoid_forward",
    "masked_fill.Scalar",
    "masked_fill.Tensor",
    "copy",
    "fill.Scalar",
    "fill.Tensor",
    "zero",
    "hardswish",
    "mish",
    "_prelu_kernel",
    "_prelu_kernel_backward",
    "polar",
    "complex",
    "threshold",
    "_add_relu.Tensor",
    "rsub.Tensor",
)
# Tagged pointwise, but random, or with one value for all ranks.
_EXCLUDED = {"aten::equal", "aten::rrelu", "aten::rrelu_", "aten::rrelu_with_noise", "aten::rrelu_with_noise_"}


def pointwise_rows(call: Call) -> Iterator[Row]:
    """Split any dim of the output, each operand on the dim it broadcasts along."""
    shape = max((m.shape for m in call.outputs if m is not None), key=len)
    for dim in range(len(shape)):
        ins = [S(d) if (d := aligned(meta, dim, shape)) is not None else R for meta in call.inputs]
        if any(p is not R for p in ins):
            # Shape (0,) denotes an output that is not computed.
            yield row([R if m is not None and m.shape == (0,) else S(dim) for m in call.outputs], ins)


def aligned(meta: Meta, dim: int, shape: tuple[int, ...]) -> int | None:
    """Return the operand's dim for an output dim, or None where it is broadcast."""
    own = dim - (len(shape) - meta.ndim)
    return own if own >= 0 and meta.shape[own] == shape[dim] else None


def _additive(call: Call) -> Iterable[Row]:
    yield from pointwise_rows(call)
    if not isinstance(call.values.get("other"), int | float | complex):
        yield row([P], [P] * len(call.inputs))


def _bilinear(call: Call) -> Iterable[Row]:
    yield from pointwise_rows(call)
    for i in range(len(call.inputs)):
        yield row([P], [P if i == j else R for j in range(len(call.inputs))])


def _linear_in_first(call: Call) -> Iterable[Row]:
    yield from pointwise_rows(call)
    yield row([P], [P] + [R] * (len(call.inputs) - 1))


def _linear_in_all_but_first(call: Call) -> Iterable[Row]:
    """Return rows of `where`, which is linear in the values for a replicated condition."""
    yield from pointwise_rows(call)
    yield row([P], [R] + [P] * (len(call.inputs) - 1))


def _cast(call: Call) -> Iterable[Row]:
    """Return rows of a cast. Partial sums pass through a cast to a dtype that represents all their values."""
    yield from pointwise_rows(call)
    source, target = call.inputs[0].dtype, call.outputs[0].dtype if call.outputs[0] else None
    if target is not None and torch.promote_types(source, target) == target and target.is_floating_point:
        yield row([P], [P])


def _tagged_pointwise() -> Iterator[Op]:
    for name in op_names():
        if name.startswith("aten::") and name.partition(".")[0] not in _EXCLUDED:
            op = aten(name.removeprefix("aten::"))
            if op is not None and torch.Tag.pointwise in op.tags:
                yield op


def _register() -> None:
    rule(*_tagged_pointwise(), empty=True)(pointwise_rows)
    for names, rows in (
        (_UNTAGGED, pointwise_rows),
        (_ADDITIVE, _additive),
        (_BILINEAR, _bilinear),
        (_LINEAR_IN_FIRST, _linear_in_first),
        (
            ("alias", "alias_copy", "detach", "lift_fresh", "lift_fresh_copy", "_conj", "_neg_view", "real", "imag"),
            _additive,
        ),
        (("where.self",), _linear_in_all_but_first),
        (("_to_copy",), _cast),
    ):
        rule(*(aten(name) for name in names), empty=True)(rows)
        rule(*(aten(_in_place(name)) for name in names), empty=True)(rows)


def _in_place(name: str) -> str:
    base, _, overload = name.partition(".")
    return f"{base}_.{overload}" if overload else f"{base}_"


_register()

"""Convolution, pooling, resampling, padding: batch and channels may be sharded, spatial dims may not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardlib.engine.ops._rows import Call, Local, Op, P, R, Row, S, aten, row, rule

__all__: list[str] = []


# --- convolution --------------------------------------------------------------------------------------------------


def _channel_dims(call: Call) -> tuple[int, int]:
    """Return the weight's dims of output and input channels."""
    return (1, 0) if call["transposed"] else (0, 1)


def _forward_groups(op: Op, args: list[Any], local: Local) -> tuple[Op, list[Any]]:
    """Scale the number of groups by this rank's share of the input channels."""
    groups = args[8] * local.inputs[0][1] // local.global_shapes[0][1]
    return op, [*args[:8], max(1, groups), *args[9:]]


def _backward_groups(op: Op, args: list[Any], local: Local) -> tuple[Op, list[Any]]:
    """Scale the groups likewise; the bias has as many elements as the output gradient has channels."""
    groups = args[9] * local.inputs[1][1] // local.global_shapes[1][1]
    bias = [local.inputs[0][1]] if args[3] else args[3]
    return op, [*args[:3], bias, *args[4:9], max(1, groups), *args[10:]]


@rule(aten("convolution"), aten("convolution_overrideable"), localize=_forward_groups)
def convolution(call: Call) -> Iterable[Row]:
    """Shard input, weight [, bias] -> output."""
    out, into = _channel_dims(call)
    has_bias = call["bias"] is not None
    yield row([S(0)], [S(0), R, *[R] * has_bias])
    yield row([P], [P, R, *[P] * has_bias], partition=True)
    if call["groups"] == 1:
        yield row([S(1)], [R, S(out), *[S(0)] * has_bias])
        yield row([P], [S(1), S(into), *[P] * has_bias], partition=True)
    elif call["groups"] % call.size == 0:
        yield row([S(1)], [S(1), S(0), *[S(0)] * has_bias], parallel=False)


@rule(aten("convolution_backward"), aten("convolution_backward_overrideable"), localize=_backward_groups)
def convolution_backward(call: Call) -> Iterable[Row]:
    """Shard grad_output, input, weight -> grads of input, weight, bias."""
    out, into = _channel_dims(call)
    yield row([S(0), P, P], [S(0), S(0), R])
    yield row([P, P, P], [P, R, R])
    if call["groups"] == 1:
        yield row([P, S(out), S(0)], [S(1), R, S(out)])
        yield row([S(1), S(into), R], [R, S(1), S(into)])
    elif call["groups"] % call.size == 0:
        yield row([S(1), S(0), S(0)], [S(1), S(1), S(0)], parallel=False)


# --- ops that slide over the last dims ----------------------------------------------------------------------------


def _register(space: int, names: Iterable[str], *, grad: bool = False, localize: Any = None) -> None:
    """Register rows for the dims before the last `space` ones, shared by operands with as many dims as the first."""

    @rule(*map(aten, names), localize=localize)
    def rows(call: Call) -> Iterable[Row]:
        ndim = call.inputs[0].ndim
        same = [meta.ndim == ndim for meta in call.inputs]
        for dim in range(ndim - space):
            yield row([S(dim)] * len(call.outputs), [S(dim) if s else R for s in same])
        if grad:
            yield row([P] * len(call.outputs), [P] + [R] * (len(call.inputs) - 1))


_SLIDING = (
    "avg_pool{}d",
    "max_pool{}d_with_indices",
    "_adaptive_avg_pool{}d",
    "adaptive_max_pool{}d",
    "reflection_pad{}d",
    "replication_pad{}d",
)
for _d in (1, 2, 3):
    _names = [name.format(_d) for name in _SLIDING]
    _register(_d, [*_names, f"max_unpool{_d}d"])
    _register(_d, [f"{name}_backward" for name in _names], grad=True)

_RESAMPLERS = {
    1: ("upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_linear1d"),
    2: (
        "upsample_nearest2d",
        "_upsample_nearest_exact2d",
        "upsample_bilinear2d",
        "upsample_bicubic2d",
        "_upsample_bilinear2d_aa",
        "_upsample_bicubic2d_aa",
        "_upsample_lanczos2d_aa",
    ),
    3: ("upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_trilinear3d"),
}


def _local_input_size(op: Op, args: list[Any], local: Local) -> tuple[Op, list[Any]]:
    """Make the input size of grad_output, output_size, input_size, ... local: the full shape of the result."""
    return op, [*args[:2], list(local.outputs[0] or ()), *args[3:]]


for _d, _resamplers in _RESAMPLERS.items():
    _register(_d, _resamplers, grad=True)
    _register(_d, [f"{name}_backward" for name in _resamplers], grad=True, localize=_local_input_size)

_register(3, ["pixel_shuffle", "pixel_unshuffle", "channel_shuffle"])


@rule(aten("constant_pad_nd"), empty=True)
def constant_pad(call: Call) -> Iterable[Row]:
    """Shard dims without padding. `pad` lists (before, after) from the last dim backwards."""
    ndim, pad = call.inputs[0].ndim, list(call["pad"])
    padded = {ndim - 1 - i // 2 for i, width in enumerate(pad) if width}
    for dim in range(ndim):
        if dim not in padded:
            yield row([S(dim)], [S(dim)])


@rule(aten("grid_sampler_2d"), aten("grid_sampler_3d"))
def grid_sampler(call: Call) -> Iterable[Row]:
    """Shard input, grid -> input sampled at the grid's points."""
    return [row([S(0)], [S(0), S(0)]), row([S(1)], [S(1), R]), row([P], [P, R])]


@rule(aten("grid_sampler_2d_backward"), aten("grid_sampler_3d_backward"))
def grid_sampler_backward(call: Call) -> Iterable[Row]:
    """Shard grad_output, input, grid -> grads of input and grid."""
    return [row([S(0), S(0)], [S(0), S(0), S(0)]), row([S(1), P], [S(1), S(1), R]), row([P, P], [P, R, R])]


@rule(aten("im2col"), aten("col2im"))
def patches(call: Call) -> Iterable[Row]:
    if call.inputs[0].ndim == (4 if "im2col" in call.op.name() else 3):
        yield row([S(0)], [S(0)])
    yield row([P], [P])

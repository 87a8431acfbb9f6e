"""Convolutions, pooling and losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from shardlib.jax._lowerings.gradients import absolute
from shardlib.jax._lowerings.index import put_at
from shardlib.jax._table import lowering

__all__: list[str] = []

_CHOICE = PartitionSpec.UNCONSTRAINED  # the partitioner's


# --- convolutions ---------------------------------------------------------------------------------------------------


def _each(value: Any, count: int) -> tuple[int, ...]:
    """Return one number per dim; a single number stands for all."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * count if len(values) == 1 else values


@lowering(*(f"aten::conv{n}d.{overload}" for n in (1, 2, 3) for overload in ("default", "padding")), constrained=True)
def _conv(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    *,
    constraints: Any = None,
) -> Any:
    if not isinstance(padding, str):
        return _convolution(x, weight, bias, stride, padding, dilation, False, 0, groups, constraints=constraints)
    dims = weight.ndim - 2
    totals = [d * (k - 1) for d, k in zip(_each(dilation, dims), weight.shape[2:], strict=True)]
    pairs = [(t // 2, t - t // 2) if padding == "same" else (0, 0) for t in totals]
    return _convolved(x, weight, bias, _each(stride, dims), pairs, _each(dilation, dims), groups, constraints)


@lowering("aten::convolution.default", constrained=True)
def _convolution(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    *,
    constraints: Any = None,
) -> Any:
    dims = weight.ndim - 2
    stride, padding, dilation = (_each(value, dims) for value in (stride, padding, dilation))
    if transposed:
        outputs = _each(output_padding, dims)
        return _transposed(x, weight, bias, stride, padding, dilation, outputs, groups, constraints)
    return _convolved(x, weight, bias, stride, [(p, p) for p in padding], dilation, groups, constraints)


@lowering(
    "aten::conv_transpose1d.default", "aten::conv_transpose2d.input", "aten::conv_transpose3d.input", constrained=True
)
def _conv_transpose(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
    *,
    constraints: Any = None,
) -> Any:
    return _convolution(
        x, weight, bias, stride, padding, dilation, True, output_padding, groups, constraints=constraints
    )


def _convolved(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    pairs: Any,
    dilation: Any,
    groups: int,
    constraints: Any,
    spread: Any = None,
) -> Any:
    batched = x.ndim == weight.ndim

    def convolve(x: Any, weight: Any) -> Any:
        return lax.conv_general_dilated(
            x,
            weight,
            window_strides=stride,
            padding=pairs,
            lhs_dilation=spread,
            rhs_dilation=dilation,
            feature_group_count=groups,
        )

    y = _partitioned(convolve, x if batched else x[None], weight, groups, constraints)
    y = y if bias is None else y + bias.reshape(1, -1, *[1] * (y.ndim - 2))
    return y if batched else y[0]


def _partitioned(convolve: Callable[..., Any], x: Any, weight: Any, groups: int, constraints: Any) -> Any:
    """Convolve in a way that XLA's partitioner gets right.

    The one of jaxlib 0.10.2 adds up over all devices what only those of one axis have to add, if both operands are
    split along a window, or if the rows are split that the gradient of a grouped kernel sums over. Another axis, along
    which nothing is split, then multiplies the result by its size. It takes a convolution for a matrix product where
    each window has one element, or there is one window, and then forgets the groups of split channels: the result is
    wrong, or the process dies (`tests/jax/partitioner.py`).
    """
    if constraints is None:
        return convolve(x, weight)
    if groups > 1:
        windows = jax.eval_shape(convolve, x, weight).shape[2:]
        slides = any(k > 1 and n > 1 for k, n in zip(weight.shape[2:], windows, strict=True))
        channels = _CHOICE if slides else None
        return constraints.by_rows(convolve, x, constraints.split_along(weight, channels), channels)
    x, weight = (constraints.split_along(operand, _CHOICE, _CHOICE) for operand in (x, weight))
    return constraints.split_along(convolve(x, weight), _CHOICE, _CHOICE)


def _transposed(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    output_padding: Any,
    groups: int,
    constraints: Any,
) -> Any:
    """Compute a transposed convolution: a convolution of the dilated input with the mirrored kernel."""
    ins, outs, *kernel = weight.shape
    mirrored = jnp.flip(weight, tuple(range(2, weight.ndim)))
    mirrored = mirrored.reshape(groups, ins // groups, outs, *kernel).swapaxes(1, 2).reshape(-1, ins // groups, *kernel)
    pairs = [
        (d * (k - 1) - p, d * (k - 1) - p + o)
        for d, k, p, o in zip(dilation, kernel, padding, output_padding, strict=True)
    ]
    return _convolved(x, mirrored, bias, (1,) * len(kernel), pairs, dilation, groups, constraints, stride)


# --- pooling --------------------------------------------------------------------------------------------------------


def _windows(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> tuple[int, int]:
    """Return the padding on both sides; more on the right where a last window exceeds the input."""
    reach = dilation * (kernel - 1) + 1
    count = (size + 2 * padding - reach) / stride
    outs = (math.ceil(count) if ceil_mode else math.floor(count)) + 1
    if ceil_mode and (outs - 1) * stride >= size + padding:  # the last window has to start inside
        outs -= 1
    return padding, max((outs - 1) * stride + reach - size - padding, 0 if ceil_mode else -size)


def _pooled(
    x: Any, start: Any, combine: Callable[..., Any], kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool
) -> Any:
    dims = len(kernel)
    outer = (1,) * (x.ndim - dims)
    sizes = x.shape[-dims:]
    pairs = [_windows(*each, ceil) for each in zip(sizes, kernel, stride, padding, dilation, strict=True)]
    x = lax.pad(x, jnp.asarray(start, x.dtype), [(0, 0, 0)] * len(outer) + [(a, b, 0) for a, b in pairs])
    return lax.reduce_window(
        x, start, combine, (*outer, *kernel), (*outer, *stride), "VALID", window_dilation=(*outer, *dilation)
    )


@lowering(*(f"aten::max_pool{n}d.default" for n in (1, 2, 3)))
def _max_pool(
    x: Any, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> Any:
    dims = _dims_of(x, kernel)
    kernel = _each(kernel, dims)
    low = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else np.iinfo(x.dtype).min
    start = np.asarray(low, x.dtype)
    if any(d != 1 for d in _each(dilation, dims)):  # which JAX (0.10) does not differentiate
        return _max_pool_with_indices(x, kernel, stride, padding, dilation, ceil_mode)[0]
    return _pooled(
        x, start, lax.max, kernel, _each(stride or kernel, dims), _each(padding, dims), _each(dilation, dims), ceil_mode
    )


def _dims_of(x: Any, kernel: Any) -> int:
    """Return the number of pooled dims, which follow batch and channels."""
    return x.ndim - 2 if isinstance(kernel, int) or len(kernel) == 1 else len(kernel)


@lowering(*(f"aten::max_pool{n}d_with_indices.default" for n in (1, 2, 3)))
def _max_pool_with_indices(
    x: Any, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> tuple[Any, Any]:
    dims = _dims_of(x, kernel)
    kernel, padding, dilation = (_each(value, dims) for value in (kernel, padding, dilation))
    stride = _each(stride or kernel, dims)
    positions = []
    for size, k, s, p, d in zip(x.shape[-dims:], kernel, stride, padding, dilation, strict=True):
        before, after = _windows(size, k, s, p, d, ceil_mode)
        outs = (size + before + after - d * (k - 1) - 1) // s + 1
        positions.append(np.arange(outs)[:, None] * s - p + np.arange(k) * d)
    return _largest_in_windows(x, positions)


@lowering(*(f"aten::adaptive_max_pool{n}d.default" for n in (1, 2, 3)))
def _adaptive_max_pool(x: Any, output_size: Any) -> tuple[Any, Any]:
    sizes = (output_size,) if isinstance(output_size, int) else tuple(output_size)
    positions = []
    for ins, outs in zip(x.shape[-len(sizes) :], sizes, strict=True):
        starts = np.arange(outs) * ins // outs
        stops = -(-(np.arange(outs) + 1) * ins // outs)
        at = starts[:, None] + np.arange(max(stops - starts, default=1))
        positions.append(np.where(at < stops[:, None], at, -1))
    return _largest_in_windows(x, positions)


def _largest_in_windows(x: Any, positions: Sequence[Any]) -> tuple[Any, Any]:
    """Return the first maximum of each window, and its index in the pooled dims, flat.

    Args:
        x: an array whose last dims are pooled.
        positions: for each of them the positions in each window, `(windows, positions)`; outside of the array is none.
    """
    dims, sizes = len(positions), x.shape[-len(positions) :]
    outer = x.ndim - dims
    inside: Any = True
    flat: Any = 0
    for d, (at, size) in enumerate(zip(positions, sizes, strict=True)):
        axis = outer + 2 * d
        x = jnp.take(x, jnp.clip(at, 0, size - 1).reshape(-1), axis=axis)
        x = x.reshape(*x.shape[:axis], *at.shape, *x.shape[axis + 1 :])
        own = at.reshape([n for e in range(dims) for n in (at.shape if e == d else (1, 1))])
        inside, flat = inside & (own >= 0) & (own < size), flat * size + own
    order = [*range(0, 2 * dims, 2), *range(1, 2 * dims, 2)]
    outs = x.shape[outer::2]
    rows = jnp.transpose(x, [*range(outer), *(outer + d for d in order)]).reshape(*x.shape[:outer], *outs, -1)
    inside, flat = (jnp.transpose(jnp.asarray(t), order).reshape(*outs, -1) for t in (inside, flat))
    low = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else np.iinfo(x.dtype).min
    chosen = jnp.argmax(jnp.where(inside, lax.stop_gradient(rows), low), axis=-1, keepdims=True)
    values = jnp.take_along_axis(rows, chosen, axis=-1)[..., 0]
    return values, jnp.take_along_axis(jnp.broadcast_to(flat, rows.shape), chosen, axis=-1)[..., 0]


@lowering(*(f"aten::avg_pool{n}d.default" for n in (1, 2, 3)))
def _avg_pool(
    x: Any,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    dims = _dims_of(x, kernel)
    kernel, padding = _each(kernel, dims), _each(padding, dims)
    stride = _each(stride or kernel, dims)

    def added(values: Any, pads: Any) -> Any:
        return _pooled(values, np.asarray(0, x.dtype), lax.add, kernel, stride, pads, (1,) * dims, ceil_mode)

    if divisor_override:
        return added(x, padding) / divisor_override
    ones = jnp.ones(x.shape[-dims:], x.dtype)
    if count_include_pad:
        counts = added(lax.pad(ones, jnp.ones((), x.dtype), [(p, p, 0) for p in padding]), (0,) * dims)
    else:
        counts = added(ones, padding)
    return added(x, padding) / counts


@lowering(*(f"aten::adaptive_avg_pool{n}d.default" for n in (1, 2, 3)), "aten::_adaptive_avg_pool2d.default")
def _adaptive_avg_pool(x: Any, output_size: Any) -> Any:
    """Pool each dim by a product with its windows' weights, or by a mean where windows are even."""
    sizes = (output_size,) if isinstance(output_size, int) else tuple(output_size)
    for dim, outs in zip(range(x.ndim - len(sizes), x.ndim), sizes, strict=True):
        ins = x.shape[dim]
        if ins % outs == 0:
            x = x.reshape(*x.shape[:dim], outs, ins // outs, *x.shape[dim + 1 :]).mean(dim + 1)
        else:
            x = jnp.moveaxis(jnp.moveaxis(x, dim, -1) @ jnp.asarray(_averages(ins, outs), x.dtype), -1, dim)
    return x


def _averages(ins: int, outs: int) -> np.ndarray:
    matrix = np.zeros((ins, outs))
    for i in range(outs):
        start, stop = i * ins // outs, -(-(i + 1) * ins // outs)
        matrix[start:stop, i] = 1 / (stop - start)
    return matrix


@lowering("aten::max_unpool2d.default", "aten::max_unpool3d.default")
def _max_unpool(x: Any, indices: Any, output_size: Sequence[int], *_windows: Any) -> Any:
    """Put elements where indices of the flat pooled dims say."""
    dims = len(output_size)
    flat, at = (t.reshape(-1, math.prod(x.shape[-dims:])) for t in (x, indices))
    zeros = jnp.zeros((flat.shape[0], math.prod(output_size)), x.dtype)
    y = put_at(zeros, (jnp.arange(flat.shape[0])[:, None], at), flat)
    return y.reshape(*x.shape[:-dims], *output_size)


@lowering("aten::fractional_max_pool2d.default", "aten::fractional_max_pool3d.default")
def _fractional_max_pool(x: Any, kernel: Any, output_size: Any, samples: Any) -> tuple[Any, Any]:
    """Pool windows whose starts are drawn for each channel (torch's sequence, of Graham, arXiv:1412.6071)."""
    dims = len(kernel)
    samples = samples[..., ::-1] if dims == 2 else samples  # in two dims, torch draws the width's first

    def of_channel(plane: Any, drawn: Any) -> tuple[Any, Any]:
        return _largest_in_windows(plane, [starts(plane, drawn, d) for d in range(dims)])

    def starts(plane: Any, drawn: Any, d: int) -> Any:
        ins, outs, size = plane.shape[d], output_size[d], kernel[d]
        alpha = (ins - size) / max(outs - 1, 1)
        begins = jnp.floor((jnp.arange(outs) + drawn[d]) * alpha).astype(jnp.int32)
        begins = (begins - jnp.floor(drawn[d] * alpha).astype(jnp.int32)).at[-1].set(ins - size)
        return begins[:, None] + jnp.arange(size)

    planes = x.reshape(-1, *x.shape[-dims:])
    values, indices = jax.vmap(of_channel)(planes, samples.reshape(-1, dims))
    outer = x.shape[:-dims]
    return values.reshape(*outer, *values.shape[1:]), indices.reshape(*outer, *indices.shape[1:])


# --- losses ---------------------------------------------------------------------------------------------------------


def _reduced(loss: Any, reduction: int) -> Any:
    """Reduce a loss: 0 leaves it, 1 takes the mean, 2 the sum."""
    return (lambda x: x, jnp.mean, jnp.sum)[reduction](loss)


@lowering("aten::cross_entropy_loss.default")
def _cross_entropy(
    logits: Any,
    target: Any,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """Compute cross entropy. The class is picked by a comparison, which needs no communication where classes are
    split."""
    classes = 0 if logits.ndim == 1 else 1
    logp = jax.nn.log_softmax(logits, axis=classes)
    if jnp.issubdtype(target.dtype, jnp.floating):
        return _of_probabilities(logp, target, weight, reduction, label_smoothing, classes)
    loss, scale = _picked(logp, target, weight, ignore_index, classes)
    if label_smoothing:
        count = logp.shape[classes]
        by_class = logp if weight is None else logp * _at_dim(weight, classes, logp.ndim)
        spread = -jnp.where(target == ignore_index, 0, jnp.sum(by_class, axis=classes))
        loss = (1 - label_smoothing) * loss + label_smoothing / count * spread
    return jnp.sum(loss) / jnp.sum(scale) if reduction == 1 else _reduced(loss, reduction)


def _of_probabilities(logp: Any, target: Any, weight: Any, reduction: int, smoothing: float, classes: int) -> Any:
    if smoothing:
        target = target * (1 - smoothing) + smoothing / target.shape[classes]
    by_class = logp * target if weight is None else logp * target * _at_dim(weight, classes, logp.ndim)
    loss = -jnp.sum(by_class, axis=classes)
    return jnp.mean(loss) if reduction == 1 else _reduced(loss, reduction)


@lowering("aten::nll_loss_nd.default", "aten::nll_loss.default", "aten::nll_loss2d.default")
def _nll_loss(logp: Any, target: Any, weight: Any = None, reduction: int = 1, ignore_index: int = -100) -> Any:
    loss, scale = _picked(logp, target, weight, ignore_index, 0 if logp.ndim == 1 else 1)
    return jnp.sum(loss) / jnp.sum(scale) if reduction == 1 else _reduced(loss, reduction)


def _picked(logp: Any, target: Any, weight: Any, ignore_index: int, classes: int) -> tuple[Any, Any]:
    """Return minus the entry of each target's class, and its weight; an ignored target has weight zero."""
    ids = lax.broadcasted_iota(target.dtype, logp.shape, classes)
    chosen = ids == jnp.expand_dims(target, classes)
    kept = target != ignore_index
    scale = kept.astype(logp.dtype)
    if weight is not None:
        scale = scale * jnp.sum(jnp.where(chosen, _at_dim(weight, classes, logp.ndim), 0), axis=classes)
    return -jnp.sum(jnp.where(chosen, logp, 0), axis=classes) * scale, scale


def _at_dim(vector: Any, dim: int, ndim: int) -> Any:
    return vector.reshape([-1 if d == dim else 1 for d in range(ndim)])


@lowering("aten::mse_loss.default")
def _mse_loss(x: Any, target: Any, reduction: int = 1) -> Any:
    return _reduced(jnp.square(x - target), reduction)


@lowering("aten::l1_loss.default")
def _l1_loss(x: Any, target: Any, reduction: int = 1) -> Any:
    return _reduced(absolute(x - target), reduction)


@lowering("aten::smooth_l1_loss.default")
def _smooth_l1_loss(x: Any, target: Any, reduction: int = 1, beta: float = 1.0) -> Any:
    far = absolute(x - target)
    if beta == 0:
        return _reduced(far, reduction)
    return _reduced(jnp.where(far < beta, 0.5 * jnp.square(x - target) / beta, far - 0.5 * beta), reduction)


@lowering("aten::huber_loss.default")
def _huber_loss(x: Any, target: Any, reduction: int = 1, delta: float = 1.0) -> Any:
    far = absolute(x - target)
    return _reduced(jnp.where(far <= delta, 0.5 * jnp.square(x - target), delta * (far - 0.5 * delta)), reduction)


@lowering("aten::binary_cross_entropy_with_logits.default")
def _bce_with_logits(x: Any, target: Any, weight: Any = None, pos_weight: Any = None, reduction: int = 1) -> Any:
    positive, negative = jax.nn.log_sigmoid(x), jax.nn.log_sigmoid(-x)
    loss = -(target * positive * (1 if pos_weight is None else pos_weight) + (1 - target) * negative)
    return _reduced(loss if weight is None else loss * weight, reduction)


@lowering("aten::binary_cross_entropy.default")
def _bce(x: Any, target: Any, weight: Any = None, reduction: int = 1) -> Any:
    loss = _bce_of(*jnp.broadcast_arrays(x, target))
    return _reduced(loss if weight is None else loss * weight, reduction)


@jax.custom_jvp
def _bce_of(x: Any, target: Any) -> Any:
    """Return the loss of probabilities, whose logarithms are at least -100, with torch's finite gradient."""
    return (target - 1) * jnp.maximum(jnp.log1p(-x), -100) - target * jnp.maximum(jnp.log(x), -100)


@_bce_of.defjvp
def _bce_of_jvp(primals: Any, tangents: Any) -> Any:
    (x, target), (x_dot, target_dot) = primals, tangents
    of_x = x_dot * (x - target) / jnp.maximum(x * (1 - x), 1e-12)
    return _bce_of(x, target), of_x + target_dot * (jnp.log1p(-x) - jnp.log(x))


@lowering("aten::kl_div.default")
def _kl_div(x: Any, target: Any, reduction: int = 1, log_target: bool = False) -> Any:
    if log_target:
        return _reduced(jnp.exp(target) * (target - x), reduction)
    positive = target > 0
    return _reduced(jnp.where(positive, target * (jnp.log(jnp.where(positive, target, 1)) - x), 0), reduction)


@lowering("aten::multilabel_margin_loss_forward.default")
def _multilabel_margin_loss(x: Any, target: Any, reduction: int = 1) -> tuple[Any, Any]:
    """Return the loss, flat at the margin, and which classes are targets; targets end at the first -1."""
    shape = target.shape
    x, target = (t.reshape(-1, t.shape[-1]) if t.ndim else t.reshape(1, 1) for t in (x, target))
    valid = jnp.cumsum(target < 0, axis=1) == 0
    own = jnp.take_along_axis(x, jnp.where(valid, target, 0), axis=1)
    classes = jnp.arange(x.shape[1])
    is_target = jnp.any((target[..., None] == classes) & valid[..., None], axis=1)
    missed = jax.nn.relu(1 - own[:, :, None] + x[:, None, :])
    loss = jnp.sum(jnp.where(valid[:, :, None] & ~is_target[:, None, :], missed, 0), axis=(1, 2)) / x.shape[1]
    loss = loss if len(shape) > 1 else loss[0]
    return _reduced(loss, reduction), is_target.reshape(shape).astype(x.dtype)

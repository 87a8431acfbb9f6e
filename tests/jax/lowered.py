"""Ops one by one: what a lowering gives, and its gradient, beside torch's. Runs on the devices, in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils import _pytree as pytree

import shardlib.jax as sj
from shardlib.jax._bits import to_numpy, to_tensor
from shardlib.jax._lowerings.pointwise import _slope_at_a_bound
from shardlib.jax._table import find_lowering

__all__ = ["CASES", "differences", "without_case"]

aten = torch.ops.aten


def _numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """No two alike, none near zero, both signs."""
    if 0 in shape:
        return torch.zeros(shape, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    count = max(int(np.prod(shape)), 1)
    values = (torch.randperm(count, generator=generator) + 0.5) / count + 0.1
    signs = torch.randint(2, (count,), generator=generator) * 2 - 1
    return (values * signs).to(torch.float64).view(shape)


def _positive(*shape: int) -> torch.Tensor:
    return _numbers(*shape).abs()


X, Y, P = _numbers(3, 4, seed=1), _numbers(3, 4, seed=2), _positive(3, 4)
V, S = _numbers(4, seed=3), _numbers(seed=4)
B3, C3 = _numbers(2, 3, 4, seed=5), _numbers(2, 4, 5, seed=6)
IDS, J = torch.tensor([[1, 0, 2, 2], [0, 3, 1, 0], [2, 2, 0, 3]]), torch.tensor([2, 0, 1])
MASK = torch.tensor([[True, False, True, False], [False, True, True, True], [True, True, False, False]])
HALF = X.to(torch.bfloat16)
AT_BOUNDS = torch.tensor([-1.0, -0.3, 0.1, 0.4, 2.0], dtype=torch.float64)
IMAGE, IMAGE1, IMAGE3 = _numbers(2, 4, 7, 6), _numbers(2, 4, 9), _numbers(1, 2, 4, 5, 3)
KERNEL, KERNEL1, KERNEL3 = _numbers(6, 4, 3, 2, seed=7), _numbers(6, 2, 3, seed=8), _numbers(3, 2, 2, 2, 2, seed=9)
Q, K, VALUES = _numbers(2, 4, 5, 6, seed=1), _numbers(2, 4, 7, 6, seed=2), _numbers(2, 4, 7, 3, seed=3)
K2, V2 = K[:, :2], VALUES[:, :2]
SEEN = torch.ones(5, 7, dtype=torch.bool).tril(2)
NOTHING_SEEN = SEEN & (torch.arange(5) != 2)[:, None]
LOGITS, CLASSES = _numbers(6, 5, seed=11), torch.tensor([0, 4, 2, -100, 1, 2])

SQUARE = _numbers(3, 3, seed=21)
POSITIVE_DEFINITE = SQUARE @ SQUARE.T + torch.eye(3, dtype=torch.float64)
WIDE, TALL = _numbers(2, 3, 5, seed=22), _numbers(2, 5, 3, seed=23)
COMPLEX = torch.complex(X, Y)
PLACES, TIED = torch.tensor([[0, 1, 0], [2, 1, 1]]), torch.tensor([[1.0, 0, 2], [0, 1, 2], [2, 2, 0]]).double()
BAGS, FIRST_OF_BAG = torch.tensor([0, 2, 1, 2, 0, 0]), torch.tensor([0, 2, 2, 5])
WITH_NAN = torch.where(MASK, X, float("nan"))
LOWER, UPPER = SQUARE.tril() + torch.eye(3).double(), SQUARE.triu() + torch.eye(3).double()
# `torch.nn.LSTM(3, 4, 2, bidirectional=True, proj_size=2)` and the like: input, state, weights
SEQUENCE = _numbers(5, 2, 3, seed=31)


def _cells(gates: int, layers: int, directions: int, *, projection: int = 0, biases: bool = True) -> list[torch.Tensor]:
    shapes: list[tuple[int, ...]] = []
    for layer in range(layers):
        own = 3 if layer == 0 else directions * (projection or 4)
        cell = [(gates * 4, own), (gates * 4, projection or 4), *[(gates * 4,)] * (2 * biases)]
        shapes += (cell + [(projection, 4)] * (projection > 0)) * directions
    return [_numbers(*shape, seed=40 + i) for i, shape in enumerate(shapes)]


def _states(count: int, hidden: int = 4) -> torch.Tensor:
    return _numbers(count, 2, hidden, seed=32)


_UNARY = """abs acos alias asin atan ceil cos cosh deg2rad detach erf erfc erfinv exp exp2 expm1 floor frac isfinite
isinf isnan logical_not neg positive rad2deg reciprocal relu relu6 round selu sgn sigmoid sign signbit silu sin sinh
softplus square asinh angle conj_physical _neg_view i0 special_erfcx special_i0e special_i1 special_i1e
special_log_ndtr square tan tanh trunc mish log_sigmoid gelu hardtanh hardswish elu leaky_relu celu
clone contiguous"""
_OF_POSITIVE = ("log", "log10", "log1p", "log2", "rsqrt", "sqrt", "lgamma", "special_entr", "special_ndtri")
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def _call(op: Any, *args: Any, **kwargs: Any) -> Call:
    return op, args, kwargs


CASES: list[Call] = [
    *(
        _call(getattr(aten, name).default, X * (0.8 if name in ("acos", "asin", "erfinv") else 3))
        for name in _UNARY.split()
    ),
    *(_call(getattr(aten, name).default, P) for name in _OF_POSITIVE),
    *(_call(getattr(aten, name).default, IDS) for name in ("sqrt", "sigmoid", "abs", "neg", "bitwise_not")),
    *(_call(getattr(aten, name).Tensor, IDS, J[:, None]) for name in _COMPARED),
    *(_call(getattr(aten, name).Scalar, X, 0.3) for name in _COMPARED),
    _call(aten.eq.Scalar, IDS, 1.5),
    _call(aten.hardsigmoid.default, X),
    # what torch makes of two kinds of numbers
    _call(aten.add.Tensor, X, V, alpha=2),
    _call(aten.add.Tensor, IDS, S),
    _call(aten.add.Tensor, HALF, X.float()),
    _call(aten.lt.Tensor, HALF, X.float()[0, 0]),
    _call(aten.add.Tensor, HALF, IDS[0, 0]),
    _call(aten.add.Tensor, MASK, MASK),
    _call(aten.mul.Tensor, MASK, 2),
    _call(aten.mul.Tensor, HALF, 0.3),
    _call(aten.mul.Tensor, IDS, 0.5),
    _call(aten.mul.Tensor, IDS.int(), IDS),
    _call(aten.div.Tensor, IDS, J[:, None] + 1),
    _call(aten.div.Tensor, X, Y),
    _call(aten.sub.Tensor, X, S),
    _call(aten.rsub.Scalar, X, 2.0, 3),
    _call(aten.pow.Tensor_Scalar, X, 2),
    _call(aten.pow.Tensor_Scalar, X, 3.0),
    _call(aten.pow.Tensor_Scalar, P, 0.5),
    _call(aten.pow.Tensor_Scalar, P, -1.5),
    _call(aten.pow.Tensor_Scalar, IDS, 2),
    _call(aten.pow.Scalar, 2.0, X),
    _call(aten.pow.Tensor_Tensor, P, Y),
    _call(aten.pow.Tensor_Tensor, TIED, TIED.T - 1),
    _call(aten.nextafter.default, TIED, TIED.T),
    _call(aten.hypot.default, TIED, TIED.T),
    _call(aten.div.Tensor_mode, X, Y, rounding_mode="floor"),
    _call(aten.div.Tensor_mode, IDS - 2, torch.tensor(2), rounding_mode="trunc"),
    _call(aten.floor_divide.default, IDS - 2, torch.tensor(2)),
    _call(aten.remainder.Scalar, X, 0.4),
    _call(aten.fmod.Scalar, X, 0.4),
    _call(aten.maximum.default, X, Y),
    _call(aten.minimum.default, X, Y),
    _call(aten.max.other, X, X),
    _call(aten.fmax.default, X, Y),
    _call(aten.fmin.default, X, Y),
    *(_call(op, TIED, TIED.T) for op in (aten.fmax.default, aten.fmin.default, aten.maximum.default)),
    *(_call(op, (X * 9).float()) for op in (aten.digamma.default, aten.lgamma.default)),
    *(
        _call(op, TIED - 1)
        for op in (aten.i0.default, aten.abs.default, aten.relu.default, aten.sinc.default, aten.sgn.default)
    ),
    _call(aten.std.correction, torch.ones(2, 3).double(), [1]),
    _call(aten.l1_loss.default, TIED, TIED.T),
    *(_call(aten.linalg_vector_norm.default, TIED * (TIED > 1), p, [1]) for p in (0.5, 1, 1.5, 2, 3, float("inf"))),
    _call(aten.bitwise_left_shift.Tensor, IDS, J[:, None]),
    _call(aten.bitwise_right_shift.Tensor, IDS, J[:, None]),
    _call(aten.atan2.default, X, Y),
    _call(aten.atan2.default, TIED, TIED.T),
    _call(aten.clamp.Tensor, TIED, torch.ones(3).double(), torch.tensor([1.0, 2, 0]).double()),
    _call(aten.hypot.default, X, Y),
    _call(aten.logaddexp.default, X, Y),
    _call(aten.bitwise_and.Tensor, IDS, J[:, None]),
    _call(aten.bitwise_or.Tensor, MASK, ~MASK),
    _call(aten.bitwise_xor.Tensor, IDS, J[:, None]),
    _call(aten.logical_and.default, X, MASK),
    _call(aten.logical_or.default, MASK, X),
    _call(aten.logical_xor.default, MASK, X),
    _call(aten.where.self, MASK, X, Y),
    _call(aten.where.ScalarOther, MASK, X, 0.5),
    _call(aten.where.self, MASK, IDS, X),
    _call(aten.masked_fill.Scalar, X, MASK, -1),
    _call(aten.masked_fill.Tensor, X, MASK, S),
    _call(aten.lerp.Scalar, X, Y, 0.7),
    _call(aten.lerp.Tensor, X, Y, P),
    _call(aten.addcmul.default, X, Y, V, value=0.5),
    _call(aten.addcdiv.default, X, Y, P, value=0.5),
    _call(aten.clamp.default, X, -0.3, 0.4),
    _call(aten.relu6.default, AT_BOUNDS.round() * 3),
    _call(aten.polar.default, TIED, TIED),
    _call(aten.angle.default, TIED - 1),
    *(_call(op, AT_BOUNDS, -0.3, 0.4) for op in (aten.clamp.default, aten.hardtanh.default)),
    _call(aten.clamp.Tensor, AT_BOUNDS, AT_BOUNDS[1], AT_BOUNDS[3:4]),
    _call(aten.clamp_min.default, AT_BOUNDS, -0.3),
    *(_call(op, TIED, TIED.T) for op in (aten.clamp_min.Tensor, aten.clamp_max.Tensor)),
    _call(aten.clamp_max.default, AT_BOUNDS, 0.4),
    *(
        _call(op, torch.tensor([-4.0, -3.0, 0.0, 3.0, 5.0]))
        for op in (aten.hardsigmoid.default, aten.hardswish.default)
    ),
    _call(aten.clamp.Tensor, X, None, V),
    _call(aten.clamp_min.default, IDS, 1),
    _call(aten.clamp_max.default, X, 0.1),
    _call(aten.threshold.default, X, 0.2, 7.0),
    _call(aten.gelu.default, X, approximate="tanh"),
    _call(aten.nan_to_num.default, torch.tensor([float("nan"), float("inf"), 1.0]), 2.0),
    _call(aten._to_copy.default, X, dtype=torch.float32),
    _call(aten._to_copy.default, X * 3, dtype=torch.int64),
    _call(aten._to_copy.default, X, dtype=torch.bool),
    _call(aten.fill.Scalar, X, 2.0),
    _call(aten.fill.Tensor, X, S),
    _call(aten.acosh.default, P + 1),
    _call(aten.atanh.default, X * 0.8),
    # torch's zeta function (2.13) has the digits of float32 in any dtype
    *(_call(aten.polygamma.default, n, (X * 9).float()) for n in (0, 1, 2)),
    _call(aten.copysign.Tensor, X, Y),
    _call(aten.copysign.Tensor, TIED, -TIED),
    _call(aten.gcd.default, IDS * 6, J[:, None] * 4),
    _call(aten.lcm.default, IDS * 6, J[:, None] * 4),
    _call(aten.igamma.default, P, P[:, :1]),
    _call(aten.igammac.default, P, P[:, :1]),
    _call(aten.nextafter.default, X, Y),
    _call(aten.xlogy.Tensor, TIED, TIED + 1),
    _call(aten.special_xlog1py.default, TIED, TIED),
    _call(aten.special_zeta.default, (P + 1.5).float(), P.float()),
    _call(aten.frexp.Tensor, X),
    *(_call(aten.logit.default, given, eps) for given in (P * 0.8, TIED / 2) for eps in (None, 0.1)),
    *(_call(aten.round.decimals, X * 100, decimals=d) for d in (0, 2, -1)),
    _call(aten.complex.default, X, Y),
    _call(aten.polar.default, P, Y),
    _call(aten.view_as_complex.default, X.view(3, 2, 2)),
    _call(aten.view_as_real.default, COMPLEX),
    *(_call(op, COMPLEX) for op in (aten._conj.default, aten._conj_physical.default)),
    _call(aten.view.dtype, X, torch.int32),
    _call(aten.view.dtype, X, torch.int64),
    _call(aten.view.dtype, X, torch.uint8),
    # new tensors
    _call(aten.full.default, (2, 3), 0.5),
    _call(aten.full.default, (2,), True),
    _call(aten.zeros.default, (2, 3), dtype=torch.int32),
    _call(aten.ones.default, (2, 3)),
    _call(aten.full_like.default, X, 3),
    _call(aten.zeros_like.default, X),
    _call(aten.ones_like.default, X, dtype=torch.int64),
    _call(aten.new_full.default, X, (2,), 3),
    _call(aten.new_zeros.default, X, (2,)),
    _call(aten.new_ones.default, X, (2,), dtype=torch.bool),
    _call(aten.arange.default, 5),
    _call(aten.arange.default, 2.5),
    _call(aten.arange.start, 1, 5),
    _call(aten.arange.start_step, 0, 1, 0.3),
    _call(aten.linspace.default, 0, 1, 5),
    _call(aten.eye.default, 3),
    _call(aten.eye.m, 2, 3),
    _call(aten.scalar_tensor.default, 3.5),
    # along dims
    _call(aten.sum.default, MASK),
    _call(aten.sum.dim_IntList, X, [0], True),
    _call(aten.sum.dim_IntList, B3, [-1, 0]),
    _call(aten.sum.dim_IntList, X, []),
    _call(aten.mean.default, X),
    _call(aten.mean.dim, B3, [1, 2], True),
    _call(aten.mean.dim, HALF, [1], dtype=torch.float32),
    _call(aten.prod.default, X),
    _call(aten.prod.dim_int, X, 1),
    _call(aten.var.correction, X, [1]),
    _call(aten.var.correction, X, [1], correction=0, keepdim=True),
    _call(aten.std.correction, X, [0], correction=1),
    _call(aten.var_mean.correction, X, [1], correction=0),
    _call(aten.amax.default, X, [1]),
    _call(aten.amin.default, torch.ones(2, 3, dtype=torch.float64), [1]),
    _call(aten.max.default, X),
    _call(aten.min.default, X),
    _call(aten.max.dim, X, 1, True),
    _call(aten.min.dim, X, 0),
    _call(aten.argmax.default, X, 1),
    _call(aten.argmin.default, X),
    _call(aten.any.default, MASK),
    _call(aten.any.dim, MASK, 1),
    _call(aten.all.default, MASK),
    _call(aten.all.dim, MASK, 0, True),
    _call(aten.logsumexp.default, X, [1]),
    _call(aten.linalg_vector_norm.default, X),
    _call(aten.linalg_vector_norm.default, X, 3, [1], True),
    _call(aten.linalg_vector_norm.default, X, float("inf"), [1]),
    _call(aten.linalg_vector_norm.default, torch.zeros(3, dtype=torch.float64)),
    _call(aten.norm.ScalarOpt_dim, X, 1, [0]),
    _call(aten.softmax.int, X, -1),
    _call(aten.softmax.int, HALF, -1, torch.float32),
    _call(aten._softmax.default, X, 0, False),
    _call(aten.log_softmax.int, X, 1),
    _call(aten._safe_softmax.default, torch.where(NOTHING_SEEN, 0.5, -torch.inf).double(), 1),
    _call(aten._log_softmax.default, X, 0, False),
    _call(aten.cumsum.default, X, 1),
    _call(aten.cumsum.default, MASK, 0),
    _call(aten.cumprod.default, X, 0),
    _call(aten.diff.default, X, 1, -1),
    _call(aten.topk.default, X, 2),
    _call(aten.topk.default, X, 2, 0, False),
    _call(aten.sort.default, X, -1, True),
    _call(aten.sort.stable, IDS, stable=True, dim=1),
    _call(aten.argsort.default, X, 0),
    _call(aten.histc.default, torch.tensor([0.0, 1.0, 1.0, 3.0, 4.0, 9.0]), 4, 0, 4),
    _call(aten.logcumsumexp.default, X, 1),
    *(_call(op, TIED, dim) for op in (aten.cummax.default, aten.cummin.default) for dim in (0, 1)),
    _call(aten.kthvalue.default, X, 2, 0, True),
    *(_call(op, given) for op in (aten.median.default, aten.nanmedian.default) for given in (X, TIED, WITH_NAN, IDS)),
    *(_call(op, given, 1) for op in (aten.median.dim, aten.nanmedian.dim) for given in (X, WITH_NAN)),
    _call(aten.mode.default, TIED, 1),
    _call(aten.mode.default, IDS, 0, True),
    _call(aten.histogram.bin_ct, X, 5),
    _call(aten.histogram.bins_tensor, X, torch.tensor([-0.5, 0.0, 0.2, 1.0]).double(), weight=P, density=True),
    # moved
    _call(aten.view.default, X, (2, -1)),
    _call(aten.reshape.default, X.t(), (6, 2)),
    _call(aten.flatten.using_ints, B3, 1),
    _call(aten.unflatten.int, X, 1, (2, -1)),
    _call(aten.transpose.int, B3, -1, 0),
    _call(aten.t.default, X),
    _call(aten.permute.default, B3, (2, 0, 1)),
    _call(aten.movedim.intlist, B3, (0,), (2,)),
    _call(aten.unsqueeze.default, X, -1),
    _call(aten.squeeze.default, X[None, :, None]),
    _call(aten.squeeze.dim, X[None], 0),
    _call(aten.squeeze.dim, X, 0),
    _call(aten.squeeze.dims, X[None, :, None], (0, 1, 2)),
    _call(aten.expand.default, V, (2, -1)),
    _call(aten.expand_as.default, V, X),
    _call(aten.repeat.default, X, (2, 1, 3)),
    _call(aten.repeat_interleave.self_int, X, 2, 0),
    _call(aten.repeat_interleave.self_int, X, 2),
    _call(aten.cat.default, [X, IDS[:2], Y], 0),
    _call(aten.cat.default, [torch.zeros(0, dtype=torch.float64), X], 1),
    _call(aten.stack.default, [X, Y], -1),
    _call(aten.split.Tensor, X, 3, 1),
    _call(aten.split_with_sizes.default, X, [1, 3], -1),
    _call(aten.chunk.default, X, 2, 1),
    _call(aten.unbind.int, X, 1),
    _call(aten.select.int, X, 1, -1),
    _call(aten.slice.Tensor, X, 1, -3, 9223372036854775807, 2),
    _call(aten.narrow.default, X, 1, 1, 2),
    _call(aten.slice_scatter.default, X, Y[:, :2], 1, 1, 3),
    _call(aten.select_scatter.default, X, V, 0, -1),
    _call(aten.diagonal_scatter.default, B3, _numbers(2, 3), 1, 1, 2),
    *(_call(op, S, 0) for op in (aten.cumsum.default, aten.max.dim, aten.argmax.default, aten.softmax.int)),
    _call(aten.sum.dim_IntList, S, [0]),
    _call(aten.flip.default, X, (0, 1)),
    _call(aten.roll.default, X, (1, -2), (0, 1)),
    _call(aten.roll.default, X, (5,)),
    _call(aten.tril.default, X, 1),
    _call(aten.triu.default, X, -1),
    _call(aten.diagonal.default, B3, 1, 1, 2),
    _call(aten.unfold.default, X, 1, 2, 1),
    _call(aten.pad.default, X, (1, -1, 0, 2)),
    _call(aten.pad.default, X, (1, 2), "constant", 3.0),
    _call(aten.pad.default, B3, (1, 2), "reflect"),
    _call(aten.pad.default, B3, (1, 2), "replicate"),
    _call(aten.pad.default, B3, (1, 2), "circular"),
    _call(aten.constant_pad_nd.default, X, (-1, 1), 0.5),
    # looked up
    _call(aten.embedding.default, X, IDS % 3),
    _call(aten.embedding.default, X, IDS % 3, 1),
    _call(aten.index.Tensor, B3, [None, J]),
    _call(aten.index.Tensor, X, [J, J - 3]),
    _call(aten.index.Tensor, B3, [torch.tensor([1, 0]), None, torch.tensor([3, -1])]),
    _call(aten.index_put.default, X, [J], Y),
    _call(aten.index_put.default, X, [J % 2], Y, True),
    _call(aten.index_put.default, X, [MASK], S),
    _call(aten.index_select.default, X, 1, J),
    _call(aten.index_add.default, X, 0, J % 2, Y, alpha=2),
    _call(aten.index_copy.default, X, 0, J, Y),
    _call(aten.gather.default, X, 1, IDS),
    _call(aten.gather.default, X, 0, IDS[:, :2] % 3),
    _call(aten.scatter.src, X, 1, J[:, None], Y[:, :1]),
    _call(aten.scatter.value, X, 1, J[:, None], 2.0),
    _call(aten.scatter_add.default, X, 0, IDS % 3, Y),
    _call(aten.one_hot.default, J, 4),
    _call(aten.bucketize.Tensor, X, torch.tensor([-0.5, 0.0, 0.5], dtype=torch.float64)),
    *(
        _call(aten.scatter_reduce.two, TIED, 0, PLACES, TIED[:2], reduce, include_self=own)
        for reduce in ("sum", "prod", "mean", "amax", "amin")
        for own in (True, False)
    ),
    *(_call(aten.index_reduce.default, TIED, 1, J % 2, TIED, reduce) for reduce in ("prod", "mean", "amax", "amin")),
    _call(aten.scatter_reduce.two, IDS, 1, J[:, None], IDS, "mean"),
    _call(aten.scatter_reduce.two, IDS, 1, J[:, None], IDS, "amax", include_self=False),
    _call(aten.take.default, X, PLACES),
    _call(aten.put.default, X, PLACES, Y[:2, :3]),
    _call(aten.put.default, X, PLACES, Y[:2, :3], True),
    _call(aten.masked_scatter.default, X, MASK, Y),
    _call(aten.searchsorted.Tensor, X.sort(dim=1).values, Y, right=True),
    _call(aten.searchsorted.Scalar, X.sort(dim=1).values[0], 0.2),
    _call(aten.bucketize.Scalar, 0.1, torch.tensor([-0.5, 0.0, 0.5], dtype=torch.float64)),
    _call(aten.embedding.default, X, IDS % 3, -1, True),
    *(_call(aten._embedding_bag.default, X, BAGS, FIRST_OF_BAG, False, mode) for mode in (0, 1, 2)),
    *(_call(aten._embedding_bag.default, TIED, BAGS, FIRST_OF_BAG, padding_idx=2, mode=mode) for mode in (0, 1, 2)),
    _call(aten._embedding_bag.default, X, BAGS, torch.tensor([0, 2, 6]), False, 0, False, _numbers(6), True),
    # products
    _call(aten.linear.default, B3, C3[0].t().contiguous(), _numbers(5)),
    _call(aten.linear.default, V, Y),
    _call(aten.mm.default, X, Y.t()),
    _call(aten.bmm.default, B3, C3),
    _call(aten.matmul.default, B3, C3[0]),
    _call(aten.matmul.default, V, C3),
    _call(aten.mv.default, X, V),
    _call(aten.dot.default, V, V),
    _call(aten.addmm.default, _numbers(3), X, Y.t()),
    _call(aten.addmm.default, _numbers(3), X, Y.t(), beta=0.5, alpha=2),
    _call(aten.baddbmm.default, _numbers(2, 3, 5), B3, C3, beta=0),
    _call(aten.baddbmm.default, _numbers(2, 3, 5), B3, C3, alpha=0.3),
    _call(aten.outer.default, V, _numbers(3)),
    _call(aten.einsum.default, "bij,bjk->bki", [B3, C3]),
    _call(aten.bilinear.default, X, Y, _numbers(2, 4, 4), _numbers(2)),
    _call(aten.addbmm.default, _numbers(3, 5), B3, C3, beta=0.5, alpha=2),
    _call(aten.vdot.default, V, _numbers(4, seed=5)),
    *(_call(aten._cdist_forward.default, B3, _numbers(2, 5, 4), p, None) for p in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)),
    *(_call(aten._cdist_forward.default, TIED, TIED, p, None) for p in (0.5, 1.0, 1.5, 2.0, 3.0, float("inf"))),
    _call(aten._pdist_forward.default, X, 2.0),
    # linear algebra: of vectors that any sign or phase may have, both libraries take LAPACK's
    *(_call(aten._linalg_svd.default, given, full) for given in (SQUARE, TALL) for full in (False, True)),
    *(_call(aten._linalg_eigh.default, given, which) for given in (POSITIVE_DEFINITE, SQUARE) for which in "LU"),
    _call(aten.linalg_eig.default, POSITIVE_DEFINITE @ LOWER),
    _call(aten.linalg_eigvals.default, POSITIVE_DEFINITE @ LOWER),
    *(_call(aten.linalg_qr.default, given) for given in (SQUARE, WIDE, TALL)),
    _call(aten.linalg_qr.default, SQUARE, "complete"),
    _call(aten.geqrf.default, TALL),
    _call(aten.linalg_householder_product.default, TALL, _numbers(2, 3, seed=24)),
    *(_call(aten.ormqr.default, TALL, _numbers(2, 3), _numbers(2, 5, 4), True, t) for t in (False, True)),
    *(_call(aten.ormqr.default, TALL, _numbers(2, 3), _numbers(2, 4, 5), False, t) for t in (False, True)),
    *(_call(aten.linalg_cholesky_ex.default, POSITIVE_DEFINITE, upper=u) for u in (False, True)),
    *(_call(aten.cholesky.default, POSITIVE_DEFINITE + SQUARE.triu(1), u) for u in (False,)),
    *(_call(aten.cholesky_solve.default, _numbers(3, 2), factor, u) for factor, u in ((LOWER, False), (UPPER, True))),
    *(_call(aten.cholesky_inverse.default, factor, u) for factor, u in ((LOWER, False), (UPPER, True))),
    *(_call(aten.linalg_lu_factor_ex.default, given) for given in (SQUARE, WIDE, TALL)),
    *(_call(aten.linalg_lu.default, given) for given in (SQUARE, WIDE, TALL)),
    _call(aten.lu_unpack.default, *torch.linalg.lu_factor(WIDE)),
    *(
        _call(aten.linalg_lu_solve.default, *torch.linalg.lu_factor(SQUARE), _numbers(3, 3), left=left, adjoint=adjoint)
        for left in (True, False)
        for adjoint in (True, False)
    ),
    *(_call(aten.linalg_solve_triangular.default, UPPER, SQUARE, upper=True, left=left) for left in (True, False)),
    _call(aten.linalg_solve_triangular.default, LOWER, _numbers(2, 3, 2), upper=False, unitriangular=True),
    *(_call(aten.triangular_solve.default, SQUARE, UPPER, True, t, u) for t in (False, True) for u in (False, True)),
    *(_call(aten._linalg_solve_ex.default, SQUARE, _numbers(3, 3, seed=25), left=left) for left in (True, False)),
    _call(aten._linalg_solve_ex.default, SQUARE, _numbers(3)),
    *(_call(op, SQUARE) for op in (aten.linalg_inv.default, aten.linalg_inv_ex.default, aten.inverse.default)),
    _call(aten.linalg_solve.default, SQUARE, _numbers(2, 3, 3)),
    _call(aten.linalg_cholesky.default, POSITIVE_DEFINITE, upper=True),
    _call(aten.linalg_lu_factor.default, TALL),
    _call(aten.linalg_tensorinv.default, _numbers(6, 2, 3, seed=26), 1),
    _call(aten._linalg_det.default, SQUARE),
    _call(aten._linalg_slogdet.default, SQUARE),
    *(_call(aten.linalg_pinv.atol_rtol_tensor, given) for given in (TALL, WIDE)),
    _call(aten.linalg_pinv.atol_rtol_tensor, SQUARE, atol=torch.tensor(0.5).double(), rtol=torch.tensor(0.01).double()),
    _call(aten.linalg_matrix_exp.default, SQUARE),
    *(_call(aten._fft_r2c.default, B3, [0, 2], norm, one) for norm in (0, 1, 2) for one in (True, False)),
    *(_call(aten._fft_c2c.default, COMPLEX, [0, 1], norm, way) for norm in (0, 1, 2) for way in (True, False)),
    *(_call(aten._fft_c2r.default, COMPLEX, [0, 1], norm, 2 * 3 + norm % 2) for norm in (0, 1, 2)),
    # recurrent layers
    _call(aten.lstm.input, SEQUENCE, [_states(2), _states(2)], _cells(4, 2, 1), True, 2, 0.0, True, False, False),
    _call(
        aten.lstm.input,
        SEQUENCE.transpose(0, 1),
        [_states(4, 2), _states(4)],
        _cells(4, 2, 2, projection=2, biases=False),
        *(False, 2, 0.0, True, True, True),
    ),
    *(
        _call(op, SEQUENCE, _states(4), _cells(gates, 2, 2), True, 2, 0.0, False, True, False)
        for op, gates in ((aten.gru.input, 3), (aten.rnn_tanh.input, 1), (aten.rnn_relu.input, 1))
    ),
    # attention
    _call(aten.scaled_dot_product_attention.default, Q, K, VALUES),
    _call(aten.scaled_dot_product_attention.default, Q, K, VALUES, SEEN),
    _call(aten.scaled_dot_product_attention.default, Q, K, VALUES, NOTHING_SEEN),
    _call(aten.scaled_dot_product_attention.default, Q, K, VALUES, _numbers(5, 7)),
    _call(aten.scaled_dot_product_attention.default, Q, K, VALUES, None, 0.0, True),
    _call(aten.scaled_dot_product_attention.default, Q, K, VALUES, scale=0.3),
    _call(aten.scaled_dot_product_attention.default, Q, K2, V2, enable_gqa=True),
    # norms
    _call(aten.layer_norm.default, B3, (4,), V, V),
    _call(aten.layer_norm.default, B3, (3, 4), X, None, 1e-3),
    _call(aten.native_layer_norm.default, B3, (4,), V, V, 1e-5),
    _call(aten.native_group_norm.default, IMAGE, V, V, 2, 4, 42, 2, 1e-5),
    _call(aten._batch_norm_with_update_functional.default, IMAGE, V, V, V, P[0], 0.1, 1e-5),
    _call(aten.rms_norm.default, X, (4,), V),
    _call(aten.group_norm.default, IMAGE, 2, V, V),
    _call(aten._native_batch_norm_legit_functional.default, IMAGE, V, V, V, P[0], True, 0.1, 1e-5),
    _call(aten._native_batch_norm_legit_no_training.default, IMAGE, V, V, V, P[0], 0.1, 1e-5),
    _call(aten._native_batch_norm_legit.no_stats, IMAGE, V, None, True, 0.1, 1e-5),
    _call(aten.batch_norm.default, IMAGE, V, V, V, P[0], False, 0.1, 1e-5, True),
    # images resized with antialiasing: smaller, larger, by a factor that is not the quotient, at aligned corners
    *(
        _call(getattr(aten, f"_upsample_{name}2d_aa").default, IMAGE, size, corners, *factors)
        for name in ("bilinear", "bicubic", "lanczos")
        for size, corners, factors in (([2, 11], False, ()), ([3, 3], False, (0.65, 0.6)), ([3, 9], True, ()))
        if not (name == "lanczos" and corners)  # torch has none
    ),
    # convolutions, pooling
    _call(aten.conv2d.default, IMAGE, KERNEL, _numbers(6), [2, 1], [1, 0], [1, 2]),
    _call(aten.conv2d.padding, IMAGE, KERNEL, None, [1, 1], "same"),
    _call(aten.conv1d.default, IMAGE1, KERNEL1, None, [1], [2], [1], 2),
    _call(aten.conv1d.default, IMAGE1[0], _numbers(6, 4, 3), _numbers(6)),
    _call(aten.conv3d.default, IMAGE3, KERNEL3),
    _call(aten.conv_transpose2d.input, IMAGE, _numbers(4, 3, 3, 2), _numbers(3), [2, 1], [1, 0], [1, 0]),
    _call(aten.conv_transpose1d.default, IMAGE1, _numbers(4, 3, 3), _numbers(6), [2], [1], [0], 2, [2]),
    _call(aten.convolution.default, IMAGE, KERNEL, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    _call(aten.max_pool2d.default, IMAGE, [2, 3], [2, 1], [1, 1]),
    _call(aten.max_pool2d.default, IMAGE, [3, 3], [2, 2], [1, 1], [1, 1], True),
    _call(aten.max_pool1d.default, IMAGE1, [2], [2], [0], [2]),
    _call(aten.avg_pool2d.default, IMAGE, [3, 2], [2, 2], [1, 1]),
    _call(aten.avg_pool2d.default, IMAGE, [3, 3], [2, 2], [1, 1], True, True),
    _call(aten.avg_pool2d.default, IMAGE, [3, 3], [2, 2], [1, 1], True, False),
    _call(aten.avg_pool2d.default, IMAGE, [2, 2], [], [0, 0], False, True, 3),
    _call(aten.avg_pool1d.default, IMAGE1, [2]),
    _call(aten.avg_pool3d.default, IMAGE3, [2, 2, 1]),
    _call(aten.max_pool3d.default, IMAGE3, [2, 2, 2]),
    _call(aten.adaptive_avg_pool3d.default, IMAGE3, [2, 5, 2]),
    _call(aten.conv_transpose3d.input, IMAGE3, _numbers(2, 3, 2, 1, 2)),
    _call(aten.adaptive_avg_pool2d.default, IMAGE, [3, 2]),
    _call(aten.adaptive_avg_pool2d.default, IMAGE, [1, 1]),
    _call(aten.adaptive_avg_pool1d.default, IMAGE1, [4]),
    _call(aten.max_pool2d_with_indices.default, IMAGE, [3, 3], [2, 2], [1, 1], [1, 2], True),
    _call(aten.max_pool3d_with_indices.default, IMAGE3, [2, 2, 2]),
    _call(aten.max_unpool2d.default, B3, torch.arange(24).view(2, 3, 4) % 12 // 2, [4, 5]),
    _call(aten.max_unpool3d.default, B3[None], torch.arange(24).view(1, 2, 3, 4), [2, 3, 4], [1, 1, 1], [0, 0, 0]),
    _call(aten.adaptive_max_pool2d.default, IMAGE, [3, 4]),
    _call(aten.adaptive_max_pool3d.default, IMAGE3, [2, 2, 2]),
    _call(aten.fractional_max_pool2d.default, IMAGE, [2, 2], [3, 4], _positive(2, 4, 2) * 0.9),
    _call(aten.fractional_max_pool3d.default, IMAGE3, [2, 2, 1], [2, 3, 2], _positive(1, 2, 3) * 0.9),
    # losses
    _call(aten.cross_entropy_loss.default, LOGITS, CLASSES),
    _call(aten.cross_entropy_loss.default, LOGITS, CLASSES, _positive(5), 1, -100, 0.2),
    _call(aten.cross_entropy_loss.default, LOGITS, CLASSES, None, 2),
    _call(aten.cross_entropy_loss.default, LOGITS, CLASSES.clamp(min=0), None, 0, 2, 0.1),
    _call(aten.cross_entropy_loss.default, LOGITS.view(2, 5, 3), CLASSES.view(2, 3)),
    _call(aten.cross_entropy_loss.default, LOGITS, LOGITS.softmax(1), None, 1, -100, 0.1),
    _call(aten.nll_loss_nd.default, LOGITS, CLASSES, _positive(5)),
    _call(aten.mse_loss.default, X, Y),
    _call(aten.l1_loss.default, X, Y, 2),
    _call(aten.smooth_l1_loss.default, X, Y, 1, 0.5),
    _call(aten.huber_loss.default, X, Y, 0, 0.5),
    _call(aten.binary_cross_entropy_with_logits.default, X, P, None, V.abs()),
    *(
        _call(aten.multilabel_margin_loss_forward.default, given, torch.tensor([[2, 0, -1], [1, -1, 2], [0, 1, 2]]), r)
        for given in (SQUARE, TIED)
        for r in (0, 1)
    ),
    _call(aten.binary_cross_entropy.default, P * 0.9, P.flip(0) * 0.9, V.abs()),
    _call(
        aten.binary_cross_entropy.default,
        torch.tensor([0.0, 1.0, 0.0, 1.0]),
        torch.tensor([0.0, 0.0, 1.0, 1.0]),
        None,
        0,
    ),
    _call(aten.kl_div.default, X, P),
    _call(aten.kl_div.default, X, Y, 2, log_target=True),
]

# Ops whose numbers are JAX's own, ops with no kernel on CPU, and other spellings of what has a case.
_NOT_COMPARED = """random normal normal_functional log_normal cauchy geometric poisson multinomial randperm
randint_like rrelu_with_noise_functional _embedding_bag_forward_only max_pool1d_with_indices adaptive_max_pool1d
_linalg_eigvals bernoulli dropout native_dropout rand randn rand_like randn_like randint uniform exponential
empty empty_like empty_strided new_empty _grouped_mm grouped_mm_fallback view.dtype detach_copy split_with_sizes_copy
_unsafe_view _unsafe_index _unsafe_index_put lift_fresh_copy concatenate true_divide numpy_T mT addmv ger nll_loss
copy nll_loss2d _adaptive_avg_pool2d __and__ __or__ __xor__ conj imag real"""


def without_case() -> list[str]:
    """Ops of the table that no case is of and that are not excused; another overload of the op will do."""
    compared = {op.overloadpacket.__name__ for op, _, _ in CASES} | {
        name.partition(".")[0] for name in _NOT_COMPARED.split()
    }
    own = [name.partition("::")[2].partition(".")[0] for name in sj.known_ops() if name.startswith("aten::")]
    return sorted(set(own) - compared)


_AT_ONCE = 60  # cases of one program: compiling is what takes time, which grows faster than their number


def differences() -> list[str]:
    """What is not as torch has it, a line each."""
    starts = range(0, len(CASES), _AT_ONCE)
    return [line for start in starts for line in _differences(CASES[start : start + _AT_ONCE])]


def _differences(cases: list[Call]) -> list[str]:
    found, inputs, wanted = [], [], []
    for op, args, kwargs in cases:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        constant = next((which for name, which in _CONSTANT.items() if name in str(op)), ())
        trained = [at for at, leaf in enumerate(leaves) if _is_float(leaf) and at not in constant]
        inputs.append([jnp.asarray(to_numpy(leaf)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])
        wanted.append((structure, trained, *_torch_does(op, leaves, structure, trained)))

    def all_of_them(arrays: Any) -> Any:
        results = []
        for (op, args, _), given, fixed, expected in zip(cases, arrays, inputs, wanted, strict=True):
            leaves = [given.get(str(at), leaf) for at, leaf in enumerate(fixed)]
            try:
                results.append(_jax_does(op, leaves, *expected))
            except Exception as error:
                found.append(f"{op}{_shapes(args)}: {type(error).__name__}: {error}")
                results.append(None)
        return results

    arrays = [{str(at): leaf for at, leaf in enumerate(case) if isinstance(leaf, jax.Array)} for case in inputs]
    for (op, args, _), got, expected in zip(cases, jax.jit(all_of_them)(arrays), wanted, strict=True):
        found += [] if got is None else [f"{op}{_shapes(args)}: {what}" for what in _compared(op, got, expected[2:])]
    return found


def slopes_at_a_bound() -> list[tuple[float, float]]:
    """What torch is found to do, asked where gradients are off or tensors have no values."""
    found = []
    for around in (torch.enable_grad(), torch.no_grad(), torch.inference_mode(), torch.device("meta")):
        _slope_at_a_bound.cache_clear()
        with around:
            found.append((_slope_at_a_bound(tensor=False), _slope_at_a_bound(tensor=True)))
    return found


# Operands by which torch has no gradient.
_CONSTANT: dict[str, tuple[int, ...]] = {
    "histogram": tuple(range(9)),
    "geqrf": (0,),
    "linalg_pinv": (1, 2),
    "fractional_max_pool": (5, 7),
    "igamma": (0,),
    "special_zeta": (0,),
    "batch_norm": (3, 4),
    "cross_entropy_loss": (2,),
    "nll_loss": (2,),
    "entropy_with_logits": (3,),
    "binary_cross_entropy.default": (2,),
}


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _shapes(args: Any) -> str:
    return str(pytree.tree_map_only(torch.Tensor, lambda t: (str(t.dtype)[6:], *t.shape), args))


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_complex() else tensor.double()


def _compared(op: Any, got: Any, wanted: Any) -> list[str]:
    found, close = [], _close_to_inverses if any(name in str(op) for name in _INVERSES) else _close
    for name, ours, theirs in zip(("value", "gradient"), got, wanted, strict=True):
        for array, b in zip(ours, theirs or [], strict=True):
            a = to_tensor(array)
            if tuple(a.shape) != tuple(b.shape) or a.dtype != b.dtype:
                found.append(f"{name} is {a.dtype} {tuple(a.shape)}, torch's {b.dtype} {tuple(b.shape)}")
            elif not torch.allclose(_wide(a), _wide(b), rtol=close(b), atol=close(b), equal_nan=True):
                found.append(f"{name} is {a.tolist()}, torch's {b.tolist()}")
    return found


def _close(tensor: torch.Tensor) -> float:
    """A few roundings of the dtype; of series of JAX's own (lgamma, erfinv) a few more."""
    return 32 * torch.finfo(tensor.dtype).eps if tensor.is_floating_point() or tensor.is_complex() else 0.0


# Ops that solve equations, whose roundings grow by condition numbers of some hundreds.
_INVERSES = ("linalg", "cholesky", "lu_", "triangular_solve", "ormqr", "zeta", "gamma")


def _close_to_inverses(tensor: torch.Tensor) -> float:
    return 300 * _close(tensor)


def _weights(like: Any) -> torch.Tensor:
    return _numbers(*like.shape, seed=99).to(like.dtype)


def _torch_does(op: Any, leaves: list[Any], structure: Any, trained: list[int]) -> Any:
    """The values, and the gradients of a weighted sum of them; None where there is none."""
    own = [leaf.clone().requires_grad_() if at in trained else leaf for at, leaf in enumerate(leaves)]
    args, kwargs = pytree.tree_unflatten(own, structure)
    results = op(*args, **kwargs)
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    differentiable = [r for r in results if r.requires_grad]
    values = [r.detach() for r in results]
    if not differentiable:
        return values, None
    inputs = [own[at] for at in trained]
    grads = torch.autograd.grad(differentiable, inputs, [_weights(r) for r in differentiable], allow_unused=True)
    return values, [torch.zeros_like(t) if g is None else g for g, t in zip(grads, inputs, strict=True)]


def _jax_does(op: Any, leaves: list[Any], structure: Any, trained: list[int], wanted: Any, grads: Any) -> Any:
    known = find_lowering(op)
    assert known is not None, "no lowering"

    def function(*inputs: Any) -> Any:
        mixed = list(leaves)
        for at, value in zip(trained, inputs, strict=True):
            mixed[at] = value
        args, kwargs = pytree.tree_unflatten(mixed, structure)
        results = known.function(*args, **kwargs)
        results = list(results) if isinstance(results, tuple | list) else [results]
        # As the interpreter does: the dtype is torch's. What only torch's backward reads is not computed.
        pairs = zip(results, wanted, strict=True)
        return [jnp.asarray(to_numpy(w)) if r is None else r.astype(to_numpy(w).dtype) for r, w in pairs]

    results, pull = jax.vjp(function, *[leaves[at] for at in trained])
    if grads is None:
        return results, []
    whole_numbers = (np.zeros(w.shape, jax.dtypes.float0) for w in wanted)
    cotangents = [
        jnp.asarray(to_numpy(_weights(w))) if w.is_floating_point() or w.is_complex() else nothing
        for w, nothing in zip(wanted, whole_numbers, strict=True)
    ]
    return results, [jnp.conj(gradient) for gradient in pull(cotangents)]

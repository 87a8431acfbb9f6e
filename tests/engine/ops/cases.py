"""Functions that models are made of, with inputs, for brute-force checks over placements.

Sizes are small and mostly uneven on two and three ranks; values differ in magnitude and sign.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.testing.ops import Sample

__all__ = ["CASES"]

CASES: dict[str, Sample] = {}


def _t(*shape: int, seed: int = 0, grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) * 7 + len(shape) + seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (values * 3 ** torch.linspace(-1, 1, values.numel(), dtype=torch.float64).view(shape)).requires_grad_(grad)


def _plain(*shape: int, seed: int = 0) -> Tensor:
    return _t(*shape, seed=seed, grad=False)


def _ids(*shape: int, below: int = 6, seed: int = 0) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed + 3))


def _case(name: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    assert name not in CASES
    CASES[name] = Sample(fn, args, kwargs)


# --- attention ----------------------------------------------------------------------------------------------------

_sdpa = F.scaled_dot_product_attention
_qkv = (_t(2, 4, 6, 4), _t(2, 4, 5, 4, seed=1), _t(2, 4, 5, 4, seed=2))

_case("attention", _sdpa, *_qkv)
_case("attention causal", _sdpa, _t(2, 4, 6, 4), _t(2, 4, 6, 4, seed=1), _t(2, 4, 6, 4, seed=2), is_causal=True)
_case("attention mask of the batch", _sdpa, *_qkv, attn_mask=_plain(2, 1, 6, 5))
_case("attention mask of the heads", _sdpa, *_qkv, attn_mask=_plain(1, 4, 6, 5))
_case("attention mask of bools", _sdpa, *_qkv, attn_mask=_ids(6, 5, below=4) > 0)
_case("attention mask with a gradient", _sdpa, *_qkv, attn_mask=_t(1, 4, 6, 5))
_case("attention dropout", _sdpa, *_qkv, dropout_p=0.3)
_case("attention grouped", _sdpa, _t(2, 4, 6, 4), _t(2, 2, 6, 4), _t(2, 2, 6, 4, seed=2), enable_gqa=True)


def _multi_head(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor, out_bias: Tensor) -> Tensor:
    options = {"need_weights": False}
    found = F.multi_head_attention_forward(
        x, x, x, 6, 2, weight, bias, None, None, False, 0.0, out, out_bias, **options
    )
    return found[0]


_case("multi head", _multi_head, _t(4, 3, 6), _t(18, 6), _t(18), _t(6, 6), _t(6))
_case("rotate half", lambda x: torch.cat([-x[..., 3:], x[..., :3]], -1) * x, _t(2, 4, 6))

# --- convolution, norms, pooling ----------------------------------------------------------------------------------

_case("conv2d", lambda x, w, b: F.conv2d(x, w, b, padding=1), _t(3, 4, 5, 5), _t(6, 4, 3, 3), _t(6))
_case("conv2d stride", lambda x, w: F.conv2d(x, w, stride=2), _t(3, 4, 5, 5), _t(6, 4, 3, 3))
_case("conv2d groups", lambda x, w, b: F.conv2d(x, w, b, groups=2), _t(3, 4, 5, 5), _t(6, 2, 3, 3), _t(6))
_case("conv2d depthwise", lambda x, w, b: F.conv2d(x, w, b, groups=4), _t(3, 4, 5, 5), _t(4, 1, 3, 3), _t(4))
_case("conv1d", F.conv1d, _t(3, 4, 7), _t(6, 4, 3), _t(6))
_case("conv transposed", lambda x, w, b: F.conv_transpose2d(x, w, b), _t(3, 4, 5, 5), _t(4, 6, 3, 3), _t(6))


def _batch_norm(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return F.batch_norm(x, mean, var, weight, bias, training=True)


_case("batch norm", _batch_norm, _t(4, 6, 3, 3), _t(6), _t(6, seed=1), _plain(6), _plain(6).abs())
_case("batch norm eval", F.batch_norm, _t(4, 6, 3), _plain(6), _plain(6).abs(), _t(6), _t(6, seed=1))
_case("group norm", lambda x, w, b: F.group_norm(x, 3, w, b), _t(4, 6, 3, 3), _t(6), _t(6, seed=1))
_case("layer norm", lambda x, w, b: F.layer_norm(x, (6,), w, b), _t(4, 5, 6), _t(6), _t(6, seed=1))
_case("rms norm", lambda x, w: F.rms_norm(x, (6,), w), _t(4, 5, 6), _t(6))
_case("weight norm", lambda v, g: torch._weight_norm(v, g, 0), _t(5, 6), _t(5, 1))
_case("max pool", lambda x: F.max_pool2d(x, 2), _t(3, 4, 6, 6))
_case("average pool", lambda x: F.avg_pool2d(x, 2), _t(3, 4, 6, 6))
_case("adaptive pool", lambda x: F.adaptive_avg_pool2d(x, 1), _t(3, 4, 6, 6))
_case("interpolate bilinear", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), _t(2, 4, 3, 3))
_case("interpolate nearest", lambda x: F.interpolate(x, size=(5, 5)), _t(2, 4, 3, 3))
_case("pad", lambda x: F.pad(x, (1, 2, 0, 0)), _t(3, 4, 5))
_case("pad reflect", lambda x: F.pad(x, (1, 2), mode="reflect"), _t(3, 4, 5))
_case("pixel shuffle", lambda x: F.pixel_shuffle(x, 2), _t(2, 8, 3, 3))
_case("unfold", lambda x: F.unfold(x, 2), _t(2, 3, 4, 4))

# --- losses -------------------------------------------------------------------------------------------------------

for _how in ("mean", "sum", "none"):
    _r = {"reduction": _how}
    _case(f"cross entropy {_how}", F.cross_entropy, _t(7, 6), _ids(7), **_r)
    _case(f"cross entropy of pixels {_how}", F.cross_entropy, _t(2, 6, 3, 5), _ids(2, 3, 5), **_r)
    _case(f"cross entropy smoothed {_how}", F.cross_entropy, _t(7, 6), _ids(7), label_smoothing=0.1, **_r)
    _weights = {"weight": _plain(6).abs(), "ignore_index": 2}
    _case(f"cross entropy weighted {_how}", F.cross_entropy, _t(7, 6), _ids(7), **_weights, **_r)
    _case(f"squared error {_how}", F.mse_loss, _t(7, 5), _t(7, 5, seed=1), **_r)
    _case(f"huber {_how}", F.huber_loss, _t(7, 5), _t(7, 5, seed=1), **_r)
    _case(f"binary {_how}", F.binary_cross_entropy_with_logits, _t(7, 5), _plain(7, 5).sigmoid(), **_r)
    _case(f"divergence {_how}", F.kl_div, _t(7, 5), _plain(7, 5).softmax(1), **_r)
_case("triplet", F.triplet_margin_loss, _t(5, 6), _t(5, 6, seed=1), _t(5, 6, seed=2))
_case("cosine", F.cosine_similarity, _t(5, 6), _t(5, 6, seed=1))
_case("ctc", F.ctc_loss, _t(6, 2, 5), _ids(2, 3, below=4) + 1, torch.tensor([6, 6]), torch.tensor([3, 3]))

# --- reductions and what mixes a dim ------------------------------------------------------------------------------

_case("softmax", lambda x: x.softmax(-1) * x, _t(4, 6))
_case("log softmax", lambda x: x.log_softmax(0) * x, _t(4, 6))
_case("logsumexp", lambda x: x.logsumexp(-1), _t(4, 6))
_case("norms", lambda x: x.norm() + x.norm(p=1) + x.norm(p=float("inf")), _t(5, 6))
_case("extremes", lambda x: x.amax() + x.amin(1).sum() + x.max() + x.min(0).values.sum(), _t(5, 6))
_case("variance", lambda x: x.std(0) + x.var() + x.var(1).sum(), _t(5, 6))
_case("means", lambda x: x.mean() + x.mean(0).sum() + x.mean((0, 1)), _t(5, 7))
_case("any and all", lambda x: ((x > 1).any(), (x > -9).all(1), (x > 0).all()), _plain(5, 6))
_case("products", lambda x: x.prod(1).sum() + x.prod(), _t(5, 3))
_case("median", lambda x: x.median(1)[0] + x.median(), _t(5, 7))
_case("argmax", lambda x: (x.argmax(1), x.argmax()), _plain(5, 7))
_case("accuracy", lambda x, y: (x.argmax(-1) == y).double().mean(), _plain(5, 7), _ids(5))
_case("cumsum", lambda x: x.cumsum(0) + x.cumsum(1), _t(5, 6))
_case("topk", lambda x: x.topk(2, 1)[0], _t(5, 6))
_case("sort", lambda x: x.sort(0)[0] + x.sort(1)[0], _t(5, 6))
_case("glu", lambda x: F.glu(x, -1), _t(5, 6))

# --- products -----------------------------------------------------------------------------------------------------

_case("linear", F.linear, _t(2, 3, 4), _t(6, 4), _t(6))
_case("linear of one dim", F.linear, _t(4), _t(6, 4), _t(6))
_case("matrix times vector", torch.mv, _t(5, 6), _t(6))
_case("vector times matrix", torch.matmul, _t(5), _t(5, 6))
_case("batches of matrices", torch.matmul, _t(2, 3, 4, 5), _t(5, 6))
_case("einsum", lambda a, b: torch.einsum("bik,bkj->bij", a, b), _t(3, 4, 5), _t(3, 5, 6))
_case("outer", torch.outer, _t(5), _t(6))
_case("tensordot", lambda a, b: torch.tensordot(a, b, 2), _t(3, 4, 5), _t(4, 5, 6))
_case("kron", torch.kron, _t(2, 3), _t(4, 2))
_case("distances", torch.cdist, _t(5, 6), _t(4, 6, seed=1))
_case("inverse", torch.linalg.inv, _t(3, 4, 4))
_case("singular values", torch.linalg.svdvals, _t(4, 5))
_case("spectrum", lambda x: torch.fft.rfft(x).abs(), _t(4, 6))
_case("recurrent cell", lambda x, h, c, w, u: torch.lstm_cell(x, (h, c), w, u), *(
    _t(3, 4), _t(3, 5), _t(3, 5, seed=1), _t(20, 4), _t(20, 5)
))  # fmt: skip

# --- views --------------------------------------------------------------------------------------------------------

_case("chunk", lambda x: [p * 2 for p in x.chunk(3, -1)], _t(4, 12))
_case("split", lambda x: [p * 2 for p in x.split([4, 8], -1)], _t(4, 12))
_case("unbind", lambda x: sum(x.unbind(1)), _t(4, 3, 5))
_case(
    "cat and stack", lambda a, b: torch.cat([torch.stack([a, b]), torch.stack([b, a])], 1), _t(4, 6), _t(4, 6, seed=1)
)
_case("cat with nothing", lambda a: torch.cat([torch.zeros(0, dtype=a.dtype), a], 0), _t(4, 6))
_case("flatten", lambda x: x.flatten(0, 1) * 2, _t(4, 6, 5))
_case("flatten all", lambda x: x.view(-1) * 2, _t(4, 6))
_case("unflatten", lambda x: x.unflatten(1, (2, 3)) * 2, _t(4, 6, 5))
_case("regroup", lambda x: x.view(6, 4) * 2, _t(4, 6))
_case("ones come and go", lambda x: x.view(4, 1, 6).squeeze(1).unsqueeze(0) * 2, _t(4, 6))
_case("reshape of a transpose", lambda x: x.t().reshape(3, 8) * 2, _t(4, 6))
_case("permute", lambda x: x.permute(2, 0, 1).reshape(5, 24), _t(4, 6, 5))
_case("expand", lambda x: x.expand(3, 4, 6).reshape(12, 6) * 2, _t(4, 6))
_case("repeat", lambda x: x.repeat(2, 1) + x.repeat_interleave(2, 0), _t(4, 6))
_case("roll and flip", lambda x: x.roll(1, 1) + x.flip(0), _t(4, 6))
_case("triangles", lambda x: x.tril() + x.triu(1), _t(5, 5))
_case("diagonals", lambda x: x.trace() + x.diag().sum() + x.diagonal(1).prod(), _t(5, 5))
_case("complex", lambda a, b: torch.view_as_real(torch.polar(a.abs(), b) * 1j), _t(4, 6), _t(4, 6, seed=1))
_case("slice scattered", lambda x, v: torch.slice_scatter(x, v, 1, 1, 4), _t(5, 6), _t(5, 3))

# --- indices ------------------------------------------------------------------------------------------------------

_case("embedding", F.embedding, _ids(3, 5, below=9), _t(9, 4))
_case("embedding with padding", F.embedding, _ids(3, 5, below=9), _t(9, 4), padding_idx=1)
_case("embedding bag", F.embedding_bag, _ids(3, 5, below=9), _t(9, 4))
_case("gather", lambda x, i: x.gather(1, i), _t(5, 6), _ids(5, 3))
_case("scatter add", lambda x, i, s: x.scatter_add(1, i, s), _t(5, 6), _ids(5, 3), _t(5, 3))
_case("index add", lambda x, i, s: x.index_add(1, i, s), _t(5, 6), _ids(3), _t(5, 3))
_case("index select", lambda x, i: x.index_select(1, i), _t(5, 6), _ids(3))
_case("masked", lambda x: x[x > 0] * 2, _t(5, 6))
_case("nonzero", lambda x: (x > 0).nonzero(), _plain(5, 6))
_case("unique", lambda x: torch.unique(x.round(), return_counts=True), _plain(5, 6))
_case("bincount", torch.bincount, _ids(9))
_case("one hot", lambda i: F.one_hot(i, 6), _ids(7))
_case("search", lambda a, b: torch.searchsorted(a.sort()[0], b), _plain(9), _plain(5))
_case("where", lambda c, x, y: torch.where(c > 0, x, y), _plain(5, 6), _t(5, 6), _t(1, 6))
_case("masked fill", lambda x: x.masked_fill(x > 0, -9.0), _t(5, 6))

# --- writing in place ---------------------------------------------------------------------------------------------


def _assign_mask(x: Tensor) -> Tensor:
    y = x * 1
    y[y > 0] = 0.5
    return y


def _assign_slices(x: Tensor) -> Tensor:
    y = x * 1
    y[:, 1:3] = y[:, 3:5] * 2
    y[0] = 1.0
    y[..., -1].add_(3)
    return y


def _write_through_slices(x: Tensor) -> Tensor:
    y = x * 1
    y[:, 1:4].mul_(2)
    y[1:3].zero_()
    y.t()[2].add_(1)
    return y.sum(0)


def _assign_indices(x: Tensor, i: Tensor) -> Tensor:
    y = x * 1
    y[i] = 7.0
    y[:, i] += 1
    return y


def _write_the_base(x: Tensor) -> Tensor:
    y = x * 1
    some, flat = y[:, 1:3], y.view(-1)[3:9]
    y.mul_(2)
    return some.sum() + flat.prod()


_case("assign mask", _assign_mask, _t(5, 6))
_case("assign slices", _assign_slices, _t(5, 6))
_case("write through slices", _write_through_slices, _t(5, 6))
_case("assign indices", _assign_indices, _t(6, 6), _ids(2))
_case("write the base of views", _write_the_base, _t(5, 6))
_case("activations in place", lambda x: (x * 1).relu_().add(1).clamp_(max=2).exp().neg(), _t(5, 6))
_case("out", lambda a, b: torch.add(a, b, out=torch.empty_like(a)), _plain(5, 6), _plain(5, 6, seed=1))

# --- random numbers -----------------------------------------------------------------------------------------------

_case("dropout", lambda x: F.dropout(x, 0.3), _t(5, 6))
_case("dropout of channels", lambda x: F.dropout2d(x, 0.5), _t(3, 4, 5, 5))
_case("alpha dropout", lambda x: F.alpha_dropout(x, 0.3, True), _t(5, 6))
_case("random like", lambda x: x + torch.rand_like(x) + torch.randn_like(x), _t(5, 6))
_case("bernoulli", lambda x: torch.bernoulli(x.sigmoid()), _plain(5, 6))
_case("multinomial", lambda x: torch.multinomial(x.abs(), 2), _plain(5, 6))
_case("gumbel", F.gumbel_softmax, _t(5, 6))
_case("random slope", lambda x: F.rrelu(x, training=True), _t(5, 6))

# --- numbers and lists --------------------------------------------------------------------------------------------

_case("item", lambda x: x * x.sum().item(), _t(5, 6))
_case(
    "lists",
    lambda a, b: torch._foreach_add(torch._foreach_mul([a * 1, b * 1], 2.0), [b, a]),
    _t(5, 6),
    _t(5, 6, seed=1),
)
_case("total norm", lambda a, b: torch.nn.utils.get_total_norm([a, b]), _t(5, 6), _t(5, 6, seed=1))
_case("blend", torch.lerp, _t(5, 6), _t(5, 6, seed=1), _t(6))
_case("fused product", lambda a, b, c: torch.addcmul(a, b, c, value=2), _t(5, 6), _t(5, 6, seed=1), _t(6))

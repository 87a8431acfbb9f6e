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

__all__ = ["CASES", "floats", "ids", "plain"]

CASES: dict[str, Sample] = {}


def floats(*shape: int, seed: int = 0, grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) * 7 + len(shape) + seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (values * 3 ** torch.linspace(-1, 1, values.numel(), dtype=torch.float64).view(shape)).requires_grad_(grad)


def plain(*shape: int, seed: int = 0) -> Tensor:
    return floats(*shape, seed=seed, grad=False)


def ids(*shape: int, below: int = 6, seed: int = 0) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed + 3))


def _case(name: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    assert name not in CASES
    CASES[name] = Sample(fn, args, kwargs)


# --- attention ----------------------------------------------------------------------------------------------------

_sdpa = F.scaled_dot_product_attention


def _sdpa_repeated(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Repeat one head of keys and values for all queries, as models without `enable_gqa` do."""
    return _sdpa(query, key.expand(-1, query.shape[1], -1, -1), value.expand(-1, query.shape[1], -1, -1))


_qkv = (floats(2, 4, 6, 4), floats(2, 4, 5, 4, seed=1), floats(2, 4, 5, 4, seed=2))

_case("attention", _sdpa, *_qkv)
_case(
    "attention causal",
    _sdpa,
    floats(2, 4, 6, 4),
    floats(2, 4, 6, 4, seed=1),
    floats(2, 4, 6, 4, seed=2),
    is_causal=True,
)
_same = (floats(2, 4, 7, 4), floats(2, 4, 7, 4, seed=1), floats(2, 4, 7, 4, seed=2))
_case("attention causal and uneven", _sdpa, *_same, is_causal=True)
_packed = torch.block_diag(*[torch.ones(n, n) for n in (3, 1, 3)]).tril() > 0
_packed[5] = False  # sees nothing
_case("attention packed", _sdpa, *_same, attn_mask=_packed)
_case("attention mask of the batch", _sdpa, *_qkv, attn_mask=plain(2, 1, 6, 5))
_case("attention mask of the heads", _sdpa, *_qkv, attn_mask=plain(1, 4, 6, 5))
_case("attention mask of bools", _sdpa, *_qkv, attn_mask=ids(6, 5, below=4) > 0)
_case("attention mask with a gradient", _sdpa, *_qkv, attn_mask=floats(1, 4, 6, 5))
_case("attention dropout", _sdpa, *_qkv, dropout_p=0.3)
_case("attention repeated", _sdpa_repeated, floats(2, 4, 6, 4), floats(2, 1, 6, 4), floats(2, 1, 6, 4, seed=2))
_case("attention grouped", _sdpa, floats(2, 4, 6, 4), floats(2, 2, 6, 4), floats(2, 2, 6, 4, seed=2), enable_gqa=True)


def _multi_head(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor, out_bias: Tensor) -> Tensor:
    options = {"need_weights": False}
    found = F.multi_head_attention_forward(
        x, x, x, 6, 2, weight, bias, None, None, False, 0.0, out, out_bias, **options
    )
    return found[0]


_case("multi head", _multi_head, floats(4, 3, 6), floats(18, 6), floats(18), floats(6, 6), floats(6))
_case("rotate half", lambda x: torch.cat([-x[..., 3:], x[..., :3]], -1) * x, floats(2, 4, 6))

# --- convolution, norms, pooling ----------------------------------------------------------------------------------

_case("conv2d", lambda x, w, b: F.conv2d(x, w, b, padding=1), floats(3, 4, 5, 5), floats(6, 4, 3, 3), floats(6))
_case("conv2d stride", lambda x, w: F.conv2d(x, w, stride=2), floats(3, 4, 5, 5), floats(6, 4, 3, 3))
_case("conv2d groups", lambda x, w, b: F.conv2d(x, w, b, groups=2), floats(3, 4, 5, 5), floats(6, 2, 3, 3), floats(6))
_case(
    "conv2d depthwise", lambda x, w, b: F.conv2d(x, w, b, groups=4), floats(3, 4, 5, 5), floats(4, 1, 3, 3), floats(4)
)
_case("conv1d", F.conv1d, floats(3, 4, 7), floats(6, 4, 3), floats(6))
_case("conv transposed", lambda x, w, b: F.conv_transpose2d(x, w, b), floats(3, 4, 5, 5), floats(4, 6, 3, 3), floats(6))


def _batch_norm(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return F.batch_norm(x, mean, var, weight, bias, training=True)


_case(
    "batch norm",
    _batch_norm,
    floats(4, 6, 3, 3),
    floats(6),
    floats(6, seed=1),
    plain(6),
    plain(6).abs(),
)
_case(
    "batch norm eval",
    F.batch_norm,
    floats(4, 6, 3),
    plain(6),
    plain(6).abs(),
    floats(6),
    floats(6, seed=1),
)
_case("group norm", lambda x, w, b: F.group_norm(x, 3, w, b), floats(4, 6, 3, 3), floats(6), floats(6, seed=1))
_case("layer norm", lambda x, w, b: F.layer_norm(x, (6,), w, b), floats(4, 5, 6), floats(6), floats(6, seed=1))
_case("rms norm", lambda x, w: F.rms_norm(x, (6,), w), floats(4, 5, 6), floats(6))
_case("weight norm", lambda v, g: torch._weight_norm(v, g, 0), floats(5, 6), floats(5, 1))
_case("max pool", lambda x: F.max_pool2d(x, 2), floats(3, 4, 6, 6))
_case("average pool", lambda x: F.avg_pool2d(x, 2), floats(3, 4, 6, 6))
_case("adaptive pool", lambda x: F.adaptive_avg_pool2d(x, 1), floats(3, 4, 6, 6))
_case("interpolate bilinear", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), floats(2, 4, 3, 3))
_case("interpolate nearest", lambda x: F.interpolate(x, size=(5, 5)), floats(2, 4, 3, 3))
_case("pad", lambda x: F.pad(x, (1, 2, 0, 0)), floats(3, 4, 5))
_case("pad reflect", lambda x: F.pad(x, (1, 2), mode="reflect"), floats(3, 4, 5))
_case("pixel shuffle", lambda x: F.pixel_shuffle(x, 2), floats(2, 8, 3, 3))
_case("unfold", lambda x: F.unfold(x, 2), floats(2, 3, 4, 4))

# --- losses -------------------------------------------------------------------------------------------------------

for _how in ("mean", "sum", "none"):
    _r = {"reduction": _how}
    _case(f"cross entropy {_how}", F.cross_entropy, floats(7, 6), ids(7), **_r)
    _case(f"cross entropy of pixels {_how}", F.cross_entropy, floats(2, 6, 3, 5), ids(2, 3, 5), **_r)
    _case(f"cross entropy smoothed {_how}", F.cross_entropy, floats(7, 6), ids(7), label_smoothing=0.1, **_r)
    _weights = {"weight": plain(6).abs(), "ignore_index": 2}
    _case(f"cross entropy weighted {_how}", F.cross_entropy, floats(7, 6), ids(7), **_weights, **_r)
    _case(f"squared error {_how}", F.mse_loss, floats(7, 5), floats(7, 5, seed=1), **_r)
    _case(f"huber {_how}", F.huber_loss, floats(7, 5), floats(7, 5, seed=1), **_r)
    _case(f"binary {_how}", F.binary_cross_entropy_with_logits, floats(7, 5), plain(7, 5).sigmoid(), **_r)
    _case(f"divergence {_how}", F.kl_div, floats(7, 5), plain(7, 5).softmax(1), **_r)
_case("triplet", F.triplet_margin_loss, floats(5, 6), floats(5, 6, seed=1), floats(5, 6, seed=2))
_case("cosine", F.cosine_similarity, floats(5, 6), floats(5, 6, seed=1))
_case("ctc", F.ctc_loss, floats(6, 2, 5), ids(2, 3, below=4) + 1, torch.tensor([6, 6]), torch.tensor([3, 3]))

# --- reductions and what mixes a dim ------------------------------------------------------------------------------

_case("softmax", lambda x: x.softmax(-1) * x, floats(4, 6))
_case("log softmax", lambda x: x.log_softmax(0) * x, floats(4, 6))
_case("logsumexp", lambda x: x.logsumexp(-1), floats(4, 6))
_case("norms", lambda x: x.norm() + x.norm(p=1) + x.norm(p=float("inf")), floats(5, 6))
_case("extremes", lambda x: x.amax() + x.amin(1).sum() + x.max() + x.min(0).values.sum(), floats(5, 6))
_case("variance", lambda x: x.std(0) + x.var() + x.var(1).sum(), floats(5, 6))
_case("means", lambda x: x.mean() + x.mean(0).sum() + x.mean((0, 1)), floats(5, 7))
_case("any and all", lambda x: ((x > 1).any(), (x > -9).all(1), (x > 0).all()), plain(5, 6))
_case("products", lambda x: x.prod(1).sum() + x.prod(), floats(5, 3))
_case("median", lambda x: x.median(1)[0] + x.median(), floats(5, 7))
_case("argmax", lambda x: (x.argmax(1), x.argmax()), plain(5, 7))
_case("accuracy", lambda x, y: (x.argmax(-1) == y).double().mean(), plain(5, 7), ids(5))
_case("cumsum", lambda x: x.cumsum(0) + x.cumsum(1), floats(5, 6))
_case("topk", lambda x: x.topk(2, 1)[0], floats(5, 6))
_case("sort", lambda x: x.sort(0)[0] + x.sort(1)[0], floats(5, 6))
_case("glu", lambda x: F.glu(x, -1), floats(5, 6))

# --- products -----------------------------------------------------------------------------------------------------

_case("linear", F.linear, floats(2, 3, 4), floats(6, 4), floats(6))
_case("linear of one dim", F.linear, floats(4), floats(6, 4), floats(6))
_case("matrix times vector", torch.mv, floats(5, 6), floats(6))
_case("vector times matrix", torch.matmul, floats(5), floats(5, 6))
_case("batches of matrices", torch.matmul, floats(2, 3, 4, 5), floats(5, 6))
_case("einsum", lambda a, b: torch.einsum("bik,bkj->bij", a, b), floats(3, 4, 5), floats(3, 5, 6))
_case("outer", torch.outer, floats(5), floats(6))
_case("tensordot", lambda a, b: torch.tensordot(a, b, 2), floats(3, 4, 5), floats(4, 5, 6))
_case("kron", torch.kron, floats(2, 3), floats(4, 2))
_case("distances", torch.cdist, floats(5, 6), floats(4, 6, seed=1))
_case("inverse", torch.linalg.inv, floats(3, 4, 4))
_case("singular values", torch.linalg.svdvals, floats(4, 5))
_case("spectrum", lambda x: torch.fft.rfft(x).abs(), floats(4, 6))
_case("recurrent cell", lambda x, h, c, w, u: torch.lstm_cell(x, (h, c), w, u), *(
    floats(3, 4), floats(3, 5), floats(3, 5, seed=1), floats(20, 4), floats(20, 5)
))  # fmt: skip

# --- views --------------------------------------------------------------------------------------------------------

_case("chunk", lambda x: [p * 2 for p in x.chunk(3, -1)], floats(4, 12))
_case("split", lambda x: [p * 2 for p in x.split([4, 8], -1)], floats(4, 12))
_case("unbind", lambda x: sum(x.unbind(1)), floats(4, 3, 5))
_case(
    "cat and stack",
    lambda a, b: torch.cat([torch.stack([a, b]), torch.stack([b, a])], 1),
    floats(4, 6),
    floats(4, 6, seed=1),
)
_case("cat with nothing", lambda a: torch.cat([torch.zeros(0, dtype=a.dtype), a], 0), floats(4, 6))
_case("flatten", lambda x: x.flatten(0, 1) * 2, floats(4, 6, 5))
_case("flatten all", lambda x: x.view(-1) * 2, floats(4, 6))
_case("unflatten", lambda x: x.unflatten(1, (2, 3)) * 2, floats(4, 6, 5))
_case("regroup", lambda x: x.view(6, 4) * 2, floats(4, 6))
_case("ones come and go", lambda x: x.view(4, 1, 6).squeeze(1).unsqueeze(0) * 2, floats(4, 6))
_case("reshape of a transpose", lambda x: x.t().reshape(3, 8) * 2, floats(4, 6))
_case("uneven dims", lambda x: x.flatten(0, 1).view(3, 4, 5).transpose(0, 1).reshape(2, 30), floats(4, 3, 5))
_case("permute", lambda x: x.permute(2, 0, 1).reshape(5, 24), floats(4, 6, 5))
_case("expand", lambda x: x.expand(3, 4, 6).reshape(12, 6) * 2, floats(4, 6))
_case("repeat", lambda x: x.repeat(2, 1) + x.repeat_interleave(2, 0), floats(4, 6))
_case("roll and flip", lambda x: x.roll(1, 1) + x.flip(0), floats(4, 6))
_case("triangles", lambda x: x.tril() + x.triu(1), floats(5, 5))
_case("diagonals", lambda x: x.trace() + x.diag().sum() + x.diagonal(1).prod(), floats(5, 5))
_case("complex", lambda a, b: torch.view_as_real(torch.polar(a.abs(), b) * 1j), floats(4, 6), floats(4, 6, seed=1))
_case("slice scattered", lambda x, v: torch.slice_scatter(x, v, 1, 1, 4), floats(5, 6), floats(5, 3))

# --- indices ------------------------------------------------------------------------------------------------------

_case("embedding", F.embedding, ids(3, 5, below=9), floats(9, 4))
_case("embedding with padding", F.embedding, ids(3, 5, below=9), floats(9, 4), padding_idx=1)
_case("embedding bag", F.embedding_bag, ids(3, 5, below=9), floats(9, 4))
_case("gather", lambda x, i: x.gather(1, i), floats(5, 6), ids(5, 3))
_case("scatter add", lambda x, i, s: x.scatter_add(1, i, s), floats(5, 6), ids(5, 3), floats(5, 3))
_case("index add", lambda x, i, s: x.index_add(1, i, s), floats(5, 6), ids(3), floats(5, 3))
_case("index select", lambda x, i: x.index_select(1, i), floats(5, 6), ids(3))
_case("rows that are kept", lambda x: x[(x > 0).any(1).nonzero(as_tuple=True)[0]], floats(5, 3))
_case("masked", lambda x: x[x > 0] * 2, floats(5, 6))
_case("nonzero", lambda x: (x > 0).nonzero(), plain(5, 6))
_case("unique", lambda x: torch.unique(x.round(), return_counts=True), plain(5, 6))
_case("bincount", torch.bincount, ids(9))
_case("one hot", lambda i: F.one_hot(i, 6), ids(7))
_case("search", lambda a, b: torch.searchsorted(a.sort()[0], b), plain(9), plain(5))
_case("where", lambda c, x, y: torch.where(c > 0, x, y), plain(5, 6), floats(5, 6), floats(1, 6))
_case("masked fill", lambda x: x.masked_fill(x > 0, -9.0), floats(5, 6))

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


_case("assign mask", _assign_mask, floats(5, 6))
_case("assign slices", _assign_slices, floats(5, 6))
_case("write through slices", _write_through_slices, floats(5, 6))
_case("assign indices", _assign_indices, floats(6, 6), ids(2))
_case("write the base of views", _write_the_base, floats(5, 6))
_case("activations in place", lambda x: (x * 1).relu_().add(1).clamp_(max=2).exp().neg(), floats(5, 6))
_case("out", lambda a, b: torch.add(a, b, out=torch.empty_like(a)), plain(5, 6), plain(5, 6, seed=1))

# --- random numbers -----------------------------------------------------------------------------------------------

_case("dropout", lambda x: F.dropout(x, 0.3), floats(5, 6))
_case("dropout of channels", lambda x: F.dropout2d(x, 0.5), floats(3, 4, 5, 5))
_case("alpha dropout", lambda x: F.alpha_dropout(x, 0.3, True), floats(5, 6))
_case("random like", lambda x: x + torch.rand_like(x) + torch.randn_like(x), floats(5, 6))
_case("bernoulli", lambda x: torch.bernoulli(x.sigmoid()), plain(5, 6))
_case("multinomial", lambda x: torch.multinomial(x.abs(), 2), plain(5, 6))
_case("gumbel", F.gumbel_softmax, floats(5, 6))
_case("random slope", lambda x: F.rrelu(x, training=True), floats(5, 6))

# --- numbers and lists --------------------------------------------------------------------------------------------

_case("item", lambda x: x * x.sum().item(), floats(5, 6))
_case(
    "lists",
    lambda a, b: torch._foreach_add(torch._foreach_mul([a * 1, b * 1], 2.0), [b, a]),
    floats(5, 6),
    floats(5, 6, seed=1),
)
_case("total norm", lambda a, b: torch.nn.utils.get_total_norm([a, b]), floats(5, 6), floats(5, 6, seed=1))
_case("blend", torch.lerp, floats(5, 6), floats(5, 6, seed=1), floats(6))
_case("fused product", lambda a, b, c: torch.addcmul(a, b, c, value=2), floats(5, 6), floats(5, 6, seed=1), floats(6))

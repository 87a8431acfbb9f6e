"""What ops are also asked to do: write in place, through views and into `out=`, on few elements, in other types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.testing.ops import Sample
from tests.engine.ops.cases import floats, ids, plain

__all__ = ["CORNERS"]

CORNERS: dict[str, Sample] = {}


def _corner(name: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    assert name not in CORNERS
    CORNERS[name] = Sample(fn, args, kwargs)


def _writing(write: Callable[..., Any]) -> Callable[..., Tensor]:
    """A function that writes to a copy of its first argument and goes on to use it."""

    def fn(x: Tensor, *others: Tensor) -> Tensor:
        y = x * 1
        write(y, *others)
        return y * y

    return fn


def _sets(key: Any, value: Any = None) -> Callable[..., None]:
    """`x[key] = value`, or = another operand."""

    def write(x: Tensor, *others: Tensor) -> None:
        x[key] = others[0] if others else value

    return write


# --- in place -----------------------------------------------------------------------------------------------------

for _name in ("add_", "sub_", "mul_", "div_", "copy_", "atan2_"):
    _corner(_name, _writing(lambda y, b, n=_name: getattr(y, n)(b)), floats(6, 5), floats(6, 5, seed=1))
    _corner(f"{_name} broadcast", _writing(lambda y, b, n=_name: getattr(y, n)(b)), floats(6, 5), floats(5, seed=1))
for _name in ("relu_", "exp_", "neg_", "sigmoid_", "tanh_", "zero_", "abs_", "square_", "floor_"):
    _corner(_name, _writing(lambda y, n=_name: getattr(y, n)()), floats(6, 5))
_corner("silu in place", _writing(lambda y: F.silu(y, inplace=True)), floats(6, 5))
_corner("dropout in place", _writing(lambda y: F.dropout(y, 0.4, inplace=True)), floats(6, 5))
_corner("fill_", _writing(lambda y: y.fill_(3)), floats(6, 5))
_corner("fill_diagonal_", _writing(lambda y: y.fill_diagonal_(3)), floats(6, 5))
_corner("clamp_", _writing(lambda y: y.clamp_(-1, 1)), floats(6, 5))
_corner("lerp_", _writing(lambda y, b: y.lerp_(b, 0.3)), floats(6, 5), floats(6, 5, seed=1))
_corner("addcmul_", _writing(lambda y, a, b: y.addcmul_(a, b, value=2)), floats(6, 5), floats(6, 5, seed=1), floats(5))
_corner("addmm_", _writing(lambda y, a, b: y.addmm_(a, b)), floats(6, 5), floats(6, 4), floats(4, 5))
_corner("baddbmm_", _writing(lambda y, a, b: y.baddbmm_(a, b)), floats(2, 6, 5), floats(2, 6, 4), floats(2, 4, 5))
_corner("masked_fill_", _writing(lambda y, m: y.masked_fill_(m > 0, 7)), floats(6, 5), plain(6, 5))
_corner(
    "masked_scatter_", _writing(lambda y, m, v: y.masked_scatter_(m > 0, v)), floats(6, 5), plain(6, 5), floats(6, 5)
)
_corner("index_add_", _writing(lambda y, i, v: y.index_add_(0, i, v)), floats(6, 5), ids(3), floats(3, 5))
_corner("index_copy_", _writing(lambda y, v: y.index_copy_(1, torch.tensor([0, 3]), v)), floats(6, 5), floats(6, 2))
_corner("index_fill_", _writing(lambda y, i: y.index_fill_(0, i, 2.0)), floats(6, 5), ids(3))
_corner("scatter_", _writing(lambda y, i, v: y.scatter_(1, i, v)), floats(4, 5), ids(4, 1, below=5), floats(4, 1))
_corner("scatter_add_", _writing(lambda y, i, v: y.scatter_add_(0, i, v)), floats(6, 5), ids(3, 5), floats(3, 5))
_corner("put_", _writing(lambda y, i, v: y.put_(i, v, accumulate=True)), floats(6, 5), ids(4), floats(4))
_corner("cumsum_", _writing(lambda y: y.cumsum_(0)), floats(6, 5))
_corner("triangles in place", _writing(lambda y: y.tril_().triu_(-2)), floats(6, 5))
_corner("where in place", _writing(lambda y: y.where(y > 0, -y)), floats(6, 5))
_corner(
    "lists in place",
    _writing(lambda y, b: torch._foreach_mul_([y[0], y[1:3]], [b[2], b[3:5]])),
    floats(6, 5),
    plain(6, 5),
)


def _turned_in_place(x: Tensor) -> Tensor:
    y = (x * 1).t_()
    y.unsqueeze_(0)
    y.transpose_(0, 2).squeeze_(-1)
    return y * 2


def _step(x: Tensor, grad: Tensor) -> Tensor:
    """An optimizer's step written by hand: the leaf itself changes."""
    with torch.no_grad():
        x.mul_(0.9).sub_(grad * 0.1)
        x -= 0.01
    return x * 2


def _through_detach(x: Tensor) -> Tensor:
    y = x * 1
    y.detach()[1:3].mul_(2)
    y.data.add_(1)
    return y.detach() * 1


_corner("turned in place", _turned_in_place, floats(6, 5))
_corner("a step", _step, floats(6, 5), plain(6, 5))
_corner("through detach", _through_detach, plain(6, 5))

# --- x[...] = -----------------------------------------------------------------------------------------------------

_corner("set all", _writing(_sets(slice(None))), floats(6, 5), floats(6, 5, seed=1))
_corner("set all to a row", _writing(_sets(...)), floats(6, 5), floats(5, seed=1))
_corner("set a row", _writing(_sets(2)), floats(6, 5), floats(5, seed=1))
_corner("set a column", _writing(_sets((..., 1))), floats(6, 5), floats(6, seed=1))
_corner("set an element", _writing(_sets((2, 3), 9.0)), floats(6, 5))
_corner("set a block", _writing(_sets((slice(1, 4), slice(2, None)))), floats(6, 5), floats(3, 3))
_corner("set every other", _writing(_sets((slice(None), slice(None, None, 2)))), floats(6, 5), floats(6, 3))
_corner("set nothing", _writing(_sets((slice(2, 2), 0), 1.0)), floats(6, 5))
_corner("set where negative", _writing(lambda y: y.__setitem__(y < 0, 0.25)), floats(6, 5))
_corner("set where negative to values", _writing(lambda y, v: y.__setitem__(y < -9, v[:0])), floats(6, 5), floats(6))
_corner("set rows by a mask", _writing(lambda y, m: y.__setitem__(m > 2, 0.25)), floats(6, 5), ids(6))
_corner(
    "set points",
    _writing(lambda y, i, v: y.__setitem__((torch.arange(4), i), v)),
    floats(6, 5),
    ids(4, below=5),
    floats(4),
)
_corner("set rows", _writing(lambda y, v: y.__setitem__(torch.tensor([4, 1]), v)), floats(6, 5), floats(2, 5))
_corner(
    "add to rows", _writing(lambda y, i: y.index_put_((i,), torch.ones((), dtype=y.dtype), True)), floats(6, 5), ids(3)
)

# --- through views ------------------------------------------------------------------------------------------------

_corner("view of a view", _writing(lambda y: y[:, 1:][2:4].t()[0].add_(1)), floats(6, 5))
_corner("flat view", _writing(lambda y: y.view(-1)[3:17].mul_(2)), floats(6, 5))
_corner("flat view with steps", _writing(lambda y: y.view(-1)[::4].zero_()), floats(6, 5))
_corner("regrouped view", _writing(lambda y: y.view(3, 2, 5)[:, 1].mul_(3)), floats(6, 5))
_corner("diagonal view", _writing(lambda y: y.diagonal().mul_(3)), floats(6, 5))
_corner("narrow view", _writing(lambda y, v: y.narrow(0, 1, 3).copy_(v)), floats(6, 5), floats(3, 5))
_corner("select view", _writing(lambda y: y.select(1, 2).fill_(4)), floats(6, 5))
_corner("squeezed view", _writing(lambda y: y.view(6, 1, 5).squeeze(1)[2].neg_()), floats(6, 5))
_corner("permuted view", _writing(lambda y: y.permute(2, 0, 1)[1:3].mul_(2)), floats(4, 3, 5))
_corner("as_strided view", _writing(lambda y: y.as_strided((3, 2), (5, 2), 1).mul_(2)), floats(6, 5))
_corner("chunks written without gradients", lambda x: [p.mul_(2) for p in (x * 1).chunk(2)] and x * 1, plain(6, 5))


def _views_stay_equal(x: Tensor, v: Tensor) -> list[Tensor]:
    """Whatever is written, base and views show it, in both directions."""
    y = x * 1
    rows, columns, flat = y[1:4], y[:, 2:], y.view(-1)
    rows.mul_(2)
    columns[0] = v
    flat[7:9].add_(5)
    y.add_(1)
    return [y * 1, rows * 1, columns * 1, flat * 1]


_corner("views stay equal", _views_stay_equal, floats(6, 5), floats(3))

# --- out= ---------------------------------------------------------------------------------------------------------


def _into(fn: Callable[..., Any], *shape: int, dtype: torch.dtype = torch.float64) -> Callable[..., Any]:
    """The function writes into a tensor made from its first argument, and what it returns is that tensor."""

    def call(x: Tensor, *others: Any) -> tuple[Any, ...]:
        out = x.new_zeros(shape, dtype=dtype)
        return fn(x, *others, out=out), out

    return call


_corner("mm out", _into(torch.mm, 6, 3), plain(6, 5), plain(5, 3))
_corner("sum out", _into(lambda x, out: torch.sum(x, 0, out=out), 5), plain(6, 5))
_corner("cat of nothing and one", lambda a: torch.cat([torch.empty(0), a], 0), floats(5, 4))
_corner("cat out", _into(lambda x, y, out: torch.cat([x, y], out=out), 8, 5), plain(6, 5), plain(2, 5))
_corner("compare out", _into(torch.gt, 6, 5, dtype=torch.bool), plain(6, 5), plain(6, 5, seed=1))
_corner("out grows", _into(torch.mul, 0), plain(6, 5), plain(6, 5, seed=1))
_corner("out is an operand", lambda x, y: (torch.add(x, y, out=x), x), plain(6, 5), plain(6, 5, seed=1))
_corner("two outs", lambda x, v, i: torch.max(x, 1, out=(v, i)), plain(6, 5), plain(6), ids(6))
_corner("out is a view", lambda x, y: (torch.mul(x, 2, out=y[1:4]), y), plain(3, 5), plain(6, 5))

# --- few elements -------------------------------------------------------------------------------------------------

_sdpa = F.scaled_dot_product_attention
for _n in (0, 1, 2):
    _corner(f"product of {_n}", torch.matmul, floats(_n, 5), floats(5, 3))
    _corner(f"product over {_n}", torch.matmul, floats(4, _n), floats(_n, 3))
    _corner(f"linear {_n}", F.linear, floats(2, _n, 4), floats(3, 4), floats(3))
    _corner(f"sums of {_n}", lambda x: (x.sum(0), x.sum(1), x.sum(), x.mean(1)), floats(_n, 3))
    _corner(f"softmax of {_n}", lambda x: x.softmax(0) * x, floats(_n, 3))
    _corner(f"layer norm of {_n}", lambda x, w, b: F.layer_norm(x, (3,), w, b), floats(_n, 3), floats(3), floats(3))
    _corner(f"embedding of {_n}", F.embedding, ids(_n, below=4), floats(4, 3))
    _corner(f"join with {_n}", lambda a, b: torch.cat([a, b], 0), floats(_n, 3), floats(2, 3))
    _corner(f"slices of {_n}", lambda x: (x[1:], x[:1], x.flip(0), x.reshape(-1, 1)), floats(_n, 3))
    _corner(f"write to {_n}", _writing(lambda y: y[:1].mul_(2)), floats(_n, 3))
    _corner(f"indices of {_n}", lambda x, i: x[i], floats(2, 3), ids(_n, below=2))
for _n in (1, 2):
    _corner(f"extremes of {_n}", lambda x: (x.amax(0), x.min(1).values, x.argmax(1), x.max()), floats(_n, 3))
    _corner(f"cross entropy of {_n}", F.cross_entropy, floats(_n, 3), ids(_n, below=3))
    _corner(f"attention of {_n}", _sdpa, floats(1, _n, 3, 2), floats(1, _n, 3, 2, seed=1), floats(1, _n, 3, 2, seed=2))
    _corner(f"convolution of {_n}", F.conv2d, floats(_n, 2, 3, 3), floats(2, 2, 2, 2), floats(2))
    _corner(f"variance of {_n}", lambda x: x.var(1) + x.std(1), floats(_n, 3))
_corner("numbers", lambda x, y: (x * y, x + 1, x.view(1), x.expand(3), x.item()), floats(), floats(seed=1))

# --- other types and strides --------------------------------------------------------------------------------------


def _as(dtype: torch.dtype, *tensors: Tensor) -> list[Tensor]:
    return [t.detach().to(dtype).requires_grad_(t.requires_grad) for t in tensors]


for _dtype in (torch.float32, torch.bfloat16):
    _name = str(_dtype).removeprefix("torch.")
    _corner(f"linear {_name}", F.linear, *_as(_dtype, floats(3, 4), floats(5, 4), floats(5)))
    _corner(f"softmax {_name}", lambda x: x.softmax(-1), *_as(_dtype, floats(3, 4)))
    _corner(f"norm {_name}", lambda x, w: F.layer_norm(x, (4,), w), *_as(_dtype, floats(3, 4), floats(4)))
    _corner(f"attention {_name}", _sdpa, *_as(_dtype, floats(2, 2, 3, 4), floats(2, 2, 3, 4), floats(2, 2, 3, 4)))
    _corner(f"in place {_name}", _writing(lambda y, b: y[1:].add_(b)), *_as(_dtype, floats(3, 4), floats(4)))
    _corner(f"cast {_name}", lambda x: x.double() * 2 + x.to(torch.float32).sum(), *_as(_dtype, floats(3, 4)))
_corner(
    "complex products",
    lambda x, y: torch.view_as_complex(x) @ torch.view_as_complex(y).conj(),
    floats(3, 4, 2),
    floats(4, 3, 2),
)
_corner(
    "integers", lambda i, j: (i + j, i // 2, i.sum(0), i @ j.t(), i.cumsum(1), i.float().mean()), ids(4, 3), ids(4, 3)
)
_corner("booleans", lambda i: ((i > 2) & (i < 5), (i > 2).sum(), ~(i > 1), (i > 2).any(0)), ids(4, 3))
_corner("turned operands", lambda x, w: (x.t() @ w.t()).t().contiguous(), floats(4, 6), floats(3, 4))


def _channels_last(x: Tensor, w: Tensor) -> Tensor:
    x = x.contiguous(memory_format=torch.channels_last)
    return F.conv2d(x, w).relu().flatten(1)


_corner("channels last", _channels_last, floats(2, 4, 4, 4), floats(4, 4, 3, 3))

# --- kernels that do not keep the order of dims in memory that their shape functions tell --------------------------


def _turned(fn: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Apply a function in the order (batch, channel, length), and view its result in both orders."""

    def in_both_orders(x: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        y = fn(x.transpose(1, 2), *others)
        return y.transpose(1, 2).reshape(-1, x.shape[2]) * 2, y.view(x.shape[0], -1) * 2

    return in_both_orders


for _n in (6, 3):  # on two ranks, one has a single channel of three
    _corner(
        f"batch norm of {_n} channels of a transpose",
        _turned(lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True)),
        *(floats(4, 5, _n), floats(_n), floats(_n, seed=1)),
    )
    _corner(f"log of a sigmoid of {_n} transposed", _turned(F.logsigmoid), floats(4, 5, _n))
_corner(
    "loss of a transpose", lambda x, y: F.mse_loss((x * 2).t(), y.t(), reduction="mean"), floats(4, 6), floats(4, 6)
)

# --- halves, whose sums overflow or lose digits in their own dtype --------------------------------------------------

_large = (floats(4, 8).half().detach().abs().clamp(1, 2) * 15000).requires_grad_()
_corner("mean of large halves", lambda x: (x.mean(), x.mean(0), x.mean(-1, keepdim=True)), _large)
_corner("variance of large halves", lambda x: ((x / 60).var(0), (x / 9).std(1)), _large.detach())
_corner("norm of large halves", lambda x: (torch.linalg.vector_norm(x / 200, 2, 0), (x / 20).norm() / 20), _large)
_corner("losses of large halves", lambda x: F.l1_loss(x, x * 0) + F.smooth_l1_loss(x, x * 0), _large)
_corner("squared error of halves", lambda x: F.mse_loss(x / 100, x / 300), _large)
_corner("likelihood of halves", lambda x, i: F.nll_loss(-x, i), _large, ids(4, below=8))
_even = torch.full((2, 4096), 0.5, dtype=torch.float16)
_corner("softmax of many halves", lambda x: (x.softmax(1) * 4096, x.log_softmax(1), x.logsumexp(1)), _even)

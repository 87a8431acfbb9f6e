"""Exact implementations of PyTorch's random ops. Random ops that cannot be drawn per element raise.

Ops are intercepted below autograd, where dropout, attention and initialisers are decomposed into a few of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from shardlib.engine import _torch
from shardlib.engine._torch import Op
from shardlib.engine.feature.exact._data_rank import DataRank
from shardlib.engine.feature.exact._draw import draw, new_key, traced_draw, traced_key
from shardlib.engine.feature.exact._local_elements import LocalElements
from shardlib.engine.ops import _alias
from shardlib.engine.ops._operands import arguments_by_name, in_order, meta_of, redistributed
from shardlib.errors import ShardingError

__all__ = ["RANDOM", "Caller"]

Named = Mapping[str, Any]
Handler = Callable[["Caller", Named], Any]
aten = torch.ops.aten


@dataclass(frozen=True)
class Caller:
    """The data rank that draws, and whether draws become nodes of a graph that is being traced."""

    data_rank: DataRank
    traced: bool = False

    def __call__(self, op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Execute an op of `RANDOM`, or return `NotImplemented` where PyTorch's own implementation applies.

        It applies with an explicit generator, on meta, and for ops such as attention without dropout.
        """
        named = arguments_by_name(op, args, kwargs)
        if named.get("generator") is not None or _on_meta(named):
            return NotImplemented
        return RANDOM[op](self, named)

    def values(
        self, kind: str, params: Sequence[float], elements: LocalElements, dtype: torch.dtype, device: Any
    ) -> torch.Tensor:
        """Return the local elements of a new random tensor."""
        device = torch.device(device)
        if dtype.is_complex:
            return self._complex(params, elements, dtype, device)
        if self.traced:
            return traced_draw(kind, params, traced_key(), elements, dtype, device)
        return draw(kind, params, new_key(), elements, dtype, device)

    def _complex(
        self, params: Sequence[float], elements: LocalElements, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return normal numbers whose real and imaginary parts have half the variance each."""
        mean, std = params
        components = LocalElements((*elements.shape, 2), (*elements.runs, ((0, 2),)))
        real = self.values("normal", (mean, std / math.sqrt(2)), components, dtype.to_real(), device)
        return torch.view_as_complex(real)

    def like(self, tensor: torch.Tensor, kind: str, params: Sequence[float], dtype: torch.dtype | None = None) -> Any:
        """Return a random tensor with the shape, layout and strides of another; Partial becomes Replicate."""
        dtype = tensor.dtype if dtype is None else dtype
        if not isinstance(tensor, DTensor):
            drawn = self.values(kind, params, self.data_rank.elements_of_shape(tensor.shape), dtype, tensor.device)
            return in_order(drawn, tensor.stride())
        spec = _without_sums(_torch.spec_of(tensor))
        drawn = self.values(
            kind, params, self.data_rank.elements_of(_torch.wrap(_torch.local_of(tensor), spec)), dtype, tensor.device
        )
        return _torch.wrap(in_order(drawn, meta_of(spec).stride), spec)

    def fill(self, tensor: torch.Tensor, kind: str, params: Sequence[float]) -> torch.Tensor:
        """Overwrite a tensor with random values."""
        own = _torch.local_of(tensor) if isinstance(tensor, DTensor) else tensor
        plain = not isinstance(tensor, DTensor) or not (_alias.watched(tensor) or _has_sums(_torch.spec_of(tensor)))
        if plain and own.is_contiguous() and not own.is_complex() and not self.traced:
            draw(kind, params, new_key(), self.data_rank.elements_of(tensor), own.dtype, own.device, own)
            return tensor
        return self.write(tensor, self.like(tensor, kind, params))

    def write(self, tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Overwrite a tensor with values that `like` made for it."""
        if not isinstance(tensor, DTensor):
            return tensor.copy_(values)
        assert isinstance(values, DTensor)
        if _alias.watched(tensor):
            _alias.catch_up(tensor)
        own = _torch.local_of(values)
        _torch.local_of(tensor).copy_(own if _is_summand(_torch.spec_of(tensor)) else torch.zeros_like(own))
        _alias.after_write([tensor] if _alias.watched(tensor) else [])
        return tensor


def _on_meta(named: Named) -> bool:
    tensor = named.get("self", named.get("input"))
    return isinstance(tensor, torch.Tensor) and tensor.is_meta


def _has_sums(spec: Any) -> bool:
    return any(p.is_partial() for p in spec.placements)


def _without_sums(spec: Any) -> Any:
    return _torch.spec_with(spec, tuple(Replicate() if p.is_partial() else p for p in spec.placements))


def _is_summand(spec: Any) -> bool:
    """Return whether this rank holds the value of a partial sum; the other ranks hold zeros."""
    at = spec.mesh.get_coordinate()
    return all(index == 0 or not p.is_partial("sum") for index, p in zip(at, spec.placements, strict=True))


def _summed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with its partial sums all-reduced."""
    if not isinstance(tensor, DTensor) or not _has_sums(spec := _torch.spec_of(tensor)):
        return tensor
    now = _without_sums(spec)
    return _torch.wrap(redistributed(_torch.local_of(tensor), spec, now.placements), now)


# --- kinds of ops -------------------------------------------------------------------------------------------------

Params = Callable[[Named], tuple[str, tuple[float, ...]]]


def _filling(params: Params) -> Handler:
    return lambda caller, named: caller.fill(named["self"], *params(named))


def _like(params: Params) -> Handler:
    return lambda caller, named: caller.like(named["self"], *params(named), named.get("dtype"))


def _factory(params: Params, default: torch.dtype | None = None) -> Handler:
    def make(caller: Caller, named: Named) -> torch.Tensor:
        given = named["dtype"]  # the schema's own default is a number
        dtype = given if isinstance(given, torch.dtype) else default or torch.get_default_dtype()
        elements = caller.data_rank.elements_of_shape(named["size"])
        return caller.values(*params(named), elements, dtype, named["device"] or "cpu")

    return make


def _with(kind: str, **defaults: float | None) -> Params:
    """Take the parameters of a distribution from the arguments of these names."""
    return lambda n: (kind, tuple(n.get(name, default) for name, default in defaults.items()))


_uniform = _with("uniform", **{"from": 0.0, "to": 1.0})
_normal = _with("normal", mean=0.0, std=1.0)
_exponential = _with("exponential", lambd=None)
_geometric = _with("geometric", p=None)
_chance = _with("chance", p=None)


def _integer(n: Named) -> tuple[str, tuple[float, ...]]:
    low, high = n.get("low", 0), n["high"]
    if not low < high:
        raise ShardingError(f"Random integers from {low} up to, but not including, {high}: there are none.")
    return "integer", (low, high - low)


def _any_number(n: Named) -> tuple[str, tuple[float, ...]]:
    """Return the range of `random_`: from `from` up to `to`, by default all integers from 0 that the dtype holds."""
    dtype = n["self"].dtype
    if dtype.is_floating_point:
        top = 2 ** round(1 - math.log2(torch.finfo(dtype).eps))
    else:
        top = 1 if dtype is torch.bool else torch.iinfo(dtype).max
    low, high = n.get("from") or 0, n.get("to")
    return _integer({"low": low, "high": top + 1 if high is None else high})


def _dropout(caller: Caller, n: Named) -> tuple[torch.Tensor, torch.Tensor]:
    """Map x, p, train to x / (1 - p) where elements are kept and zero elsewhere, and the mask."""
    x, p = _summed(n["input"]), n["p"]
    if n["train"] is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = caller.like(x, "chance", (1.0 - p,), torch.bool)
    local, kept = (_torch.local_of(t) if isinstance(t, DTensor) else t for t in (x, mask))
    # Rounded like the ops that dropout decomposes into on CPU, so that every code path gives the same bits.
    noise = kept.to(dtype=x.dtype.to_real()).div(1.0 - p) if p < 1 else kept.to(dtype=x.dtype.to_real())
    y = local * noise
    return (_torch.wrap(y, _torch.spec_of(x)) if isinstance(x, DTensor) else y), mask


def _bernoulli(caller: Caller, n: Named) -> torch.Tensor:
    """Draw each element with its own probability of 1."""
    chances = _summed(n["self"])
    return _compared(caller, chances, chances).to(chances.dtype)


def _bernoulli_of(caller: Caller, n: Named) -> torch.Tensor:
    return _compared(caller, n["self"], n["p"]).to(n["self"].dtype)


def _compared(caller: Caller, like: torch.Tensor, chances: torch.Tensor) -> torch.Tensor:
    return caller.like(like, "uniform", (0.0, 1.0), torch.float64) < chances


def _normal_around(caller: Caller, n: Named) -> torch.Tensor:
    """Draw `normal` with tensors for mean or std, at the full shape."""
    mean, std = n["mean"], n["std"]
    tensors = [t for t in (mean, std) if isinstance(t, torch.Tensor)]
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    elements = caller.data_rank.elements_of_shape(shape)
    return caller.values("normal", (0.0, 1.0), elements, tensors[0].dtype, tensors[0].device) * std + mean


# --- the table ----------------------------------------------------------------------------------------------------

_DRAWN: dict[Op, Handler] = {
    aten.bernoulli.p: _like(_chance),
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.Tensor: _bernoulli_of,
    aten.uniform.default: _like(_uniform),
    aten.normal_functional.default: _like(_normal),
    aten.exponential.default: _like(_exponential),
    aten.geometric.default: _like(_geometric),
    aten.random.default: _like(_any_number),
    aten.random.to: _like(_any_number),
    getattr(aten.random, "from"): _like(_any_number),
    aten.normal.Tensor_float: _normal_around,
    aten.normal.float_Tensor: _normal_around,
    aten.normal.Tensor_Tensor: _normal_around,
    aten.normal.float_float: _factory(_normal),
    aten.rand_like.default: _like(_uniform),
    aten.randn_like.default: _like(_normal),
    aten.randint_like.default: _like(_integer),
    aten.randint_like.low_dtype: _like(_integer),
    aten.rand.default: _factory(_uniform),
    aten.randn.default: _factory(_normal),
    aten.randint.default: _factory(_integer, torch.int64),
    aten.randint.low: _factory(_integer, torch.int64),
    aten.native_dropout.default: _dropout,
    aten.bernoulli_.float: _filling(_chance),
    aten.bernoulli_.Tensor: lambda caller, named: named["self"].copy_(_bernoulli_of(caller, named)),
    aten.uniform_.default: _filling(_uniform),
    aten.normal_.default: _filling(_normal),
    aten.exponential_.default: _filling(_exponential),
    aten.geometric_.default: _filling(_geometric),
    aten.random_.default: _filling(_any_number),
    aten.random_.to: _filling(_any_number),
    getattr(aten.random_, "from"): _filling(_any_number),
}


def _refused(op: Op) -> Handler:
    def refuse(_caller: Caller, named: Named) -> Any:
        raise ShardingError(
            f'rng="exact" cannot draw {op}, element by element; it can draw dropout of every kind, uniform, normal, '
            "exponential, geometric and Bernoulli numbers and integers. Pass a generator= of your own that is seeded "
            'the same on every rank, draw it outside of the model, or use rng="fast".'
        )

    return refuse


def _attention(op: Op) -> Handler:
    """Refuse dropout in a fused attention kernel, which draws its masks in its own order."""

    def attend(_caller: Caller, named: Named) -> Any:
        if not named.get("dropout_p"):
            return NotImplemented
        raise ShardingError(
            f'{op} was called with dropout_p={named["dropout_p"]}: it draws its own masks, which rng="exact" cannot. '
            "Run the model inside torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), whose dropout is "
            'drawn exactly, set attention dropout to 0, or use rng="fast".'
        )

    return attend


def _recurrent(op: Op) -> Handler:
    def run(caller: Caller, named: Named) -> Any:
        return _refused(op)(caller, named) if named.get("train") and named.get("dropout") else NotImplemented

    return run


def _others() -> Iterable[tuple[Op, Handler]]:
    """Yield handlers for every other ATen op that draws random numbers."""
    for name in _torch.op_names():
        space, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        op = getattr(getattr(aten, packet, None), overload or "default", None) if space == "aten" else None
        if op is None or torch.Tag.nondeterministic_seeded not in op.tags or _torch.is_composite(op):
            continue
        if "attention" in packet or "sdp" in packet:
            if "backward" not in packet and "choice" not in packet:
                yield op, _attention(op)
        elif "rnn" in packet and "init" not in packet:
            yield op, _recurrent(op)
        elif "generator" not in overload and "init" not in packet:
            yield op, _refused(op)


# All random ops that this package handles.
RANDOM: dict[Op, Handler] = {**dict(_others()), **_DRAWN}

"""PyTorch's random ops, each drawn by element; those that cannot be are refused.

Ops are met below autograd, where dropout, attention and initialisers have come apart into a few of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from shardlib.engine import _torch
from shardlib.engine._torch import Op
from shardlib.engine.exact._draw import draw, new_key, traced_draw, traced_key
from shardlib.engine.exact._held import Held
from shardlib.engine.exact._place import Place
from shardlib.engine.ops import _alias
from shardlib.engine.ops._operands import in_order, meta_of, redistributed
from shardlib.errors import ShardingError

__all__ = ["FUNCTIONAL", "RANDOM", "Caller"]

Named = Mapping[str, Any]
Handler = Callable[["Caller", Named], Any]
aten = torch.ops.aten


@dataclass(frozen=True)
class Caller:
    """Who draws: the rank's place, and whether what is drawn becomes nodes of a graph that is being traced."""

    place: Place
    traced: bool = False

    def __call__(self, op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Carry out an op of `RANDOM`; `NotImplemented` where it is to be left as it is.

        That is: with a generator of the caller's own, on meta, or where an op that may draw does not.
        """
        named = {
            name: args[i] if i < len(args) else kwargs.get(name, default)
            for i, (name, default) in enumerate(_arguments(op))
        }
        if named.get("generator") is not None or _on_meta(named):
            return NotImplemented
        return RANDOM[op](self, named)

    def values(self, kind: str, params: Sequence[float], held: Held, dtype: torch.dtype, device: Any) -> torch.Tensor:
        """The held elements of a new random tensor."""
        device = torch.device(device)
        if dtype.is_complex:
            return self._complex(params, held, dtype, device)
        if self.traced:
            return traced_draw(kind, params, traced_key(), held, dtype, device)
        return draw(kind, params, new_key(), held, dtype, device)

    def _complex(self, params: Sequence[float], held: Held, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Normal numbers whose real and imaginary parts have half the variance each."""
        mean, std = params
        parts = Held((*held.shape, 2), (*held.runs, ((0, 2),)))
        real = self.values("normal", (mean, std / math.sqrt(2)), parts, dtype.to_real(), device)
        return torch.view_as_complex(real)

    def like(self, tensor: torch.Tensor, kind: str, params: Sequence[float], dtype: torch.dtype | None = None) -> Any:
        """A new random tensor of the shape, layout and strides of another; partial sums count as whole."""
        dtype = tensor.dtype if dtype is None else dtype
        if not isinstance(tensor, DTensor):
            drawn = self.values(kind, params, self.place.held(tensor.shape), dtype, tensor.device)
            return in_order(drawn, tensor.stride())
        spec = _without_sums(_torch.spec_of(tensor))
        drawn = self.values(
            kind, params, self.place.held_by(_torch.wrap(_torch.local_of(tensor), spec)), dtype, tensor.device
        )
        return _torch.wrap(in_order(drawn, meta_of(spec).stride), spec)

    def fill(self, tensor: torch.Tensor, kind: str, params: Sequence[float]) -> torch.Tensor:
        """Overwrite a tensor with random values."""
        own = _torch.local_of(tensor) if isinstance(tensor, DTensor) else tensor
        plain = not isinstance(tensor, DTensor) or not (_alias.watched(tensor) or _has_sums(_torch.spec_of(tensor)))
        if plain and own.is_contiguous() and not own.is_complex() and not self.traced:
            draw(kind, params, new_key(), self.place.held_by(tensor), own.dtype, own.device, own)
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


@functools.cache
def _arguments(op: Op) -> tuple[tuple[str, Any], ...]:
    """Names and defaults; reading a schema costs as much as a small draw."""
    return tuple((argument.name, argument.default_value) for argument in _torch.schema_of(op).arguments)


def _on_meta(named: Named) -> bool:
    tensor = named.get("self", named.get("input"))
    return isinstance(tensor, torch.Tensor) and tensor.is_meta


def _has_sums(spec: Any) -> bool:
    return any(p.is_partial() for p in spec.placements)


def _without_sums(spec: Any) -> Any:
    return _torch.spec_with(spec, tuple(Replicate() if p.is_partial() else p for p in spec.placements))


def _is_summand(spec: Any) -> bool:
    """Whether this rank is the one that has the value where ranks hold summands; the others have zeros."""
    at = spec.mesh.get_coordinate()
    return all(index == 0 or not place.is_partial("sum") for index, place in zip(at, spec.placements, strict=True))


def _summed(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose partial sums are added up."""
    if not isinstance(tensor, DTensor) or not _has_sums(spec := _torch.spec_of(tensor)):
        return tensor
    now = _without_sums(spec)
    return _torch.wrap(redistributed(_torch.local_of(tensor), spec, now.placements), now)


# --- kinds of ops -------------------------------------------------------------------------------------------------

Params = Callable[[Named], tuple[str, tuple[float, ...]]]


def _filling(params: Params) -> Handler:
    return lambda caller, named: caller.fill(named["self"], *params(named))


def _functional(params: Params) -> Handler:
    return lambda caller, named: caller.like(named["self"], *params(named))


def _like(params: Params) -> Handler:
    return lambda caller, named: caller.like(named["self"], *params(named), named.get("dtype"))


def _factory(params: Params, default: torch.dtype | None = None) -> Handler:
    def make(caller: Caller, named: Named) -> torch.Tensor:
        given = named["dtype"]  # the schema's own default is a number
        dtype = given if isinstance(given, torch.dtype) else default or torch.get_default_dtype()
        held = caller.place.held(named["size"])
        return caller.values(*params(named), held, dtype, named["device"] or "cpu")

    return make


def _uniform(n: Named) -> tuple[str, tuple[float, ...]]:
    return "uniform", (n.get("from", 0.0), n.get("to", 1.0))


def _normal(n: Named) -> tuple[str, tuple[float, ...]]:
    return "normal", (n.get("mean", 0.0), n.get("std", 1.0))


def _exponential(n: Named) -> tuple[str, tuple[float, ...]]:
    return "exponential", (n["lambd"],)


def _geometric(n: Named) -> tuple[str, tuple[float, ...]]:
    return "geometric", (n["p"],)


def _chance(n: Named) -> tuple[str, tuple[float, ...]]:
    return "chance", (n["p"],)


def _integer(n: Named) -> tuple[str, tuple[float, ...]]:
    low, high = n.get("low", 0), n["high"]
    if not low < high:
        raise ShardingError(f"Random integers from {low} up to, but not including, {high}: there are none.")
    return "integer", (low, high - low)


def _any_number(n: Named) -> tuple[str, tuple[float, ...]]:
    """`random_`: integers from `from` up to `to`, by default all that the dtype holds exactly from 0 on."""
    dtype = n["self"].dtype
    if dtype.is_floating_point:
        top = 2 ** round(1 - math.log2(torch.finfo(dtype).eps))
    else:
        top = 1 if dtype is torch.bool else torch.iinfo(dtype).max
    low, high = n.get("from") or 0, n.get("to")
    return _integer({"low": low, "high": top + 1 if high is None else high})


def _dropout(caller: Caller, n: Named) -> tuple[torch.Tensor, torch.Tensor]:
    """x, p, train -> x / (1 - p) where it is kept and zero elsewhere, and the mask."""
    x, p = _summed(n["input"]), n["p"]
    if n["train"] is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = caller.like(x, "chance", (1.0 - p,), torch.bool)
    local, kept = (_torch.local_of(t) if isinstance(t, DTensor) else t for t in (x, mask))
    # As the ops that dropout comes apart into on CPU round it, so that every way gives the same bits.
    noise = kept.to(dtype=x.dtype.to_real()).div(1.0 - p) if p < 1 else kept.to(dtype=x.dtype.to_real())
    y = local * noise
    return (_torch.wrap(y, _torch.spec_of(x)) if isinstance(x, DTensor) else y), mask


def _bernoulli(caller: Caller, n: Named) -> torch.Tensor:
    """Each element 1 with the chance that it says itself."""
    chances = _summed(n["self"])
    return _compared(caller, chances, chances).to(chances.dtype)


def _bernoulli_of(caller: Caller, n: Named) -> torch.Tensor:
    return _compared(caller, n["self"], n["p"]).to(n["self"].dtype)


def _compared(caller: Caller, like: torch.Tensor, chances: torch.Tensor) -> torch.Tensor:
    return caller.like(like, "uniform", (0.0, 1.0), torch.float64) < chances


def _bernoulli_of_(caller: Caller, n: Named) -> torch.Tensor:
    drawn = _bernoulli_of(caller, n)
    return n["self"].copy_(drawn)


def _normal_around(caller: Caller, n: Named) -> torch.Tensor:
    """`normal` with tensors for mean or std, drawn whole."""
    mean, std = n["mean"], n["std"]
    tensors = [t for t in (mean, std) if isinstance(t, torch.Tensor)]
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    held = caller.place.held(shape)
    return caller.values("normal", (0.0, 1.0), held, tensors[0].dtype, tensors[0].device) * std + mean


def _normal_of_size(caller: Caller, n: Named) -> torch.Tensor:
    return _factory(_normal)(caller, n)


# --- the table ----------------------------------------------------------------------------------------------------

FUNCTIONAL: dict[Op, Handler] = {
    aten.bernoulli.p: _functional(_chance),
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.Tensor: _bernoulli_of,
    aten.uniform.default: _functional(_uniform),
    aten.normal_functional.default: _functional(_normal),
    aten.exponential.default: _functional(_exponential),
    aten.geometric.default: _functional(_geometric),
    aten.random.default: _functional(_any_number),
    aten.random.to: _functional(_any_number),
    getattr(aten.random, "from"): _functional(_any_number),
    aten.normal.Tensor_float: _normal_around,
    aten.normal.float_Tensor: _normal_around,
    aten.normal.Tensor_Tensor: _normal_around,
    aten.normal.float_float: _normal_of_size,
    aten.rand_like.default: _like(_uniform),
    aten.randn_like.default: _like(_normal),
    aten.randint_like.default: _like(_integer),
    aten.randint_like.low_dtype: _like(_integer),
    aten.rand.default: _factory(_uniform),
    aten.randn.default: _factory(_normal),
    aten.randint.default: _factory(_integer, torch.int64),
    aten.randint.low: _factory(_integer, torch.int64),
    aten.native_dropout.default: _dropout,
}
_IN_PLACE: dict[Op, Handler] = {
    aten.bernoulli_.float: _filling(_chance),
    aten.bernoulli_.Tensor: _bernoulli_of_,
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
            'alike on every rank, draw it outside of the model, or use rng="fast".'
        )

    return refuse


def _attention(op: Op) -> Handler:
    """Fused attention kernels draw their own dropout, in an order of their own."""

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
    """Every other op of ATen that draws random numbers."""
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


# The whole of what this room draws.
RANDOM: dict[Op, Handler] = {**dict(_others()), **_IN_PLACE, **FUNCTIONAL}

"""Random values per element: a local tensor from a key, the local elements and a distribution."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from shardlib.engine.feature.exact._bits import Stream, bits
from shardlib.engine.feature.exact._local_elements import LocalElements
from shardlib.engine.feature.exact._normal import log, quantile

__all__ = ["draw", "new_key", "traced_draw", "traced_key"]

# Maps 64 random bits, as int64 in a buffer that may be overwritten, to values.
Distribution = Callable[[torch.Tensor], torch.Tensor]


def new_key() -> int:
    """Draw the key of one random call: 63 bits of torch's default CPU generator, which `torch.manual_seed` seeds.

    Saving and restoring that generator, as activation checkpointing does, repeats the same numbers.
    """
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


def draw(
    kind: str,
    params: Sequence[float],
    key: int,
    elements: LocalElements,
    dtype: torch.dtype,
    device: torch.device,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the local elements of a random tensor, contiguous.

    Args:
        kind: "chance" (of p: 1 or 0), "uniform" (low, high), "normal" (mean, std), "exponential" (rate), "geometric"
            (p), "integer" (low, count).
        params: the parameters of the distribution, as above.
        key: identifies the random tensor.
        elements: the elements to draw.
        dtype: of the result. A chance is the same in every dtype; a uniform number has as many bits as its dtype holds.
        device: of the result; the bits do not depend on it.
        out: a contiguous tensor of that dtype and device to write to.
    """
    distribution = partial(_KINDS[kind], dtype, *params)
    local = torch.empty(elements.local_shape, dtype=dtype, device=device) if out is None else out
    flat = local.view(-1)
    for where, chunk in bits(Stream.of(key), elements, device):
        flat[where] = distribution(chunk)
    return local


def _chance(_dtype: torch.dtype, p: float, z: torch.Tensor) -> torch.Tensor:
    """Compare a uniform number of 53 bits with p, as integers."""
    bound = (math.ceil(min(max(p, 0.0), 1.0) * 2**53) - 2**52) << 11
    return z < bound if bound < 2**63 else torch.ones_like(z, dtype=torch.bool)


def _uniform(dtype: torch.dtype, low: float, high: float, z: torch.Tensor) -> torch.Tensor:
    """Return multiples of 2**-m in [low, high) where a number of this dtype holds m bits."""
    m = round(1 - math.log2(torch.finfo(dtype).eps))
    u = z.bitwise_right_shift_(64 - m).add_(1 << (m - 1)).to(torch.float64)
    return u.mul_(2.0**-m).mul_(high - low).add_(low)


def _normal(_dtype: torch.dtype, mean: float, std: float, z: torch.Tensor) -> torch.Tensor:
    """Return the quantile of an odd multiple of 2**-53 in (-1, 1); float64 represents each of these exactly."""
    x = z.bitwise_right_shift_(11).mul_(2).add_(1).to(torch.float64).mul_(2.0**-53)
    return quantile(x).mul_(std).add_(mean)


def _minus_log(z: torch.Tensor) -> torch.Tensor:
    """Return -log u for u an odd multiple of 2**-53 in (0, 1)."""
    u = z.bitwise_right_shift_(12).add_(1 << 51).mul_(2).add_(1).to(torch.float64).mul_(2.0**-53)
    return log(u).neg_()


def _exponential(_dtype: torch.dtype, rate: float, z: torch.Tensor) -> torch.Tensor:
    return _minus_log(z).div_(rate)


def _geometric(_dtype: torch.dtype, p: float, z: torch.Tensor) -> torch.Tensor:
    """Return the number of trials until the first success: ceil(log u / log(1 - p))."""
    if p == 1:
        return torch.ones_like(z)
    return _minus_log(z).div_(-math.log1p(-p)).ceil_().clamp_(min=1)


def _integer(_dtype: torch.dtype, low: float, count: float, z: torch.Tensor) -> torch.Tensor:
    """Return 63 bits modulo `count`; the bias is at most count / 2**63."""
    return z.bitwise_right_shift_(1).bitwise_and_((1 << 63) - 1).remainder_(int(count)).add_(int(low))


_KINDS: dict[str, Callable[..., torch.Tensor]] = {
    "chance": _chance,
    "uniform": _uniform,
    "normal": _normal,
    "exponential": _exponential,
    "geometric": _geometric,
    "integer": _integer,
}


# --- custom ops, for compiled graphs -----------------------------------------------------------------------------

_library = torch.library.Library("shardlib", "DEF")
_library.define("new_key(int serial) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_library.define(
    "draw(str kind, Scalar[] params, Tensor key, int[] shape, int[] runs, ScalarType dtype, Device device) -> Tensor"
)
_serial = itertools.count()


def _draw_op(
    kind: str, params: Sequence[float], key: torch.Tensor, shape: Sequence[int], runs: Sequence[int],
    dtype: torch.dtype, device: torch.device,
) -> torch.Tensor:  # fmt: skip
    return draw(kind, params, int(key), LocalElements.from_flat(shape, runs), dtype, device)


_library.impl("new_key", lambda serial: torch.tensor(new_key(), device="cpu"), "CompositeExplicitAutograd")
_library.impl("draw", _draw_op, "CompositeExplicitAutograd")
torch.library.register_fake(
    "shardlib::new_key", lambda serial: torch.empty((), dtype=torch.int64, device="cpu"), lib=_library
)
torch.library.register_fake(
    "shardlib::draw",
    lambda kind, params, key, shape, runs, dtype, device: torch.empty(
        LocalElements.from_flat(shape, runs).local_shape, dtype=dtype, device=device
    ),
    lib=_library,
)


def traced_key() -> torch.Tensor:
    """Add a graph node that draws a key whenever the graph runs.

    Each node has its own serial number, so that common subexpression elimination does not merge two of them; the tag
    keeps them in order, and keeps the backward graph from drawing again.
    """
    return torch.ops.shardlib.new_key(next(_serial))


def traced_draw(
    kind: str,
    params: Sequence[float],
    key: torch.Tensor,
    elements: LocalElements,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Add `draw` as a node of the graph."""
    return torch.ops.shardlib.draw(kind, list(params), key, elements.shape, elements.flat(), dtype, device)

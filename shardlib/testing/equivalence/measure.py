"""Distances of two tensors, and their limits.

The distance of a tensor is the largest absolute difference over the largest absolute value of the single device's
tensor: a mistake in one element of a large tensor then counts in full. Elements that are zero in exact arithmetic (the
gradient of a key bias) are rounding noise of the summands; so that noise is not divided by itself, the divisor is at
least a thousandth of the largest value that any tensor of the same kind has. A loss is a sum that may cancel too
(the mean of what a LayerNorm leaves is zero): of a loss, it is at least a thousandth of the model's largest output.

float64: both runs round, nothing else. One rounding is 1.1e-16 of a result; splitting a contraction over ranks
reorders sums of at most some ten thousand terms, whose error grows like the square root of their number, through a few
dozen layers: 1.1e-16 * 100 * 36 = 4e-13. The limit is 1e-10. That leaves two digits for what training steps amplify;
a mistake misses it by many more, since one wrong element among millions shows in the largest difference.

Models may compute in float32 inside (normalisation and loss of many transformers do) and then round more coarsely.
And optimizers that divide by the size of a gradient blow rounding up where a gradient is zero in exact arithmetic (the
bias of a key). A value that is itself of a coarser dtype (a loss in float32) is rounded to it in both runs whatever its
parameters do: its limit is `RATIO` units of its dtype at least. What a model does with rounding otherwise is measured,
not guessed: where a value misses its limit, the single device runs again, `DRAWS` times, with every parameter moved by
one unit of the coarsest dtype that its ops compute in, and a difference counts as rounding if it is at most `RATIO`
times the farthest that moved it, and under `CEILING`. A step has one loss and one norm, and each is one draw of luck;
those of all steps share the largest. So do buffers: the statistics of BatchNorm follow a bias before it, which is such
noise.

float32, bfloat16, float16: the single device also runs in float64, from the same rounded parameters. Both runs' error
against that is measured, and the sharded one may be `RATIO` times the single device's. Two sums of the same numbers in
different order err alike, not equally: the largest error over a tensor is one draw from a distribution with a common
scale. Tensors of a few elements may be lucky in one of the two draws; so the single device's error counts at least as
the median over tensors of its kind, and as one unit of rounding. After an optimizer's step luck is coarser: Adam moves
an element whose gradient is smaller than its rounding by the learning rate, up in one run and down in the other.
Whether a tensor has such an element is chance; parameters and optimizer state share the largest error of their kind.
Where a limit is still exceeded, the single device runs again with its parameters moved by one unit, for further draws.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import TypeVar

import torch

__all__ = ["CEILING", "DRAWS", "FLOAT64_LIMIT", "RATIO", "distance", "limits_beside", "scale_of", "size"]

K = TypeVar("K")

FLOAT64_LIMIT = 1e-10
RATIO = 10.0
CEILING = 1e-4
DRAWS = 4
_NOISE = 1e-3


def size(tensor: torch.Tensor) -> float:
    """Return the largest absolute value; 0 for no elements."""
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    return float(tensor.abs().max())


def distance(got: torch.Tensor, want: torch.Tensor | None, scale: float) -> float:
    """Return the largest difference over `scale`; infinite where shape or dtype differ, or where either is not finite.

    >>> distance(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]), 2.0)
    0.25
    """
    if want is None or got.shape != want.shape or got.dtype != want.dtype:
        return math.inf
    if not want.numel():
        return 0.0
    if not (want.is_floating_point() or want.is_complex()):
        return 0.0 if torch.equal(got, want) else math.inf
    off = float((got - want).abs().max())
    if off == 0.0:
        return 0.0
    return off / scale if scale and math.isfinite(off) else _same_infinities(got, want)


def _same_infinities(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the distance of tensors with infinities. Equal ones (a masked score) are no difference; two NaNs show
    nothing."""
    finite = torch.isfinite(want)
    same = torch.equal(torch.isfinite(got), finite) and torch.equal(got[~finite], want[~finite])
    if not same:
        return math.inf
    return distance(got[finite], want[finite], size(want[finite]))


def scale_of(size: float, largest: float) -> float:
    """Return what differences of a tensor of this size are divided by; `largest` is that of all tensors of its kind."""
    return max(size, _NOISE * largest)


def limits_beside(errors: Mapping[K, float], units: Mapping[K, float], *, together: bool = False) -> dict[K, float]:
    """Return limits on the error of tensors of one kind in float64, given the single device's errors.

    Args:
        errors: the single device's, by name.
        units: the least that counts as one, by name.
        together: all tensors have the limit of the one with the largest error; else of their own, or the median.
    """
    finite = [error for error in errors.values() if math.isfinite(error)]
    usual = (max(finite) if together else statistics.median(finite)) if finite else 0.0
    return {name: RATIO * max(error, usual, units[name]) for name, error in errors.items()}

"""Resizing of images with antialiasing: two products with matrices of weights. Torch decomposes what has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from shardlib.errors import InputError
from shardlib.jax._table import lowering

__all__: list[str] = []

_Filter = Callable[[np.ndarray], np.ndarray]


def _triangle(x: np.ndarray) -> np.ndarray:
    return np.clip(1 - x, 0, None)


def _cubic(x: np.ndarray) -> np.ndarray:
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _lanczos(x: np.ndarray) -> np.ndarray:
    return np.where(x < 3, np.sinc(x) * np.sinc(x / 3), 0)


def _resized(x: Any, size: Sequence[int], align_corners: bool, scales: Sequence[Any], of: _Filter, width: int) -> Any:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise InputError(f"An image of {x.dtype} was resized with antialiasing, which rounds. Convert it to floats.")
    down, across = (
        jnp.asarray(_weights(before, after, align_corners, scale, of, width), x.dtype)
        for before, after, scale in zip(x.shape[-2:], size, scales, strict=True)
    )
    return jnp.einsum("...hw,Hh,Ww->...HW", x, down, across)


def _weights(before: int, after: int, align_corners: bool, factor: float | None, of: _Filter, width: int) -> np.ndarray:
    """Return the weight of each pixel of a line, (before), in each pixel of the resized line, (after)."""
    if align_corners:
        scale = (before - 1) / (after - 1) if after > 1 else 0.0
    else:
        scale = 1 / factor if factor else before / after
    spread = max(scale, 1.0)
    weights = np.zeros((after, before))
    for at in range(after):
        center, support = scale * (at + 0.5), width / 2 * spread
        first = max(int(center - support + 0.5), 0)
        last = min(int(center + support + 0.5), before)
        found = of(np.abs((np.arange(first, last) - center + 0.5) / spread))
        weights[at, first:last] = found / (found.sum() or 1.0)
    return weights


for _name, _of, _width in (("bilinear", _triangle, 2), ("bicubic", _cubic, 4), ("lanczos", _lanczos, 6)):

    @lowering(f"aten::_upsample_{_name}2d_aa.default")
    def _upsample(
        x: Any,
        output_size: Sequence[int],
        align_corners: bool,
        scales_h: float | None = None,
        scales_w: float | None = None,
        *,
        of: _Filter = _of,
        width: int = _width,
    ) -> Any:
        return _resized(x, output_size, align_corners, (scales_h, scales_w), of, width)

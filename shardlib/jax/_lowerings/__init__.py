"""Lowerings of torch ops to JAX, by kind. Importing this fills the table."""

from __future__ import annotations

from shardlib.jax._lowerings import (
    attention,
    create,
    index,
    linalg,
    matmul,
    nets,
    norms,
    pointwise,
    random,
    recurrent,
    reduce,
    resize,
    views,
)

__all__ = [
    "attention",
    "create",
    "index",
    "linalg",
    "matmul",
    "nets",
    "norms",
    "pointwise",
    "random",
    "recurrent",
    "reduce",
    "resize",
    "views",
]

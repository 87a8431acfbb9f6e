"""Ops of PyTorch's database on one device of JAX give torch's values and gradients, or are refused by name."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shardlib.testing.jax_ops import check_ops
from shardlib.testing.ops import Verdict, database

# Ops of which a model may stop for the lack of one: lowered here, decomposed by torch, and mixed with views.
_OFTEN_USED = (
    "broadcast_tensors|",
    "cdist|",
    "linalg.inv|",
    "max|reduction_with_dim",
    "nn.functional.embedding_bag|",
    "nn.functional.glu|",
    "nn.functional.interpolate|bilinear",
    "nn.functional.mse_loss|",
    "nn.functional.pixel_shuffle|",
    "scatter_reduce|amax",
    "std_mean|",
    "vdot|",
)
_PARTS = 60  # of the database, each some seconds
_BAD = ("wrong", "crashed", "hung")


def _said(verdict: Verdict, kinds: Sequence[str]) -> list[str]:
    return [f"{verdict.name} {f.kind}: {f.detail}" for f in verdict.findings if f.kind in kinds]


def test_ops_that_models_often_use_are_right():
    verdicts = check_ops(_OFTEN_USED, count=2)
    assert [verdict.name for verdict in verdicts if verdict.kind != "right"] == [], "\n".join(
        line for verdict in verdicts for line in _said(verdict, (*_BAD, "refused"))
    )


def test_some_of_pytorchs_ops():
    assert [line for v in check_ops(database()[7::_PARTS], count=2) for line in _said(v, _BAD)] == []


@pytest.mark.deep
@pytest.mark.parametrize("part", range(_PARTS))
def test_each_of_pytorchs_ops(part: int):
    assert [line for v in check_ops(database()[part::_PARTS]) for line in _said(v, _BAD)] == []

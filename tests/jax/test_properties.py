"""Whatever layouts are drawn for a model's tensors, the JAX engine trains as one device of torch does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from shardlib.testing import strategies
from shardlib.testing.strategies import Case
from tests.jax.any_layout import proved


@pytest.mark.deep
@settings(max_examples=settings.default.max_examples // 4)  # each exports and compiles a model
@given(strategies.cases(max_world=8))
def test_any_layout_trains_as_one_device_does(case: Case):
    report = proved(case)
    assert report is None or report, str(report)

"""Whatever layouts are drawn for a model's tensors, the JAX engine has the numbers of one device."""

from __future__ import annotations

import pytest
from hypothesis import given

from shardlib.testing import strategies
from shardlib.testing.strategies import Case
from tests.jax import any_layout, on_devices


@pytest.mark.deep
@given(strategies.cases(max_world=8))
def test_any_layout_has_the_numbers_of_one_device(case: Case):
    """Rounding of 1.1e-16, magnified by norms over few values; a mistake is of order one."""
    assert on_devices.run(any_layout.difference, case) <= 1e-9

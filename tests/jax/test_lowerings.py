"""Each op of the table gives torch's values, dtypes and gradients."""

from __future__ import annotations

from tests.jax import lowered, on_devices


def test_values_dtypes_and_gradients_are_those_of_torch():
    assert on_devices.run(lowered.differences) == []


def test_every_op_of_the_table_has_a_case():
    assert on_devices.run(lowered.without_case) == []

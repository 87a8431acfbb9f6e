"""Each op of the table gives torch's values, dtypes and gradients."""

from __future__ import annotations

from tests.jax import lowered, on_devices


def test_values_dtypes_and_gradients_are_those_of_torch():
    assert on_devices.run(lowered.differences) == []


def test_every_op_of_the_table_has_a_case():
    assert on_devices.run(lowered.without_case) == []


def test_what_torch_does_at_a_bound_is_the_same_wherever_it_is_asked():
    assert len(set(on_devices.run(lowered.slopes_at_a_bound))) == 1

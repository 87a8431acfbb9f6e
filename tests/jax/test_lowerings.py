"""Each op of the table gives torch's values, dtypes and gradients."""

from __future__ import annotations

from tests.jax import drawn, lowered, on_devices


def test_values_dtypes_and_gradients_are_those_of_torch():
    assert on_devices.run(lowered.differences) == []


def test_every_op_of_the_table_has_a_case():
    assert on_devices.run(lowered.without_case) == []


def test_what_torch_does_at_a_bound_is_the_same_wherever_it_is_asked():
    assert len(set(on_devices.run(lowered.slopes_at_a_bound))) == 1


def test_numbers_are_drawn_from_the_distributions_of_torch():
    """By Kolmogorov and Smirnov: a distance above 2.2 standard errors has a probability of one in ten thousand. A
    normal distribution that is a tenth too wide makes 2.7."""
    assert {name: far for name, far in on_devices.run(drawn.distances).items() if far > 2.2} == {}


def test_draws_without_replacement_are_distinct():
    order = on_devices.run(drawn.permuted)
    assert sorted(order) == list(range(50)) != order
    rows = on_devices.run(drawn.without_replacement)
    assert all(sorted(row) == [0, 2, 3] for row in rows) and len(set(map(tuple, rows))) > 1

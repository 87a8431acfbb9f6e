"""The planner's predictions against published tables. `benchmarks/planner_published.py` prints them."""

from __future__ import annotations

import pytest

import shardlib as sl
from tests.planner.comparisons import layer_memory, stage_memory, stored_memory

A100 = sl.Cluster.preset("a100-80")
MODELS = ("22B", "175B", "530B", "1T")


@pytest.mark.parametrize("name", MODELS)
def test_activations_of_a_layer_are_those_of_megatron(name: str):
    for row in layer_memory([name]):
        assert row.predicted == round(row.published + row.derived), row.what


@pytest.mark.parametrize("name", MODELS)
def test_parameters_gradients_and_state_of_a_stage_are_18_bytes_a_parameter(name: str):
    (row,) = stored_memory([name])
    assert row.predicted == row.published + row.derived


@pytest.mark.parametrize("name", MODELS)
def test_activations_of_the_first_stage_are_those_of_megatron(name: str):
    for row in stage_memory([name], A100):
        assert abs(row.unexplained) < 0.05, row

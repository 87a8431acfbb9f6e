"""Convolutions are those of torch in every layout, where XLA's partitioner alone would multiply some of them."""

from __future__ import annotations

import pytest

from tests.jax import convolutions, on_devices, partitioner

MESHES = ("dp=1", "dp=2,tp=2", "dp=2,tp=4", "dp=4,tp=2", "dp=2,tp=2,cp=2")
# Rounding is 1.1e-16 of a result; a gradient sums up to eight thousand terms, whose roundings add up as their root.
BOUND = 1e-12

_MENDED = (
    "XLA's partitioner gets this convolution right in this version of JAX. If it does so in the oldest one that "
    "shardlib takes, delete the entry of partitioner.FAULTS; with the last one, delete _partitioned in "
    "shardlib/jax/_lowerings/nets.py, Constraints.split_along and by_rows, and the table's constrained="
)


def _check(mesh: str, seed: int) -> None:
    found = on_devices.run(convolutions.differences, mesh, seed)
    assert all(apart <= BOUND for apart in found.values()), {k: v for k, v in found.items() if not v <= BOUND}


@pytest.mark.parametrize(("mesh", "seed"), [(mesh, seed) for seed, mesh in enumerate(MESHES)])
def test_convolutions_of_all_kinds_in_any_layout_are_those_of_torch(mesh: str, seed: int):
    _check(mesh, seed)


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(5, 13))
@pytest.mark.parametrize("mesh", MESHES)
def test_more_convolutions(mesh: str, seed: int):
    _check(mesh, seed)


@pytest.mark.parametrize("name", partitioner.FAULTS)
def test_the_partitioner_of_xla_still_counts_an_axis_that_shards_nothing(name: str):
    found = on_devices.run(partitioner.factors, name)
    times = float(partitioner.FAULTS[name][0]["tp"])
    # Where the output is wrong the gradient is too, by the same factor.
    assert found == {"output": times if name.startswith("output") else 1.0, "gradient": times}, _MENDED


def test_the_partitioner_of_xla_still_forgets_groups_where_a_window_has_one_element():
    mended = "XLA gets it right now: delete this test, and `slides` in _partitioned of shardlib/jax/_lowerings/nets.py"
    assert on_devices.run(partitioner.forgotten_groups) > 0.1, mended

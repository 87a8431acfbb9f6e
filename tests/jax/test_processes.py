"""Tensors and arrays over several processes: each rank of torch is a process of JAX."""

from __future__ import annotations

import pytest

from tests.jax import on_processes, over_processes


@pytest.mark.covering
@pytest.mark.parametrize("dtype", over_processes.DTYPES)
@pytest.mark.parametrize("case", over_processes.CASES)
def test_a_dtensor_has_the_same_bits_there_and_back(case: str, dtype: str):
    on_processes.run(over_processes.there_and_back, case, dtype)


@pytest.mark.parametrize("check", over_processes.CHECKS)
def test_numbers_are_those_of_torch(check: str):
    on_processes.run(over_processes.CHECKS[check])


WORDS = {
    "uneven": ("InputError", "(5, 2)", "uneven shards in dim 0", "pad=True"),
    "nested": ("InputError", "unevenly in dim 0 over several axes", "Redistribute it"),
    "nested back": ("InputError", "unevenly in dim 0 over several axes", "Redistribute it"),
    "fused": ("LayoutError", "fused"),
    "partial": ("LayoutError", 'a pending sum over "dp"'),
    "order": ("MeshError", "the ranks [0, 1, 2, 3]", "the processes [[3, 2], [1, 0]]", "make_mesh(shape, devices="),
    "order back": ("MeshError", "the ranks [3, 2, 1, 0]", "the processes [[0, 1], [2, 3]]"),
    "plain": ("InputError", "devices of several processes", "Pass device_mesh="),
    "other axes": ("MeshError", "sharded over dp", 'the torch mesh "tp=2" does not have it'),
    "part of the processes": ("MeshError", 'mesh "tp=2" has 2 of 4 processes', "Give to_jax the mesh of JAX"),
}


def test_what_is_refused_is_explained_on_every_process():
    for raised in on_processes.run(over_processes.refused):
        assert raised.keys() == WORDS.keys()
        for name, words in WORDS.items():
            assert [word for word in words if word not in raised[name]] == [], raised[name]

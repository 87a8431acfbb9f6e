"""Ops on DTensors compute what they compute on plain tensors, in every placement, forward and backward, on real ranks.

Here are the functions that models are made of, what else ops are asked to do, and PyTorch's own database of ops: a
part of it by default, all of it, on more meshes and in more placements, in the deep run.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from shardlib.engine import ops
from shardlib.testing.ops import FORMS, Finding, check_function, check_op, database
from tests.engine.ops.cases import CASES
from tests.engine.ops.corners import CORNERS

_FUNCTIONS = {**CASES, **CORNERS}
_BAD = ("wrong", "crashed", "hung")
_BATCH = 24  # functions for one call of the ranks, which need a tenth of a second to meet


def _batches(names: list[str]) -> list[list[str]]:
    return [names[i : i + _BATCH] for i in range(0, len(names), _BATCH)]


_BATCHES = _batches(list(_FUNCTIONS))


def _check(names: list[str], shape: tuple[int, ...], tries: int) -> list[tuple[str, Finding]]:
    warnings.simplefilter("ignore", ops.ShardlibGatherWarning)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
    ops.enable(mesh)
    try:
        found = [(name, f) for name in names for f in check_function(_FUNCTIONS[name], mesh, tries=tries)]
    finally:
        ops.disable(mesh)
    return [(name, finding) for name, finding in found if finding.kind in _BAD]


def _bad(ranks: Callable, names: list[str], shape: tuple[int, ...], tries: int) -> list[tuple[str, Finding]]:
    return [bad for found in ranks(math.prod(shape)).run(_check, names, shape, tries, timeout=300) for bad in found]


@pytest.mark.parametrize("names", _BATCHES, ids=lambda names: f"{names[0]} to {names[-1]}")
def test_functions_in_some_placements(ranks: Callable, names: list[str]):
    """A few placements each: every row that may be chosen is proved in `test_rules.py`."""
    assert _bad(ranks, names, (2,), 2) == []


@pytest.mark.deep
@pytest.mark.parametrize("names", _BATCHES, ids=lambda names: f"{names[0]} to {names[-1]}")
@pytest.mark.parametrize(("shape", "tries"), [((2,), 48), ((3,), 48), ((2, 2), 16), ((2, 3), 8)], ids=str)
def test_functions_in_many_placements(ranks: Callable, names: list[str], shape: tuple[int, ...], tries: int):
    """Each axis takes a row of a rule by itself, and each row is proved in `test_rules.py`: fewer tries over two."""
    assert _bad(ranks, names, shape, tries) == []


@pytest.mark.parametrize("name", database()[::40])
def test_some_of_pytorchs_ops(name: str):
    assert [f for f in check_op(name, (2,), tries=6).findings if f.kind in _BAD] == []


@pytest.mark.parametrize("form", FORMS[1:])
@pytest.mark.parametrize("name", database()[7::80])
def test_some_of_pytorchs_ops_that_write(name: str, form: str):
    assert [f for f in check_op(name, (2,), tries=6, form=form).findings if f.kind in _BAD] == []


# On three ranks, which divide few sizes, and over two axes ops take turns: what an op does there its rows do, which
# are proved for each op in `test_rules.py`.
_ON_A_MESH = [
    *((name, (2,)) for name in database()),
    *((name, (3,)) for name in database()[::3]),
    *((name, (2, 2)) for name in database()[1::3]),
]


@pytest.mark.deep
@pytest.mark.parametrize(("name", "shape"), _ON_A_MESH, ids=str)
def test_each_of_pytorchs_ops(name: str, shape: tuple[int, ...]):
    assert [f for f in check_op(name, shape).findings if f.kind in _BAD] == []


@pytest.mark.deep
@pytest.mark.parametrize("form", FORMS[1:])
@pytest.mark.parametrize("name", database())
def test_each_of_pytorchs_ops_that_writes(name: str, form: str):
    assert [f for f in check_op(name, (2,), form=form).findings if f.kind in _BAD] == []


@pytest.mark.deep
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", database()[::8])
def test_ops_in_other_types(name: str, dtype: torch.dtype):
    assert [f for f in check_op(name, (2,), dtype=dtype).findings if f.kind in _BAD] == []

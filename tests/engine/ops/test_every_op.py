"""Ops on DTensors compute what they compute on plain tensors, in every placement, forward and backward, on real ranks.

Here are the functions that models are made of, what else ops are asked to do, and PyTorch's own database of ops: a
part of it by default, all of it, on more meshes and in more placements, in the deep run.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardlib.engine import ops
from shardlib.errors import ShardingError
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


def test_the_database_leaves_flags_of_back_ends_free():
    """Importing it forbids a whole process to set them, the trainer's `cudnn_benchmark` too."""
    free = not torch.backends.flags_frozen()
    database()
    assert torch.backends.flags_frozen() is not free


@pytest.mark.deep
@pytest.mark.parametrize("names", _BATCHES, ids=lambda names: f"{names[0]} to {names[-1]}")
@pytest.mark.parametrize(("shape", "tries"), [((2,), 48), ((3,), 16), ((2, 2), 8), ((2, 3), 4)], ids=str)
def test_functions_in_many_placements(ranks: Callable, names: list[str], shape: tuple[int, ...], tries: int):
    """Each axis takes a row of a rule by itself, and each row is proved in `test_rules.py`: fewer tries over two, and
    on three ranks, which differ from two in what they divide.
    """
    assert _bad(ranks, names, shape, tries) == []


# Numbers stand for slices of the database, which takes seconds to import.
_PARTS = 40
# By form and name, what is said where we refuse what a plain tensor does.
_REFUSED = {
    "in place": {
        "nn.functional.dropout3d|": "ShardingError: A tensor of shape (1, 5, 5, 5, 5) is written to",
        "resize_as_|": "ShardingError: A tensor of shape (5, 5, 1) is written to, after resize_as_() has changed",
    },
    # Autograd's backward of what unsqueeze_() makes of a slice of a DTensor.
    "view": {"nn.functional.dropout3d|": "RuntimeError: "},
}


def _reshaped_beside_a_view() -> tuple[bool, list[str]]:
    """Reading goes on, and writes are refused: to the tensor itself, and to the view, which is a copy."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ops.enable(mesh)
    try:
        x = distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [Shard(1)])
        view = x[:, :1]
        x.unsqueeze_(0)
        same = bool((view.full_tensor() * 1 == x.full_tensor()[0, :, :1]).all())
        said = []
        for one in (x, view):
            with pytest.raises(ShardingError) as refused:
                one.mul_(2)
            said.append(str(refused.value))
        return same, said
    finally:
        ops.disable(mesh)


def test_a_tensor_of_other_shape_than_its_views_had_is_not_written_to(ranks: Callable):
    for same, said in ranks(2).run(_reshaped_beside_a_view):
        assert same and len(said) == 2
        assert all("after unsqueeze_() has changed" in each and "y = x.unsqueeze(...)" in each for each in said)


def _bad_ops(part: int, parts: int, shape: tuple[int, ...] = (2,), **options: Any) -> dict[str, list[Finding]]:
    found = {name: check_op(name, shape, **options).findings for name in database()[part::parts]}
    bad = {name: [finding for finding in findings if finding.kind in _BAD] for name, findings in found.items()}
    refused = _REFUSED.get(options.get("form", "call"), {})
    return {
        name: findings
        for name, findings in bad.items()
        if not all(name in refused and refused[name] in each.detail for each in findings)
    }


@pytest.mark.parametrize("form", FORMS)
def test_some_of_pytorchs_ops(form: str):
    """Few, since the functions above and `test_rules.py` have those that models are made of."""
    assert _bad_ops(7, (8 if form == "call" else 3) * _PARTS, tries=6, form=form) == {}


# On three ranks, which divide few sizes, and over two axes ops take turns: what an op does there its rows do, which
# are proved for each op in `test_rules.py`.
@pytest.mark.deep
@pytest.mark.parametrize(("shape", "every"), [((2,), 1), ((3,), 8), ((2, 2), 8)], ids=str)
@pytest.mark.parametrize("part", range(_PARTS))
def test_each_of_pytorchs_ops(part: int, shape: tuple[int, ...], every: int):
    assert _bad_ops(part * every + shape[0] % every, _PARTS * every, shape) == {}


@pytest.mark.deep
@pytest.mark.parametrize("form", FORMS[1:])
@pytest.mark.parametrize("part", range(_PARTS))
def test_each_of_pytorchs_ops_that_writes(part: int, form: str):
    assert _bad_ops(part, _PARTS, tries=8, form=form) == {}


@pytest.mark.deep
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("part", range(8))
def test_ops_in_other_types(part: int, dtype: torch.dtype):
    assert _bad_ops(8 * part, 64, dtype=dtype) == {}

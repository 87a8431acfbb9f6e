"""Moves that ranks really carry out: every local tensor of the target has its elements of the global one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardlib as sl
from shardlib._plan import Plan
from shardlib.checkpoint._peers import peers
from shardlib.testing import shared_pool
from shardlib.weights._carry import carry

RULES = {
    "rows": sl.Rules({"**.weight": "out@tp in", "**.bias": "out@tp"}),
    "columns": sl.Rules({"**.weight": "out in@tp", "**.bias": None}),
    "heads": sl.Rules(
        {"**.weight": "(three heads@tp size) in", "**.bias": "(three heads@tp size)"}, sizes={"three": 3, "heads": 4}
    ),
    "whole": sl.Rules({"**": None}),
}


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.device("meta"):
        return nn.ModuleDict({name: nn.Linear(300, 600, dtype=dtype) for name in ("a", "b", "c")})


def _plan(mesh: str, rules: str, dtype: torch.dtype = torch.float32) -> Plan:
    return sl.plan(_model(dtype), mesh, RULES[rules])


def _full(plan: Plan) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {row.name: torch.randn(row.global_shape, generator=draw) for row in plan.rows}


def _local(plan: Plan, ranks: range, full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return this rank's local tensors; none where the mesh does not have it."""
    if dist.get_rank() not in ranks:
        return {}
    at = plan.mesh.coordinate(ranks.index(dist.get_rank()))
    return {row.name: row.stored.take(full[row.name], plan.mesh, at).clone().to(row.dtype) for row in plan.rows}


def _carried(source: Plan, first: range, target: Plan, second: range, bucket: int) -> tuple[bool, int, list[str]]:
    """Return whether all values came, the most bytes that were in a message, and the names that have gone, in order."""
    moves = source.moves_to(target, source_ranks=first, target_ranks=second)
    full = _full(source)
    have, want = _local(source, first, full), _local(target, second, full)
    got = {name: torch.full_like(tensor, torch.nan) for name, tensor in want.items()}
    gone = list[str]()

    def give(name: str) -> torch.Tensor:
        assert name not in gone
        return have[name]

    everyone = peers("sl.transfer", "testing", None)
    carry(everyone, "send", moves, give, got.__getitem__, bucket_bytes=bucket, gone=gone.append)
    rounded = {name: tensor.to(source[name].dtype).to(tensor.dtype) for name, tensor in want.items()}
    right = all(torch.equal(got[name], rounded[name]) for name in want)
    most = max((part.bytes for each in moves.buckets(bucket) for part in each if part.source != part.target), default=0)
    return right, most, gone


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (("tp=4", "rows", range(4)), ("tp=2,dp=2", "columns", range(4))),
        (("tp=4", "heads", range(4)), ("tp=2", "heads", range(2))),
        (("tp=2", "heads", range(2)), ("tp=2", "rows", range(2, 4))),
        (("dp=2", "whole", range(2)), ("tp=3", "columns", range(1, 4))),
    ],
)
@pytest.mark.parametrize("bucket", [1 << 14, 1 << 25])
def test_every_rank_gets_its_elements(here: Any, there: Any, bucket: int):
    source, target = _plan(*here[:2]), _plan(*there[:2])
    for rank, (right, most, gone) in enumerate(shared_pool(4).run(_carried, source, here[2], target, there[2], bucket)):
        assert right
        assert most <= bucket
        assert rank in here[2] or not gone
        assert len(gone) == len(set(gone))


@pytest.mark.parametrize(("first", "second"), [(torch.bfloat16, torch.float32), (torch.float64, torch.bfloat16)])
def test_what_is_sent_has_the_smaller_dtype(first: torch.dtype, second: torch.dtype):
    source, target = _plan("tp=2", "rows", first), _plan("tp=2", "columns", second)
    assert source.moves_to(target).sent[0].dtype == torch.bfloat16
    for right, _, gone in shared_pool(2).run(_carried, source, range(2), target, range(2), 1 << 20):
        assert right and sorted(gone) == sorted(row.name for row in source.rows)

"""Full tensors, group by group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardlib as sl
from shardlib.errors import ShardlibError
from shardlib.testing import shared_pool
from shardlib.weights import stream_weights
from tests.weights.cases import COLUMNS, RULES, STAGED, Shard, fsdp, made, ours


def _streamed(shard: Shard, options: dict[str, Any]) -> tuple[bool, int, int]:
    """Return whether all tensors came, how many, and the most bytes that were there at a time beside the model's."""
    model = made(0, width=64)
    want = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model = shard(model)
    dtype, got = options.get("dtype"), dict[str, torch.Tensor]()
    for name, tensor in stream_weights(model, **options):
        assert name not in got
        got[name] = tensor
    right = all(torch.equal(tensor, want[name].to(tensor.dtype)) for name, tensor in got.items())
    kinds = {tensor.dtype for tensor in got.values() if tensor.is_floating_point()}
    return right and (dtype is None or kinds <= {dtype}), len(got), dist.get_rank()


@pytest.mark.parametrize(
    "shard", [ours("dp=2,tp=2", RULES, sl.zero(3)), ours("tp=4", COLUMNS), ours("pp=2,dp=2", STAGED), fsdp]
)
def test_full_tensors_come_by_name(shard: Shard):
    for right, count, _ in shared_pool(4).run(_streamed, shard, {"group_mb": 1 / 16}):
        assert right and count == 14  # the head is tied to the embedding


def test_some_ranks_get_them_in_a_dtype():
    options = {"ranks": [1, 3], "dtype": torch.bfloat16}
    for right, count, rank in shared_pool(4).run(_streamed, ours("tp=4", COLUMNS), options):
        assert right and count == (14 if rank in (1, 3) else 0)


def _refused(options: dict[str, Any]) -> str:
    with pytest.raises(ShardlibError) as caught:
        list(stream_weights(sl.shard_model(made(0), "tp=2", RULES), **options))
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"ranks": [2]}, "it has no rank 2"), ({"group_mb": 0}, "group_mb=0"), ({"ranks": [-1]}, "no rank -1")],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], said: str):
    for told in shared_pool(2).run(_refused, options):
        assert said in told

"""Full tensors, group by group."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers.core_model_loading import revert_weight_conversion

import shardlib as sl
from shardlib.errors import ShardlibError
from shardlib.testing import shared_pool
from shardlib.weights import stream_weights
from tests.vllm.families import LORA, model_of
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
    [
        ({"dtype": int}, "dtype=<class 'int'>"),
        ({"names": lambda name: "a"}, 'names= gives two tensors the name "a"'),
        ({"ranks": [2]}, "it has no rank 2"),
        ({"group_mb": 0}, "group_mb=0"),
        ({"ranks": [-1]}, "no rank -1"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], said: str):
    for told in shared_pool(2).run(_refused, options):
        assert said in told


def _as_saved(family: str, mesh: str, transforms: tuple[Any, ...]) -> float:
    """Return how far the tensors of a checkpoint are from what transformers makes of the model on one device."""
    model = model_of(family)
    alone = copy.deepcopy(model)
    if family == LORA:
        alone = alone.merge_and_unload()
    want = revert_weight_conversion(alone, alone.state_dict())
    model = sl.shard_model(model, mesh, transforms=transforms)
    before = {name: tensor.clone() for name, tensor in sl.full_state_dict(model).items()}
    came = dict(stream_weights(model, names="huggingface", group_mb=1 / 16))
    assert came.keys() == want.keys() - {"lm_head.weight"} or came.keys() == want.keys()
    after = sl.full_state_dict(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())  # also where adapters were merged
    return max(float((tensor - want[name]).abs().max()) for name, tensor in came.items())


@pytest.mark.parametrize(
    ("family", "mesh", "transforms"),
    [("mixtral", "ep=2", ()), ("qwen3-moe", "tp=2", (sl.zero(3),)), (LORA, "tp=2", ()), (LORA, "dp=2", (sl.zero(3),))],
)
def test_tensors_come_as_transformers_saves_them(family: str, mesh: str, transforms: tuple[Any, ...]):
    for apart in shared_pool(2).run(_as_saved, family, mesh, transforms):
        assert apart < (1e-6 if family == LORA else 1e-12)

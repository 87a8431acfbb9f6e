"""What a step borrows, added up by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardlib as sl

KIB, MIB = 2**10, 2**20


def _plan(mesh: str, width: int, count: int, transform: sl.Plan | None, *, listed: bool = True, **step) -> sl.Plan:
    """So many square weights of float32, blocks of a list or layers that are no block."""
    with torch.device("meta"):
        layers = [nn.Linear(width, width, bias=False) for _ in range(count)]
        model = nn.ModuleList(layers) if listed else nn.ParameterList([layer.weight for layer in layers])
    made = sl.plan(model, mesh, {"**": "replicate"}, transforms=[transform] if transform else [])
    return made.replace(step=made.step.replace(**step))


def _workspace(*args, **kwargs) -> int:
    return _plan(*args, **kwargs).memory().buckets


def test_what_lies_whole_borrows_nothing():
    assert _workspace("dp=1", 64, 2, None) == 0
    assert _workspace("tp=4", 64, 2, sl.zero(3)) == 0


def test_small_gradients_of_an_all_reduce_are_packed():
    assert _workspace("dp=4", 64, 2, None) == 2 * 16 * KIB
    assert _workspace("dp=4", 512, 2, None) == 0  # reduced in their own memory


@pytest.mark.parametrize(
    ("stage", "gradients"),
    [(1, 3 * 4 * KIB + 16 * KIB), (2, 3 * 4 * KIB + 16 * KIB)],  # they are packed, and three quarters arrive
)
def test_small_gradients_and_updates_travel_in_buckets(stage: int, gradients: int):
    updates = 16 * KIB + 4 * KIB  # gathered, and this rank's quarter to begin with
    assert _workspace("dp=4", 64, 1, sl.zero(stage)) == gradients + updates
    assert _workspace("dp=4", 64, 5, sl.zero(stage)) == 5 * (gradients + updates)


@pytest.mark.parametrize("stage", [1, 2])
def test_from_a_mebibyte_on_a_tensor_travels_where_it_lies(stage: int):
    assert _workspace("dp=4", 512, 1, sl.zero(stage)) == 3 * MIB // 4
    assert _workspace("dp=2", 512, 4, sl.zero(stage)) == 4 * MIB // 2


def test_a_large_tensor_of_uneven_shards_is_packed_like_a_small_one():
    block = 342 * 1024 * 4  # of the rank with the largest shard; other ranks' blocks are as large, with padding
    gradient, update = (3 + 2) * block, (3 + 1) * block
    assert _workspace("dp=3", 1024, 1, sl.zero(1)) == gradient + update


@pytest.mark.parametrize(("bucket_mb", "expected"), [(0.25, MIB // 2), (1.5, 3 * MIB // 2), (25, 2 * MIB)])
def test_as_much_is_under_way_as_a_bucket_holds_or_the_largest_tensor_needs(bucket_mb: float, expected: int):
    assert _workspace("dp=2", 512, 4, sl.zero(1), bucket_mb=bucket_mb) == expected


def test_many_small_gradients_are_several_buckets():
    """40 of 64 KiB. Packed they take their size, and half of it arrives. A second bucket waits for the first."""
    updates = 40 * (64 + 32) * KIB
    assert _workspace("dp=2", 128, 40, sl.zero(1), bucket_mb=0.5) - updates == 3 * MIB // 4
    assert _workspace("dp=2", 128, 40, sl.zero(1), bucket_mb=1) - updates == 3 * MIB // 2
    assert _workspace("dp=2", 128, 40, sl.zero(1), bucket_mb=25) - updates == 3 * 40 * 64 * KIB // 2


def test_units_take_turns_in_two_buffers():
    gradients = 3 * MIB // 2
    assert _workspace("dp=2", 512, 3, sl.zero(3)) - gradients == 2 * MIB
    assert _workspace("dp=2", 512, 3, sl.fsdp(reshard_after_forward=False)) - gradients == 3 * MIB
    assert _workspace("dp=2", 512, 3, sl.zero(3), schedule="zbv") - gradients == 3 * MIB
    assert _workspace("dp=2", 512, 3, sl.zero(3, only="0")) - MIB // 2 == MIB


def test_small_units_are_gathered_together_through_a_copy():
    """Three of 16 KiB are one unit: one buffer of 48, and as much to gather it in."""
    gradients = (8 + 16) * KIB
    assert _workspace("dp=2", 64, 3, sl.zero(3)) - 3 * gradients == 2 * 48 * KIB
    # In buckets of 16 KiB each stands alone: two buffers, and two copies. One gradient is reduced at a time.
    assert _workspace("dp=2", 64, 3, sl.zero(3), bucket_mb=1 / 64) - gradients == 4 * 16 * KIB
    assert _workspace("dp=2", 64, 3, sl.zero(3), bucket_mb=1 / 64, schedule="zbv") - gradients == (48 + 32) * KIB


def test_what_lies_in_no_unit_stays_whole_to_the_end():
    gradients = (8 + 16) * 3 * KIB
    assert _workspace("dp=2", 64, 3, sl.zero(3), listed=False) - gradients == 2 * 48 * KIB
    assert _workspace("dp=2", 512, 3, sl.zero(3), listed=False) - 3 * MIB // 2 == 3 * MIB


def test_frozen_parameters_are_gathered_and_have_no_gradient():
    plan = _plan("dp=2", 512, 2, None)
    frozen = plan.map_rows(lambda row: row.replace(requires_grad=False, grad=None, state=None))
    assert (frozen | sl.zero(3)).memory().buckets == 2 * MIB
    assert (frozen | sl.zero(2)).memory().buckets == 0

"""Mistakes that only several units and several buckets meet: a proof of one unit and one bucket misses all of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch

from shardlib.engine.data import params, schedule, units
from shardlib.engine.data.executor import gather, reduce
from shardlib.testing.mutants._mutant import Mutant, replaced, transformer
from shardlib.transforms import hsdp, zero

__all__ = ["SCALE"]


def _all(*plants: Callable[[], AbstractContextManager[Any]]) -> Callable[[], AbstractContextManager[Any]]:
    """Return a plant of several changes."""

    @contextmanager
    def planted() -> Any:
        with ExitStack() as stack:
            for plant in plants:
                stack.enter_context(plant())
            yield

    return planted


def _nothing(original: Any) -> Any:
    return lambda *args, **kwargs: None


_UNGUARDED = replaced(params.ParamState, "set_unsharded_version", _nothing)
_UNCHECKED = replaced(units._Unit, "_is_written", lambda original: lambda self, param_state: False)


def _into_any_buffer(original: Any) -> Any:
    def prefetch(self: Any, following: Any, unit: Any) -> None:
        order = list(dict.fromkeys(self.units.values()))
        after = order[(order.index(unit) + 2) % len(order)]  # which has the same buffer
        if after is not unit and not after.is_unsharded:
            busy, unit.buffer.busy = unit.buffer.busy, 0
            after.begin_unshard()
            unit.buffer.busy = busy

    return prefetch


def _first_bucket_alone(original: Any) -> Any:
    def wait(self: Any) -> None:
        for bucket in self.buckets[:1]:
            bucket.wait()
        for bucket in self.buckets[1:]:
            moving, bucket._moving = bucket._moving, None
            if moving is not None:
                moving.wait()
                for buffer in moving.borrowed:
                    bucket._bucket.workspace.give(buffer)

    return wait


def _last_left_out(original: Any) -> Any:
    def gradients(self: Any) -> Any:
        found = original(self)
        return found if self.flags or len(found) < 2 else [*found[:-1], None]

    return gradients


def _scaled_twice(original: Any) -> Any:
    def wait(self: Any) -> Any:
        if not self.flags and self.is_packed:
            self.sent.mul_(self.scale) if self.work is None else self.work.wait()
            self.sent.mul_(self.scale)
        return original(self)

    return wait


def _alone_not_scaled(original: Any) -> Any:
    def wait(self: Any) -> Any:
        if not self.is_packed:
            with mock.patch.object(reduce.AllReduceBucket, "scale", 1.0):
                return original(self)
        return original(self)

    return wait


def _not_copied_back(original: Any) -> Any:
    def wait(self: Any) -> Any:
        own = [None if grad is None else grad.clone() for grad in self.locals]
        found = original(self)
        for grad, before in list(zip(self.locals, own, strict=True))[1 if not self.flags else len(own) :]:
            if before is not None:
                grad.copy_(before)
        return found

    return wait


def _alone_not_added(original: Any) -> Any:
    def set_grads(self: Any, is_used: Any) -> None:
        if self.bucket.alone:
            for slot in self.slots:
                slot.accumulated = None
        original(self, is_used)

    return set_grads


def _in_workspace(original: Any) -> Any:
    def set_grads(self: Any, is_used: Any) -> None:
        kept = _kept_shards.setdefault(self.dtype, torch.empty(1 << 12, dtype=self.dtype))
        for shard, own in zip(self.shards, self.bucket.shards_in(kept), strict=False):
            own.copy_(shard)
        self.shards = self.bucket.shards_in(kept)[: len(self.shards)]
        original(self, is_used)

    return set_grads


_kept_shards: dict[torch.dtype, torch.Tensor] = {}


def _in_place_not_gathered(original: Any) -> Any:
    return lambda self: None if self.is_in_place else original(self)


def _first_bucket_gathered(original: Any) -> Any:
    def begin(self: Any, parameters: Any) -> None:
        every, self.buckets = self.buckets, self.buckets[:1]
        try:
            original(self, parameters)
        finally:
            self.buckets = every

    return begin


def _closing_bucket_alone(original: Any) -> Any:
    def sum_over_shards(self: Any) -> Any:
        if self.flags:
            return original(self)
        remaining, self.remaining_axes = self.remaining_axes, ()
        try:
            with mock.patch.object(reduce.ReduceScatterBucket, "scale", 1.0):
                return original(self)
        finally:
            self.remaining_axes = remaining

    return sum_over_shards


# Cases that several mutants share pass once.
_ON_ZERO_3, _ON_ZERO_2, _ON_ZERO_1 = (
    partial(transformer, "dp=2", layers=2, transforms=(zero(stage),)) for stage in (3, 2, 1)
)
_ON_DP = partial(transformer, "dp=2", layers=2)
_IN_PASSES = partial(transformer, "dp=2", layers=2, transforms=(zero(2),), accumulate=2)
_ON_HSDP = partial(transformer, "dp=2,fsdp=2", layers=2, transforms=(hsdp(shard="fsdp", replicate="dp"),))

SCALE = (
    Mutant(
        "another unit's weights", "a backward reads the weights of the unit that has taken the buffer",
        "deepspeedai/DeepSpeed#3539", r"blocks\.1\.attn\.qkv",
        _ON_ZERO_3, _all(_UNGUARDED, _UNCHECKED, replaced(units.Units, "before_backward", _nothing)),
    ),
    Mutant(
        "busy buffer", "the next unit is gathered into the buffer of the unit that computes",
        "deepspeedai/DeepSpeed#1849", r"blocks\.1\.norm1",
        _ON_ZERO_3, _all(_UNGUARDED, _UNCHECKED, replaced(units.Units, "_prefetch", _into_any_buffer)),
    ),
    Mutant(
        "second bucket of a unit", "only the first all-gather of a unit is copied out",
        "deepspeedai/DeepSpeed#1170", r"blocks\.0\.norm1",
        _ON_ZERO_3, replaced(units._Unit, "wait_for_unshard", _first_bucket_alone),
    ),
    Mutant(
        "end of a bucket", "a bucket is reduced without its last gradient",
        "deepspeedai/DeepSpeed#545", r"blocks\.0\.attn\.qkv",
        _ON_DP, replaced(reduce.ReduceBucket, "_gradients", _last_left_out),
    ),
    Mutant(
        "scaled twice", "gradients of all buckets but the last are divided by the number of ranks twice",
        "pytorch/pytorch#36516", r"blocks\.0\.attn\.qkv",
        _ON_DP, replaced(reduce.AllReduceBucket, "wait", _scaled_twice),
    ),
    Mutant(
        "large gradients summed", "gradients that are reduced in their own memory are summed, and not averaged",
        "pytorch/pytorch#106034", r"embed",
        _ON_DP, replaced(reduce.AllReduceBucket, "wait", _alone_not_scaled),
    ),
    Mutant(
        "copied back in part", "only the first gradient of a bucket is copied back after the reduction",
        "pytorch/pytorch#43307", r"blocks\.0\..*",
        _ON_DP, replaced(reduce.AllReduceBucket, "wait", _not_copied_back),
    ),
    Mutant(
        "accumulated lost", "what earlier passes have accumulated of a large gradient is dropped",
        "allenai/open-instruct#1498; InfiniTensor/InfiniTrain#183", r"embed",
        _IN_PASSES, replaced(reduce.ReduceScatterBucket, "set_grads", _alone_not_added),
    ),
    Mutant(
        "gradients in workspace", "gradients stay in a buffer that the next bucket overwrites",
        "pytorch/pytorch#41954", r"embed",
        _ON_ZERO_2, replaced(reduce.ReduceScatterBucket, "set_grads", _in_workspace),
    ),
    Mutant(
        "updates in place", "parameters whose shards are updated in place are not gathered after a step",
        "pytorch/pytorch#62157", r"embed",
        _ON_ZERO_1, replaced(gather.UpdateBucket, "begin", _in_place_not_gathered),
    ),
    Mutant(
        "second bucket of updates", "only the first bucket of updated parameters is gathered",
        "zxypro1/algolocal#92; InfiniTensor/InfiniTrain#217", r"position",
        _ON_ZERO_1, replaced(schedule.Updates, "begin", _first_bucket_gathered),
    ),
    Mutant(
        "replicas of shards", "only the last bucket of shards is summed over the replicas of hsdp",
        "pytorch/torchtitan#813; pytorch/pytorch#125484", r"embed",
        _ON_HSDP, replaced(reduce.ReduceScatterBucket, "_sum", _closing_bucket_alone),
    ),
)  # fmt: skip

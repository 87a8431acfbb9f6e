"""Decide when movements begin and when they are waited for: a plan leaves only order and overlap open.

Buckets are reduced in the order in which the first backward pass made their gradients, each as soon as it is full, and
as many at a time as the memory limit allows (Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", VLDB 2020, section 3.2). While a unit computes, the unit that ran after it in the last forward is unsharded
(Zhao et al., "PyTorch FSDP", VLDB 2023, section 3.3). Updated parameters are gathered when a step ends, or while the
next forward runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from shardlib.engine.data.executor.gather import UpdateBucket
from shardlib.engine.data.executor.reduce import AllReduceBucket, GradientBucket, ReduceBucket

__all__ = ["Reductions", "RunOrder", "Updates", "wait_in_model"]

T = TypeVar("T")


class Reductions:
    """The buckets of one backward pass, in the order in which all ranks send them.

    Args:
        limit: the workspace bytes that pending buckets may use together; a larger bucket is pending alone.
        flags: returns the flags of this rank, for the bucket that closes the pass.
        agree: called with the sums of the flags over all ranks.
    """

    def __init__(self, limit: int, flags: Callable[[], torch.Tensor], agree: Callable[[torch.Tensor], None]) -> None:
        self.limit, self._flags, self._agree = limit, flags, agree
        self.buckets: list[ReduceBucket] = []
        self.registered: Callable[[GradientBucket], object] | None = None
        self._begun = self._waited = 0

    def reduce_by(self, reduction: Callable[[GradientBucket], object] | None) -> None:
        """Use a registered reduction in the place of the all-reduce from the next bucket on; None ends that."""
        self.registered = reduction

    def restart(self, buckets: Sequence[ReduceBucket] = ()) -> None:
        """Set the buckets of a new pass."""
        for bucket in self.buckets:
            bucket.begun = False
        self.buckets = list(buckets)
        self._begun = self._waited = 0

    @property
    def waiting(self) -> list[ReduceBucket]:
        """The buckets that have not begun."""
        return self.buckets[self._begun :]

    def begin_full(self) -> None:
        """Begin the buckets that are full, in order, but for the last one, which closes the pass."""
        while self._begun < len(self.buckets) - 1 and self.buckets[self._begun].missing == 0:
            self._begin()

    def finish(self) -> None:
        """Begin the remaining buckets, full or not, and wait for all."""
        while self._begun < len(self.buckets):
            self._begin()
        while self._waited < len(self.buckets):
            self._wait()

    def drop(self) -> None:
        """Drop the buckets that have begun, when the next pass begins after one that has raised."""
        for bucket in self.buckets[: self._begun]:
            bucket.drop()
        self.restart()

    def _begin(self) -> None:
        bucket = self.buckets[self._begun]
        while bucket.workspace_bytes + sum(self._pending_bytes()) > self.limit and self._waited < self._begun:
            self._wait()
        if self._begun > self._waited:
            self.buckets[self._begun - 1].advance()
        flags = self._flags() if bucket.flags else None
        if self.registered is None:
            bucket.begin(flags)
        else:
            assert isinstance(bucket, AllReduceBucket)
            bucket.begin_by(self.registered, flags, self._begun)
        bucket.begun = True
        self._begun += 1

    def _wait(self) -> None:
        flags = self.buckets[self._waited].wait()
        self._waited += 1
        if flags is not None:
            self._agree(flags)

    def _pending_bytes(self) -> Iterator[int]:
        return (bucket.workspace_bytes for bucket in self.buckets[self._waited : self._begun])


class RunOrder(Generic[T]):
    """The order in which units run; the order of the last forward predicts the next unit.

    Attributes:
        running: the units of this forward, in their order.
    """

    def __init__(self) -> None:
        self._last: list[T] = []
        self.running: list[T] = []

    def restart(self) -> None:
        """Begin to record a new forward."""
        self._last, self.running = self.running, []

    def runs(self, unit: T) -> None:
        """Record that a unit runs in forward."""
        if not self.running or self.running[-1] is not unit:
            self.running.append(unit)

    def after_forward_of(self, unit: T) -> T | None:
        """Return the unit whose forward is expected next, or None."""
        position = len(self.running)
        is_known = 0 < position < len(self._last) and self._last[position - 1] is unit
        return self._last[position] if is_known else None

    def after_backward_of(self, unit: T) -> T | None:
        """Return the unit whose backward is expected next, which ran before this one; or None."""
        position = next((i for i in reversed(range(len(self.running))) if self.running[i] is unit), 0)
        return self.running[position - 1] if position > 0 else None


class Updates:
    """All-gathers after each step, of parameters that are not stored in shards and whose state data axes split.

    Args:
        buckets: the buckets that gather them.
        deferred: the modules that wait for their own parameters when they run. The other parameters are waited for
            when a step ends or, if there are deferred modules, when the model runs.
    """

    def __init__(self, buckets: Sequence[UpdateBucket], deferred: Sequence[str]) -> None:
        self.buckets, self._has_deferred = list(buckets), bool(deferred)
        self._pending: list[UpdateBucket] = []
        self._stepping: Sequence[torch.Tensor] = ()  # the parameters of a step that has not ended
        self._bucket_of = {
            id(one.param): (bucket, i) for bucket in self.buckets for i, one in enumerate(bucket.param_states)
        }

    def local_shards(self, params: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return this rank's shards of some parameters, by the parameters' ids, to be updated in place."""
        self.wait()
        found = {key: self._bucket_of[key] for key in map(id, params) if key in self._bucket_of}
        for bucket in {id(bucket): bucket for bucket, _ in found.values()}.values():
            bucket.load()
        self._stepping = params
        return {key: bucket.shards[i] for key, (bucket, i) in found.items()}

    def begin(self, params: Sequence[torch.Tensor]) -> None:
        """Gather the updated shards of some parameters. Collective over the axes that split them."""
        ids, self._stepping = set(map(id, params)), ()
        self._pending = [bucket for bucket in self.buckets if not ids.isdisjoint(bucket.ids)]
        for bucket in self._pending:
            bucket.begin()
        if not self._has_deferred:
            self.wait()

    def wait(self, module: str | None = None) -> None:
        """Wait for the parameters of a module; "" is for all outside of deferred modules, None for all parameters.

        After a step that has raised, gather what it has updated before, so that ranks do not differ.
        """
        if self._stepping:
            self.begin(self._stepping)
        pending, self._pending = self._pending, []
        for bucket in pending:
            if module is None or module in bucket.units:
                bucket.wait()
            else:
                self._pending.append(bucket)

    def call(self, module: str, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a module that waits for its own parameters."""
        self.wait(module)
        return inner(*args, **kwargs)

    def full_gradients(self, params: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Gather gradients for optimizers that need them full. Collective over the axes that split them."""
        ids = set(map(id, params))
        return [pair for bucket in self.buckets if not ids.isdisjoint(bucket.ids) for pair in bucket.full_gradients()]


def wait_in_model(updates: Updates, model: nn.Module) -> list[Any]:
    """Let a model wait for the parameters outside of deferred modules; return the handles of its hooks."""
    return [
        model.register_forward_pre_hook(lambda *_: updates.wait("")),
        model.register_forward_hook(lambda *_: updates.wait(), always_call=True),
        model.register_state_dict_pre_hook(lambda *_: updates.wait()),
        model.register_load_state_dict_pre_hook(lambda *_: updates.wait()),
    ]

"""Decide when movements begin and when they are waited for: all that a plan leaves open is order and overlap.

Reductions leave in the order in which the first backward pass made their gradients, each as soon as it is full, and as
many at a time as their memory allows (Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", VLDB 2020, section 3.2). The unit that ran next last time is unsharded while this one computes (Zhao et al.,
"PyTorch FSDP", VLDB 2023, section 3.3). Updated parameters are gathered when a step ends, or while the next forward
runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from shardlib.engine.executor.gather import UpdateBucket
from shardlib.engine.executor.reduce import GradientBucket, ReduceBucket
from shardlib.engine.held import held_of

__all__ = ["Reductions", "RunOrder", "Updates", "updates_of", "wait_for_updates", "wait_in_model", "wait_in_modules"]

T = TypeVar("T")


class Reductions:
    """The buckets of one backward pass, in the order in which all ranks send them.

    Args:
        limit: bytes that buckets under way may borrow together; a larger one is under way alone.
        agree: called with what the last bucket says that ranks lack.
    """

    def __init__(self, limit: int, agree: Callable[[torch.Tensor], None]) -> None:
        self.limit, self._agree = limit, agree
        self.buckets: list[ReduceBucket] = []
        self.reduction: Callable[[GradientBucket], object] | None = None
        self._numbers: dict[int, int] = {}
        self._begun = self._waited = 0

    def restart(self, buckets: Sequence[ReduceBucket], numbers: dict[int, int]) -> None:
        """Take the buckets of a new pass, each with its number among all there are."""
        self.buckets, self._numbers = list(buckets), numbers
        self._begun = self._waited = 0

    @property
    def waiting(self) -> list[ReduceBucket]:
        """Those that have not begun."""
        return self.buckets[self._begun :]

    def has_begun(self, bucket: ReduceBucket) -> bool:
        return any(one is bucket for one in self.buckets[: self._begun])

    def begin_full(self) -> None:
        """Begin those that are full, but for the last one, which closes the pass."""
        while self._begun < len(self.buckets) - 1 and self.buckets[self._begun].missing == 0:
            self._begin()

    def finish(self) -> None:
        """Begin what is left, full or not, and wait for all."""
        while self._begun < len(self.buckets):
            self._begin()
        while self._waited < len(self.buckets):
            self._wait()

    def drop(self) -> None:
        """Forget what has begun: the pass has raised."""
        for bucket in self.buckets[: self._begun]:
            bucket.drop()
        self.buckets, self._begun, self._waited = [], 0, 0

    def _begin(self) -> None:
        bucket = self.buckets[self._begun]
        while bucket.borrows + sum(self._borrowed()) > self.limit and self._waited < self._begun:
            self._wait()
        bucket.begin(self._lacking() if bucket.last else 0, self._numbers.get(id(bucket), 0), self.reduction)
        self._begun += 1

    def _wait(self) -> None:
        bucket = self.buckets[self._waited]
        lacking = bucket.wait()
        self._waited += 1
        if lacking is not None:
            self._agree(lacking)

    def _borrowed(self) -> Iterator[int]:
        return (bucket.borrows for bucket in self.buckets[self._waited : self._begun])

    def _lacking(self) -> int:
        """How many gradients of this pass this rank does not have."""
        return sum(not slot.filled for bucket in self.buckets for slot in bucket.slots)


class RunOrder(Generic[T]):
    """The order in which units run: that of the last forward tells which one follows."""

    def __init__(self) -> None:
        self._last: list[T] = []
        self._running: list[T] = []

    def restart(self) -> None:
        """A new forward begins."""
        self._last, self._running = self._running, []

    def runs(self, unit: T) -> None:
        """A unit runs in forward."""
        if not self._running or self._running[-1] is not unit:
            self._running.append(unit)

    def after_forward_of(self, unit: T) -> T | None:
        """The unit whose forward follows."""
        at = len(self._running)
        known = 0 < at < len(self._last) and self._last[at - 1] is unit
        return self._last[at] if known else None

    def after_backward_of(self, unit: T) -> T | None:
        """The unit whose backward follows: the one that ran before it."""
        at = next((i for i in reversed(range(len(self._running))) if self._running[i] is unit), 0)
        return self._running[at - 1] if at > 0 else None


class Updates:
    """Parameters whose state is split over data axes and which themselves are not: gathered after each step.

    Args:
        buckets: that gather them.
        late: modules whose parameters may arrive when they run; others are there when a step ends, or, if there are
            such modules at all, when the model runs.
    """

    def __init__(self, buckets: Sequence[UpdateBucket], late: Sequence[str]) -> None:
        self.buckets, self._late = list(buckets), bool(late)
        self._under_way: list[UpdateBucket] = []
        self._home = {id(one.param): (bucket, i) for bucket in self.buckets for i, one in enumerate(bucket.held)}

    def local_shards(self, params: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """This rank's shards of some parameters, by the parameters' ids, to be updated in place."""
        self.wait()
        homes = {key: self._home[key] for key in map(id, params) if key in self._home}
        for bucket in {id(bucket): bucket for bucket, _ in homes.values()}.values():
            bucket.load()
        return {key: bucket.shards[i] for key, (bucket, i) in homes.items()}

    def begin(self, params: Sequence[torch.Tensor]) -> None:
        """Gather the updated shards of some parameters. Collective over the axes that split them."""
        ids = set(map(id, params))
        self._under_way = [bucket for bucket in self.buckets if not ids.isdisjoint(bucket.ids)]
        for bucket in self._under_way:
            bucket.begin()
        if not self._late:
            self.wait()

    def wait(self, module: str | None = None) -> None:
        """Wait for the parameters of a module; "" is for all outside of late modules, None for all there are."""
        under_way, self._under_way = self._under_way, []
        for bucket in under_way:
            if module is None or module in bucket.units:
                bucket.wait()
            else:
                self._under_way.append(bucket)

    def call(self, module: str, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a module that waits for its own parameters."""
        self.wait(module)
        return inner(*args, **kwargs)

    def full_gradients(self, params: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Gather gradients for optimizers that need them full. Collective over the axes that split them."""
        ids = set(map(id, params))
        return [pair for bucket in self.buckets if not ids.isdisjoint(bucket.ids) for pair in bucket.full_gradients()]


def wait_for_updates(params: Iterable[torch.Tensor]) -> None:
    """Wait until parameters hold what the last step has made of them."""
    for updates in updates_of(params):
        updates.wait()


def updates_of(params: Iterable[torch.Tensor]) -> list[Updates]:
    """What gathers parameters after a step, each once; nothing for those that are not updated in shards."""
    known = (one.updates for param in params if (one := held_of(param)) is not None)
    return list({id(updates): updates for updates in known if updates is not None}.values())


def wait_in_modules(updates: Updates, late: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """Return, by name, what stands around modules that wait for their own parameters."""
    return {name: functools.partial(updates.call, name) for name in late}


def wait_in_model(updates: Updates, model: nn.Module) -> list[Any]:
    """Let a model wait for the parameters outside of such modules; return the hooks' handles."""
    return [
        model.register_forward_pre_hook(lambda *_: updates.wait("")),
        model.register_forward_hook(lambda *_: updates.wait(), always_call=True),
        model.register_state_dict_pre_hook(lambda *_: updates.wait()),
        model.register_load_state_dict_pre_hook(lambda *_: updates.wait()),
    ]

"""`check="always"`: compare in every step what ranks must have in common, before a difference does harm.

Three times in a step, before forward, backward and the optimizer's step, ranks exchange a checksum of where they are;
and before each collective of the data axes one of what it carries. Before a forward they also compare checksums of the
batch and of the tensors that several of them hold whole. A difference raises on all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from shardlib._plan import Movement
from shardlib.engine import _torch
from shardlib.engine.data.executor import Executor
from shardlib.engine.data.params import ParamState, local_of
from shardlib.engine.data.schedule import Updates
from shardlib.engine.feature import batchnorm, exact
from shardlib.engine.ranks import agree, lost
from shardlib.errors import InputError, warn

__all__ = ["Check", "SameBatches", "StepComparison", "check_choice"]

Check = bool | Literal["always"]


def check_choice(check: Check) -> None:
    """Refuse what `check` does not know.

    Raises:
        InputError: it is neither a bool nor "always".
    """
    if not (isinstance(check, bool) or check == "always"):
        raise InputError(f'check={check!r} was given; give True, False or "always".')


_COMPARED = 2  # batches


class SameBatches:
    """Warns once, on the first rank, of data ranks that train on the same batches, as without a DistributedSampler.

    Each rank leaves checksums of its first batches at the job's store, and waits for no other: a forward of one rank
    alone stays possible. The first rank reads them in a later forward, when all are there. Ranks that are given one
    batch again and again mean to fit that batch, or warm up, and are not warned.
    """

    def __init__(self, group: dist.ProcessGroup, axes: str) -> None:
        self.store = dist.PrefixStore(f"shardlib/batches/{lost.number('batches')}", _torch.default_store())
        self.axes, self.ranks = axes, dist.get_process_group_ranks(group)
        # A fake group, which has no time limit, has no store that keeps anything either.
        self.is_over = 0 not in self.ranks or _torch.timeout_of(group) is None
        self.seen: list[int] = []

    def before_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note the batch of a forward that trains, or compare those that were noted."""
        if self.is_over or not torch.is_grad_enabled():
            return
        if len(self.seen) < _COMPARED:
            mark = agree.batch_fingerprint(args, kwargs)
            if mark is None:
                self.is_over = True
                return
            self.seen.append(mark)
            if len(self.seen) == _COMPARED:
                self.store.set(f"of/{dist.get_rank()}", repr(self.seen))
                self.is_over = dist.get_rank() != 0
        elif self.store.check(keys := [f"of/{rank}" for rank in self.ranks]):
            self.is_over = True
            if len({self.store.get(key) for key in keys}) == 1 < len(set(self.seen)):
                self._warn()

    def _warn(self) -> None:
        warn(
            f'All ranks of the data axis "{self.axes}" train on the same batches: the first {_COMPARED} were equal. '
            "Give each data rank its own examples, for example with DistributedSampler(dataset, "
            'num_replicas=mesh["dp"].size(), rank=mesh["dp"].get_local_rank()) and sampler.set_epoch(epoch), or with '
            'batch.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]. check=False compares no batches.'
        )


@dataclass(eq=False)
class StepComparison:
    """Compares the ranks that train one model.

    Attributes:
        model: the model, whose buffers are compared.
        param_states: its parameters.
        everyone: all ranks that train it, of all stages.
        executor: has the groups of the mesh, and sends what is compared before.
        data_axes: the axes (of size > 1) whose ranks have different examples.
        model_axes: the axes (of size > 1) whose ranks have the same examples.
        updates: gathers parameters after a step; None if no state is split without its parameter.
        batch_norm_is_global: whether data ranks have the same statistics of BatchNorm.
        begun: how often each part of a step has begun.
    """

    model: nn.Module
    param_states: Sequence[ParamState]
    everyone: dist.ProcessGroup | None
    executor: Executor
    data_axes: tuple[str, ...]
    model_axes: tuple[str, ...]
    updates: Updates | None
    _: KW_ONLY
    batch_norm_is_global: bool
    begun: Counter[str] = field(default_factory=Counter)

    def before_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Compare ranks before a forward. One without gradients may run on one data rank, if it can.

        Warns of data ranks that train on different numbers of examples.

        Raises:
            ShardingError: ranks are at different places, or hold different weights.
            InputError: ranks with the same examples have different batches.
        """
        trains = torch.is_grad_enabled()
        if not trains and not self.model_axes and not any(one.is_stored_sharded for one in self.param_states):
            return
        self._meet("forward" if trains else "forward without gradients")
        comparisons: list[Callable[[], None]] = []
        if self.model_axes:
            group = self.executor.group(self.model_axes)
            comparisons.append(partial(agree.batches_agree, args, kwargs, group, ", ".join(self.model_axes)))
        if trains:
            comparisons += self._of_weights()
        agree.parts_agree(comparisons, self.everyone)
        if trains and self.data_axes:
            group = self.executor.group(self.data_axes)
            agree.warn_of_unequal_rows(exact.batch_rows(args, kwargs), group, ", ".join(self.data_axes))

    def before_backward(self) -> None:
        """Compare ranks before a backward pass, as `before_forward` does."""
        self._meet("backward")

    def before_step(self) -> None:
        """Compare ranks, and which gradients they have, before an optimizer's step."""
        lacking = [one.name for one in self.param_states if one.param.requires_grad and one.param.grad is None]
        self._meet("optimizer step")
        if axes := self.data_axes + self.model_axes:
            text = f"before an optimizer step, without gradients of {', '.join(lacking) or 'no parameter'}"
            agree.places_agree(text, self.executor.group(axes))

    def before_call(self, kind: str, carries: Iterable[Movement], group: dist.ProcessGroup) -> None:
        """Compare ranks before a collective."""
        names = [f'{movement.purpose} of "{movement.name}"' for movement in carries] or ["other tensors"]
        said = " to ".join(dict.fromkeys((names[0], names[-1])))
        agree.places_agree(f"before {kind}, {len(names)} times: {said}", group)

    def _meet(self, what: str) -> None:
        done = ", ".join(f"{count} x {name}" for name, count in self.begun.items())
        self.begun[what] += 1
        agree.places_agree(f"before {what}, after {done or 'nothing'}", self.everyone)

    def _of_weights(self) -> Iterator[Callable[[], None]]:
        """Iterate over comparisons of the tensors that ranks along some axes have in common."""
        if self.updates is not None:
            self.updates.wait()
        for axes in (self.data_axes, self.model_axes):
            if axes:
                tensors, group = self._replicated_over(axes), self.executor.group(axes)
                yield partial(agree.weights_stay_equal, tensors, group, ", ".join(axes))

    def _replicated_over(self, axes: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """Return the tensors that ranks along some axes have in common, by name."""
        found = {one.name: local_of(one.param) for one in self.param_states if one.row.stored.axes.isdisjoint(axes)}
        for prefix, module in self.model.named_modules():
            if self.batch_norm_is_global or not batchnorm.is_batch_norm(module):
                own = module.named_buffers(prefix, recurse=False)
                found |= {name: buffer for name, buffer in own if type(buffer) is torch.Tensor}
        return found

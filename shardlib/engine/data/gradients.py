"""Reduce gradients in backward, so that `p.grad` is the gradient of the mean loss over data ranks.

On data axes every rank has the gradient of its own examples, which is averaged over these axes. On a model axis, a
gradient may be a partial sum. Where the plan splits gradient or state over data axes, each rank gets its own shard of
the mean; otherwise all ranks get the full mean.

A large gradient is a bucket of its own and is not copied. Other gradients share buckets, in the order in which the
first backward pass makes them; `shardlib/engine/data/schedule.py` decides when a bucket is sent.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardlib._mesh_shape import MeshShape
from shardlib._plan import Bucket as PlannedBucket
from shardlib._plan import Step, gradient_buckets
from shardlib.engine import _torch
from shardlib.engine.data.executor import Executor
from shardlib.engine.data.executor.reduce import (
    AllReduceBucket,
    Averaging,
    GradientBucket,
    ReduceBucket,
    ReduceScatterBucket,
    Slot,
)
from shardlib.engine.data.params import Axes, ParamState, local_of
from shardlib.engine.data.schedule import Reductions
from shardlib.engine.ops.redistribute import to_full_tensor
from shardlib.engine.ranks import agree
from shardlib.engine.ranks.lost import naming_lost_ranks
from shardlib.errors import ShardingError

__all__ = ["ORDER_BITS", "Aside", "GradientBucket", "GradientReducer", "begin_hook"]

# The gradient of this rank's examples, and the reduced gradient.
Aside = tuple[torch.Tensor | None, torch.Tensor | None]
ORDER_BITS = 16  # of the number that tells orders of units apart


class GradientReducer:
    """Keeps `p.grad` of every parameter equal to the gradient of the mean loss over the data axes.

    Args:
        param_states: all parameters in registration order; frozen ones may begin to train later.
        executor: the executor that sends gradients.
        data_axes: the mesh axes (of size > 1) over which gradients are averaged.
        step: the settings of the step.
        everyone: the ranks of all stages, where this model is a pipeline stage.
        end_pass: called when a backward pass has ended.
        end_step: called after the last backward pass of a step.
    """

    def __init__(
        self,
        param_states: Sequence[ParamState],
        executor: Executor,
        data_axes: Axes,
        step: Step,
        *,
        everyone: dist.ProcessGroup | None = None,
        end_pass: Callable[[], None] | None = None,
        end_step: Callable[[], None] | None = None,
    ) -> None:
        mesh = executor.mesh
        self.executor, self.mesh, self.data_axes = executor, mesh, data_axes
        self.step, self.passes = step, step.accumulate
        self.sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
        self.averaging = Averaging(data_axes, self.sizes, step.accumulate)
        self.reductions = Reductions(step.bucket_bytes, self._flags, self._agree_on_missing)
        self.enabled = True
        self.compare: Callable[[], None] | None = None  # called before each backward pass
        self.order_of_units: Callable[[], int] | None = None  # a number that tells orders of units apart
        self._keeping = False  # whether gradients stay unreduced until `reduce_now`
        self._everyone, self._end_pass, self._end_step = everyone, end_pass, end_step
        self._slots = [Slot(one, i) for i, one in enumerate(param_states)]
        self.has_shards = any(
            one.shard_spec is not None or not one.compute.axes.isdisjoint(data_axes) for one in param_states
        )
        self._slot_of = {id(slot.param_state.param): slot for slot in self._slots}
        self._by_name = {slot.param_state.name: slot for slot in self._slots}
        self.buckets: list[ReduceBucket] = []
        self._learned = False
        self._arrived: dict[int, Axes] = {}  # until buckets are laid out in the order of gradients
        self._ending: weakref.ref[Callable[[], None]] | None = None  # the callback at the end of this pass
        self._pass_hooks: list[Any] = []  # hooks that are removed then
        self._pass = 0
        self._closing = False  # whether this backward pass is the last of several in a step
        self._used: list[bool] | None = None
        self._known_flags: dict[Any, torch.Tensor] = {}  # those of the last pass
        self._handles: list[Any] = []
        self._listen()
        self._left_out = self._slots  # frozen when buckets were laid out
        self._unbucketed = self._slots  # those, and others that no axis sums
        self.notice_unfrozen()

    def _listen(self) -> None:
        """Register hooks on all parameters, also on those that are frozen and may be thawed."""
        this = weakref.ref(self)
        for slot in self._slots:
            param = slot.param_state.param
            if not (param.is_floating_point() or param.is_complex()):
                continue
            frozen = not param.requires_grad
            param.requires_grad_(True)  # torch registers hooks on no other tensor
            if slot.param_state.is_stored_sharded:
                self._handles.append(param.register_hook(_torch.own_hook(_shard_hook(this, slot.index))))
            else:
                self._handles.append(param.register_post_accumulate_grad_hook(_accumulation_hook(this)))
            if slot.param_state.is_updated_sharded:
                self._handles.append(param.register_hook(begin_hook(this, slot)))
            param.requires_grad_(not frozen)

    def remove(self) -> None:
        """Remove all hooks from the parameters."""
        for handle in self._handles:
            handle.remove()

    @property
    def param_states(self) -> list[ParamState]:
        """All parameters, in registration order."""
        return [slot.param_state for slot in self._slots]

    @property
    def scale(self) -> float:
        """The factor that turns a sum over data ranks and passes into their mean."""
        return self.averaging.over(self.data_axes)

    def due(self, param_state: ParamState) -> Axes:
        """Return the data axes over which a gradient is summed: not those whose ranks have different experts."""
        return tuple(axis for axis in self.data_axes if axis not in param_state.compute.axes)

    def data_group(self) -> dist.ProcessGroup | None:
        """Return the group of ranks that train on different examples; None where there is one such rank."""
        return self.executor.group(self.data_axes) if self.data_axes else None

    def group_of_all(self) -> dist.ProcessGroup | None:
        """Return the group of all ranks that train the model; None where there is one rank."""
        if self._everyone is not None:
            return self._everyone
        axes = tuple(axis for axis, size in self.sizes.items() if size > 1)
        return self.executor.group(axes) if axes else None

    @property
    def listens(self) -> bool:
        """Whether a backward pass needs the reducer, or gradients just accumulate in place."""
        return self.enabled or self.has_shards or self._end_pass is not None

    def is_between_passes(self) -> bool:
        """Tell whether a step has begun, and further backward passes belong to it."""
        return 0 < self._pass < self.passes and not self._has_raised

    def pending(self, params: Iterable[torch.Tensor]) -> Iterator[str]:
        """Yield the names of parameters whose gradients the running backward pass has yet to reduce."""
        if self.is_running:
            known = (slot for param in params if (slot := self._slot_of.get(id(param))) is not None)
            waiting = (slot.param_state for slot in known if slot.bucket is not None)
            yield from (param_state.name for param_state in waiting if not param_state.is_stored_sharded)

    @property
    def is_running(self) -> bool:
        """Whether a backward pass is running, or a nested one, as in reentrant checkpointing."""
        return self._ending is not None and self._ending() is not None

    @property
    def _has_raised(self) -> bool:
        """Whether the last backward pass has raised: autograd has dropped the callback at its end."""
        return self._ending is not None and self._ending() is None

    def notice_unfrozen(self) -> None:
        """Include parameters that have begun to require gradients since; lay buckets out again if there are any."""
        unfrozen = [slot for slot in self._left_out if slot.param_state.param.requires_grad]
        if not unfrozen:
            return
        self._learned = False
        for slot in unfrozen:
            slot.param_state.expect_gradient(slot.param_state.row.partial)
        self._lay_out(reversed(range(len(self._slots))))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate each rank's own gradients in the block; the next backward pass outside reduces them.

        Gradients of parameters that are stored in shards are reduced all the same: no memory can hold their full sum.
        """
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    @contextmanager
    def keep(self) -> Iterator[None]:
        """Accumulate each rank's own gradients of all parameters in the block, for `reduce_now` to reduce."""
        before, self._keeping = self._keeping, True
        try:
            with self.no_sync():
                yield
        finally:
            self._keeping = before

    # --- one backward pass --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start a backward pass on this model: reduce when it ends, whichever parameters it leaves unused."""
        if self.is_running:
            return
        if self._has_raised:
            self._drop_pending()
        self.notice_unfrozen()
        if self.compare is not None:
            self.compare()
        if not self.listens:
            return
        ending = functools.partial(self._finish)
        self._ending = weakref.ref(ending, _raised_callback(weakref.ref(self)))
        for slot in self._slots if self.has_shards else ():
            if slot.param_state.shard_spec is None:
                _set_reduced_aside(slot)
        self._begin()
        self._average_returned()
        _torch.run_at_end_of_backward(ending)

    def _average_returned(self) -> None:
        """Let `autograd.grad` return means over the data axes, for parameters that are not stored in shards."""
        for slot in self._slots if self.data_axes else ():
            due = self.due(slot.param_state)
            if slot.param_state.is_stored_sharded or not slot.param_state.param.requires_grad or not due:
                continue
            node = _torch.accumulation_of(slot.param_state.param)
            if node is None:
                _refuse_transform()
            accumulates = _torch.asks_for_gradient(node)
            if accumulates:
                return  # this pass adds to `p.grad`
            if accumulates is None:
                averaging = functools.partial(_mean_hook, self, due, slot.param_state)
                self._pass_hooks.append(slot.param_state.param.register_hook(averaging))

    @naming_lost_ranks("backward")
    def all_reduce_mean(self, grad: torch.Tensor, axes: Axes) -> torch.Tensor:
        """Return the mean of each rank's gradient over some data axes."""
        mean = local_of(grad).clone(memory_format=torch.contiguous_format)
        self.executor.transport(axes).all_reduce(mean).wait()
        mean.mul_(1.0 / math.prod(self.sizes[axis] for axis in axes))
        return _torch.wrap(mean, _torch.spec_of(grad)) if isinstance(grad, DTensor) else mean

    def _remove_pass_hooks(self) -> None:
        for handle in self._pass_hooks:
            handle.remove()
        self._pass_hooks = []

    def _give_back(self) -> None:
        """Let `p.grad` be what it was, with what the pass has made, as soon as the pass has raised.

        Nothing is waited for here: another rank may be gone. Gradients of parameters that are stored in shards, of
        which a part is reduced, are dropped. On an accelerator autograd drops the end of a pass in a thread of its own,
        while the user's code goes on and may clear gradients: `_drop_pending` does it when the next pass begins.
        """
        if self.executor.device.type == "cpu":
            self._set_all_grads()

    def _drop_pending(self) -> None:
        """Drop what a pass that has raised has left, before the next one begins.

        A gradient of earlier passes that was set aside comes back, unless `p.grad` was cleared meanwhile.
        """
        self._remove_pass_hooks()
        self.reductions.drop()
        for slot in self._slots:
            slot.unsharded = None
            grad = slot.param_state.param.grad
            if grad is None or grad is slot.accumulated or (slot.accumulated is not None and not local_of(grad).any()):
                slot.accumulated = None
        self._set_all_grads()
        self.executor.downloads.wait()
        self._ending, self._pass = None, 0

    def _set_all_reduced_aside(self) -> None:
        for slot in self._slots if self.has_shards else ():
            _set_reduced_aside(slot)

    def _set_all_grads(self) -> None:
        for slot in self._slots if self.has_shards else ():
            _set_grad(slot, self.passes)

    def _begin(self) -> None:
        closing = False
        if self.enabled:
            self._pass = self._pass % self.passes + 1
            closing = self._pass == self.passes
        self._closing = closing and self.passes > 1
        to_send = [b for b in self.buckets if closing or b.planned.ends == "pass ends"]
        to_send = [b for b in to_send if self.enabled or (b.like.is_stored_sharded and not self._keeping)]
        self.reductions.restart(to_send)
        self._used = None
        self._arrived.clear()
        for bucket in self.buckets:
            bucket.reset()

    def leaves(self) -> list[torch.Tensor]:
        """Return the leaf tensors in which autograd accumulates gradients."""
        leaves = (one.param if one.mutable.leaf is None else one.mutable.leaf for one in self.param_states)
        return [leaf for leaf in leaves if leaf.requires_grad]

    def collect_leaf_gradients(self) -> None:
        """Keep the gradients that the microbatches of a pipeline step accumulated, of parameters stored in shards."""
        for slot in self._slots:
            slot.add(slot.param_state.pop_leaf_gradient())

    def has_gradient(self, param_state: ParamState) -> bool:
        """Tell whether a parameter has a gradient of this rank's examples, or a reduced one."""
        return self._slot_of[id(param_state.param)].unreduced is not None

    @contextmanager
    def room_for_gradients(self) -> Iterator[None]:
        """Let gradients accumulate in the leaves, as during one backward pass that includes the passes of the block."""
        self._set_all_reduced_aside()
        ending = functools.partial(self._finish)  # never called: alive as long as the pass runs
        self._ending = weakref.ref(ending)
        try:
            yield
        finally:
            self._ending = None
            self._set_all_grads()

    def put_gradients_aside(self) -> list[Aside]:
        """Set all gradients to None; return the former ones."""
        self._set_all_reduced_aside()
        before: list[Aside] = []
        for slot in self._slots:
            stored, grad = slot.param_state.is_stored_sharded, slot.param_state.param.grad
            before.append((slot.unsharded, grad) if stored else (grad, slot.accumulated))
            slot.param_state.param.grad = slot.unsharded = slot.accumulated = None
        return before

    def multiply_gradients(self, factor: float) -> None:
        """Multiply this rank's unreduced gradients in place."""
        grads = [slot.unreduced for slot in self._slots]
        _torch.multiply_all([local_of(grad) for grad in grads if grad is not None], factor)

    def add_gradients(self, before: Sequence[Aside]) -> None:
        """Add the gradients that `put_gradients_aside` returned."""
        self._join(before)
        self._set_all_grads()

    @naming_lost_ranks("backward")
    def reduce_now(self, before: Sequence[Aside] = ()) -> None:
        """Reduce the gradients that were accumulated inside of `keep`, as the end of a backward pass outside does.

        Args:
            before: the gradients that were put aside, which are added first.
        """
        self._join(before)
        self._begin()
        for slot in reversed(self._slots):
            if slot.unreduced is not None:
                slot.unreduced = slot.param_state.unwrap(slot.unreduced)
                self._mark_ready(slot)
        self._finish()

    def _join(self, before: Sequence[Aside]) -> None:
        self._set_all_reduced_aside()
        for slot, (unreduced, accumulated) in zip(self._slots, before, strict=False):
            if slot.param_state.is_stored_sharded:
                slot.param_state.param.grad = accumulated
            else:
                slot.accumulated = accumulated
            slot.add(unreduced)

    @naming_lost_ranks("backward")
    def _on_gradient(self, param: nn.Parameter) -> None:
        if isinstance(param.grad, DTensor) and not isinstance(param, DTensor):
            self._unwrap_gradients_of(param)
        self.begin()
        self.reductions.begin_full()  # not the bucket of this gradient, of which more hooks may run
        if self.enabled and param.grad is not None:  # a backward function may return no gradient
            self._mark_ready(self._slot_of[id(param)])

    @naming_lost_ranks("backward")
    def reduce_unsharded(
        self, param_states: Sequence[ParamState], grads: Sequence[torch.Tensor | None], at_once: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Take the full gradients of parameters that are stored in shards.

        Args:
            param_states: the parameters.
            grads: the gradients of this rank's examples; None where there is none.
            at_once: whether to reduce a gradient immediately, because autograd gives it to others than `param.grad`.

        Returns:
            The gradients with which autograd continues: None where `param.grad` gets the gradient when the pass ends.
        """
        self.begin()
        urgent: list[Slot] = []
        for one, grad, now in zip(param_states, grads, at_once, strict=True):
            slot = self._slot_of[id(one.param)]
            grad = None if grad is None else one.unwrap(grad)
            if now or (slot.bucket is not None and slot.bucket.begun):
                urgent.append(Slot(one, slot.index, filled=grad is not None, unsharded=grad))
                continue
            slot.add(grad)
            if grad is not None:
                self._mark_ready(slot)
        self.reductions.begin_full()
        reduced = self._reduced_at_once(urgent)
        return [reduced.get(id(one)) for one in param_states]

    def reduce_outside_unit(self, param_state: ParamState, grad: torch.Tensor) -> None:
        """Take a gradient of a parameter that is stored in shards from a reader outside of its unit."""
        (reduced,) = self.reduce_unsharded([param_state], [grad], [False])
        if reduced is not None:
            before, reduced = param_state.param.grad, reduced * self.averaging.over(())
            param_state.param.grad = reduced if before is None else before + reduced  # type: ignore[assignment]

    def _reduced_at_once(self, slots: Sequence[Slot]) -> dict[int, torch.Tensor]:
        """Return shards of the mean, by the id of the parameter state, where any rank has a gradient.

        All ranks pass the same parameters.
        """
        if not slots:
            return {}
        used = torch.tensor([float(slot.filled) for slot in slots], device=self.executor.device)
        if self.data_axes:
            self.executor.transport(self.data_axes).all_reduce(used).wait()
        by_name = {slot.param_state.name: slot for slot in slots}
        reductions = [slot.param_state.reduction(slot.param_state.partial_axes(slot.unreduced)) for slot in slots]
        found: dict[int, torch.Tensor] = {}
        for planned in gradient_buckets(reductions, MeshShape.of(self.mesh), self.step):
            batch = [by_name[name] for name in planned.names]
            bucket = self._bucket(planned.summed, batch, planned)
            assert isinstance(bucket, ReduceScatterBucket)
            bucket.averaging = dataclasses.replace(self.averaging, passes=1)  # hooks of parameters see to passes
            bucket.begin(None)
            bucket.wait()
            self.executor.downloads.wait()
            found |= {
                id(slot.param_state): slot.param_state.wrap(shard)
                for slot, shard in zip(batch, bucket.shards, strict=True)
            }
        return {
            id(slot.param_state): found[id(slot.param_state)]
            for slot, n in zip(slots, used.tolist(), strict=True)
            if n > 0
        }

    def _mark_ready(self, slot: Slot) -> None:
        """Note that a gradient is complete."""
        if not self._learned:
            self._arrived[slot.index] = slot.param_state.partial_axes(slot.unreduced)
        bucket = slot.bucket
        if bucket is None:
            slot.unreduced = slot.param_state.lay_out(slot.unreduced)
            return
        if bucket.begun:
            raise ShardingError(
                f'"{slot.param_state.name}" got a second gradient in one backward pass, after the first was on its '
                "way. Use torch.utils.checkpoint with use_reentrant=False, or run this backward inside "
                "shardlib.no_sync."
            )
        if not slot.filled:
            slot.filled = True
            bucket.missing -= 1

    def _unwrap_gradients_of(self, param: nn.Parameter) -> None:
        """Convert DTensor gradients of a plain parameter to full tensors from now on.

        The parameter was used with DTensors outside of regions.
        """
        assert param.grad is not None
        param.grad = to_full_tensor(param.grad)
        self._handles.append(param.register_hook(to_full_tensor))

    @naming_lost_ranks("backward")
    def _finish(self) -> None:
        """Finish a backward pass: send the remaining buckets, in the order that all ranks share, and set `p.grad`."""
        self._ending = None
        self._remove_pass_hooks()
        if self._end_pass is not None:
            self._end_pass()
        for slot in self._slots if self.has_shards else ():
            if not slot.filled:  # hooks have done it for the others
                _set_reduced_aside(slot)
        for slot in (slot for bucket in self.reductions.waiting for slot in bucket.slots):
            slot.filled = slot.filled or slot.unreduced is not None
        self.reductions.finish()
        self.executor.downloads.wait()
        for bucket in self.reductions.buckets:
            bucket.set_grads(self._is_used)
        self._average_passes()
        self._put_on_mesh()
        ends_step = self.enabled and not self.is_between_passes() and (self.reductions.buckets or not self.buckets)
        if ends_step and self._end_step is not None:
            self._end_step()
        self.reductions.restart()
        self._set_all_grads()
        if self.enabled and not self._learned:
            self._learn()

    def _average_passes(self) -> None:
        """Average gradients outside of buckets over the passes of a step; no axis sums them."""
        if self._closing:
            unbucketed = (slot.param_state.param.grad for slot in self._unbucketed)
            if grads := [local_of(grad) for grad in unbucketed if grad is not None]:
                _torch.multiply_all(grads, self.averaging.over(()))
        self._closing = False

    def _put_on_mesh(self) -> None:
        """Wrap gradients outside of buckets as DTensors on the whole mesh, as `AllReduceBucket.on_mesh` says.

        These are complete without a reduction: those of experts that no two ranks share.
        """
        if not (self.has_shards and self.enabled) or self.is_between_passes():
            return
        for slot in self._unbucketed:
            param_state, grad = slot.param_state, slot.param_state.param.grad
            if isinstance(grad, DTensor) and not param_state.is_local_shard(grad):
                param_state.param.grad = param_state.wrap(local_of(grad))  # type: ignore[assignment]

    # --- missing gradients --------------------------------------------------------------------------------------------

    def _flags(self) -> torch.Tensor:
        """Return ones for the gradients that this rank has, in the order of slots, and for its order of units.

        Each bit of the order's number has two flags, one for 0 and one for 1: sums of both are above zero only where
        ranks differ, in any dtype.
        """
        filled = tuple(slot.filled for slot in self._slots)
        order = 0 if self.order_of_units is None else self.order_of_units()
        if (filled, order) not in self._known_flags:
            bits = [order >> i & 1 for i in range(ORDER_BITS)]
            ones = [float(one) for one in (*filled, *bits, *(1 - bit for bit in bits))]
            self._known_flags = {(filled, order): torch.tensor(ones, device=self.executor.device)}
        return self._known_flags[filled, order]

    def _agree_on_missing(self, flags: torch.Tensor) -> None:
        """Find the gradients that any rank has: ranks without them contribute zeros; others stay None on all ranks.

        A rank that has all gradients on an accelerator need not know, and does not wait for the device. In a dry run
        nothing can be counted, and all ranks are taken to have the same gradients.
        """
        sent = [slot for bucket in self.reductions.buckets for slot in bucket.slots]
        complete = all(slot.filled for slot in sent)
        if not _torch.has_values(flags) or (complete and flags.device.type != "cpu"):
            return
        numbers = (flags.real if flags.is_complex() else flags).tolist()
        set_bits, unset_bits = numbers[len(self._slots) :][:ORDER_BITS], numbers[-ORDER_BITS:]
        ranks = set_bits[0] + unset_bits[0]
        differ = any(one and zero for one, zero in zip(set_bits, unset_bits, strict=True))
        if differ and any(numbers[slot.index] < ranks for slot in sent):
            raise ShardingError(
                "Data ranks ran other modules, or in another order, while the plan stores parameters in shards: "
                "each rank gathers what the others gather at the same time, and has computed with the weights of "
                "another module. Run the same modules on every rank, as by adding 0 * module(x); or keep "
                "parameters full between steps: zero(2)."
            )
        self._used = [number > 0 for number in numbers]

    def _is_used(self, slot: Slot) -> bool:
        return slot.filled or (self._used is not None and self._used[slot.index])

    # --- laying out ---------------------------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Lay buckets out in the order in which this backward pass made gradients, the same on all ranks."""
        arrived = list(self._arrived.items())
        if self.data_axes:
            arrived = agree.of_first(arrived, self.executor.group(tuple(self.mesh.mesh_dim_names or ())))
        for i, partial in arrived:
            self._slots[i].param_state.expect_gradient(partial)
        self._lay_out(dict.fromkeys([*(i for i, _ in arrived), *reversed(range(len(self._slots)))]))
        self._learned = True

    def _lay_out(self, order: Iterable[int]) -> None:
        self._left_out = [slot for slot in self._slots if not slot.param_state.param.requires_grad]
        movements = [
            slot.param_state.named(one)
            for slot in (self._slots[i] for i in order)
            if slot.param_state.param.requires_grad
            for one in slot.param_state.movements.values()
        ]
        regular = gradient_buckets(movements, MeshShape.of(self.mesh), self.step)
        closing = self._closing_bucket(regular) if self.data_axes and regular else None
        self.buckets = [self._bucket(one.summed, self._slots_of(one), one) for one in regular if one is not closing]
        flags = len(self._slots) + 2 * ORDER_BITS
        if closing is not None:
            self.buckets.append(self._bucket(closing.summed, self._slots_of(closing), closing, flags))
        elif self.data_axes and regular:  # the flags travel in an empty bucket like one of the others
            self.buckets.append(self._bucket(self.data_axes, [], self._regular(regular)[0], flags))
        for slot in self._slots:
            slot.bucket = None
        for bucket in self.buckets:
            bucket.reset()
            for slot in bucket.slots:
                slot.bucket = bucket
        self._unbucketed = [slot for slot in self._slots if slot.bucket is None]

    def _closing_bucket(self, buckets: Sequence[PlannedBucket]) -> PlannedBucket | None:
        """Return the bucket that is sent last in every pass, with room for flags; None where none is fit for that."""
        packed = [one for one in self._regular(buckets) if not one.alone and {*self.data_axes} <= {*one.summed}]
        return packed[-1] if packed else None

    def _regular(self, buckets: Sequence[PlannedBucket]) -> Sequence[PlannedBucket]:
        """Return the buckets that are sent in most passes: those of stored shards, or those of every pass, or all."""
        each_pass = [one for one in buckets if one.ends == "pass ends"]
        stored = [one for one in each_pass if self._by_name[one.first.name].param_state.is_stored_sharded]
        return stored or each_pass or buckets

    def _slots_of(self, bucket: PlannedBucket) -> list[Slot]:
        return [self._by_name[name] for name in bucket.names]

    def _bucket(self, axes: Axes, slots: list[Slot], planned: PlannedBucket, flags: int = 0) -> ReduceBucket:
        like = self._by_name[planned.first.name].param_state
        dtype = planned.first.dtype if slots else self.step.reduce_dtype or torch.float32
        common = self.executor, self.averaging, axes, slots, dtype, planned, like, flags
        assert bool(planned.scattered) == (like.shard_spec is not None), planned
        if planned.scattered:
            return ReduceScatterBucket(*common)
        return AllReduceBucket(*common, on_mesh=self.has_shards)


def _set_reduced_aside(slot: Slot) -> None:
    """Move a reduced gradient away from `p.grad`: a full gradient cannot be accumulated into a shard."""
    param_state, grad = slot.param_state, slot.param_state.param.grad
    if grad is None or param_state.is_stored_sharded or not param_state.is_local_shard(grad):
        return
    if param_state.shard_spec is not None:
        slot.accumulated, param_state.param.grad = grad, None
    elif isinstance(param_state.param, DTensor):
        param_state.param.grad = _torch.wrap(local_of(grad), _torch.spec_of(param_state.param))  # type: ignore[arg-type,assignment]


def _set_grad(slot: Slot, passes: int) -> None:
    """Set `param.grad` after a pass: to the accumulated gradient, or to this rank's full one if not reduced yet.

    The accumulated shard of an earlier mean is added to the full gradient, scaled so that the later mean contains it
    once.
    """
    param_state, accumulated = slot.param_state, slot.accumulated
    if accumulated is None:
        return
    slot.accumulated, full = None, param_state.param.grad
    if full is None:
        param_state.param.grad = accumulated  # type: ignore[assignment]
        return
    assert param_state.shard_spec is not None and param_state.transport is not None
    factor = passes * param_state.transport.count / _summands(full)
    for target, chosen in param_state.shard_spec.places(local_of(full), param_state.transport.index):
        shard = local_of(accumulated).narrow(param_state.shard_spec.dim, chosen.start, chosen.stop - chosen.start)
        target.add_(shard.to(target.device), alpha=factor)


def _raised_callback(reducer: weakref.ref[GradientReducer]) -> Callable[[Any], None]:
    """Return a function that is called when autograd drops the end of a backward pass, which has raised."""

    def raised(_ending: Any) -> None:
        if (alive := reducer()) is not None:
            alive._give_back()

    return raised


def _accumulation_hook(reducer: weakref.ref[GradientReducer]) -> Callable[[nn.Parameter], None]:
    """Return a hook that takes a complete gradient.

    It holds a weak reference to the reducer, which owns the parameter: the garbage collector sees no cycle through
    hooks.
    """

    def hook(leaf: nn.Parameter) -> None:
        alive = reducer()
        if alive is not None and (alive.listens or isinstance(leaf.grad, DTensor)):
            alive._on_gradient(leaf)

    return hook


def _shard_hook(reducer: weakref.ref[GradientReducer], index: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a hook on a parameter that is stored in shards, for a gradient that autograd adds to `p.grad`.

    One from outside of the units may be full, as that of `p[0]`, and then is that of this rank's examples: it becomes
    shards of the mean. In a step of several passes, `p.grad` has the mean over them.
    """

    def hook(grad: torch.Tensor) -> torch.Tensor:
        alive = reducer()
        param = None if alive is None else alive._slots[index].param_state.param
        if alive is None or not isinstance(grad, DTensor) or not isinstance(param, DTensor):
            return grad
        if grad.placements != param.placements:
            grad = grad.redistribute(param.device_mesh, param.placements)
        if alive.passes > 1 and _torch.asks_for_gradient(_torch.accumulation_of(param)):
            grad = grad * alive.averaging.over(())
        return grad

    return hook


def begin_hook(reducer: weakref.ref[GradientReducer], slot: Slot | None = None) -> Callable[[torch.Tensor], None]:
    """Return a hook that starts a backward pass before its first gradient is accumulated.

    On a parameter, it sets the reduced gradient of earlier passes aside. It holds a weak reference: a hook that kept
    the model of its own output would never be freed, since the garbage collector does not see through an autograd
    graph.
    """

    def hook(_grad: torch.Tensor) -> None:
        if (alive := reducer()) is not None:
            alive.begin()
            if slot is not None and alive.is_running:
                _set_reduced_aside(slot)

    return hook


def _refuse_transform() -> None:
    raise ShardingError(
        "torch.func.grad transforms a model on data ranks, and would return the gradient of this rank's examples. Call "
        "loss.backward(), or torch.autograd.grad(loss, list(model.parameters())), which return means over data ranks."
    )


def _mean_hook(
    reducer: GradientReducer, axes: Axes, param_state: ParamState, grad: torch.Tensor | None
) -> torch.Tensor | None:
    """Average a gradient over data ranks, as a hook of one backward pass. All ranks ask for the same gradients."""
    if grad is None:
        _refuse_gradients_of_other_ranks(reducer, axes, param_state)
        return None
    if not torch.is_grad_enabled():
        return reducer.all_reduce_mean(param_state.lay_out(grad), axes)
    return _Mean.apply(grad, reducer, axes)


def _refuse_gradients_of_other_ranks(reducer: GradientReducer, axes: Axes, param_state: ParamState) -> None:
    """Take part in the mean of a gradient that the backward of this rank does not return; refuse one of other ranks.

    Autograd does not let a hook put a tensor in the place of a gradient that is None.
    """
    if reducer.all_reduce_mean(torch.zeros_like(param_state.memory), axes).count_nonzero():
        raise ShardingError(
            f'autograd.grad was asked for the gradient of "{param_state.name}", which the backward functions of other '
            "data ranks return, and those of this rank do not. Return zeros instead of None from the backward function "
            "on every rank, or call loss.backward() and read p.grad."
        )


class _Mean(torch.autograd.Function):
    """Take the mean over data ranks. The loss is a mean over them, so that this function is its own adjoint."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, reducer: GradientReducer, axes: Axes) -> torch.Tensor:  # type: ignore[override]
        ctx.reducer, ctx.axes = reducer, axes
        return reducer.all_reduce_mean(x, axes)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return _Mean.apply(grad, ctx.reducer, ctx.axes), None, None


def _summands(grad: torch.Tensor) -> int:
    """Return the number of ranks on the model axes that hold a partial sum of a gradient."""
    if not isinstance(grad, DTensor):
        return 1
    placements = zip(grad.device_mesh.shape, grad.placements, strict=True)
    return math.prod(size for size, placement in placements if placement.is_partial())

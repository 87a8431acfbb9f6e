"""What autograd and a user's gradients have to do with reductions: `p.grad` is that of the mean loss over data ranks.

On data axes every rank holds the gradient of its own examples, so the mean over these axes is due; on a model axis a
gradient may come out of the global view as a partial sum. Where the plan splits gradient or state over data axes, each
rank gets the mean of its own shard; else all ranks get all of it.

A large gradient is a bucket of its own and is not copied. Others share buckets, laid out in the order in which the
first backward pass makes gradients; `shardlib/engine/schedule.py` says when they leave.
"""

from __future__ import annotations

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

from shardlib.engine import _torch
from shardlib.engine.executor import Executor
from shardlib.engine.executor.bucket import goes_alone, in_batches
from shardlib.engine.executor.reduce import (
    AllReduceBucket,
    Averaging,
    GradientBucket,
    ReduceBucket,
    ReduceScatterBucket,
    Slot,
)
from shardlib.engine.held import Axes, Held, local_of
from shardlib.engine.lost import naming_lost_ranks
from shardlib.engine.plain import plain
from shardlib.engine.schedule import Reductions
from shardlib.errors import ShardingError

__all__ = ["Aside", "GradientBucket", "GradientReducer"]

# A gradient of this rank's examples, and this rank's shard of a reduced one.
Aside = tuple[torch.Tensor | None, torch.Tensor | None]


class GradientReducer:
    """Keeps `p.grad` of every parameter equal to the gradient of the mean loss over the data axes.

    Args:
        held: all parameters in registration order; frozen ones may begin to train later.
        executor: sends them.
        data_axes: axes of the mesh (size > 1) over which gradients are averaged.
        bucket_bytes: how much one bucket carries; a larger one has fewer latencies, a smaller one overlaps more.
        passes: backward passes that make one step; the gradient is that of their mean.
        dtype: in which gradients travel; by default their own.
    """

    def __init__(
        self,
        held: Sequence[Held],
        executor: Executor,
        data_axes: Axes,
        *,
        bucket_bytes: int = 25 << 20,
        passes: int = 1,
        dtype: torch.dtype | None = None,
    ) -> None:
        mesh = executor.mesh
        self.executor, self.mesh, self.data_axes, self.passes = executor, mesh, data_axes, passes
        self.dtype, self.bucket_bytes = dtype, bucket_bytes
        self.sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
        self.averaging = Averaging(data_axes, self.sizes, passes)
        self.reductions = Reductions(bucket_bytes, self._agree_on_missing)
        self.enabled = True
        self._keeping = False  # whether gradients stay as they come until `reduce_now`
        self.everyone: dist.ProcessGroup | None = None  # of all stages, where this model is one of a pipeline's
        self._slots = [Slot(h) for h in held]
        self.in_parts = any(one.cut is not None or not one.compute.axes.isdisjoint(data_axes) for one in held)
        self._index = {id(slot.held.param): i for i, slot in enumerate(self._slots)}
        self._buckets: list[ReduceBucket] = []
        self._home: dict[int, ReduceBucket] = {}
        self._numbers: dict[int, int] = {}
        self._learned = False
        self._arrived: dict[int, Axes] = {}
        self._ending: weakref.ref[Callable[[], None]] | None = None  # what the pass that runs calls when it ends
        self._of_this_pass: list[Any] = []  # hooks that it takes away then
        self._pass = 0
        self._closing = False  # whether the backward pass that runs is the last one of a step of several
        self._used: list[bool] | None = None
        self._handles: dict[int, list[Any]] = {}
        self._converting: list[Any] = []
        self.at_the_end: list[Callable[[], None]] = []  # what else to do when a backward pass has ended
        self.at_the_end_of_steps: list[Callable[[], None]] = []  # and when it was the last one of a step
        self._left_out = self._slots  # of the buckets, because they required no gradient when these were laid out
        self.notice_unfrozen()

    def remove(self) -> None:
        for handle in (*(h for handles in self._handles.values() for h in handles), *self._converting):
            handle.remove()

    @property
    def all_held(self) -> list[Held]:
        return [slot.held for slot in self._slots]

    @property
    def scale(self) -> float:
        """What a sum over data ranks and passes is multiplied with to be their mean."""
        return self.averaging.over(self.data_axes)

    def due(self, index: int) -> Axes:
        """The data axes over which a gradient is to be summed: not over those whose ranks have different experts."""
        compute = self._slots[index].held.compute
        return tuple(axis for axis in self.data_axes if axis not in compute.axes)

    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks that train on different examples; None where there is one."""
        return self.executor.group(self.data_axes) if self.data_axes else None

    def group_of_all(self) -> dist.ProcessGroup | None:
        """All ranks that train the model; None where it is one."""
        if self.everyone is not None:
            return self.everyone
        axes = tuple(axis for axis, size in self.sizes.items() if size > 1)
        return self.executor.group(axes) if axes else None

    @property
    def listens(self) -> bool:
        """Whether there is anything to do in a backward pass, other than to let gradients add up where they are."""
        return self.enabled or self.in_parts or bool(self.at_the_end)

    def is_between_passes(self) -> bool:
        """Whether a step has begun, and backward passes that belong to it are still to come."""
        return 0 < self._pass < self.passes and not self._has_raised

    def pending(self, params: Iterable[torch.Tensor]) -> Iterator[str]:
        """Names of those parameters whose gradients the backward pass in progress has yet to reduce."""
        if self.is_running:
            ours = (self._slots[i].held for param in params if (i := self._index.get(id(param), -1)) in self._home)
            yield from (held.name for held in ours if not held.is_stored_in_parts)

    @property
    def is_running(self) -> bool:
        """Whether a backward pass is under way, or one inside of it, as reentrant checkpointing has them."""
        return self._ending is not None and self._ending() is not None

    @property
    def _has_raised(self) -> bool:
        """Whether the last backward pass has raised: autograd has let go of what it was to call in the end."""
        return self._ending is not None and self._ending() is None

    def notice_unfrozen(self) -> None:
        """Take in parameters that have begun to require gradients since; buckets are then laid out anew."""
        thawed = [slot for slot in self._left_out if slot.held.param.requires_grad]
        if not thawed:
            return
        me = weakref.ref(self)
        for slot in thawed:
            param = slot.held.param
            if id(param) not in self._handles and not slot.held.is_stored_in_parts:
                self._handles[id(param)] = [param.register_post_accumulate_grad_hook(_calling(me))]
                if slot.held.cut is not None:
                    self._handles[id(param)].append(param.register_hook(_announcing(me)))
        self._learned = False
        self._lay_out([(i, self.due(i)) for i in reversed(range(len(self._slots)))])

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside leave each rank its own sum of gradients; the next one outside reduces it.

        Those of parameters that are stored in parts are reduced all the same: a sum has no place to stay in.
        """
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    @contextmanager
    def keep(self) -> Iterator[None]:
        """Backward passes inside leave each rank its own sum of all gradients, which `reduce_now` reduces."""
        before, self._keeping = self._keeping, True
        try:
            with self.no_sync():
                yield
        finally:
            self._keeping = before

    # --- one backward pass --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A backward pass has reached this model: reduce when it ends, whatever it leaves unused."""
        if self.is_running:
            return
        if self._has_raised:
            self._drop_what_was_sent()
        if not self.listens:
            return
        ending = functools.partial(self._finish)
        self._ending = weakref.ref(ending)
        self._make_room()
        self._begin()
        self._average_what_is_returned()
        _torch.run_at_end_of_backward(ending)

    def _average_what_is_returned(self) -> None:
        """Let `autograd.grad` return means over the data axes, of parameters that are computed with as they are."""
        for i, slot in enumerate(self._slots):
            if slot.held.is_stored_in_parts or not slot.held.param.requires_grad or not self.due(i):
                continue
            asked = _torch.asks_for_gradient(_torch.accumulation_of(slot.held.param))
            if asked:
                return  # this pass adds to `p.grad`
            if asked is None:
                averaging = functools.partial(_averaged, self, self.due(i), slot.held)
                self._of_this_pass.append(slot.held.param.register_hook(averaging))

    @naming_lost_ranks("backward")
    def averaged(self, grad: torch.Tensor, axes: Axes) -> torch.Tensor:
        """The mean over data ranks of what each has."""
        mean = local_of(grad).clone(memory_format=torch.contiguous_format)
        self.executor.transport(axes).all_reduce(mean).wait()
        mean.mul_(1.0 / math.prod(self.sizes[axis] for axis in axes))
        return _torch.wrap(mean, _torch.spec_of(grad)) if isinstance(grad, DTensor) else mean

    def _forget_this_pass(self) -> None:
        for handle in self._of_this_pass:
            handle.remove()
        self._of_this_pass = []

    def _drop_what_was_sent(self) -> None:
        self._forget_this_pass()
        self.reductions.drop()
        for slot in self._slots:
            slot.unsharded = None
        self.executor.downloads.wait()
        self._ending, self._pass = None, 0

    def _make_room(self) -> None:
        for slot in self._slots if self.in_parts else ():
            _make_room(slot)

    def _show(self) -> None:
        for slot in self._slots if self.in_parts else ():
            _show(slot, self.passes)

    def _begin(self) -> None:
        closing = False
        if self.enabled:
            self._pass = self._pass % self.passes + 1
            closing = self._pass == self.passes
        self._closing = closing and self.passes > 1
        leaving = [b for b in self._buckets if closing or b.at_every_pass]
        leaving = [b for b in leaving if self.enabled or (self._is_stored(b) and not self._keeping)]
        self.reductions.restart(leaving, self._numbers)
        self._used = None
        self._arrived.clear()
        for bucket in self._buckets:
            bucket.reset()

    def leaves(self) -> list[torch.Tensor]:
        """The tensors that autograd gives gradients."""
        leaves = (slot.held.param if slot.held.leaf is None else slot.held.leaf for slot in self._slots)
        return [leaf for leaf in leaves if leaf.requires_grad]

    def take_from_leaves(self) -> None:
        """Keep what the microbatches of a pipeline step have added up, for parameters that are stored in shards."""
        for slot in self._slots:
            if slot.held.leaf is not None:
                slot.add(slot.held.leaf.grad)
                slot.held.leaf = None

    def has_gradient(self, held: Held) -> bool:
        """Whether there is a gradient of this rank's examples, or a reduced one, of a parameter."""
        return self._slots[self._index[id(held.param)]].own is not None

    @contextmanager
    def room_for_gradients(self) -> Iterator[None]:
        """Let gradients be added to the leaves', as during a backward pass; passes inside belong to it."""
        self._make_room()
        ending = functools.partial(self._finish)  # never called: it says that a pass is running
        self._ending = weakref.ref(ending)
        try:
            yield
        finally:
            self._ending = None
            self._show()

    def put_gradients_aside(self) -> list[Aside]:
        """Let gradients accumulate from nothing; returns what there was."""
        self._make_room()
        before: list[Aside] = []
        for slot in self._slots:
            stored, grad = slot.held.is_stored_in_parts, slot.held.param.grad
            before.append((slot.unsharded, grad) if stored else (grad, slot.prior))
            slot.held.param.grad = slot.unsharded = slot.prior = None
        return before

    def multiply_gradients(self, factor: float) -> None:
        grads = [slot.own for slot in self._slots]
        _torch.multiply_all([local_of(grad) for grad in grads if grad is not None], factor)

    def add_gradients(self, before: Sequence[Aside]) -> None:
        """Add what was put aside."""
        self._join(before)
        self._show()

    @naming_lost_ranks("backward")
    def reduce_now(self, before: Sequence[Aside] = ()) -> None:
        """Reduce what backward passes inside of `keep` have added up, as the end of a pass outside of it does.

        Args:
            before: what was put aside, which belongs to it too.
        """
        self._join(before)
        self._begin()
        for slot in reversed(self._slots):
            if slot.own is not None:
                if isinstance(slot.own, DTensor) and slot.held.compute_spec is None:
                    slot.own = plain(slot.own)
                self._take(slot)
        self._finish()

    def _join(self, before: Sequence[Aside]) -> None:
        self._make_room()
        for slot, (own, prior) in zip(self._slots, before, strict=False):
            if slot.held.is_stored_in_parts:
                slot.held.param.grad = prior
            else:
                slot.prior = prior
            slot.add(own)

    @naming_lost_ranks("backward")
    def _on_gradient(self, param: nn.Parameter) -> None:
        if isinstance(param.grad, DTensor) and not isinstance(param, DTensor):
            self._make_plain(param)
        self.begin()
        if self.enabled:
            self._take(self._slots[self._index[id(param)]])

    @naming_lost_ranks("backward")
    def take_unsharded(
        self, held: Sequence[Held], grads: Sequence[torch.Tensor | None], at_once: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Take gradients of parameters that are stored in parts, on their way from unsharded ones to shards.

        Args:
            held: of the parameters.
            grads: of this rank's examples; None where there is none.
            at_once: which of them autograd is to have, because it gives them to others than `param.grad` alone.

        Returns:
            What autograd is to go on with. It is None where `param.grad` gets the gradient when the pass ends.
        """
        self.begin()
        urgent: list[Slot] = []
        for one, grad, now in zip(held, grads, at_once, strict=True):
            slot = self._slots[self._index[id(one.param)]]
            if isinstance(grad, DTensor) and one.compute_spec is None:
                grad = plain(grad)
            home = self._home.get(self._index[id(one.param)])
            sent = home is not None and self.reductions.has_begun(home)
            if now or sent:
                urgent.append(Slot(one, filled=grad is not None, unsharded=grad))
                continue
            slot.add(grad)
            if grad is not None:
                self._take(slot)
        reduced = self._reduced_at_once(urgent)
        return [reduced.get(id(one)) for one in held]

    def _reduced_at_once(self, slots: Sequence[Slot]) -> dict[int, torch.Tensor]:
        """Shards of the mean, of those of which any rank has a gradient. All ranks bring the same parameters."""
        if not slots:
            return {}
        used = torch.tensor([float(slot.filled) for slot in slots], device=self.executor.device)
        if self.data_axes:
            self.executor.transport(self.data_axes).all_reduce(used).wait()
        batches: dict[Any, list[Slot]] = {}
        for slot in slots:
            axes = self.due(self._index[id(slot.held.param)]) + _summed_later(slot)
            batches.setdefault((axes, *_alike(slot.held)), []).append(slot)
        found: dict[int, torch.Tensor] = {}
        for (axes, *_), batch in batches.items():
            bucket = ReduceScatterBucket(self.executor, self.averaging, axes, batch, self._dtype_of(batch))
            bucket.allocate(batch[0].held)
            bucket.begin(0)
            bucket.wait()
            self.executor.downloads.wait()
            found |= {id(slot.held): slot.held.wrap(shard) for slot, shard in zip(batch, bucket.shards, strict=True)}
        return {id(slot.held): found[id(slot.held)] for slot, n in zip(slots, used.tolist(), strict=True) if n > 0}

    def _dtype_of(self, slots: Sequence[Slot]) -> torch.dtype:
        """In which gradients of one bucket travel."""
        return self.dtype or next((slot.held.dtype for slot in slots), torch.float32)

    def _take(self, slot: Slot) -> None:
        """A gradient is there: its bucket may leave."""
        index = self._index[id(slot.held.param)]
        self._arrived[index] = self.due(index) + _summed_later(slot)
        bucket = self._home.get(index)
        if bucket is None:
            slot.own = slot.held.lay_out(slot.own)
            return
        if self.reductions.has_begun(bucket):
            raise ShardingError(
                f'"{slot.held.name}" got a second gradient in one backward pass, after the first was on its way. '
                "Use torch.utils.checkpoint with use_reentrant=False, or run this backward inside shardlib.no_sync."
            )
        if not slot.filled:
            slot.filled = True
            bucket.missing -= 1
        self.reductions.begin_full()

    def _make_plain(self, param: nn.Parameter) -> None:
        """The parameter met DTensors outside of regions. From now on its gradients are made whole as they come."""
        assert param.grad is not None
        param.grad = plain(param.grad)
        self._converting.append(param.register_hook(plain))

    @naming_lost_ranks("backward")
    def _finish(self) -> None:
        """The backward pass has ended: send what is left, in the order all ranks share, and hand the results out."""
        self._ending = None
        self._forget_this_pass()
        for also in self.at_the_end:
            also()
        for slot in (slot for bucket in self.reductions.waiting for slot in bucket.slots):
            slot.filled = slot.filled or slot.own is not None
        self.reductions.finish()
        self.executor.downloads.wait()
        for bucket in self.reductions.buckets:
            bucket.hand_out(self._is_used)
        self._average_passes()
        if self.enabled and not self.is_between_passes() and (self.reductions.buckets or not self._buckets):
            for also in self.at_the_end_of_steps:
                also()
        self.reductions.restart((), {})
        self._show()
        if self.enabled and not self._learned:
            self._learn()

    def _average_passes(self) -> None:
        """What no bucket carries, since no axis is to be summed over, is still a sum over the passes of a step."""
        if self._closing:
            rest = [slot.held.param.grad for i, slot in enumerate(self._slots) if i not in self._home]
            if grads := [local_of(grad) for grad in rest if grad is not None]:
                _torch.multiply_all(grads, self.averaging.over(()))
        self._closing = False

    # --- gradients that ranks lack ------------------------------------------------------------------------------------

    def _agree_on_missing(self, count: torch.Tensor) -> None:
        """A rank that lacks a gradient which another one has takes part in it; one that none has stays None.

        In a dry run nothing can be counted, and all ranks are taken to be alike.
        """
        if _torch.has_values(count) and count.item():
            used = torch.tensor([float(slot.filled) for slot in self._slots], device=count.device)
            self.executor.transport(self.data_axes).all_reduce(used).wait()
            self._used = [number > 0 for number in used.tolist()]

    def _is_used(self, slot: Slot) -> bool:
        return slot.filled or (self._used is not None and self._used[self._index[id(slot.held.param)]])

    # --- laying out ---------------------------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Lay buckets out in the order in which this backward pass made gradients, the same on all ranks."""
        seen = list(self._arrived.items())
        if self.data_axes:
            seen = _first_ranks(seen, self.executor.group(tuple(self.mesh.mesh_dim_names or ())))
        known = dict(seen)
        rest = [i for i in reversed(range(len(self._slots))) if i not in known]
        self._lay_out([*seen, *((i, self.due(i)) for i in rest)])
        self._learned = True

    def _lay_out(self, order: Sequence[tuple[int, Axes]]) -> None:
        self._left_out = [slot for slot in self._slots if not slot.held.param.requires_grad]
        batches = in_batches(
            [(self._slots[i], axes) for i, axes in order if axes and self._slots[i].held.param.requires_grad],
            alone=lambda one: self._goes_alone(one[0].held),
            key=lambda one: (one[1], *_alike(one[0].held)),
            size=lambda one: one[0].held.memory.nbytes,
            limit=self.bucket_bytes,
        )
        self._buckets = [self._bucket([slot for slot, _ in batch], batch[0][1]) for batch in batches]
        if self.data_axes and self._buckets:
            self._close()
        divided = next((s.held for bucket in self._buckets for s in bucket.slots if s.held.cut is not None), None)
        for bucket in self._buckets:
            if isinstance(bucket, ReduceScatterBucket):
                like = bucket.slots[0].held if bucket.slots else divided
                assert like is not None
                bucket.allocate(like)
            elif isinstance(bucket, AllReduceBucket) and (bucket.last or not self._is_alone(bucket)):
                bucket.allocate()
            bucket.reset()
        self._home = {self._index[id(s.held.param)]: bucket for bucket in self._buckets for s in bucket.slots}
        self._numbers = {id(bucket): i for i, bucket in enumerate(self._buckets)}

    def _bucket(self, slots: list[Slot], axes: Axes, *, like: ReduceBucket | None = None) -> ReduceBucket:
        """A bucket for gradients; an empty one of the kind of another."""
        common = self.executor, self.averaging, axes, slots, self._dtype_of(slots)
        if isinstance(like, ReduceScatterBucket) or (slots and slots[0].held.cut is not None):
            return ReduceScatterBucket(*common)
        return AllReduceBucket(*common, on_mesh=self.in_parts)

    def _is_stored(self, bucket: ReduceBucket) -> bool:
        """Whether a bucket leaves inside of `no_sync` too; an empty one, which closes a pass, does so with others."""
        return any(one.is_stored_in_parts for one in ([bucket] if bucket.slots else self._buckets))

    def _is_alone(self, bucket: ReduceBucket) -> bool:
        return len(bucket.slots) == 1 and self._goes_alone(bucket.slots[0].held)

    def _goes_alone(self, held: Held) -> bool:
        """Whether a gradient is a bucket of its own, which is sent from where it lies."""
        return self.dtype in (None, held.dtype) and goes_alone(held.memory, held.cut)

    def _close(self) -> None:
        """Put a bucket at the end that leaves at every pass, and has room to tell how many gradients are missing."""
        regular = [b for b in self._buckets if b.at_every_pass] or self._buckets
        regular = [b for b in regular if b.is_stored_in_parts] or regular
        packed = [b for b in regular if not self._is_alone(b) and {*self.data_axes} <= {*b.axes}]
        if packed:
            closing = packed[-1]
            self._buckets.remove(closing)
        else:
            closing = self._bucket([], self.data_axes, like=regular[0])
        closing.last = True
        self._buckets.append(closing)


def _alike(held: Held) -> tuple[Any, ...]:
    """What gradients in one bucket have in common. What leaves for the host leaves no memory of others behind."""
    return held.axes, held.is_stored_in_parts, held.keeps_gradient, held.dtype, "grad" in held.hosted


def _make_room(slot: Slot) -> None:
    """Let autograd add to the parameter's gradient: a full gradient cannot be accumulated into a shard."""
    held, grad = slot.held, slot.held.param.grad
    if held.is_stored_in_parts:
        return
    if held.cut is None:
        if held.is_part(grad) and isinstance(held.param, DTensor):
            held.param.grad = _torch.wrap(local_of(grad), _torch.spec_of(held.param))  # type: ignore[arg-type,assignment]
        return
    slot.prior = None
    if grad is not None and held.is_part(grad):
        mine = local_of(grad)
        slot.prior = mine.clone() if slot.in_bucket or held.keeps_gradient else mine
        held.param.grad = None


def _show(slot: Slot, passes: int) -> None:
    """Let `param.grad` be what there is: of passes that were not reduced, this rank's own full gradient.

    This rank's shard of an earlier mean is added to it, as large as makes the mean what it was.
    """
    held, prior, own = slot.held, slot.prior, slot.held.param.grad
    if prior is None:
        return
    slot.prior = None
    if own is None:
        held.param.grad = held.wrap(prior)  # type: ignore[assignment]
        return
    assert held.cut is not None and held.transport is not None
    factor = passes * held.transport.count / _summands(own)
    for place, chosen in held.cut.places(local_of(own), held.transport.index):
        mine = prior.narrow(held.cut.dim, chosen.start, chosen.stop - chosen.start)
        place.add_(mine.to(place.device), alpha=factor)


def _calling(reducer: weakref.ref[GradientReducer]) -> Callable[[nn.Parameter], None]:
    """A hook that does not keep its reducer, which keeps the parameter: through a hook the collector sees no cycle."""

    def hook(leaf: nn.Parameter) -> None:
        alive = reducer()
        if alive is not None and (alive.listens or isinstance(leaf.grad, DTensor)):
            alive._on_gradient(leaf)

    return hook


def _announcing(reducer: weakref.ref[GradientReducer]) -> Callable[[torch.Tensor], None]:
    """A hook that tells of a backward pass before the first gradient is added to what is there."""

    def hook(_grad: torch.Tensor) -> None:
        if (alive := reducer()) is not None:
            alive.begin()

    return hook


def _averaged(reducer: GradientReducer, axes: Axes, held: Held, grad: torch.Tensor) -> torch.Tensor:
    """A hook of one backward pass: the mean of a gradient over data ranks, which all ask for the same ones."""
    if not torch.is_grad_enabled():
        return reducer.averaged(held.lay_out(grad), axes)
    return _Mean.apply(grad, reducer, axes)


class _Mean(torch.autograd.Function):
    """The mean over data ranks. The loss is a mean over them, so that this is its own adjoint."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, reducer: GradientReducer, axes: Axes) -> torch.Tensor:  # type: ignore[override]
        ctx.reducer, ctx.axes = reducer, axes
        return reducer.averaged(x, axes)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return _Mean.apply(grad, ctx.reducer, ctx.axes), None, None


def _summands(grad: torch.Tensor) -> int:
    """How many ranks of the model axes hold a partial sum of a gradient."""
    if not isinstance(grad, DTensor):
        return 1
    places = zip(grad.device_mesh.shape, grad.placements, strict=True)
    return math.prod(size for size, place in places if place.is_partial())


def _summed_later(slot: Slot) -> Axes:
    """The model axes over which a gradient is a partial sum of what is the same on all their ranks."""
    grad, spec = slot.own, slot.held.compute_spec
    if not isinstance(grad, DTensor) or spec is None:
        return ()
    names = grad.device_mesh.mesh_dim_names or ()
    places = zip(names, grad.placements, spec.placements, strict=True)
    return tuple(name for name, have, want in places if have.is_partial("sum") and want.is_replicate())


def _first_ranks(seen: list[tuple[int, Axes]], group: dist.ProcessGroup) -> list[tuple[int, Axes]]:
    """What the first rank of the mesh saw, on every rank."""
    box = [seen]
    dist.broadcast_object_list(box, group_src=0, group=group)
    return box[0]

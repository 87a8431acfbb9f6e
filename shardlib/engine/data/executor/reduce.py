"""Buckets of gradients: reduced by an all-reduce, or by a reduce-scatter where each rank owns shards of them."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardlib._plan import Bucket as PlannedBucket
from shardlib._plan import Movement
from shardlib.engine import _torch
from shardlib.engine.data.executor import Executor
from shardlib.engine.data.executor.bucket import Bucket
from shardlib.engine.data.params import Axes, ParamState, local_of
from shardlib.engine.ranks.transport import Handle
from shardlib.layout import ShardSpec

__all__ = [
    "AllReduceBucket",
    "Averaging",
    "GradientBucket",
    "ReduceBucket",
    "ReduceScatterBucket",
    "Slot",
]


@dataclass(frozen=True)
class GradientBucket:
    """Gradients that are summed together, as a registered reduction receives them.

    Attributes:
        tensor: this rank's gradients in one flat tensor, which the reduction overwrites with the sum.
        group: the group over which the gradients are summed.
        axes: the mesh axes of the group.
        names: the names of the parameters, in order.
        index: the index of the bucket; after the first step, every step has the same buckets in the same order.
    """

    tensor: torch.Tensor
    group: dist.ProcessGroup
    axes: tuple[str, ...]
    names: tuple[str, ...]
    index: int


@dataclass(frozen=True)
class Averaging:
    """The factors that turn sums of gradients into means.

    Attributes:
        data_axes: the mesh axes (of size > 1) whose ranks train on different examples.
        sizes: the sizes of all mesh axes.
        passes: the number of backward passes in a step.
    """

    data_axes: Axes
    sizes: dict[str, int]
    passes: int

    def over(self, axes: Axes) -> float:
        """Return the factor that turns a sum over these axes and all passes into a mean over data ranks and passes."""
        return 1.0 / (math.prod(self.sizes[axis] for axis in self.data_axes if axis in axes) * self.passes)


@dataclass(eq=False)
class Slot:
    """The gradient of one parameter.

    Between backward passes, `param.grad` is the only state: a gradient that a user sets to None or zero is gone. Its
    memory is its own: no later pass writes into a gradient that a user has kept.

    Attributes:
        param_state: the parameter.
        index: the index of the parameter among all.
        bucket: the bucket that reduces the gradient; None where the gradient is not reduced.
        filled: whether the running backward pass has made the gradient.
        accumulated: while a backward pass runs, the reduced gradient of earlier passes, to which the new one is added;
            for a parameter that is not stored in shards.
        unsharded: while a backward pass runs, the full gradient of a parameter that is stored in shards.
    """

    param_state: ParamState
    index: int
    bucket: ReduceBucket | None = None
    filled: bool = False
    accumulated: torch.Tensor | None = None
    unsharded: torch.Tensor | None = None

    @property
    def unreduced(self) -> torch.Tensor | None:
        """The full gradient of this rank's examples, in the compute layout."""
        return self.unsharded if self.param_state.is_stored_sharded else self.param_state.param.grad

    @unreduced.setter
    def unreduced(self, grad: torch.Tensor | None) -> None:
        if self.param_state.is_stored_sharded:
            self.unsharded = grad
        else:
            self.param_state.param.grad = grad

    def add(self, grad: torch.Tensor | None) -> None:
        """Add to the unreduced gradient."""
        if grad is not None:
            self.unreduced = grad if self.unreduced is None else self.unreduced + grad


@dataclass(eq=False)
class ReduceBucket(ABC):
    """Gradients that are reduced together.

    Attributes:
        executor: the executor that sends the gradients.
        averaging: the factors of the mean.
        axes: the mesh axes over which the gradients are summed.
        slots: the gradients.
        dtype: the dtype in which the gradients are sent.
        planned: the bucket of the plan, or one of the same form where this one is empty.
        like: the first parameter of that bucket.
        flags: the number of flags that the bucket carries if it closes a backward pass: which gradients a rank has.
        missing: the number of gradients that the running backward pass has yet to make.
        begun: whether the bucket has been sent in the running backward pass.
    """

    executor: Executor
    averaging: Averaging
    axes: Axes
    slots: list[Slot]
    dtype: torch.dtype
    planned: PlannedBucket
    like: ParamState
    flags: int = 0
    missing: int = 0
    begun: bool = False

    @functools.cached_property
    def workspace_bytes(self) -> int:
        """The workspace bytes that the bucket may need while it is pending; the same on all ranks."""
        return self.planned.workspace_bytes if self.slots else 0

    @property
    def scale(self) -> float:
        return self.averaging.over(self.axes)

    def reset(self) -> None:
        """Prepare for a new backward pass."""
        self.missing = len(self.slots)
        for slot in self.slots:
            slot.filled = False

    @abstractmethod
    def begin(self, flags: torch.Tensor | None) -> None:
        """Send the gradients, and the flags of this rank in the bucket that closes the pass."""

    @abstractmethod
    def advance(self) -> None:
        """Begin what follows the first collective, before the next bucket begins."""

    @abstractmethod
    def wait(self) -> torch.Tensor | None:
        """Wait for the means; return the sums of the flags over all ranks, from the bucket that closes the pass."""

    @abstractmethod
    def set_grads(self, is_used: Callable[[Slot], bool]) -> None:
        """Set the gradients of the parameters."""

    @abstractmethod
    def drop(self) -> None:
        """Wait for the pending reduction and drop it, when the next backward pass begins after one that has raised."""

    def _movements(self) -> tuple[Movement, ...]:
        return self.planned.movements if self.slots else ()

    def _gradients(self) -> list[torch.Tensor | None]:
        """Return local gradients in the compute layout, but for the partial sums that this bucket reduces."""
        return [self._gradient(slot) if slot.filled else None for slot in self.slots]

    def _gradient(self, slot: Slot) -> torch.Tensor:
        grad = slot.param_state.lay_out(slot.unreduced, keep_partial=self.axes)
        if grad.requires_grad:  # create_graph=True: what the graph has saved stays as it is
            grad = grad.detach().clone()
        if not isinstance(grad, DTensor):
            return grad
        if self.axes == self.averaging.data_axes:
            return local_of(grad)
        partial = (*self.averaging.data_axes, *slot.param_state.partial_axes(grad))
        # The gradient is replicated on axes over which this bucket sums, since other gradients are partial there.
        copies = math.prod(self.averaging.sizes[axis] for axis in self.axes if axis not in partial)
        return local_of(grad) if copies == 1 else local_of(grad) / copies


@dataclass(eq=False)
class AllReduceBucket(ReduceBucket):
    """Gradients whose mean every rank gets, by an all-reduce.

    Attributes:
        on_mesh: whether gradients of DTensor parameters become DTensors on the whole mesh, as sharded gradients are:
            torch's own `clip_grad_norm_` takes DTensors of one mesh.
        sizes: the number of elements of the place of each gradient in the buffer; none where the only gradient is
            reduced in place. A place is as large as the rank with the largest local shape needs: a replicated gradient
            must have the same offset on all ranks, even if they differ in the size of other shards, since the order of
            a sum depends on the offset.
        locals: the local tensors that are sent, which get the means; None where this rank has no gradient.
        sent: the buffer that is reduced.
        borrowed: the workspace buffer that it is a part of, where gradients are packed.
        work: the pending all-reduce.
    """

    on_mesh: bool = False
    sizes: list[int] = field(default_factory=list)
    locals: list[torch.Tensor | None] = field(default_factory=list)
    sent: torch.Tensor | None = None
    borrowed: torch.Tensor | None = None
    work: Any = None

    def __post_init__(self) -> None:
        if self.flags or not (self.planned.alone and self.like.memory.is_contiguous()):
            self.sizes = [slot.param_state.max_local_numel for slot in self.slots]
        self._views: dict[int, list[torch.Tensor]] = {}  # by the address of the buffer

    @property
    def is_packed(self) -> bool:
        """Whether the gradients are copied into a buffer."""
        return bool(self.sizes) or bool(self.flags)

    def begin(self, flags: torch.Tensor | None) -> None:
        self.sent = self._packed(flags)
        self.work = self.executor.transport(self.axes).all_reduce(self.sent, self._movements())

    def begin_by(self, reduction: Callable[[GradientBucket], Any], flags: torch.Tensor | None, index: int) -> None:
        """Send the gradients by a registered reduction, as the bucket of that index; flags are reduced apart."""
        self.sent = self._packed(flags)
        transport = self.executor.transport(self.axes)
        transport.note("all_reduce", self._movements())
        flat = self.sent.as_strided((self.sent.numel(),), (1,), self.sent.storage_offset())
        if self.flags:
            dist.all_reduce(flat[-self.flags :], group=transport.group)
        names = tuple(slot.param_state.name for slot in self.slots)
        bucket = GradientBucket(flat[: flat.numel() - self.flags], transport.group, self.axes, names, index)
        self.work = reduction(bucket)

    def advance(self) -> None:
        """Do nothing: no collective follows an all-reduce."""

    def _packed(self, flags: torch.Tensor | None) -> torch.Tensor:
        """Return the buffer to reduce: a workspace buffer, or the only gradient."""
        self.locals = self._gradients()
        if not self.is_packed:
            (slot,) = self.slots
            self.locals = [_dense(self.locals[0], slot.param_state)]
            return self.locals[0]  # type: ignore[return-value]
        numel = sum(self.sizes) + self.flags
        self.borrowed = self.executor.workspace.take(numel, self.dtype, self.executor.device)
        flat = self.borrowed[:numel]
        there = [(view, grad) for view, grad in zip(self._places(flat), self.locals, strict=True) if grad is not None]
        if len(there) < len(self.locals) or numel - self.flags > sum(view.numel() for view, _ in there):
            flat.zero_()
        if there:
            _torch.copy_all([view for view, _ in there], [grad for _, grad in there])
        if flags is not None:
            flat[-self.flags :] = flags
        return flat

    def _places(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the place of each gradient in a buffer, with the strides of its parameter."""
        if flat.data_ptr() not in self._views:
            places = []
            for slot, piece in zip(self.slots, flat[: sum(self.sizes)].split(self.sizes), strict=True):
                local = local_of(slot.param_state.param)
                strides = torch.empty_like(local, device="meta").stride()
                places.append(piece[: local.numel()].as_strided(local.shape, strides))
            self._views = {flat.data_ptr(): places}
        return self._views[flat.data_ptr()]

    def wait(self) -> torch.Tensor | None:
        flat = self.sent
        assert flat is not None
        if self.work is not None:
            self.work.wait()
        self.work = None
        flags = flat[-self.flags :].clone() if self.flags else None
        if self.scale != 1:
            flat.mul_(self.scale)
        if self.is_packed:
            places = self._places(flat)
            there = [(grad, place) for grad, place in zip(self.locals, places, strict=True) if grad is not None]
            if there:
                _torch.copy_all([grad for grad, _ in there], [place for _, place in there])
            for i, grad in enumerate(self.locals):
                if grad is None:  # another rank may have one
                    self.locals[i] = places[i].to(self.slots[i].param_state.grad_dtype, copy=True)
            self._give_workspace()
        self.sent = None
        return flags

    def _give_workspace(self) -> None:
        assert self.borrowed is not None
        self.executor.workspace.give(self.borrowed)
        self.borrowed = None

    def set_grads(self, is_used: Callable[[Slot], bool]) -> None:
        for slot, local in zip(self.slots, self.locals, strict=True):
            if is_used(slot):
                assert local is not None
                slot.param_state.param.grad = self._as_grad(slot.param_state, local)
        self.locals = []

    def drop(self) -> None:
        if self.work is not None:
            self.work.wait()
        if self.sent is not None and self.is_packed:
            self._give_workspace()
        elif self.sent is not None:
            (slot,) = self.slots
            grad = slot.param_state.param.grad
            if grad is not None and _torch.share_memory(local_of(grad), self.sent):
                self.sent.div_(self.executor.transport(self.axes).count)  # the sum over ranks, which is summed again
        self.work, self.sent, self.locals = None, None, []

    def _as_grad(self, param_state: ParamState, local: torch.Tensor) -> torch.Tensor:
        param = param_state.param
        if not isinstance(param, DTensor):
            return local
        return param_state.wrap(local) if self.on_mesh else _torch.wrap(local, _torch.spec_of(param))


@dataclass(eq=False)
class ReduceScatterBucket(ReduceBucket):
    """Gradients of which each rank gets the mean of its own shards, by a reduce-scatter.

    Attributes:
        bucket: the bucket that moves the gradients; where it closes the pass, followed by the flags for each rank.
        remaining_axes: the axes that do not split the shards, over which an all-reduce follows.
        sent: the gradients, until they are reduced.
        moving: the pending reduce-scatter.
        summing: the pending all-reduce over the remaining axes.
        out: this rank's shards in one flat tensor, new in each pass.
        shards: this rank's shards.
    """

    bucket: Bucket = field(init=False)
    remaining_axes: Axes = ()
    sent: list[torch.Tensor] = field(default_factory=list)
    moving: Handle | None = None
    summing: Handle | None = None
    out: torch.Tensor | None = None
    shards: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        transport, device = self.like.transport, self.executor.device
        assert transport is not None
        specs = [slot.param_state.shard_spec for slot in self.slots if slot.param_state.shard_spec is not None]
        if self.flags:
            each = tuple((slice(r * self.flags, (r + 1) * self.flags),) for r in range(transport.count))
            specs.append(ShardSpec((transport.count * self.flags,), 0, each))
        self.bucket = Bucket(specs, transport, self.dtype, device, self.executor.workspace)
        self.remaining_axes = tuple(axis for axis in self.axes if axis not in self.planned.scattered)

    def begin(self, flags: torch.Tensor | None) -> None:
        self.sent = [_dense(grad, slot.param_state) for slot, grad in zip(self.slots, self._gradients(), strict=True)]
        if flags is not None:
            self.sent.append(flags.to(self.dtype).repeat(self.bucket.transport.count))
        self.moving = self.bucket.reduce(self.sent, self._movements())
        if self.like.is_stored_sharded:
            for slot in self.slots:
                slot.unsharded = None

    def advance(self) -> None:
        if self.remaining_axes and self.moving is not None:
            self._sum()

    def _sum(self) -> None:
        """Wait for the reduce-scatter; begin the all-reduce of shards that other ranks have too."""
        assert self.moving is not None
        self.out = torch.empty(self.bucket.shard_numel, dtype=self.bucket.dtype, device=self.bucket.device)
        self.bucket.sum_into(self.moving, self.out, 1.0 if self.remaining_axes or self.flags else self.scale)
        self.moving, self.sent = None, []
        if self.remaining_axes:
            self.summing = self.executor.transport(self.remaining_axes).all_reduce(self.out, self._movements())

    def wait(self) -> torch.Tensor | None:
        if self.moving is not None:
            self._sum()
        if self.summing is not None:
            self.summing.wait()
            self.summing = None
        assert self.out is not None
        flags = self.out[-self.flags :].clone() if self.flags else None
        if self.remaining_axes or self.flags:
            self.out.mul_(self.scale)
        shards = zip(self.slots, self.bucket.shards_in(self.out), strict=False)
        self.shards = [self._to_host(slot.param_state, shard) for slot, shard in shards]
        if not self.like.is_stored_sharded:
            self._end_full_gradients()
        return flags

    def _end_full_gradients(self) -> None:
        """Let `p.grad` be no longer this rank's full gradient, which it was until now: should the pass raise, it is
        what the pass has made so far."""
        for slot in self.slots:
            slot.param_state.param.grad = slot.accumulated  # type: ignore[assignment]
        if all(slot.filled and "grad" not in slot.param_state.offloaded for slot in self.slots):
            self.set_grads(lambda slot: True)  # no other rank needs to be asked, and no copy is under way

    def drop(self) -> None:
        if self.moving is not None:
            shards = torch.empty(self.bucket.shard_numel, dtype=self.bucket.dtype, device=self.bucket.device)
            self.bucket.sum_into(self.moving, shards, 1.0)
        if self.summing is not None:
            self.summing.wait()
        self.moving, self.summing, self.sent, self.out, self.shards = None, None, [], None, []

    def _to_host(self, param_state: ParamState, shard: torch.Tensor) -> torch.Tensor:
        """Begin to copy a shard to the host, where the plan offloads the gradient; backward goes on meanwhile."""
        shard = shard.to(param_state.grad_dtype)
        if "grad" not in param_state.offloaded:
            return shard
        param_state.copied("gradients")
        return self.executor.downloads.begin(shard)

    def set_grads(self, is_used: Callable[[Slot], bool]) -> None:
        if not self.shards:  # they were set when they had come
            return
        for slot, shard in zip(self.slots, self.shards, strict=True):
            param_state, accumulated = slot.param_state, slot.accumulated
            slot.accumulated = None
            if param_state.is_stored_sharded:
                accumulated = param_state.param.grad
            if accumulated is not None:
                local_of(accumulated).add_(shard)
                param_state.param.grad = accumulated  # type: ignore[assignment]
            elif is_used(slot):
                param_state.param.grad = param_state.wrap(shard)  # type: ignore[assignment]
        self.out, self.shards = None, []


def _dense(grad: torch.Tensor | None, param_state: ParamState) -> torch.Tensor:
    """Return a gradient with the strides of its parameter; zeros where there is none."""
    like = param_state.memory
    if grad is None:
        return torch.zeros_like(like)
    return grad if grad.stride() == like.stride() else torch.empty_like(like, dtype=grad.dtype).copy_(grad)

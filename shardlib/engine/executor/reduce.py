"""Gradients that are reduced together: by an all-reduce, or by a reduce-scatter where ranks own shards of them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardlib._plan import Movement
from shardlib.engine import _torch
from shardlib.engine.executor import Executor
from shardlib.engine.executor.bucket import Bucket
from shardlib.engine.held import Axes, Held, local_of
from shardlib.engine.transport import Handle
from shardlib.layout import Cut

__all__ = ["AllReduceBucket", "Averaging", "GradientBucket", "ReduceBucket", "ReduceScatterBucket", "Slot"]


@dataclass(frozen=True)
class GradientBucket:
    """Gradients that are summed together, as a registered reduction gets them.

    Attributes:
        tensor: this rank's gradients, one behind the other, of one dim; to be overwritten with the sum.
        group: over which they are summed.
        axes: the mesh axes that these are.
        names: of the parameters, in order.
        index: which bucket it is; the same ones come in the same order at every step, once the first has been.
    """

    tensor: torch.Tensor
    group: dist.ProcessGroup
    axes: tuple[str, ...]
    names: tuple[str, ...]
    index: int


@dataclass(frozen=True)
class Averaging:
    """What makes sums of gradients means.

    Attributes:
        data_axes: mesh axes (of size > 1) whose ranks train on different examples.
        sizes: of all mesh axes.
        passes: backward passes that make one step.
    """

    data_axes: Axes
    sizes: dict[str, int]
    passes: int

    def over(self, axes: Axes) -> float:
        """The factor that makes a sum over these axes and all passes a mean over data ranks and passes."""
        return 1.0 / (math.prod(self.sizes[axis] for axis in self.data_axes if axis in axes) * self.passes)


@dataclass(eq=False)
class Slot:
    """The gradient of one parameter.

    Attributes:
        filled: the backward pass in progress has made it.
        in_bucket: this rank's shard of it lies in memory of its bucket, which the next backward pass overwrites.
        prior: while a backward pass runs, this rank's shard of earlier ones, to which the new one is added; for a
            parameter that is not stored in shards.
        unsharded: while a backward pass runs, the full gradient of a parameter that is stored in shards.

    Between backward passes `param.grad` is all there is: what a user sets to None or zero is gone.
    """

    held: Held
    filled: bool = False
    in_bucket: bool = False
    prior: torch.Tensor | None = None
    unsharded: torch.Tensor | None = None

    @property
    def own(self) -> torch.Tensor | None:
        """The gradient of this rank's examples, laid out as the parameter is while it is computed with."""
        return self.unsharded if self.held.is_stored_in_parts else self.held.param.grad

    @own.setter
    def own(self, grad: torch.Tensor | None) -> None:
        if self.held.is_stored_in_parts:
            self.unsharded = grad
        else:
            self.held.param.grad = grad

    def add(self, grad: torch.Tensor | None) -> None:
        if grad is not None:
            self.own = grad if self.own is None else self.own + grad


@dataclass(eq=False)
class ReduceBucket(ABC):
    """Gradients that leave together.

    Attributes:
        executor: sends them.
        averaging: makes sums means.
        axes: the mesh axes over which they are summed.
        slots: the gradients.
        dtype: in which they travel.
        last: whether it closes a backward pass and carries the number of gradients that ranks lack; of others, several
            may be under way.
        missing: gradients that are still to come.
    """

    executor: Executor
    averaging: Averaging
    axes: Axes
    slots: list[Slot]
    dtype: torch.dtype
    last: bool = False
    missing: int = 0

    @property
    def is_stored_in_parts(self) -> bool:
        """Whether its parameters are stored in shards: it leaves inside of `no_sync` too."""
        return bool(self.slots) and self.slots[0].held.is_stored_in_parts

    @property
    def at_every_pass(self) -> bool:
        """Whether it leaves after each of the backward passes that make a step."""
        return False

    @property
    def borrows(self) -> int:
        """Bytes that it borrows while it is under way, the same number on all ranks."""
        return 0

    @property
    def scale(self) -> float:
        return self.averaging.over(self.axes)

    def reset(self) -> None:
        self.missing = len(self.slots)
        for slot in self.slots:
            slot.filled = False

    @abstractmethod
    def begin(self, lacking: int, number: int = 0, reduction: Callable[[GradientBucket], Any] | None = None) -> None:
        """Send the gradients.

        Args:
            lacking: how many gradients of this pass this rank does not have, for the last bucket.
            number: of this bucket among all.
            reduction: a user's own in the place of an all-reduce.
        """

    @abstractmethod
    def wait(self) -> torch.Tensor | None:
        """Wait for the means; returns how many gradients ranks lack in all, from the last bucket."""

    @abstractmethod
    def hand_out(self, is_used: Callable[[Slot], bool]) -> None:
        """Give the parameters their gradients."""

    @abstractmethod
    def drop(self) -> None:
        """Wait for what was sent, and forget it: the backward pass that sent it has raised."""

    def _carries(self) -> Iterator[Movement]:
        for slot in self.slots:
            if (movement := slot.held.movements.get("gradients")) is not None:
                yield movement

    def _gradients(self) -> list[torch.Tensor | None]:
        """Local gradients, laid out as their parameters but for the partial sums that this bucket adds up."""
        return [self._gradient(slot) if slot.filled else None for slot in self.slots]

    def _gradient(self, slot: Slot) -> torch.Tensor:
        grad = slot.held.lay_out(slot.own, keep_partial=self.axes)
        if self.axes == self.averaging.data_axes:
            return local_of(grad)
        partial = (*self.averaging.data_axes, *_partial_axes(grad))
        # Alike on all ranks of an axis over which others in this bucket are still to be summed.
        copies = math.prod(self.averaging.sizes[axis] for axis in self.axes if axis not in partial)
        return local_of(grad) if copies == 1 else local_of(grad) / copies


@dataclass(eq=False)
class AllReduceBucket(ReduceBucket):
    """Every rank gets the mean.

    Attributes:
        on_mesh: whether gradients of DTensor parameters become DTensors on the whole mesh, beside others in shards:
            torch's own `clip_grad_norm_` takes DTensors of one mesh.
        flat: memory of the bucket; None where its one gradient is reduced where it lies. Each gradient has as much room
            as the largest rank's shard of it needs: what is the same on ranks whose other shards differ in size has to
            lie in the same place on all of them, since the order of a sum depends on that.
        views: the local part of each gradient, inside `flat`.
        shown: what `p.grad` becomes; empty where gradients travel in another dtype than theirs.
    """

    on_mesh: bool = False
    flat: torch.Tensor | None = None
    views: list[torch.Tensor] = field(default_factory=list)
    shown: list[torch.Tensor] = field(default_factory=list)
    sent: torch.Tensor | None = None
    work: Any = None

    def allocate(self) -> None:
        room = [slot.held.room for slot in self.slots]
        self.flat = torch.zeros(sum(room) + self.last, dtype=self.dtype, device=self.executor.device)
        for slot, piece in zip(self.slots, self.flat[: sum(room)].split(room), strict=True):
            # In the order in memory of the parameter: fused optimizers walk both as if they were flat.
            local = local_of(slot.held.param)
            view = piece[: local.numel()].as_strided(local.shape, torch.empty_like(local, device="meta").stride())
            self.views.append(view)
            if view.dtype == local.dtype:
                self.shown.append(self._shown(slot.held, view))

    def begin(self, lacking: int, number: int = 0, reduction: Callable[[GradientBucket], Any] | None = None) -> None:
        grads = self._gradients()
        if self.flat is None:
            self.sent = _dense(grads[0], self.slots[0].held)
        else:
            self.sent = self.flat
            self._pack(grads, lacking)
        transport = self.executor.transport(self.axes)
        transport.note("all_reduce", self._carries())
        if reduction is None:
            self.work = transport.all_reduce(self.sent)
        else:
            self.work = self._by_the_users(reduction, number)

    def _by_the_users(self, reduction: Callable[[GradientBucket], Any], number: int) -> Any:
        """The count of missing gradients is reduced apart: it has to be exact."""
        assert self.sent is not None
        group = self.executor.group(self.axes)
        flat = self.sent.as_strided((self.sent.numel(),), (1,))
        if self.last:
            dist.all_reduce(flat[-1:], group=group)
        names = tuple(slot.held.name for slot in self.slots)
        return reduction(GradientBucket(flat[: flat.numel() - self.last], group, self.axes, names, number))

    def _pack(self, grads: list[torch.Tensor | None], lacking: int) -> None:
        assert self.flat is not None
        targets, sources = [], []
        for view, grad in zip(self.views, grads, strict=True):
            if grad is None:
                view.zero_()
            elif grad.data_ptr() != view.data_ptr():
                targets.append(view)
                sources.append(grad)
        if targets:
            _torch.copy_all(targets, sources)
        if self.last:
            self.flat[-1] = lacking

    def wait(self) -> torch.Tensor | None:
        assert self.sent is not None
        if self.work is not None:
            self.work.wait()
        self.work = None
        lacking = self.sent[-1].clone() if self.last else None
        if self.scale != 1:
            self.sent.mul_(self.scale)
        return lacking

    def hand_out(self, is_used: Callable[[Slot], bool]) -> None:
        for i, slot in enumerate(self.slots):
            if is_used(slot):
                slot.held.param.grad = self.shown[i] if self.shown else self._shown(slot.held, self._result(i))
        self.sent = None

    def drop(self) -> None:
        if self.work is not None:
            self.work.wait()
        for slot in self.slots:
            grad = slot.held.param.grad
            if grad is not None and self.sent is not None and _torch.share_memory(local_of(grad), self.sent):
                slot.held.param.grad = None
        self.work = self.sent = None

    def _result(self, index: int) -> torch.Tensor:
        """A mean that does not lie where `p.grad` shows it: of a gradient that moved alone, or in another dtype."""
        assert self.sent is not None
        if self.flat is None:
            return self.sent
        return self.views[index].to(self.slots[index].held.dtype)

    def _shown(self, held: Held, local: torch.Tensor) -> torch.Tensor:
        if not isinstance(held.param, DTensor):
            return local
        return held.wrap(local) if self.on_mesh else _torch.wrap(local, _torch.spec_of(held.param))


@dataclass(eq=False)
class ReduceScatterBucket(ReduceBucket):
    """Each rank gets the mean of its own shards.

    Attributes:
        bucket: moves them; where this is the last one, with a count for each rank behind the gradients.
        rest: axes over which shards have to be summed still, since they do not split them.
        sent: the gradients, until they have arrived.
        out: this rank's shards, one behind the other.
        shards: the same apart, where they do not stay in `mine`.
        flat: where full gradients keep their memory, that of the bucket.
        mine: memory of this rank's shards, where they are packed and stay until the next backward pass.
        shown: what `p.grad` becomes, over `mine`.
    """

    bucket: Bucket | None = None
    rest: Axes = ()
    sent: list[torch.Tensor] = field(default_factory=list)
    moving: Handle | None = None
    out: torch.Tensor | None = None
    shards: list[torch.Tensor] = field(default_factory=list)
    flat: torch.Tensor | None = None
    mine: torch.Tensor | None = None
    shown: list[DTensor] = field(default_factory=list)

    @property
    def keeps_gradients(self) -> bool:
        """Whether full gradients keep their memory until the step ends."""
        return bool(self.slots) and self.slots[0].held.keeps_gradient

    @property
    def at_every_pass(self) -> bool:
        return not self.keeps_gradients

    @property
    def borrows(self) -> int:
        assert self.bucket is not None
        return self.bucket.arriving_bytes + (self.bucket.packed_bytes if self.flat is None else 0)

    def allocate(self, like: Held) -> None:
        """`like`: a parameter that is divided as those of this bucket are."""
        transport, device = like.transport, self.executor.device
        assert transport is not None
        cuts = [slot.held.cut for slot in self.slots if slot.held.cut is not None]
        if self.last:
            cuts.append(Cut((transport.count,), 0, tuple((slice(r, r + 1),) for r in range(transport.count))))
        self.bucket = bucket = Bucket(cuts, transport, self.dtype, device, self.executor.workspace)
        self.rest = tuple(axis for axis in self.axes if axis not in like.axes)
        if self.keeps_gradients and not bucket.alone:
            self.flat = torch.zeros(bucket.total, dtype=self.dtype, device=device)
        if not bucket.alone and all(self._stays(slot.held) for slot in self.slots):
            block = None if self.flat is None else bucket.block_of_own(self.flat)
            self.mine = torch.empty(bucket.own, dtype=self.dtype, device=device) if block is None else block
            shards = bucket.parts_in(self.mine)
            self.shown = [slot.held.wrap(shard) for slot, shard in zip(self.slots, shards, strict=False)]
            for slot in self.slots:
                slot.in_bucket = True

    def _stays(self, held: Held) -> bool:
        """Whether `p.grad` may be memory of the bucket."""
        return not held.is_stored_in_parts and held.dtype == self.dtype and "grad" not in held.hosted

    def begin(self, lacking: int, number: int = 0, reduction: Callable[[GradientBucket], Any] | None = None) -> None:
        assert self.bucket is not None
        self.sent = [_dense(grad, slot.held) for slot, grad in zip(self.slots, self._gradients(), strict=True)]
        if self.last:
            counts = (self.bucket.transport.count,)
            self.sent.append(torch.full(counts, lacking, dtype=self.dtype, device=self.executor.device))
        self.moving = self.bucket.reduce(self.sent, self.flat, self._carries())
        for slot in self.slots:
            slot.own = None

    def wait(self) -> torch.Tensor | None:
        assert self.bucket is not None and self.moving is not None
        self.out = self._room()
        self.bucket.sum_into(self.moving, self.out, 1.0 if self.rest or self.last else self.scale)
        if self.rest:
            transport = self.executor.transport(self.rest)
            transport.note("all_reduce", self._carries())
            transport.all_reduce(self.out).wait()
        lacking = self.out[-1].clone() if self.last else None
        if self.rest or self.last:
            self.out.mul_(self.scale)
        self.moving, self.sent = None, []
        if not self.shown:
            shards = zip(self.slots, self.bucket.parts_in(self.out), strict=False)
            self.shards = [self._at_home(slot.held, shard) for slot, shard in shards]
        return lacking

    def drop(self) -> None:
        assert self.bucket is not None
        if self.moving is not None:
            self.bucket.sum_into(self.moving, self._room(), 1.0)
        self.moving, self.sent, self.out, self.shards = None, [], None, []

    def _at_home(self, held: Held, shard: torch.Tensor) -> torch.Tensor:
        """Where the plan keeps a gradient on the host, its copy begins now, and backward goes on."""
        shard = shard.to(held.param.dtype)
        return self.executor.downloads.begin(shard) if "grad" in held.hosted else shard

    def _room(self) -> torch.Tensor:
        """Memory for this rank's shards: in that of the full gradient, where it stays."""
        assert self.bucket is not None
        if self.mine is not None:
            return self.mine
        if self.flat is not None:
            return self.bucket.block_of_own(self.flat)
        if self.keeps_gradients and self.bucket.alone and self.sent[0].dtype == self.bucket.dtype:
            return self.bucket.block_of_own(self.sent[0].view(-1))
        return torch.empty(self.bucket.own, dtype=self.bucket.dtype, device=self.bucket.device)

    def hand_out(self, is_used: Callable[[Slot], bool]) -> None:
        for slot, shard in zip(self.slots, self.shown or self.shards, strict=True):
            held, prior = slot.held, slot.prior
            slot.prior = None
            if held.is_stored_in_parts and held.param.grad is not None:
                prior = local_of(held.param.grad)
            if prior is not None or is_used(slot):
                shown = shard if isinstance(shard, DTensor) else held.wrap(shard)
                if prior is not None:
                    local_of(shown).add_(prior)
                held.param.grad = shown  # type: ignore[assignment]
        self.out, self.shards = None, []


def _dense(grad: torch.Tensor | None, held: Held) -> torch.Tensor:
    """A gradient in the order in memory of its parameter; zeros where there is none."""
    like = held.memory
    if grad is None:
        return torch.zeros_like(like)
    return grad if grad.stride() == like.stride() else torch.empty_like(like, dtype=grad.dtype).copy_(grad)


def _partial_axes(grad: torch.Tensor | None) -> Axes:
    if not isinstance(grad, DTensor):
        return ()
    names = grad.device_mesh.mesh_dim_names or ()
    return tuple(name for name, placement in zip(names, grad.placements, strict=True) if placement.is_partial())

"""Gradients are reduced in buckets while backward runs, each over the axes on which it is still a partial sum.

On data axes every rank holds the gradient of its own examples, so the mean over these axes is due; on a model axis a
gradient may come out of the global view as a partial sum. Where the plan splits gradient or state over data axes, each
rank gets the sum of its own part; else all ranks get all of it.

Buckets are laid out in the order in which gradients appear, which the first backward pass shows, and leave as soon as
they are full (Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section
3.2, whose scheme this is). A large gradient is a bucket of its own and is not copied.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardlib.engine import _torch
from shardlib.engine.borders import moved
from shardlib.engine.exchange import Bundle, goes_alone, in_batches
from shardlib.engine.held import Axes, Held, local_of
from shardlib.engine.lost import naming_lost_ranks
from shardlib.engine.offload import Downloads
from shardlib.engine.plain import plain
from shardlib.engine.transport import Workspace
from shardlib.errors import ShardingError
from shardlib.layout import Cut

__all__ = ["Aside", "GradientBucket", "GradientReducer"]

# The gradient of a leaf, and this rank's part of a reduced one.
Aside = tuple[torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True)
class GradientBucket:
    """Gradients that are summed together.

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


@dataclass(eq=False)
class _Slot:
    """One parameter's place in a bucket.

    Attributes:
        filled: backward has made its gradient.
        in_bucket: this rank's part of it lies in memory of the bucket, which the next one overwrites.
        prior: while a backward pass runs, this rank's part of what earlier ones gave, to which the new one is added.

    Between backward passes `param.grad` is all there is: what a user sets to None or zero is gone.
    """

    held: Held
    filled: bool = False
    in_bucket: bool = False
    prior: torch.Tensor | None = None

    def make_room(self) -> None:
        """Let autograd add to the leaf's gradient: a full gradient cannot be accumulated into a shard."""
        held, grad = self.held, self.held.param.grad
        if held.cut is None:
            if held.is_part(grad) and isinstance(held.param, DTensor):
                held.param.grad = _torch.wrap(local_of(grad), _torch.spec_of(held.param))  # type: ignore[arg-type,assignment]
            return
        self.prior = None
        if grad is not None and held.is_part(grad):
            mine = local_of(grad)
            self.prior = mine.clone() if self.in_bucket or held.stage == 1 else mine
            held.leaf.grad = None
        elif held.leaf is not held.param:
            held.leaf.grad = None if grad is None else held.unwrap_own(grad)

    def show(self, data_axes: Axes, passes: int) -> None:
        """Let `param.grad` be what there is: of passes that were not reduced, this rank's own full gradient.

        This rank's part of an earlier mean is added to it, as large as makes the mean what it was.
        """
        held, prior, own = self.held, self.prior, self.held.leaf.grad
        self.prior = None
        if own is None:
            if prior is not None and held.param.grad is None:
                held.param.grad = held.wrap(prior)  # type: ignore[assignment]
            return
        if prior is not None:
            assert held.cut is not None and held.transport is not None
            factor = passes * held.transport.count / _summands(own)
            for place, chosen in held.cut.places(local_of(own), held.transport.index):
                mine = prior.narrow(held.cut.dim, chosen.start, chosen.stop - chosen.start)
                place.add_(mine.to(place.device), alpha=factor)
        if held.leaf is not held.param:
            held.param.grad, held.leaf.grad = held.wrap_own(own, data_axes), None  # type: ignore[assignment]


@dataclass(eq=False)
class _Bucket:
    """Gradients that leave together.

    Attributes:
        axes: over which they are summed.
        last: whether it closes a backward pass and carries the number of gradients that ranks lack; else several may be
            under way.
        missing: gradients that are still to come.
    """

    owner: GradientReducer
    axes: Axes
    slots: list[_Slot]
    last: bool = False
    missing: int = 0

    @property
    def at_every_pass(self) -> bool:
        """Whether it leaves after each of the backward passes that make a step."""
        return False

    @property
    def borrows(self) -> int:
        """Bytes that it borrows while it is under way, the same on all ranks."""
        return 0

    @property
    def scale(self) -> float:
        """What its sums are multiplied with to be means over data ranks and passes."""
        return self.owner.mean_over(self.axes)

    def reset(self) -> None:
        self.missing = len(self.slots)
        for slot in self.slots:
            slot.filled = False

    def launch(self) -> None:
        """Begin the reduction."""
        raise NotImplementedError

    def collect(self) -> None:
        """Wait for its end."""
        raise NotImplementedError

    def hand_out(self) -> None:
        """Give the parameters their gradients."""
        raise NotImplementedError

    def drop(self) -> None:
        """Wait for what was sent, and forget it: the backward pass that sent it has raised."""
        raise NotImplementedError

    def _gradients(self) -> list[torch.Tensor | None]:
        """Local gradients, laid out as their parameters but for the partial sums that this bucket adds up."""
        return [self._gradient(slot) if slot.filled else None for slot in self.slots]

    def _gradient(self, slot: _Slot) -> torch.Tensor:
        grad = _like_its_parameter(slot.held.leaf, keep_partial=self.axes)
        if self.axes == self.owner.data_axes:
            return local_of(grad)
        partial = (*self.owner.data_axes, *_partial_axes(grad))
        # Alike on all ranks of an axis over which others in this bucket are still to be summed.
        copies = math.prod(self.owner.sizes[axis] for axis in self.axes if axis not in partial)
        return local_of(grad) if copies == 1 else local_of(grad) / copies


@dataclass(eq=False)
class _Reduced(_Bucket):
    """Every rank gets the sum: one all-reduce.

    Attributes:
        flat: memory of the bucket; None where its one gradient is reduced where it lies. Each gradient has as much room
            as the largest rank's part of it needs: what is the same on ranks whose other parts differ in size has to
            lie in the same place on all of them, since the order of a sum depends on that.
        views: what is local of each gradient, inside `flat`.
        shown: what `p.grad` becomes; empty where gradients travel in another dtype than theirs.
    """

    flat: torch.Tensor | None = None
    views: list[torch.Tensor] = field(default_factory=list)
    shown: list[torch.Tensor] = field(default_factory=list)
    sent: torch.Tensor | None = None
    work: Any = None

    def allocate(self) -> None:
        room = [slot.held.room for slot in self.slots]
        self.flat = torch.zeros(sum(room) + self.last, dtype=self.owner.dtype_of(self), device=self.owner.device)
        for slot, piece in zip(self.slots, self.flat[: sum(room)].split(room), strict=True):
            # In the order in memory of the parameter: fused optimizers walk both as if they were flat.
            local = local_of(slot.held.leaf)
            view = piece[: local.numel()].as_strided(local.shape, torch.empty_like(local, device="meta").stride())
            self.views.append(view)
            if view.dtype == local.dtype:
                self.shown.append(self._shown(slot.held, view))

    def launch(self) -> None:
        grads = self._gradients()
        if self.flat is None:
            self.sent = _dense(grads[0], self.slots[0].held)
        else:
            self.sent = self.flat
            self._pack(grads)
        group = self.owner.group(self.axes)
        if self.owner.reduction is None:
            self.work = dist.all_reduce(self.sent, group=group, async_op=True)
        else:
            self.work = self._by_the_users(self.owner.reduction, group)

    def _by_the_users(self, reduction: Any, group: dist.ProcessGroup) -> Any:
        """What gradients lack is counted apart: it has to be exact."""
        assert self.sent is not None
        flat = self.sent.as_strided((self.sent.numel(),), (1,))
        if self.last:
            dist.all_reduce(flat[-1:], group=group)
        names = tuple(slot.held.name for slot in self.slots)
        gradients = flat[: flat.numel() - self.last]
        return reduction(GradientBucket(gradients, group, self.axes, names, self.owner.number_of(self)))

    def _pack(self, grads: list[torch.Tensor | None]) -> None:
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
            self.flat[-1] = self.owner.lacking()

    def collect(self) -> None:
        assert self.sent is not None
        if self.work is not None:
            self.work.wait()
        self.work = None
        if self.last:
            self.owner.agree_on_missing(self.sent[-1])
        if self.scale != 1:
            self.sent.mul_(self.scale)

    def hand_out(self) -> None:
        assert self.sent is not None
        for i, slot in enumerate(self.slots):
            if self.owner.is_used(slot):
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
        """A reduced gradient that does not lie where `p.grad` shows it: one that moved alone, or in another dtype."""
        assert self.sent is not None
        if self.flat is None:
            return self.sent
        return self.views[index].to(self.slots[index].held.leaf.dtype)

    def _shown(self, held: Held, local: torch.Tensor) -> torch.Tensor:
        """What `p.grad` becomes. Beside gradients in parts, which lie on the whole mesh, others lie there too: torch's
        own `clip_grad_norm_` takes DTensors of one mesh."""
        if not isinstance(held.param, DTensor):
            return local
        return held.wrap(local) if self.owner.in_parts else _torch.wrap(local, _torch.spec_of(held.param))


@dataclass(eq=False)
class _Scattered(_Bucket):
    """Each rank gets the sum of its own parts.

    Attributes:
        bundle: what moves them; where this bucket is the last, with a count for each rank behind the gradients.
        rest: axes over which parts have to be summed still, since they do not split them.
        sent: the gradients, until they have arrived.
        out: this rank's parts, one behind the other.
        parts: the same apart, where the plan keeps gradients.
        flat: under stage 1, the memory of whole gradients in a bucket.
        mine: memory of this rank's parts, where they are packed and stay until the next backward pass.
        shown: what `p.grad` becomes, over `mine`.
    """

    bundle: Bundle | None = None
    rest: Axes = ()
    sent: list[torch.Tensor] = field(default_factory=list)
    moving: Any = None
    out: torch.Tensor | None = None
    parts: list[torch.Tensor] = field(default_factory=list)
    flat: torch.Tensor | None = None
    mine: torch.Tensor | None = None
    shown: list[DTensor] = field(default_factory=list)

    @property
    def at_every_pass(self) -> bool:
        return not self.slots or self.slots[0].held.stage > 1

    @property
    def borrows(self) -> int:
        assert self.bundle is not None
        return self.bundle.arriving_bytes + (self.bundle.packed_bytes if self.flat is None else 0)

    def allocate(self, like: Held) -> None:
        """`like`: a parameter that is cut as those of this bucket are."""
        transport = like.transport
        assert transport is not None
        cuts = [slot.held.cut for slot in self.slots if slot.held.cut is not None]
        if self.last:
            cuts.append(Cut((transport.count,), 0, tuple((slice(r, r + 1),) for r in range(transport.count))))
        dtype, device = self.owner.dtype_of(self), self.owner.device
        self.bundle = Bundle(cuts, transport, dtype, device, self.owner.workspace)
        self.rest = tuple(axis for axis in self.axes if axis not in like.axes)
        if self.slots and self.slots[0].held.stage == 1 and not self.bundle.alone:
            self.flat = torch.zeros(self.bundle.total, dtype=dtype, device=device)
        here = all(
            s.held.leaf is s.held.param and s.held.dtype == dtype and "grad" not in s.held.hosted for s in self.slots
        )
        if here and not self.bundle.alone:
            block = None if self.flat is None else self.bundle.block_of_own(self.flat)
            self.mine = torch.empty(self.bundle.own, dtype=dtype, device=device) if block is None else block
            parts = self.bundle.parts_in(self.mine)
            self.shown = [slot.held.wrap(part) for slot, part in zip(self.slots, parts, strict=False)]
            for slot in self.slots:
                slot.in_bucket = True

    def launch(self) -> None:
        assert self.bundle is not None
        self.sent = [_dense(grad, slot.held) for slot, grad in zip(self.slots, self._gradients(), strict=True)]
        if self.last:
            count, bundle = self.owner.lacking(), self.bundle
            self.sent.append(torch.full((bundle.transport.count,), count, dtype=bundle.dtype, device=bundle.device))
        self.moving = self.bundle.reduce(self.sent, self.flat)
        for slot in self.slots:
            slot.held.leaf.grad = None
            if slot.held.leaf is not slot.held.param and slot.prior is None:
                slot.held.param.grad = None  # it showed what has just been sent

    def collect(self) -> None:
        assert self.bundle is not None
        self.out = self._room()
        self.bundle.sum_into(self.moving, self.out, 1.0 if self.rest or self.last else self.scale)
        if self.rest:
            dist.all_reduce(self.out, group=self.owner.group(self.rest))
        if self.last:
            self.owner.agree_on_missing(self.out[-1])
        if self.rest or self.last:
            self.out.mul_(self.scale)
        self.moving, self.sent = None, []
        if not self.shown:
            parts = zip(self.slots, self.bundle.parts_in(self.out), strict=False)
            self.parts = [self._at_home(slot.held, part) for slot, part in parts]

    def drop(self) -> None:
        assert self.bundle is not None
        if self.moving is not None:
            self.bundle.sum_into(self.moving, self._room(), 1.0)
        self.moving, self.sent, self.out, self.parts = None, [], None, []

    def _at_home(self, held: Held, part: torch.Tensor) -> torch.Tensor:
        """Where the plan keeps a gradient on the host, its copy begins now, and backward goes on."""
        part = part.to(held.param.dtype)
        return self.owner.downloads.begin(part) if "grad" in held.hosted else part

    def _room(self) -> torch.Tensor:
        """Memory for this rank's parts. Under stage 1 it is in that of the whole gradient, which stays."""
        assert self.bundle is not None
        if self.mine is not None:
            return self.mine
        if self.flat is not None:
            return self.bundle.block_of_own(self.flat)
        stays = bool(self.slots) and self.slots[0].held.stage == 1
        if stays and self.bundle.alone and self.sent[0].dtype == self.bundle.dtype:
            return self.bundle.block_of_own(self.sent[0].view(-1))
        return torch.empty(self.bundle.own, dtype=self.bundle.dtype, device=self.bundle.device)

    def hand_out(self) -> None:
        for slot, part in zip(self.slots, self.shown or self.parts, strict=True):
            self._hand_out(slot, part)
        self.out, self.parts = None, []

    def _hand_out(self, slot: _Slot, part: torch.Tensor) -> None:
        held, prior = slot.held, slot.prior
        slot.prior = None
        if prior is not None or self.owner.is_used(slot):
            shown = part if isinstance(part, DTensor) else held.wrap(part)
            if prior is not None:
                local_of(shown).add_(prior)
            held.param.grad = shown  # type: ignore[assignment]


def _dense(grad: torch.Tensor | None, held: Held) -> torch.Tensor:
    """A gradient in the order in memory of its parameter; zeros where there is none."""
    like = held.memory
    if grad is None:
        return torch.zeros_like(like)
    return grad if grad.stride() == like.stride() else torch.empty_like(like, dtype=grad.dtype).copy_(grad)


class GradientReducer:
    """Keeps `p.grad` of every parameter equal to the gradient of the mean loss over the data axes.

    Args:
        held: all parameters in registration order; frozen ones may begin to train later.
        mesh: the whole mesh.
        data_axes: axes of `mesh` (size > 1) over which gradients are averaged.
        bucket_bytes: how much one bucket carries; a larger one has fewer latencies, a smaller one overlaps more.
        passes: backward passes that make one step; the gradient is that of their mean.
        dtype: in which gradients travel; by default their own.
        workspace: memory that movements borrow.
    """

    def __init__(
        self,
        held: Sequence[Held],
        mesh: DeviceMesh,
        data_axes: Axes,
        *,
        bucket_bytes: int = 25 << 20,
        passes: int = 1,
        dtype: torch.dtype | None = None,
        workspace: Workspace,
    ) -> None:
        self.mesh, self.data_axes, self.bucket_bytes, self.passes = mesh, data_axes, bucket_bytes, passes
        self.dtype, self.workspace, self.downloads = dtype, workspace, Downloads()
        self.enabled = True
        self.reduction: Callable[[Any], Any] | None = None  # the user's own, for whole gradients
        self.everyone: dist.ProcessGroup | None = None  # of all stages, where this model is one of a pipeline's
        self.sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
        self._slots = [_Slot(h) for h in held]
        self.in_parts = any(one.cut is not None or not one.compute.axes.isdisjoint(data_axes) for one in held)
        self._index = {id(slot.held.leaf): i for i, slot in enumerate(self._slots)}
        self._groups: dict[Axes, dist.ProcessGroup] = {}
        self._buckets: list[_Bucket] = []
        self._home: dict[int, tuple[_Bucket, _Slot]] = {}
        self._learned = False
        self._arrived: dict[int, Axes] = {}
        self._ending: weakref.ref[Callable[[], None]] | None = None  # what the pass that runs calls when it ends
        self._pass = 0
        self._closing = False  # whether the backward pass that runs is the last one of a step of several
        self._reducing: list[_Bucket] = []  # in this backward pass, in the order in which they leave
        self._launched = self._collected = 0  # how many of them
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

    def number_of(self, bucket: _Bucket) -> int:
        """Of a bucket, among all of them."""
        return next((i for i, one in enumerate(self._buckets) if one is bucket), 0)

    @property
    def device(self) -> torch.device:
        return local_of(self._slots[0].held.leaf).device

    def dtype_of(self, bucket: _Bucket) -> torch.dtype:
        return self.dtype or next((slot.held.leaf.dtype for slot in bucket.slots), torch.float32)

    @property
    def scale(self) -> float:
        """What a sum over data ranks and passes is multiplied with to be their mean."""
        return self.mean_over(self.data_axes)

    def mean_over(self, axes: Axes) -> float:
        """What a sum over axes and passes is multiplied with to be the mean over those of data, and passes."""
        return 1.0 / (math.prod(self.sizes[axis] for axis in self.data_axes if axis in axes) * self.passes)

    def due(self, index: int) -> Axes:
        """The data axes over which a gradient is to be summed: not over those whose ranks have different experts."""
        compute = self._slots[index].held.compute
        return tuple(axis for axis in self.data_axes if axis not in compute.axes)

    def group(self, axes: Axes) -> dist.ProcessGroup:
        if axes not in self._groups:
            self._groups[axes] = _torch.flattened(self.mesh, axes).get_group()
        return self._groups[axes]

    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks that train on different examples; None where there is one."""
        return self.group(self.data_axes) if self.data_axes else None

    def group_of_all(self) -> dist.ProcessGroup | None:
        """All ranks that train the model; None where it is one."""
        if self.everyone is not None:
            return self.everyone
        axes = tuple(axis for axis, size in self.sizes.items() if size > 1)
        return self.group(axes) if axes else None

    @property
    def listens(self) -> bool:
        """Whether there is anything to do in a backward pass, other than to let gradients add up where they are."""
        return self.enabled or self.in_parts or bool(self.at_the_end)

    def is_between_passes(self) -> bool:
        """Whether a step has begun, and backward passes that belong to it are still to come."""
        return 0 < self._pass < self.passes and not self._has_raised

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
        thawed = [slot for slot in self._left_out if slot.held.leaf.requires_grad]
        if not thawed:
            return
        me = weakref.ref(self)
        for slot in thawed:
            leaf = slot.held.leaf
            if id(leaf) not in self._handles:
                self._handles[id(leaf)] = [leaf.register_post_accumulate_grad_hook(_calling(me))]
                if slot.held.cut is not None:
                    self._handles[id(leaf)].append(leaf.register_hook(_announcing(me)))
        self._learned = False
        self._lay_out([(i, self.due(i)) for i in reversed(range(len(self._slots)))])

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside leave each rank its own sum of gradients; the next one outside reduces it."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

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
        _torch.run_at_end_of_backward(ending)

    def _drop_what_was_sent(self) -> None:
        for bucket in self._reducing[: self._launched]:
            bucket.drop()
        self.downloads.wait()
        self._ending, self._pass = None, 0

    def _make_room(self) -> None:
        for slot in self._slots if self.in_parts else ():
            slot.make_room()

    def _show(self) -> None:
        for i, slot in enumerate(self._slots if self.in_parts else ()):
            if slot.prior is not None or slot.held.leaf is not slot.held.param:
                slot.show(self.due(i), self.passes)

    def _begin(self) -> None:
        closing = False
        if self.enabled:
            self._pass = self._pass % self.passes + 1
            closing = self._pass == self.passes
        self._closing = closing and self.passes > 1
        self._reducing = [b for b in self._buckets if closing or b.at_every_pass] if self.enabled else []
        self._launched = self._collected = 0
        self._used = None
        self._arrived.clear()
        for bucket in self._buckets:
            bucket.reset()

    def leaves(self) -> list[nn.Parameter]:
        """The parameters that autograd gives gradients."""
        return [slot.held.leaf for slot in self._slots if slot.held.leaf.requires_grad]

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
        before = [(slot.held.leaf.grad, slot.prior) for slot in self._slots]
        for slot in self._slots:
            slot.held.leaf.grad = slot.held.param.grad = slot.prior = None
        return before

    def multiply_gradients(self, factor: float) -> None:
        grads = [slot.held.param.grad for slot in self._slots]
        _torch.multiply_all([local_of(grad) for grad in grads if grad is not None], factor)

    def add_gradients(self, before: Sequence[Aside]) -> None:
        """Add what was put aside."""
        self._join(before)
        self._show()

    @naming_lost_ranks("backward")
    def reduce_now(self, before: Sequence[Aside] = ()) -> None:
        """Reduce what backward passes inside of `no_sync` have added up, as the end of a pass outside of it does.

        Args:
            before: what was put aside, which belongs to it too.
        """
        self._join(before)
        self._begin()
        for slot in reversed(self._slots):
            leaf = slot.held.leaf
            if leaf.grad is not None:
                if isinstance(leaf.grad, DTensor) and not isinstance(leaf, DTensor):
                    leaf.grad = plain(leaf.grad)
                self._take(leaf)
        self._finish()

    def _join(self, before: Sequence[Aside]) -> None:
        self._make_room()
        for slot, (own, prior) in zip(self._slots, before, strict=False):
            leaf, slot.prior = slot.held.leaf, prior
            if own is not None:
                leaf.grad = own if leaf.grad is None else leaf.grad + own

    @naming_lost_ranks("backward")
    def _on_gradient(self, leaf: nn.Parameter) -> None:
        if isinstance(leaf.grad, DTensor) and not isinstance(leaf, DTensor):
            self._make_plain(leaf)
        self.begin()
        if self.enabled:
            self._take(leaf)

    def _take(self, leaf: nn.Parameter) -> None:
        """A gradient is there: its bucket may leave."""
        index = self._index[id(leaf)]
        self._arrived[index] = self.due(index) + _summed_later(leaf)
        home = self._home.get(index)
        if home is None:
            leaf.grad = _like_its_parameter(leaf, keep_partial=())
            return
        bucket, slot = home
        if bucket in self._reducing[: self._launched]:
            raise ShardingError(
                f'"{slot.held.name}" got a second gradient in one backward pass, after the first was on its way. '
                "Use torch.utils.checkpoint with use_reentrant=False, or run this backward inside shardlib.no_sync."
            )
        if not slot.filled:
            slot.filled = True
            bucket.missing -= 1
        while self._launched < len(self._reducing) - 1 and self._reducing[self._launched].missing == 0:
            self._launch()

    def _make_plain(self, leaf: nn.Parameter) -> None:
        """The parameter met DTensors outside of regions. From now on its gradients are made whole as they come."""
        assert leaf.grad is not None
        leaf.grad = plain(leaf.grad)
        self._converting.append(leaf.register_hook(plain))

    def _launch(self) -> None:
        """The next bucket leaves. Those under way borrow no more than a full bucket would, or are one."""
        bucket = self._reducing[self._launched]
        while bucket.borrows + sum(self._borrowed()) > self.bucket_bytes and self._collected < self._launched:
            self._collect()
        bucket.launch()
        self._launched += 1

    def _borrowed(self) -> Iterator[int]:
        return (bucket.borrows for bucket in self._reducing[self._collected : self._launched])

    def _collect(self) -> None:
        self._reducing[self._collected].collect()
        self._collected += 1

    @naming_lost_ranks("backward")
    def _finish(self) -> None:
        """The backward pass has ended: send what is left, in the order all ranks share, and hand the results out."""
        self._ending = None
        for also in self.at_the_end:
            also()
        for slot in (slot for bucket in self._reducing[self._launched :] for slot in bucket.slots):
            slot.filled = slot.filled or slot.held.leaf.grad is not None
        while self._launched < len(self._reducing):
            self._launch()
        while self._collected < len(self._reducing):
            self._collect()
        self.downloads.wait()
        for bucket in self._reducing:
            bucket.hand_out()
        self._average_passes()
        if self.enabled and not self.is_between_passes() and (self._reducing or not self._buckets):
            for also in self.at_the_end_of_steps:
                also()
        self._reducing = []
        self._show()
        if self.enabled and not self._learned:
            self._learn()

    def _average_passes(self) -> None:
        """What no bucket carries, since no axis is to be summed over, is still a sum over the passes of a step."""
        if self._closing:
            rest = [slot.held.leaf.grad for i, slot in enumerate(self._slots) if i not in self._home]
            if grads := [local_of(grad) for grad in rest if grad is not None]:
                _torch.multiply_all(grads, self.mean_over(()))
        self._closing = False

    # --- gradients that ranks lack ------------------------------------------------------------------------------------

    def lacking(self) -> int:
        """How many gradients of this pass this rank does not have."""
        return sum(not slot.filled for bucket in self._reducing for slot in bucket.slots)

    def agree_on_missing(self, count: torch.Tensor) -> None:
        """A rank that lacks a gradient which another one has takes part in it; one that none has stays None.

        In a dry run nothing can be counted, and all ranks are taken to be alike.
        """
        if _torch.has_values(count) and count.item():
            used = torch.tensor([float(slot.filled) for slot in self._slots], device=count.device)
            dist.all_reduce(used, group=self.group(self.data_axes))
            self._used = [number > 0 for number in used.tolist()]

    def is_used(self, slot: _Slot) -> bool:
        return slot.filled or (self._used is not None and self._used[self._index[id(slot.held.leaf)]])

    # --- laying out ---------------------------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Lay buckets out in the order in which this backward pass made gradients, the same on all ranks."""
        seen = list(self._arrived.items())
        if self.data_axes:
            seen = _first_ranks(seen, self.group(self.mesh.mesh_dim_names or ()))
        known = dict(seen)
        rest = [i for i in reversed(range(len(self._slots))) if i not in known]
        self._lay_out([*seen, *((i, self.due(i)) for i in rest)])
        self._learned = True

    def _lay_out(self, order: Sequence[tuple[int, Axes]]) -> None:
        self._left_out = [slot for slot in self._slots if not slot.held.leaf.requires_grad]
        batches = in_batches(
            [(self._slots[i], axes) for i, axes in order if axes and self._slots[i].held.leaf.requires_grad],
            alone=lambda one: self._goes_alone(one[0].held),
            key=lambda one: (one[1], *_alike(one[0].held)),
            size=lambda one: local_of(one[0].held.leaf).nbytes,
            limit=self.bucket_bytes,
        )
        self._buckets = [_bucket(self, batch[0][1], [slot for slot, _ in batch]) for batch in batches]
        if self.data_axes and self._buckets:
            self._close()
        cut = next((slot.held for bucket in self._buckets for slot in bucket.slots if slot.held.cut is not None), None)
        for bucket in self._buckets:
            if isinstance(bucket, _Scattered):
                like = bucket.slots[0].held if bucket.slots else cut
                assert like is not None
                bucket.allocate(like)
            elif isinstance(bucket, _Reduced) and (bucket.last or not self._is_alone(bucket)):
                bucket.allocate()
            bucket.reset()
        self._home = {self._index[id(s.held.leaf)]: (b, s) for b in self._buckets for s in b.slots}

    def _is_alone(self, bucket: _Bucket) -> bool:
        return len(bucket.slots) == 1 and self._goes_alone(bucket.slots[0].held)

    def _goes_alone(self, held: Held) -> bool:
        """Whether a gradient is a bucket of its own, which is sent from where it lies."""
        return self.dtype in (None, held.dtype) and goes_alone(local_of(held.leaf), held.cut)

    def _close(self) -> None:
        """Put a bucket at the end that leaves at every pass, and has room to tell how many gradients are missing."""
        regular = [b for b in self._buckets if b.at_every_pass] or self._buckets
        packed = [b for b in regular if not self._is_alone(b) and {*self.data_axes} <= {*b.axes}]
        if packed:
            closing = packed[-1]
            self._buckets.remove(closing)
        else:
            closing = type(regular[0])(self, self.data_axes, [])
        closing.last = True
        self._buckets.append(closing)


def _alike(held: Held) -> tuple[Any, ...]:
    """What gradients in one bucket have in common. What leaves for the host leaves no memory of others behind."""
    return held.axes, held.stage, held.dtype, "grad" in held.hosted


def _bucket(owner: GradientReducer, axes: Axes, slots: list[_Slot]) -> _Bucket:
    return (_Reduced if slots[0].held.cut is None else _Scattered)(owner, axes, slots)


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


def _partial_axes(grad: torch.Tensor | None) -> Axes:
    if not isinstance(grad, DTensor):
        return ()
    names = grad.device_mesh.mesh_dim_names or ()
    return tuple(name for name, placement in zip(names, grad.placements, strict=True) if placement.is_partial())


def _summands(grad: torch.Tensor) -> int:
    """How many ranks of the model axes hold a partial sum of a gradient."""
    if not isinstance(grad, DTensor):
        return 1
    places = zip(grad.device_mesh.shape, grad.placements, strict=True)
    return math.prod(size for size, place in places if place.is_partial())


def _summed_later(leaf: nn.Parameter) -> Axes:
    """The model axes over which a gradient is a partial sum of what is the same on all their ranks."""
    grad = leaf.grad
    if not isinstance(grad, DTensor) or not isinstance(leaf, DTensor):
        return ()
    names = grad.device_mesh.mesh_dim_names or ()
    places = zip(names, grad.placements, leaf.placements, strict=True)
    return tuple(name for name, have, want in places if have.is_partial("sum") and want.is_replicate())


def _like_its_parameter(leaf: nn.Parameter, *, keep_partial: Axes) -> torch.Tensor:
    """The gradient laid out as its parameter, but for partial sums over the axes in `keep_partial`."""
    grad = leaf.grad
    assert grad is not None
    if not isinstance(grad, DTensor) or not isinstance(leaf, DTensor) or grad.placements == leaf.placements:
        return grad
    names = grad.device_mesh.mesh_dim_names or ()
    target = tuple(
        have if have.is_partial("sum") and want.is_replicate() and name in keep_partial else want
        for name, have, want in zip(names, grad.placements, leaf.placements, strict=True)
    )
    return grad if target == grad.placements else moved(grad, target)


def _first_ranks(seen: list[tuple[int, Axes]], group: dist.ProcessGroup) -> list[tuple[int, Axes]]:
    """What the first rank of the mesh saw, on every rank."""
    box = [seen]
    dist.broadcast_object_list(box, group_src=0, group=group)
    return box[0]

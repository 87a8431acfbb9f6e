"""Gradients are reduced in buckets while backward runs, each over the axes on which it is still a partial sum.

On data axes every rank holds the gradient of its own examples, so the mean over these axes is due; on a model axis a
gradient may come out of the global view as a partial sum. Both are one all-reduce, over the product of these axes.

The first backward pass shows in which order gradients appear and which axes each needs; from then on, buckets are laid
out in that order and leave as soon as they are full (Li et al., "PyTorch Distributed: Experiences on Accelerating Data
Parallel Training", VLDB 2020, section 3.2, whose scheme this is).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardlib.engine import _torch
from shardlib.engine.borders import moved
from shardlib.engine.plain import plain

__all__ = ["GradientReducer"]

Axes = tuple[str, ...]


@dataclass(eq=False)
class _Slot:
    """One parameter's place in a bucket: `view` is local memory inside it, `grad` is what `p.grad` becomes.

    The gradients of `small` ones are copied together when the bucket leaves: one call costs more than their bytes.
    """

    param: torch.nn.Parameter
    view: torch.Tensor
    grad: torch.Tensor
    small: bool
    filled: bool = False


@dataclass(eq=False)
class _Bucket:
    """Gradients in one flat tensor: those of the small slots, then those of the others, then a flag for each slot."""

    axes: Axes
    flat: torch.Tensor
    slots: list[_Slot]
    small_numel: int
    missing: int = 0
    work: dist.Work | None = field(default=None)

    def reset(self) -> None:
        self.missing, self.work = len(self.slots), None
        for slot in self.slots:
            slot.filled = False

    @property
    def used(self) -> torch.Tensor:
        """For each slot, how many ranks had a gradient for it."""
        return self.flat[self.flat.numel() - len(self.slots) :]


class GradientReducer:
    """Keeps `p.grad` of every parameter equal to the gradient of the mean loss over the data axes.

    Args:
        params: all parameters in registration order, plain or DTensor; frozen ones may begin to train later.
        mesh: the whole mesh.
        data_axes: axes of `mesh` (size > 1) over which gradients are averaged.
        bucket_bytes: how much one all-reduce carries; a larger bucket has fewer latencies, a smaller one overlaps more.
    """

    def __init__(
        self, params: list[torch.nn.Parameter], mesh: DeviceMesh, data_axes: Axes, *, bucket_bytes: int = 25 << 20
    ) -> None:
        self.params, self.mesh, self.data_axes, self.bucket_bytes = params, mesh, data_axes, bucket_bytes
        self.enabled = True
        self._index = {id(p): i for i, p in enumerate(params)}
        self._sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
        self._groups: dict[Axes, dist.ProcessGroup] = {}
        self._buckets: list[_Bucket] = []
        self._laid_out = False
        self._home: dict[int, tuple[_Bucket, _Slot]] = {}
        self._arrived: dict[int, Axes] = {}
        self._next = 0
        self._backward = -1
        self._handles: dict[int, Any] = {}
        self._converting: list[Any] = []
        self._left_out = params  # of the buckets, because they required no gradient when these were laid out
        self.notice_unfrozen()

    def remove(self) -> None:
        for handle in (*self._handles.values(), *self._converting):
            handle.remove()

    def notice_unfrozen(self) -> None:
        """Take in parameters that have begun to require gradients since; buckets are then laid out anew."""
        thawed = [p for p in self._left_out if p.requires_grad]
        if not thawed:
            return
        for param in thawed:
            if id(param) not in self._handles:
                self._handles[id(param)] = param.register_post_accumulate_grad_hook(_calling(weakref.ref(self)))
        self._left_out = self._frozen()
        self._buckets, self._home, self._laid_out = [], {}, False

    def _frozen(self) -> list[torch.nn.Parameter]:
        return [p for p in self.params if not p.requires_grad]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside leave each rank its own sum of gradients; the next one outside reduces it."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def begin(self) -> None:
        """A backward pass has reached this model: reduce when it ends, whatever it leaves unused."""
        if not self.enabled or self._backward == _torch.backward_id():
            return
        self._backward = _torch.backward_id()
        self._next = 0
        self._arrived.clear()
        for bucket in self._buckets:
            bucket.reset()
        _torch.run_at_end_of_backward(self._finish)

    def _on_gradient(self, param: torch.nn.Parameter) -> None:
        if isinstance(param.grad, DTensor) and not isinstance(param, DTensor):
            self._make_plain(param)
        if not self.enabled:
            return
        self.begin()
        home = self._home.get(id(param))
        if home is not None:
            self._fill(*home)
        elif self._laid_out:
            param.grad = _like_its_parameter(param, keep_partial=())
        else:
            self._arrived[self._index[id(param)]] = self._due(param)

    def _make_plain(self, param: torch.nn.Parameter) -> None:
        """The parameter met DTensors outside of regions. From now on its gradients are made whole as they come."""
        assert param.grad is not None
        param.grad = plain(param.grad)
        self._converting.append(param.register_hook(plain))

    def _due(self, param: torch.nn.Parameter) -> Axes:
        """The axes over which the gradient just accumulated must still be summed (and averaged over data axes)."""
        param.grad = _like_its_parameter(param)
        return self.data_axes + _partial_axes(param.grad)

    def _fill(self, bucket: _Bucket, slot: _Slot) -> None:
        slot.filled = True
        if not slot.small:
            self._copy_in(bucket, slot)
        bucket.missing -= 1
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._launch(self._buckets[self._next])

    def _copy_in(self, bucket: _Bucket, slot: _Slot) -> None:
        grad = _like_its_parameter(slot.param, keep_partial=bucket.axes)
        torch.mul(_local(grad).detach(), self._scale(bucket.axes, _partial_axes(grad)), out=slot.view)

    def _scale(self, axes: Axes, partial: Axes = ()) -> float:
        """One over the sizes of the summed axes on which a gradient is not a partial sum but a value to average."""
        return 1.0 / math.prod(self._sizes[axis] for axis in axes if axis not in partial)

    def _copy_small_ones_in(self, bucket: _Bucket) -> None:
        slots = [slot for slot in bucket.slots if slot.small and slot.filled]
        if slots:
            _torch.copy_all([slot.view for slot in slots], [slot.param.grad for slot in slots])
            bucket.flat[: bucket.small_numel].mul_(self._scale(bucket.axes))

    def _launch(self, bucket: _Bucket) -> None:
        self._copy_small_ones_in(bucket)
        used = bucket.used
        used.fill_(1.0)
        for i, slot in enumerate(bucket.slots):
            if not slot.filled:
                used[i] = 0.0
        bucket.work = dist.all_reduce(bucket.flat, group=self._group(bucket.axes), async_op=True)
        self._next += 1

    def _group(self, axes: Axes) -> dist.ProcessGroup:
        if axes not in self._groups:
            self._groups[axes] = _torch.flattened(self.mesh, axes).get_group()
        return self._groups[axes]

    def _finish(self) -> None:
        """The backward pass has ended: send what is left, in the order all ranks share, and hand the results out."""
        self._backward = -1
        if not self._laid_out:
            self._lay_out()
        for bucket in self._buckets[self._next :]:
            for slot in bucket.slots:
                self._complete(bucket, slot)
            self._launch(bucket)
        for bucket in self._buckets:
            self._hand_out(bucket)

    def _complete(self, bucket: _Bucket, slot: _Slot) -> None:
        if slot.filled:
            return
        if slot.param.grad is None:
            slot.view.zero_()
            return
        slot.filled = True
        if not slot.small:
            self._copy_in(bucket, slot)

    def _hand_out(self, bucket: _Bucket) -> None:
        assert bucket.work is not None
        bucket.work.wait()
        for i, slot in enumerate(bucket.slots):
            if slot.filled or bucket.used[i].item() > 0:
                slot.param.grad = slot.grad

    def _lay_out(self) -> None:
        """Buckets in the order in which the first backward pass made gradients, the same on all ranks."""
        self._laid_out, self._left_out = True, self._frozen()
        seen = list(self._arrived.items())
        if self.data_axes:
            seen = _first_ranks(seen, self._group(self.mesh.mesh_dim_names or ()))
        known = dict(seen)
        rest = [i for i in reversed(range(len(self.params))) if i not in known and self.params[i].requires_grad]
        order = [i for i, _ in seen] + rest
        pending: dict[tuple[Axes, torch.dtype], list[torch.nn.Parameter]] = {}
        for i in order:
            param, axes = self.params[i], known.get(i, self.data_axes)
            if not axes:
                continue
            batch = pending.setdefault((axes, param.dtype), [])
            batch.append(param)
            if sum(map(_local_bytes, batch)) >= self.bucket_bytes:
                self._add_bucket(axes, pending.pop((axes, param.dtype)))
        for (axes, _), batch in pending.items():
            self._add_bucket(axes, batch)

    def _add_bucket(self, axes: Axes, params: list[torch.nn.Parameter]) -> None:
        def small(param: torch.Tensor) -> bool:
            return axes == self.data_axes and not isinstance(param, DTensor) and param.numel() <= _SMALL_NUMEL

        params = sorted(params, key=lambda p: not small(p))
        sizes = [_local(p).numel() for p in params]
        flat = _local(params[0]).new_zeros(sum(sizes) + len(params))
        views = flat[: sum(sizes)].split(sizes)
        slots = [_slot(p, view, small=small(p)) for p, view in zip(params, views, strict=True)]
        bucket = _Bucket(axes, flat, slots, sum(slot.view.numel() for slot in slots if slot.small))
        bucket.reset()
        self._buckets.append(bucket)
        self._home.update({id(slot.param): (bucket, slot) for slot in slots})


_SMALL_NUMEL = 1 << 14


def _calling(reducer: weakref.ref[GradientReducer]) -> Callable[[torch.nn.Parameter], None]:
    """A hook that does not keep its reducer, which keeps the parameter: through a hook the collector sees no cycle."""

    def hook(param: torch.nn.Parameter) -> None:
        if (alive := reducer()) is not None:
            alive._on_gradient(param)

    return hook


def _slot(param: torch.nn.Parameter, view: torch.Tensor, *, small: bool) -> _Slot:
    # In the order in memory of the parameter: fused optimizers walk both as if they were flat.
    local = _local(param)
    view = view.as_strided(local.shape, torch.empty_like(local, device="meta").stride())
    grad = _torch.wrap(view, _torch.spec_of(param)) if isinstance(param, DTensor) else view
    return _Slot(param, view, grad, small)


def _local(param: torch.Tensor) -> torch.Tensor:
    return _torch.local_of(param) if isinstance(param, DTensor) else param.detach()


def _local_bytes(param: torch.Tensor) -> int:
    local = _local(param)
    return local.numel() * local.element_size()


def _partial_axes(grad: torch.Tensor) -> Axes:
    if not isinstance(grad, DTensor):
        return ()
    names = grad.device_mesh.mesh_dim_names or ()
    return tuple(name for name, placement in zip(names, grad.placements, strict=True) if placement.is_partial())


def _like_its_parameter(param: torch.nn.Parameter, *, keep_partial: Axes | None = None) -> torch.Tensor:
    """The gradient laid out as its parameter, but for partial sums over the axes in `keep_partial` (default: all)."""
    grad = param.grad
    assert grad is not None
    if not isinstance(grad, DTensor) or not isinstance(param, DTensor) or grad.placements == param.placements:
        return grad
    names = grad.device_mesh.mesh_dim_names or ()
    target = tuple(
        have
        if have.is_partial("sum") and want.is_replicate() and (keep_partial is None or name in keep_partial)
        else want
        for name, have, want in zip(names, grad.placements, param.placements, strict=True)
    )
    return grad if target == grad.placements else moved(grad, target)


def _first_ranks(seen: list[tuple[int, Axes]], group: dist.ProcessGroup) -> list[tuple[int, Axes]]:
    """What the first rank of the mesh saw, on every rank."""
    box = [seen]
    dist.broadcast_object_list(box, group_src=0, group=group)
    return box[0]

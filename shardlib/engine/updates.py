"""Where state is split over data axes, each rank updates its own part of a parameter; then parts are gathered.

While an optimizer steps, each such parameter is represented by a plain tensor of this rank's part: a view of the
parameter where that is a run of its memory, else a copy in a bucket. After the step the buckets are gathered into the
parameters, all of them at once; or, where the plan says so, while the next forward runs: each block then waits for its
own before it computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardlib._plan import unit_of
from shardlib.engine import _torch
from shardlib.engine.exchange import Bundle, goes_alone, in_batches
from shardlib.engine.held import Held, held_of, local_of
from shardlib.engine.transport import Workspace

__all__ = ["Updates", "settle", "update_in_parts", "updates_of", "wait_in_modules"]


def update_in_parts(
    held: Sequence[Held], workspace: Workspace, *, bucket_bytes: int, late: Sequence[str] = ()
) -> Updates | None:
    """Let optimizers step on this rank's parts of those parameters whose state is split and that are not stored so.

    Args:
        held: all parameters of a model.
        workspace: memory that movements borrow.
        bucket_bytes: how much a bucket carries.
        late: modules that wait for their own parameters when they run (`wait_in_modules`).
    """
    ours = [one for one in held if one.cut is not None and one.stage < 3]
    updates = Updates(ours, workspace, bucket_bytes=bucket_bytes, late=late)
    for one in ours:
        one.updates = updates
    return updates if ours else None


def settle(params: Iterable[torch.Tensor]) -> None:
    """Wait until parameters hold what the last step has made of them."""
    for updates in updates_of(params):
        updates.settle()


def updates_of(params: Iterable[torch.Tensor]) -> list[Updates]:
    """What gathers parameters after a step, each once; nothing for those that are not updated in parts."""
    known = (one.updates for param in params if (one := held_of(param)) is not None)
    return list({id(updates): updates for updates in known if updates is not None}.values())


def wait_in_modules(updates: Updates, model: nn.Module, late: Sequence[str]) -> Callable[[], None]:
    """Let modules wait for their own parameters, and the model for all others; returns what undoes it."""
    undo = ExitStack()
    for name in late:
        undo.callback(_torch.go_through(model.get_submodule(name), functools.partial(updates.call, name)))
    handles = [
        model.register_forward_pre_hook(lambda *_: updates.settle("")),
        model.register_forward_hook(lambda *_: updates.settle(), always_call=True),
        model.register_state_dict_pre_hook(lambda *_: updates.settle()),
        model.register_load_state_dict_pre_hook(lambda *_: updates.settle()),
    ]
    for handle in handles:
        undo.callback(handle.remove)
    return undo.close


class Updates:
    """The parameters of a model whose state is split over data axes and which themselves are not.

    Args:
        held: the parameters.
        workspace: memory that movements borrow.
        bucket_bytes: how much a bucket carries.
        late: modules whose parameters may arrive when they run; others are there when a step ends, or, if there are
            such modules at all, when the model runs.
    """

    def __init__(
        self, held: Iterable[Held], workspace: Workspace, *, bucket_bytes: int, late: Sequence[str] = ()
    ) -> None:
        self._late = list(late)
        batches = in_batches(
            held,
            alone=lambda one: goes_alone(local_of(one.param), one.cut),
            key=lambda one: (one.axes, one.dtype, bool(unit_of(one.names, self._late))),
            size=lambda one: local_of(one.param).nbytes,
            limit=bucket_bytes,
        )
        self._buckets = [_Bucket(batch, workspace, self._late) for batch in batches]
        self._under_way: list[tuple[_Bucket, Any]] = []
        self._home = {id(one.param): (bucket, i) for bucket in self._buckets for i, one in enumerate(bucket.held)}

    def begin(self, params: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """This rank's parts of some parameters, by the parameters' ids, to be updated in place."""
        self.settle()
        homes = {key: self._home[key] for key in map(id, params) if key in self._home}
        for bucket in {id(bucket): bucket for bucket, _ in homes.values()}.values():
            bucket.load()
        return {key: bucket.parts[i] for key, (bucket, i) in homes.items()}

    def end(self, params: Sequence[torch.Tensor]) -> None:
        """Gather the updated parts into the parameters. Collective over the axes that split them."""
        ids = set(map(id, params))
        touched = [bucket for bucket in self._buckets if not ids.isdisjoint(bucket.ids)]
        self._under_way = [(bucket, bucket.gather()) for bucket in touched]
        if not self._late:
            self.settle()

    def settle(self, module: str | None = None) -> None:
        """Wait for the parameters of a module; "" is for all outside of modules that wait, None for all there are."""
        under_way, self._under_way = self._under_way, []
        for bucket, moving in under_way:
            if module is None or module in bucket.units:
                bucket.unpack(moving)
            else:
                self._under_way.append((bucket, moving))

    def call(self, module: str, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A forward of a module that waits for its own parameters."""
        self.settle(module)
        return inner(*args, **kwargs)

    def whole_gradients(self, params: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Gradients gathered for optimizers that need them whole. Collective over the axes that split them."""
        found = []
        for bucket in self._buckets:
            if any(id(p) in bucket.ids for p in params):
                found += bucket.whole_gradients()
        return found


class _Bucket:
    """Parameters that are gathered together, and this rank's parts of them."""

    def __init__(self, held: list[Held], workspace: Workspace, late: Sequence[str]) -> None:
        self.held, self.ids = held, {id(one.param) for one in held}
        self.units = {unit_of(one.names, late) for one in held}
        first = local_of(held[0].param)
        cuts = [one.cut for one in held if one.cut is not None]
        self.bundle = Bundle(cuts, held[0].transport, first.dtype, first.device, workspace)
        if self.bundle.alone and first.is_contiguous():
            self.mine = self.bundle.block_of_own(first.view(-1))
        else:
            self.mine = torch.empty(self.bundle.own, dtype=first.dtype, device=first.device)
        self.parts = self.bundle.parts_in(self.mine)
        self._where: list[int] = []  # the parameters' memory, as it was when these were made:
        self._known: list[torch.Tensor] = []
        self._rows: list[torch.Tensor] = []
        self._loaded: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []

    def load(self) -> None:
        """What others may have written to the parameters since (a checkpoint, an average) counts."""
        locals_ = self._locals()
        if self.mine.untyped_storage().data_ptr() != locals_[0].untyped_storage().data_ptr():
            _torch.copy_all(self._loaded, self._sources)

    def _locals(self) -> list[torch.Tensor]:
        """What this rank holds of the parameters: the same list, as long as they stay where they are."""
        where = [one.memory.data_ptr() for one in self.held]
        if where != self._where:
            self._where, self._known = where, [local_of(one.param) for one in self.held]
            self._rows = self.bundle.rows_of(self._known)
            self._loaded, self._sources = [], []
            for cut, local, part in zip(self.bundle.cuts, self._known, self.parts, strict=True):
                for place, chosen in cut.places(local, self.bundle.transport.index):
                    self._sources.append(place)
                    self._loaded.append(part.narrow(cut.dim, chosen.start, chosen.stop - chosen.start))
        return self._known

    def gather(self) -> Any:
        return self.bundle.gather(self.mine, self._locals())

    def unpack(self, moving: Any) -> None:
        self.bundle.unpack(moving, self._locals(), self._rows)

    def whole_gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        parts = [local_of(one.param.grad) if one.param.grad is not None else None for one in self.held]
        shown = [torch.zeros_like(part) if have is None else have for have, part in zip(parts, self.parts, strict=True)]
        mine = torch.cat([part.reshape(-1) for part in shown])
        wholes = [torch.empty_like(local_of(one.param)) for one in self.held]
        self.bundle.unpack(self.bundle.gather(mine, wholes), wholes)
        return [
            (one.param, _torch.wrap(whole, _torch.spec_of(one.param)) if isinstance(one.param, DTensor) else whole)
            for one, whole, have in zip(self.held, wholes, parts, strict=True)
            if have is not None
        ]

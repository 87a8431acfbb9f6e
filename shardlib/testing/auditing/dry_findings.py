"""Findings and remarks on a watched step, and the parameters that a rank holds."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from shardlib._plan.fold import fold
from shardlib._plan.readable import human_bytes, human_count
from shardlib.engine import _torch
from shardlib.testing.auditing.dry_grid import NOTHING, Parts
from shardlib.testing.auditing.dry_report import DryFinding, DryWork, Kept
from shardlib.testing.auditing.dry_watch import Watch
from shardlib.testing.auditing.report import WORTH_A_REMARK

__all__ = ["Sharded", "folded", "shapes_of", "ties_of"]


Ties = tuple[tuple[str, ...], ...]


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the global shape of each parameter."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def ties_of(model: nn.Module) -> Ties:
    """Return the names of parameters that are one tensor."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(each) for each in names.values() if len(each) > 1)


class Sharded:
    """A model after a watched step, with what it was before it was sharded."""

    def __init__(self, model: nn.Module, watch: Watch, shapes: Mapping[str, tuple[int, ...]], ties: Ties) -> None:
        self.model, self.watch, self.shapes, self.ties = model, watch, shapes, ties
        self.grid, self.mesh = watch.grid, watch.grid.mesh
        self.names = dict(model.named_parameters())

    def findings(self) -> list[DryFinding]:
        """Return what makes a run wrong, causes before effects."""
        return [*self._sums(), *self._placements(), *self._untied(), *self._gradients()]

    def remarks(self, work: Sequence[DryWork], kept: Sequence[Kept]) -> list[DryFinding]:
        """Return what costs memory or time, or depends on the training loop."""
        if self.by_hand and not self.axis_by_hand:
            return list(self._pending())  # what their products differ over is unknown
        return [*self._pending(), *self._idle(work), *self._repeated(work), *self._held(kept)]

    @functools.cached_property
    def by_hand(self) -> frozenset[str]:
        """The parameters that are plain tensors of another shape than before: no placement says what splits them."""
        return frozenset(
            name
            for name, parameter in self.names.items()
            if not isinstance(parameter, DTensor) and tuple(parameter.shape) != self.shapes.get(name, parameter.shape)
        )

    @functools.cached_property
    def axis_by_hand(self) -> Parts:
        """The one axis over which parameters can have been split by hand; nothing if there are several."""
        able = self.grid.of_axes((*self.mesh.model_axes, *self.mesh.expert_axes))
        return able if len(self.grid.axes(able)) == 1 else NOTHING

    def seed(self) -> None:
        """Mark the parts of parameters and buffers, before a step."""
        for name, tensor in (*self.names.items(), *self.model.named_buffers()):
            local = _local(tensor)
            if isinstance(tensor, DTensor):
                self.watch.made(local, tensor.device_mesh, tensor.placements)
            elif name in self.by_hand:
                self.watch.marks.write(local, self.axis_by_hand)
            self.watch.marks.write_storage(local, self.watch.marks.read(local))

    def kept(self) -> list[Kept]:
        """Return the parameters as this rank holds them."""
        return [self._kept(name, parameter) for name, parameter in self.names.items()]

    def _kept(self, name: str, parameter: torch.Tensor) -> Kept:
        local = _local(parameter)
        sharded = self._split(name)
        return Kept(
            name,
            tuple(parameter.shape) if isinstance(parameter, DTensor) else self.shapes.get(name, tuple(parameter.shape)),
            tuple(local.shape),
            local.numel() * local.element_size(),
            self.grid.axes(sharded),
            self.grid.axes(self.grid.all - sharded - self._unknown(name)),
        )

    def _unknown(self, name: str) -> Parts:
        """Return the axes of which it is unknown whether they split a parameter."""
        return self.grid.all - self.grid.of_axes(self.mesh.data_axes) if name in self.by_hand else NOTHING

    def _split(self, name: str) -> Parts:
        return self.axis_by_hand if name in self.by_hand else self._split_by(self.names[name])

    def _split_by(self, tensor: torch.Tensor) -> Parts:
        """Return the axes over which the placements of a tensor are not Replicate; of a plain tensor, none."""
        if not isinstance(tensor, DTensor):
            return NOTHING
        return NOTHING.union(
            *(
                self.watch.along(tensor.device_mesh, dim)
                for dim, placement in enumerate(tensor.placements)
                if not isinstance(placement, Replicate)
            )
        )

    def _partial_over(self, tensor: Any) -> Parts:
        if not isinstance(tensor, DTensor):
            return NOTHING
        dims = [dim for dim, placement in enumerate(tensor.placements) if isinstance(placement, Partial)]
        return NOTHING.union(*(self.watch.along(tensor.device_mesh, dim) for dim in dims))

    def _of(self, axis: str) -> str:
        return f'"{axis}" ({self.mesh[axis]:,} ranks)'

    def _placements(self) -> Iterator[DryFinding]:
        found: dict[tuple[tuple[str, ...], str], list[str]] = {}
        for each in self.watch.contradictions:
            found.setdefault((self.grid.axes(each.over), each.phase), []).append(each.module)
        for (axes, phase), modules in found.items():
            over = " and ".join(map(self._of, axes))
            why = (
                "to_local() gives a gradient the placements of forward: write to_local(grad_placements=[Partial()]) "
                "where each rank computes a part of it"
                if phase == "backward"
                else "give from_local() the placements that the tensor has, or reduce it before"
            )
            yield DryFinding(
                "wrong placement",
                tuple(modules),
                axes,
                f"in {phase} of {folded(modules)}, a tensor that differs over {over} becomes a DTensor that is "
                f"Replicate there; {why}",
            )

    def _sums(self) -> Iterator[DryFinding]:
        found: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for each in self.watch.misuses:
            found.setdefault((each.over.axis, each.op), []).append((each.left_by, each.module))
        for (axis, op), places in found.items():
            left, used = [each for each, _ in places], [each for _, each in places]
            yield DryFinding(
                "unfinished sum",
                tuple(dict.fromkeys(left)),
                (axis,),
                f"{folded(left)} leaves its output a partial sum over {self._of(axis)} and gives it away as a plain "
                f"tensor; {op} in {folded(used)} takes it for the sum. Reduce it: output_layouts=Replicate(), or "
                "Shard(...) with sequence parallelism",
            )

    def _untied(self) -> Iterator[DryFinding]:
        now = {name: id(each) for name, each in self.model.named_parameters(remove_duplicate=False)}
        for names in self.ties:
            there = [name for name in names if name in now]
            if len({now[name] for name in there}) > 1:
                size = sum(each.bytes for each in self.kept() if each.name in there[1:])
                yield DryFinding(
                    "untied parameter",
                    tuple(there),
                    (),
                    f"{' and '.join(there)} were one parameter and are {len(there)} after sharding: each gets a part "
                    f"of the gradient, and a rank holds {human_bytes(size)} twice. Tie them again, or shard both alike",
                    size,
                )

    def _gradients(self) -> Iterator[DryFinding]:
        found: dict[tuple[str, str], list[str]] = {}
        trained = {name: each.grad for name, each in self.names.items() if each.grad is not None}
        for name, grad in trained.items():
            apart, local = self._split(name) | self._split_by(grad) | self._unknown(name), _local(grad)
            for axis in self.grid.axes(self.watch.marks.read(local) - apart):
                found.setdefault((axis, ""), []).append(name)
            lost = {part: each.by for part, each in self.watch.marks.sums(local).items() if each.state == "lost"}
            for axis, why in {(part.axis, why): None for part, why in lost.items() if part not in apart}:
                found.setdefault((axis, why), []).append(name)
        for name, (grad, scattered) in self.withheld.items():
            apart = self._split(name) if scattered else self._split_by(grad)
            switch = "set_requires_all_reduce" if scattered else "set_requires_gradient_sync"
            for axis in self.grid.axes(self.watch.marks.read(_local(grad)) - apart):
                found.setdefault(
                    (axis, f"{switch}(False) is left on; call it with True before the last pass of a step"), []
                ).append(name)
        for (axis, why), names in found.items():
            whose = "every parameter" if len(names) == len(trained) + len(self.withheld) else folded(names)
            text = self._no_sum(axis, whose, why) if why else self._unreduced(axis, whose)
            yield DryFinding("unreduced gradient", tuple(names), (axis,), text)

    @functools.cached_property
    def withheld(self) -> dict[str, tuple[torch.Tensor, bool]]:
        """The gradients that fully_shard has not reduced yet, and whether it has scattered them."""
        found = {id(each): (grad, scattered) for each, grad, scattered in _torch.withheld_gradients(self.model)}
        return {name: found[id(each)] for name, each in self.names.items() if id(each) in found}

    def _no_sum(self, axis: str, whose: str, why: str) -> str:
        return (
            f"the gradient of {whose} is not a sum over {self._of(axis)}, whose ranks hold the same parameter and "
            f"compute gradients of their own: {why}"
        )

    def _unreduced(self, axis: str, whose: str) -> str:
        data = axis in self.mesh.data_axes
        cover = (
            f"give fully_shard, replicate or DDP a mesh or a group that has {axis}"
            if data
            else f"name the module in the plan (SequenceParallel() for a norm between split activations), or sum its "
            f"gradient over {axis}"
        )
        return (
            f"the gradient of {whose} differs over {self._of(axis)}, whose ranks hold the same parameter, and nothing "
            f"sums it: the ranks will drift apart; {cover}"
        )

    def _pending(self) -> Iterator[DryFinding]:
        found: dict[str, list[str]] = {}
        for name, parameter in self.names.items():
            for axis in self.grid.axes(self._partial_over(parameter.grad)):
                found.setdefault(axis, []).append(name)
        for axis, names in found.items():
            yield DryFinding(
                "pending gradient",
                tuple(names),
                (axis,),
                f"the gradient of {folded(names)} stays Partial over {self._of(axis)}: each op on the DTensor reduces "
                "it anew, and whatever takes its local tensor (to_local(), a fused kernel) gets one rank's part",
            )

    def _idle(self, work: Sequence[DryWork]) -> Iterator[DryFinding]:
        for axis in self.mesh.model_axes:
            if self.mesh[axis] > 1 and work and all(axis in each.alike for each in work):
                yield DryFinding(
                    "idle axis",
                    (),
                    (axis,),
                    f"{self._of(axis)} divides no product: all of its ranks compute the same",
                )

    def _repeated(self, work: Sequence[DryWork]) -> Iterator[DryFinding]:
        total = sum(each.flops for each in work)
        for axis in self.mesh.model_axes:
            by_module: Counter[str] = Counter()
            for each in work:
                if axis in each.alike:
                    by_module[each.module] += each.flops
            repeated = sum(by_module.values())
            if WORTH_A_REMARK * total <= repeated < total:
                yield DryFinding(
                    "replicated compute",
                    tuple(by_module),
                    (axis,),
                    f"each rank of {self._of(axis)} repeats the products of {folded(by_module)}, "
                    f"{human_count(repeated)} floating-point operations, {100 * repeated / total:.0f}% of a rank's: "
                    f"{axis} divides other modules",
                )

    def _held(self, kept: Sequence[Kept]) -> Iterator[DryFinding]:
        total = sum(each.bytes for each in kept)
        for axis in self.mesh.model_axes:
            alike = [each for each in kept if axis in each.replicated]
            size = sum(each.bytes for each in alike)
            large = [each.name for each in alike if each.bytes >= WORTH_A_REMARK * total]
            if size >= WORTH_A_REMARK * total and large and len(alike) < len(kept):
                yield DryFinding(
                    "replicated parameters",
                    tuple(large),
                    (axis,),
                    f"each rank of {self._of(axis)} holds {folded(large)}, which {axis} does not split; all that it "
                    f"does not split takes {human_bytes(size)} of the {human_bytes(total)} of parameters on a rank",
                    size,
                )


def folded(names: Iterable[str]) -> str:
    """Format names, those of repeated blocks in one."""
    groups = fold(dict.fromkeys(names), name=str, same=lambda _: None)
    return ", ".join(group.title or "the model" for group in groups)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return _torch.bare_tensor(_torch.local_of(tensor) if isinstance(tensor, DTensor) else tensor)

"""One parameter of a sharded model, as the engine moves it between the phases of its plan."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from shardlib._mesh import MeshShape
from shardlib._plan import Movement, Purpose
from shardlib.engine import _torch, offload
from shardlib.engine.borders import moved
from shardlib.engine.executor.bucket import Bucket
from shardlib.engine.plain import plain
from shardlib.engine.transport import Transport, Workspace
from shardlib.errors import ShardingError
from shardlib.layout import Cut, Layout

if TYPE_CHECKING:
    from shardlib.engine.schedule import Updates

__all__ = ["Axes", "Held", "held_of", "local_of", "remember"]

Axes = tuple[str, ...]


@dataclass(eq=False)
class Held:
    """A parameter, and how its gradient and state lie.

    Attributes:
        names: all its names, the first one first.
        param: `model.get_parameter(name)`, to which autograd gives gradients.
        axes: the data axes that split gradient and state.
        cut: how a local compute tensor is divided over them; None where they split nothing.
        compute: layout of what is computed with, on the whole mesh.
        layout: of gradient and state, on the whole mesh.
        mesh: the whole mesh.
        room: elements of the largest rank's compute tensor.
        movements: what the plan moves of it in a step, by purpose.
        transport: the ranks among which `cut` divides.
        compute_spec: of the whole parameter on the model axes, where it is a DTensor there.
        unsharded: local memory of what is computed with, where the parameter is stored in parts.
        leaf: during a step of a pipeline, what is computed with in all of its microbatches: autograd adds up the
            gradients of such a parameter there.
        master_dtype: of the copy of the parameter that the optimizer steps on, laid out as its state; None where it
            steps on the parameter.
        first_master: that copy, until the first step.
        updates: what gathers it after a step, where each rank updates its own part of a parameter that is not stored in
            parts.
        device: on which it is computed with.
        hosted: its phases that lie in host memory, where that is another memory than the device's.
        beyond: the ranks of all stages, where the mesh is that of one stage of a pipeline.
        counted: whether its elements are counted here and not by another stage that holds it too.
        landing: host memory for this rank's part and its gradient, where the optimizer steps on copies there.
    """

    names: tuple[str, ...]
    param: nn.Parameter
    axes: Axes
    cut: Cut | None
    compute: Layout
    layout: Layout
    mesh: DeviceMesh
    room: int
    movements: Mapping[Purpose, Movement] = field(default_factory=dict)
    transport: Transport | None = None
    compute_spec: Any = None
    unsharded: torch.Tensor | None = None
    leaf: torch.Tensor | None = None
    master_dtype: torch.dtype | None = None
    first_master: torch.Tensor | None = None
    updates: Updates | None = None
    device: torch.device = offload.HOST
    hosted: frozenset[str] = frozenset()
    landing: dict[str, torch.Tensor] = field(default_factory=dict)
    beyond: dist.ProcessGroup | None = None
    counted: bool = True

    @property
    def name(self) -> str:
        return self.names[0]

    def to_compute_with(self) -> torch.Tensor:
        """A new tensor over the unsharded memory, apart from autograd, which counts its writes by itself: a gathering
        must not be taken for a change of what autograd saved."""
        assert self.unsharded is not None
        local = self.unsharded.data
        return local if self.compute_spec is None else _torch.wrap(local, self.compute_spec)

    def wrap(self, part: torch.Tensor) -> DTensor:
        """This rank's part of gradient or state as a DTensor of global shape."""
        spec = self._specs.get(part.dtype)
        if spec is None:
            spec = _torch.spec(self.mesh, self._placements, tuple(self.param.shape), part.dtype)
            self._specs[part.dtype] = spec
        return _torch.wrap(part, spec)

    @cached_property
    def _specs(self) -> dict[torch.dtype, Any]:
        return {}

    @cached_property
    def _placements(self) -> tuple[Placement, ...]:
        return tuple(self.layout.placements(self.mesh))

    @property
    def memory(self) -> torch.Tensor:
        """This rank's memory of what is computed with. Autograd is not kept away."""
        if self.unsharded is not None:
            return self.unsharded
        return _torch.local_of(self.param) if isinstance(self.param, DTensor) else self.param

    @property
    def is_stored_in_parts(self) -> bool:
        """Whether ranks hold different parts of the parameter between the runs of its unit."""
        return self.cut is not None and "parameters, forward" in self.movements

    @property
    def keeps_gradient(self) -> bool:
        """Whether its gradient has its own memory until the step ends, as large as what is computed with, though this
        rank reduces its part alone."""
        return self.updated_in_parts and self.movements["gradients"].needed == "step ends"

    @property
    def updated_in_parts(self) -> bool:
        """Whether gradient and state lie otherwise than the parameter does."""
        return self.cut is not None and not self.is_stored_in_parts

    @property
    def is_split(self) -> bool:
        """Whether ranks hold different parts of its state."""
        return bool(self.layout.axes)

    @property
    def visits_host(self) -> bool:
        """Whether the optimizer steps on a copy of it in host memory, where its state is."""
        return "state" in self.hosted and "stored" not in self.hosted

    @property
    def state_device(self) -> torch.device:
        """Where its state lies."""
        return offload.HOST if "state" in self.hosted else self.device

    @property
    def home(self) -> Layout:
        """How the parameter lies between steps."""
        return self.layout if self.is_stored_in_parts else self.compute

    @property
    def grad_layout(self) -> Layout:
        """How its gradient lies once it is reduced."""
        return self.compute if self.cut is None else self.layout

    @property
    def dtype(self) -> torch.dtype:
        """In which it is computed with."""
        return self.param.dtype

    @cached_property
    def part_shape(self) -> tuple[int, ...]:
        """Local shape of this rank's part of gradient and state."""
        return self.layout.local_shape(tuple(self.param.shape), MeshShape.of(self.mesh), self._place)

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor of global shape."""
        return self.layout.take(whole.detach(), MeshShape.of(self.mesh), self._place).clone()

    @cached_property
    def _place(self) -> dict[str, int]:
        return dict(zip(self.mesh.mesh_dim_names or (), self.mesh.get_coordinate() or (), strict=True))

    def gathered(self, part: torch.Tensor) -> torch.Tensor:
        """The whole tensor, on every rank, of the parts that all ranks have: a parameter, its gradient or its state.

        Collective over the axes that split it, data axes and model axes.
        """
        if self.cut is not None:
            assert self.transport is not None
            part = part.to(self.device)
            bucket = Bucket([self.cut], self.transport, part.dtype, part.device, Workspace())
            whole = torch.empty(self.cut.shape, dtype=part.dtype, device=part.device)
            bucket.unpack(bucket.gather(part.reshape(-1), [whole]), [whole])
            part = whole
        return part if self.compute_spec is None else plain(_torch.wrap(part, self.compute_spec))

    def lay_out(self, grad: torch.Tensor | None, *, keep_partial: Axes = ()) -> torch.Tensor:
        """Redistribute a full gradient as the parameter is computed with, but for sums over axes in `keep_partial`."""
        assert grad is not None
        spec = self.compute_spec
        if isinstance(grad, DTensor) and spec is None:
            return plain(grad)
        if not isinstance(grad, DTensor) or grad.placements == spec.placements:
            return grad
        names = grad.device_mesh.mesh_dim_names or ()
        target = tuple(
            have if have.is_partial("sum") and want.is_replicate() and name in keep_partial else want
            for name, have, want in zip(names, grad.placements, spec.placements, strict=True)
        )
        return grad if target == grad.placements else moved(grad, target)

    def refuse_own_examples(self) -> None:
        """Its gradient is about to be used, and must not be that of this rank's examples alone."""
        grad = self.param.grad
        partial = isinstance(grad, DTensor) and any(place.is_partial() for place in grad.placements)
        if self.cut is not None and not self.is_part(grad) and (self.updated_in_parts or partial):
            raise ShardingError(
                f'"{self.name}" has a gradient of this rank\'s examples alone: the plan splits its gradient or state '
                f"over {', '.join(self.axes)}, and no backward pass outside of shardlib.no_sync has reduced it. Run "
                "the last backward pass before a step outside of no_sync; then clip, then step."
            )

    def is_part(self, tensor: Any) -> bool:
        """Whether a tensor is a DTensor that holds this rank's part, as `wrap` makes it."""
        if not isinstance(tensor, DTensor):
            return False
        if _torch.spec_of(tensor) is self._specs.get(tensor.dtype):
            return True
        return tensor.placements == self._placements and (
            tensor.device_mesh is self.mesh or tensor.device_mesh == self.mesh
        )


# Weakly: whoever reduces a model's gradients keeps them, and they keep the parameters.
_held: weakref.WeakValueDictionary[int, Held] = weakref.WeakValueDictionary()


def held_of(param: torch.Tensor) -> Held | None:
    """What the engine knows of a parameter of a sharded model, asked for by identity; None of any other tensor."""
    held = _held.get(id(param))
    return held if held is not None and held.param is param else None


def remember(held: Held) -> None:
    """Let `held_of` find it, as long as its model lives."""
    _held[id(held.param)] = held


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a parameter or gradient, apart from autograd."""
    return _torch.local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach()

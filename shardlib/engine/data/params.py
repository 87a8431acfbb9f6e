"""One parameter of a sharded model, as the engine moves it between the phases of its plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from shardlib._mesh_shape import MeshShape
from shardlib._plan import Movement, Optimizer, Purpose, Row
from shardlib.engine import _torch
from shardlib.engine.data import offload
from shardlib.engine.data.executor import Executor
from shardlib.engine.data.executor.bucket import Bucket
from shardlib.engine.ops.redistribute import redistribute_gradient, to_full_tensor
from shardlib.engine.ranks.transport import Transport, Workspace
from shardlib.errors import ShardingError
from shardlib.layout import Layout, ShardSpec

__all__ = ["Axes", "MutableState", "ParamState", "local_of", "movements_for"]

Axes = tuple[str, ...]


@dataclass(eq=False)
class MutableState:
    """The part of a parameter that changes while its model trains. Only methods of its `ParamState` assign it.

    Attributes:
        row: the row of the plan, with the model axes over which the gradient has been a partial sum.
        movements: the movements of the row in a step, by purpose; None until they are asked for.
        unsharded: the local unsharded tensor, where the parameter is stored in shards.
        shown: the unsharded tensor over the same memory of which modules get aliases. Its version counter, which all
            of them share, tells autograd whether the memory still has the values that they had.
        leaf: during a step of a pipeline, the unsharded tensor that all microbatches compute with; autograd accumulates
            their gradients there.
        master: the copy of the parameter that the optimizer steps on, until the optimizer's state holds it.
        staging: host memory for this rank's shard and its gradient, where the optimizer steps on copies there.
    """

    row: Row
    movements: Mapping[Purpose, Movement] | None = None
    unsharded: torch.Tensor | None = None
    shown: torch.Tensor | None = None
    leaf: torch.Tensor | None = None
    master: torch.Tensor | None = None
    staging: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class ParamState:
    """A parameter, with the layouts of its gradient and optimizer state.

    Attributes:
        names: all names of the parameter, the canonical one first.
        param: `model.get_parameter(name)`, to which autograd gives gradients.
        axes: the data axes that split gradient and state.
        shard_spec: the division of the local compute tensor over `axes`; None where they split nothing.
        compute: the layout of the parameter in computation, on the whole mesh.
        layout: the layout of gradient and state, on the whole mesh.
        mutable: what changes of it.
        unit: the unit that it is gathered with; "" for the model.
        list_movements: lists the movements of a row in a step, by purpose; rows of one form share them, with one row's
            name.
        executor: the executor of the model's movements.
        transport: the transport among the ranks of `axes`.
        compute_spec: the DTensor spec of the unsharded parameter on the model axes, where it is a DTensor there.
        master_dtype: the dtype of the copy of the parameter that the optimizer steps on, laid out as its state; None
            where the optimizer steps on the parameter.
        offloaded: the phases that lie in host memory, where that is another memory than the device's.
        pipeline_group: the ranks of all stages, where the mesh is that of one pipeline stage.
        is_counted: whether norms count its elements on this stage, and not on another stage that has it too.
    """

    names: tuple[str, ...]
    param: nn.Parameter
    axes: Axes
    shard_spec: ShardSpec | None
    compute: Layout
    layout: Layout
    mutable: MutableState
    unit: str
    list_movements: Callable[[Row, Optimizer], Mapping[Purpose, Movement]]
    executor: Executor
    transport: Transport | None = None
    compute_spec: Any = None
    master_dtype: torch.dtype | None = None
    offloaded: frozenset[str] = frozenset()
    pipeline_group: dist.ProcessGroup | None = None
    is_counted: bool = True

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def mesh(self) -> DeviceMesh:
        """The whole mesh."""
        return self.executor.mesh

    @property
    def device(self) -> torch.device:
        """The device of computation."""
        return self.executor.device

    @property
    def row(self) -> Row:
        """The row of the plan, with the model axes over which the gradient has been a partial sum."""
        return self.mutable.row

    @property
    def movements(self) -> Mapping[Purpose, Movement]:
        """The movements of the parameter in a step, by purpose, without its name."""
        if self.mutable.movements is None:
            self.mutable.movements = self.list_movements(self.row, "elementwise")
        return self.mutable.movements

    def named(self, movement: Movement) -> Movement:
        """Return a movement of `list_movements` with the name and the unit of the parameter."""
        return replace(movement, name=self.name, unit=self.unit)

    def expect_gradient(self, partial: Axes) -> None:
        """List the movements of a gradient that is a partial sum over some model axes.

        The plan has no gradient of a parameter that was frozen when it was made.
        """
        row = self.row
        if row.grad is None or row.state is None or row.partial != partial:
            expected = row.replace(grad=row.grad or row.stored, state=row.state or row.stored, partial=partial)
            self.mutable.row, self.mutable.movements = expected, None

    def reduction(self, partial: Axes) -> Movement:
        """Return the movement that reduces a gradient which is a partial sum over some model axes."""
        return self.named(self.list_movements(self.row.replace(partial=partial), "elementwise")["gradients"])

    def copied(self, purpose: Purpose) -> None:
        """Record the copy between host and device of one of its movements."""
        self.executor.copied(movements_for([self], purpose))

    # --- what changes -----------------------------------------------------------------------------------------------

    def place_unsharded(self, memory: torch.Tensor) -> None:
        """Let the unsharded tensor lie at the start of a flat buffer of bytes."""
        assert self.shard_spec is not None
        flat = memory[: sum(self.shard_spec.numels) * self.dtype.itemsize].view(self.dtype)
        local = self.mutable.unsharded = flat.view(self.shard_spec.shape).data
        self.mutable.shown = local.data if self.compute_spec is None else _torch.wrap(local.data, self.compute_spec)

    def make_unsharded(self) -> torch.Tensor:
        """Return a new tensor over the unsharded memory, with the version counter of the others."""
        assert self.mutable.shown is not None
        return _torch.alias(self.mutable.shown)

    @property
    def unsharded_version(self) -> int:
        """The number that autograd compares when it reads an unsharded tensor that it saved."""
        assert self.mutable.shown is not None
        return self.mutable.shown._version

    def set_unsharded_version(self, version: int) -> None:
        """Set the version of all unsharded tensors: autograd refuses to read those that were saved at another one."""
        assert self.mutable.shown is not None
        _torch.set_version(self.mutable.shown, version)

    def step_leaf(self) -> torch.Tensor:
        """Return the leaf of a step of a pipeline, and make it where it is missing."""
        if self.mutable.leaf is None:
            if self.param.requires_grad and _torch.has_gradient_hooks(self.param):
                raise ShardingError(
                    f'"{self.name}" is stored in shards and has hooks on its gradient, which pipeline steps do not '
                    "call: they add up the gradients of all microbatches. Remove the hooks, or use zero(2) at most."
                )
            self.mutable.leaf = self.make_unsharded().requires_grad_(self.param.requires_grad)
        return self.mutable.leaf

    def pop_leaf_gradient(self) -> torch.Tensor | None:
        """Drop the leaf; return its gradient."""
        leaf, self.mutable.leaf = self.mutable.leaf, None
        return None if leaf is None else leaf.grad

    def keep_master(self, master: torch.Tensor | None) -> None:
        """Keep a master copy until the state of the optimizer has it; None where it has, or where a step makes it."""
        self.mutable.master = master

    # --- facts --------------------------------------------------------------------------------------------------------

    def wrap(self, shard: torch.Tensor) -> DTensor:
        """Wrap this rank's shard of gradient or state as a DTensor of global shape."""
        spec = self._specs.get(shard.dtype)
        if spec is None:
            spec = _torch.spec(self.mesh, self._placements, tuple(self.param.shape), shard.dtype)
            self._specs[shard.dtype] = spec
        return _torch.wrap(shard, spec)

    @cached_property
    def _specs(self) -> dict[torch.dtype, Any]:
        return {}

    @cached_property
    def _placements(self) -> tuple[Placement, ...]:
        return tuple(self.layout.placements(self.mesh))

    @property
    def memory(self) -> torch.Tensor:
        """The local tensor that this rank computes with; not detached from autograd."""
        if self.mutable.unsharded is not None:
            return self.mutable.unsharded
        return _torch.local_of(self.param) if isinstance(self.param, DTensor) else self.param

    @cached_property
    def is_stored_sharded(self) -> bool:
        """Whether ranks hold different shards of the parameter between the runs of its unit."""
        movement = self.movements.get("parameters, forward")
        return movement is not None and movement.is_sent

    @property
    def is_updated_sharded(self) -> bool:
        """Whether data axes split gradient and state, and not the stored parameter."""
        return self.shard_spec is not None and not self.is_stored_sharded

    @property
    def has_sharded_state(self) -> bool:
        """Whether ranks hold different shards of the optimizer state."""
        return bool(self.layout.axes)

    @property
    def steps_on_host(self) -> bool:
        """Whether the optimizer steps on a copy of the parameter in host memory, where the state is."""
        return "state" in self.offloaded and "stored" not in self.offloaded

    @property
    def state_device(self) -> torch.device:
        """The device of the optimizer state."""
        return offload.HOST if "state" in self.offloaded else self.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of computation."""
        return self.param.dtype

    @property
    def grad_dtype(self) -> torch.dtype:
        """The dtype of the gradient, in which backward passes add up."""
        grad = self.row.grad
        return self.dtype if grad is None or grad.dtype is None else grad.dtype

    @property
    def max_local_numel(self) -> int:
        """The number of elements of the compute tensor on the rank where it is largest."""
        return math.prod(self.row.local_shape(MeshShape.of(self.mesh), phase="compute"))

    @cached_property
    def shard_shape(self) -> tuple[int, ...]:
        """The local shape of this rank's shard of gradient and state."""
        return self.layout.local_shape(tuple(self.param.shape), MeshShape.of(self.mesh), self._coordinate)

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a tensor of global shape, as a copy."""
        return self.layout.take(full.detach(), MeshShape.of(self.mesh), self._coordinate).clone()

    @cached_property
    def _coordinate(self) -> dict[str, int]:
        return dict(zip(self.mesh.mesh_dim_names or (), self.mesh.get_coordinate() or (), strict=True))

    def full_tensor(self, local: torch.Tensor) -> torch.Tensor:
        """Return the full tensor, on every rank, of local shards: of the parameter, its gradient or its state.

        Collective over the data axes and model axes that split it.
        """
        if self.shard_spec is not None:
            local = self._gathered(local)
        return local if self.compute_spec is None else to_full_tensor(_torch.wrap(local, self.compute_spec))

    def gather(self) -> torch.Tensor:
        """Return the stored parameter as modules compute with it, in memory of its own.

        Collective over the data axes that split it.
        """
        local = self._gathered(local_of(self.param), movements_for([self], "parameters, forward"))
        return local if self.compute_spec is None else _torch.wrap(local, self.compute_spec)

    def _gathered(self, local: torch.Tensor, carries: Iterable[Movement] = ()) -> torch.Tensor:
        assert self.shard_spec is not None and self.transport is not None
        shard = local.to(self.device)
        bucket = Bucket([self.shard_spec], self.transport, shard.dtype, shard.device, Workspace())
        full = torch.empty(self.shard_spec.shape, dtype=shard.dtype, device=shard.device)
        bucket.unpack(bucket.gather([shard.reshape(-1)], [full], carries), [full])
        return full

    def lay_out(self, grad: torch.Tensor | None, *, keep_partial: Axes = ()) -> torch.Tensor:
        """Redistribute a full gradient to the compute layout, but for partial sums over axes in `keep_partial`."""
        assert grad is not None
        grad, spec = self.unwrap(grad), self.compute_spec
        if not isinstance(grad, DTensor) or grad.placements == spec.placements:
            return grad
        names, kept = grad.device_mesh.mesh_dim_names or (), {*self.partial_axes(grad)} & {*keep_partial}
        target = tuple(
            current if name in kept else wanted
            for name, current, wanted in zip(names, grad.placements, spec.placements, strict=True)
        )
        return grad if target == grad.placements else redistribute_gradient(grad, target)

    def unwrap(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the full tensor of a DTensor gradient, where the parameter is a plain tensor in computation."""
        return to_full_tensor(grad) if self.compute_spec is None else grad

    def partial_axes(self, grad: torch.Tensor | None) -> Axes:
        """Return the model axes over which a gradient is a partial sum, where the parameter is replicated."""
        if not isinstance(grad, DTensor) or self.compute_spec is None:
            return ()
        names = grad.device_mesh.mesh_dim_names or ()
        placements = zip(names, grad.placements, self.compute_spec.placements, strict=True)
        return tuple(
            name for name, current, wanted in placements if current.is_partial("sum") and wanted.is_replicate()
        )

    def check_reduced(self) -> None:
        """Raise if the gradient, which is about to be used, is that of this rank's examples alone."""
        grad = self.param.grad
        if self.shard_spec is None or self.is_local_shard(grad):
            return
        partial = isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements)
        if self.is_updated_sharded or partial:
            if not partial and grad is not None and not local_of(grad).any():
                return  # zeros, with which torch's get_optimizer_state_dict lets an optimizer make its state
            raise ShardingError(
                f'"{self.name}" has a gradient of this rank\'s examples alone: the plan shards its gradient or state '
                f"over {', '.join(self.axes)}, and no backward pass outside of shardlib.no_sync has reduced it. Run "
                "the last backward pass before a step outside of no_sync; then clip, then step."
            )

    def holds(self, state: DTensor) -> bool:
        """Tell whether a DTensor has this rank's shard of optimizer state, as it is between steps."""
        if self.is_local_shard(state):
            return True
        like = self.param
        return isinstance(like, DTensor) and (state.placements, state.device_mesh) == (
            like.placements,
            like.device_mesh,
        )

    def is_local_shard(self, tensor: Any) -> bool:
        """Tell whether a tensor is a DTensor over this rank's shard, as `wrap` returns it."""
        if not isinstance(tensor, DTensor):
            return False
        if _torch.spec_of(tensor) is self._specs.get(tensor.dtype):
            return True
        return tensor.placements == self._placements and (
            tensor.device_mesh is self.mesh or tensor.device_mesh == self.mesh
        )


def movements_for(
    param_states: Iterable[ParamState], purpose: Purpose, optimizer: Optimizer = "elementwise"
) -> Iterator[Movement]:
    """Yield the movements of one purpose, of the parameters that have one."""
    for one in param_states:
        if (movement := one.list_movements(one.row, optimizer).get(purpose)) is not None:
            yield one.named(movement)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a parameter or gradient, detached from autograd."""
    return _torch.local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach()

"""The borders between plain tensors and the global view.

Only regions of a model compute on DTensors: the smallest modules that close over what is split (`regions.py` finds
them). Everything between them computes on plain tensors that are the same on all ranks of the model axes, exactly as on
one device. At a region's border

    plain, the same on all model ranks  ->  DTensor, replicated      (on entering)
    DTensor of any layout               ->  plain, whole             (on leaving)

and, transposed, in backward: the gradient of what entered is whole again, summed over the model axes where consumers
were split. Where a region has several outputs, those after the first are gathered when they are read (`Ungathered`).
This is the only place where a DTensor becomes a local tensor and back; since both sides of both borders are replicated,
no gradient placement is left to guess. Integer and boolean inputs stay plain: they carry no gradient,
and a plain tensor inside counts as replicated.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shardlib.engine import _torch
from shardlib.engine._torch import pytree
from shardlib.engine.gradients import GradientReducer
from shardlib.engine.held import local_of
from shardlib.engine.ops._operands import redistributed
from shardlib.engine.plain import plain
from shardlib.engine.ungathered import Ungathered
from shardlib.engine.units import Units

__all__ = ["Casting", "Root", "install_region", "made_global", "made_plain"]

Check = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


@dataclass(frozen=True)
class Casting:
    """In which dtypes a model computes, where they are not those of its inputs.

    Attributes:
        device_type: of the mesh.
        autocast: what forward casts to, op by op; None is off.
        inputs: what inputs of other floating-point dtypes are cast to; None leaves them.
    """

    device_type: str
    autocast: torch.dtype | None = None
    inputs: torch.dtype | None = None

    def on_entering(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (args, kwargs) if self.inputs is None else _cast((args, kwargs), {torch.float32}, self.inputs)

    def on_leaving(self, output: Any) -> Any:
        low = self.inputs or self.autocast
        return output if low is None else _cast(output, {low}, torch.float32)


def _cast(values: Any, which: set[torch.dtype], dtype: torch.dtype) -> Any:
    def one(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.dtype in which else tensor

    return pytree.tree_map_only(torch.Tensor, one, values)


class Root:
    """Hooks on the root of a sharded model: inputs are checked, and the start of backward is noticed.

    From the first forward on, a plain tensor that meets a DTensor counts as replicated, in this thread and in the
    backward passes it starts. Autograd restores the thread's state for every node, so a switch that is on in forward
    alone would leave the masks and positions that a model makes for itself unreadable in backward. It also lets
    `torch.nn.utils.clip_grad_norm_` and the like take parameters of both kinds.

    Args:
        reducer: told when a backward pass begins.
        check: looks at the inputs before anything else, and raises `InputError`.
        units: made whole while the model runs.
        casting: in which dtypes it does.
    """

    def __init__(self, reducer: GradientReducer, check: Check, units: Units | None, casting: Casting) -> None:
        self.reducer, self.check, self.units, self.casting = reducer, check, units, casting
        self._autocasts: list[torch.autocast] = []
        self._left = False

    def install(self, model: nn.Module) -> list[Any]:
        return [
            model.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._leave),
            model.register_forward_hook(self._abandon, always_call=True),
        ]

    def _enter(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.check(model, args, kwargs)
        _torch.set_implicit_replication(True)
        if self.units is not None:
            self.units.enter_model()
        self.reducer.notice_unfrozen()
        if self.casting.autocast is not None:
            self._autocasts.append(torch.autocast(self.casting.device_type, self.casting.autocast))
            self._autocasts[-1].__enter__()
        return self.casting.on_entering(args, kwargs)

    def _abandon(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Called after every forward. One that raised has not come to `_leave`."""
        if self._left:
            self._left = False
            return
        if self._autocasts:
            self._autocasts.pop().__exit__(None, None, None)
        if self.units is not None:
            self.units.abandon()

    def _leave(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        self._left = True
        if self._autocasts:
            self._autocasts.pop().__exit__(None, None, None)
        output = self.casting.on_leaving(output)
        leaves = list(_torch.leaves_of(output))
        if any(isinstance(leaf, Ungathered | DTensor) for leaf in leaves):
            output = pytree.tree_map_only((Ungathered, DTensor), made_plain, output)
            leaves = pytree.tree_leaves(output)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not leaf.is_leaf:
                leaf.register_hook(_beginning(weakref.ref(self.reducer)))
        return output if self.units is None else self.units.leave_model(output)


def _beginning(reducer: weakref.ref[GradientReducer]) -> Callable[[torch.Tensor], None]:
    """A hook that does not keep the model: one that keeps its own output would never be freed, since Python's collector
    does not see through a graph."""

    def hook(_grad: torch.Tensor) -> None:
        if (alive := reducer()) is not None:
            alive.begin()

    return hook


def made_global(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """A plain tensor that comes into a region by another way than its module's arguments; integers stay plain."""
    if isinstance(tensor, DTensor) or not tensor.is_floating_point():
        return tensor
    return _ToGlobal.apply(tensor, mesh)


def made_plain(tensor: torch.Tensor) -> torch.Tensor:
    """What is left to be made plain at the root: what nobody has read yet, and what comes of a split parameter that
    was read outside of its region, as in `F.linear(x, self.embed.weight)`."""
    return _ToPlain.apply(tensor, False, True) if isinstance(tensor, DTensor) else tensor.view_as(tensor)


def install_region(module: nn.Module, mesh: DeviceMesh) -> list[Any]:
    """Let a module compute on DTensors over `mesh` while its surroundings see plain tensors."""
    enter, leave = _hooks(mesh)
    return [
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.register_forward_hook(leave, prepend=True, with_kwargs=True),
    ]


@_torch.cached_by_mesh
def _hooks(mesh: DeviceMesh) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """One pair of hooks for all regions of a mesh: a block compiled once then serves every block like it."""
    replicated = (Replicate(),) * mesh.ndim

    def to_global(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor) or not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        if torch.compiler.is_compiling():
            return DTensor.from_local(tensor, mesh, replicated, run_check=False)
        return _to_global(tensor, mesh)

    def to_plain(tensor: torch.Tensor, others: Any, late: bool = False) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        if torch.compiler.is_compiling():
            return tensor.full_tensor(grad_placements=replicated)
        return _to_plain(tensor, late, _is_seen(tensor, others))

    def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.compiler.is_compiling():
            _torch.set_implicit_replication(True)  # a part may be called by itself, as `generate` calls an encoder
        if not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor):
            return (to_global(args[0]),), kwargs
        return pytree.tree_map_only(torch.Tensor, to_global, (args, kwargs))

    def leave(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return to_plain(output, (args, kwargs))
        leaves, spec = pytree.tree_flatten(output)
        split = [i for i, leaf in enumerate(leaves) if isinstance(leaf, DTensor)]
        made = {i: to_plain(leaves[i], (args, kwargs, leaves[:i], leaves[i + 1 :]), i != split[0]) for i in split}
        return pytree.tree_unflatten([made.get(i, leaf) for i, leaf in enumerate(leaves)], spec)

    return enter, leave


def _is_seen(tensor: DTensor, others: Any) -> bool:
    """Whether the memory of a whole output is known to the region's surroundings by another tensor too."""
    if not all(place.is_replicate() for place in tensor.placements):
        return False  # it will be gathered
    if tensor.is_leaf and tensor.requires_grad:
        return True
    local = _torch.local_of(tensor)
    given = (other for other in _torch.leaves_of(others) if isinstance(other, torch.Tensor))
    return any(_torch.share_memory(local, local_of(other)) for other in given)


class _ToGlobal(torch.autograd.Function):
    """`DTensor.from_local(x, mesh, Replicate)` at a fraction of its cost; the gradient comes back whole."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:  # type: ignore[override]
        return _torch.wrap(x.detach(), _torch.replicated_spec(x, mesh))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        if torch.is_grad_enabled() and isinstance(grad, DTensor):  # for the gradient of this gradient
            return _ToPlain.apply(grad, False, True), None
        return plain(grad), None


class _ToPlain(torch.autograd.Function):
    """`x.full_tensor()`; its gradient, the same on all model ranks, goes back in the layout that `x` had.

    What it gives may be written to in place, as by `y += residual`: it is not a view to autograd. Where others see its
    memory it is one, and torch refuses the write: their values and gradients would change with it on one device, and
    autograd does not follow that through here.

    An output that nobody uses may be asked for its gradient all the same (by hooks on modules); autograd then makes
    plain zeros, which are what this takes. Where a module reads a split parameter of another one, DTensors are met
    outside of regions, and a gradient may be one.
    """

    @staticmethod
    def forward(ctx: Any, x: DTensor, late: bool, seen: bool) -> torch.Tensor:  # type: ignore[override]
        ctx.mesh = x.device_mesh
        ctx.placements = tuple(Replicate() if p.is_partial() else p for p in x.placements)
        if all(p.is_replicate() for p in x.placements):
            local = _torch.local_of(x)
            return local.view_as(local) if seen else local.detach()
        return Ungathered(_torch.wrap(_torch.local_of(x), _torch.spec_of(x))) if late else plain(x).detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        if torch.is_grad_enabled():
            grad = grad if isinstance(grad, DTensor) else _ToGlobal.apply(grad, ctx.mesh)
            return grad.redistribute(placements=ctx.placements), None, None
        grad = plain(grad)
        whole = _torch.replicated_spec(grad, ctx.mesh)
        local = redistributed(grad, whole, ctx.placements)
        return _torch.wrap(local, _torch.spec_with(whole, ctx.placements)), None, None


_to_global, _to_plain = _torch.direct_apply(_ToGlobal), _torch.direct_apply(_ToPlain)

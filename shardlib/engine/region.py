"""The border between the user's plain tensors and the global view inside a sharded model.

    plain, the same on all ranks of the model axes  ->  DTensor, replicated      (on entering `forward`)
    DTensor of any layout                           ->  plain, whole             (on leaving it)

and the transposes of both in backward. Integer and boolean inputs stay plain: they carry no gradient, and a plain
tensor inside the region counts as replicated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree

from shardlib.engine import _torch
from shardlib.engine.gradients import GradientReducer

__all__ = ["Region"]

Check = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


class Region:
    """Hooks on the root of one sharded model.

    Args:
        model_mesh: the sub-mesh of the model axes, or None where parameters are plain tensors.
        reducer: told when a backward pass begins.
        check: looks at the inputs before anything else, and raises `InputError`.
    """

    def __init__(self, model_mesh: DeviceMesh | None, reducer: GradientReducer, check: Check) -> None:
        self.mesh, self.reducer, self.check = model_mesh, reducer, check
        self._outside: list[bool] = []
        self._restore_after: int = -1

    def install(self, model: nn.Module) -> list[Any]:
        return [
            model.register_forward_pre_hook(self._enter, with_kwargs=True),
            model.register_forward_hook(self._leave, prepend=True),
            model.register_forward_hook(self._restore, always_call=True),
        ]

    def _enter(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.check(model, args, kwargs)
        if self.mesh is None:
            return None
        self._outside.append(_torch.set_implicit_replication(True))
        return pytree.tree_map_only(torch.Tensor, self._to_global, (args, kwargs))

    def _leave(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, self._to_plain, output)

    def _restore(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._outside:
            _torch.set_implicit_replication(self._outside.pop())

    def _to_global(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor) or not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        assert self.mesh is not None
        return DTensor.from_local(tensor, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)

    def _to_plain(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor(grad_placements=[Replicate()] * tensor.device_mesh.ndim)
        if tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(self._on_backward)
        return tensor

    def _on_backward(self, grad: torch.Tensor) -> None:
        self.reducer.begin()
        if self.mesh is None or self._restore_after == _torch.backward_id():
            return
        self._restore_after = _torch.backward_id()
        outside = _torch.set_implicit_replication(True)
        _torch.run_at_end_of_backward(lambda: self._end_backward(outside))

    def _end_backward(self, outside: bool) -> None:
        self._restore_after = -1
        _torch.set_implicit_replication(outside)

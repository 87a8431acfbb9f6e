"""BatchNorm over data axes: statistics of the global batch, as on one device.

Each data rank has its own examples. A single device normalises with the mean and variance of all of them, so both are
averaged over the data axes, in forward and (transposed) in backward. The formulas are those of Ioffe & Szegedy, arXiv
1502.03167, Algorithm 1, and of PyTorch's `BatchNorm` for the running statistics (unbiased variance).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode

from shardlib.engine._torch import BatchNorm
from shardlib.engine.ranks.lost import naming_lost_ranks_in_operations
from shardlib.engine.undo import replace_forward

__all__ = ["is_batch_norm", "use_global_batch"]


def is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, BatchNorm) and not isinstance(module, nn.SyncBatchNorm)


def use_global_batch(module: nn.Module, group: dist.ProcessGroup) -> Callable[[], None]:
    """Normalise with the statistics of all data ranks in training, and return an undo function.

    The module keeps its forward, which counts batches and may add an activation; its `F.batch_norm` is replaced.
    """
    local_forward = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _OverAllRanks(group):
            return local_forward(*args, **kwargs)

    return replace_forward(module, forward)


class _OverAllRanks(TorchFunctionMode):
    """Inside the block, `batch_norm` takes its statistics over all data ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = functools.partial(_batch_norm, self.group) if func is F.batch_norm else func
        return call(*args, **(kwargs or {}))


def _batch_norm(
    group: dist.ProcessGroup,
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Compute `F.batch_norm`, in training with the statistics of all ranks of a group."""
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    x = input
    dims = [d for d in range(x.ndim) if d != 1]
    shape = [1, -1] + [1] * (x.ndim - 2)
    if x.dtype in (torch.float16, torch.bfloat16):  # sums are accumulated in float32, as in torch
        x = x.float()
    count = _sum(torch.tensor(x.numel() // x.shape[1], device=x.device), group)
    mean = _total(x.sum(dims), group) / count
    centred = x - mean.view(shape)
    var = _total(centred.square().sum(dims), group) / count
    # Dividing integers alone gives float32.
    new = (mean.detach(), (var * count / (count - 1)).detach())
    _update_running((running_mean, running_var), new, momentum)
    out = centred * torch.rsqrt(var + eps).view(shape)
    if weight is not None:
        out = out * weight.view(shape)
    if bias is not None:
        out = out + bias.view(shape)
    return out.to(input.dtype)


@torch.no_grad()
def _update_running(
    running: tuple[torch.Tensor | None, torch.Tensor | None], new: tuple[torch.Tensor, torch.Tensor], momentum: float
) -> None:
    for kept, value in zip(running, new, strict=True):
        if kept is not None:
            kept.copy_(kept * (1 - momentum) + value * momentum)


def _total(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over the data ranks; the gradient is summed over them too (the map is its own transpose)."""
    if not isinstance(x, DTensor):
        return _SumOverRanks.apply(x, group)
    placements = [Replicate() if p.is_partial() else p for p in x.placements]
    x = x.redistribute(placements=placements)
    local = _SumOverRanks.apply(x.to_local(grad_placements=placements), group)
    return DTensor.from_local(local, x.device_mesh, placements, run_check=False, shape=x.shape, stride=x.stride())


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # type: ignore[override]
        ctx.group = group
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return _sum(grad, ctx.group), None


@naming_lost_ranks_in_operations
def _sum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total

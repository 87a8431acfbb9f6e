"""BatchNorm over data axes: statistics of the global batch, as on one device.

Each data rank has its own examples. A single device normalises with the mean and variance of all of them, so both are
averaged over the data axes, in forward and (transposed) in backward. The formulas are those of Ioffe & Szegedy, arXiv
1502.03167, Algorithm 1, and of PyTorch's `BatchNorm` for the running statistics (unbiased variance).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from shardlib.engine._torch import BatchNorm, check_input_dim
from shardlib.engine.lost import naming_lost_ranks_in_operations

__all__ = ["is_batch_norm", "use_global_batch"]


def is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, BatchNorm) and not isinstance(module, nn.SyncBatchNorm)


def use_global_batch(module: nn.Module, group: dist.ProcessGroup) -> Callable[[], None]:
    """Normalise with the statistics of all data ranks in training, and return an undo function."""
    assert isinstance(module, BatchNorm)
    local_forward = module.forward

    def forward(input: torch.Tensor) -> torch.Tensor:
        if not _uses_batch_statistics(module):
            return local_forward(input)
        check_input_dim(module, input)
        return _normalise(module, input, group)

    module.forward = forward  # type: ignore[method-assign, assignment]
    return lambda: delattr(module, "forward")


def _uses_batch_statistics(module: BatchNorm) -> bool:
    return module.training or (module.running_mean is None and module.running_var is None)


def _normalise(module: BatchNorm, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    dims = [d for d in range(x.ndim) if d != 1]
    shape = [1, -1] + [1] * (x.ndim - 2)
    dtype = x.dtype
    if dtype in (torch.float16, torch.bfloat16):  # sums are accumulated in float32, as in torch
        x = x.float()
    count = _sum(torch.tensor(x.numel() // x.shape[1], device=x.device), group)
    mean = _total(x.sum(dims), group) / count
    centred = x - mean.view(shape)
    var = _total(centred.square().sum(dims), group) / count
    _update_running(
        module, mean.detach(), (var * count / (count - 1)).detach()
    )  # dividing integers alone gives float32
    out = centred * torch.rsqrt(var + module.eps).view(shape)
    if module.affine:
        out = out * module.weight.view(shape) + module.bias.view(shape)
    return out.to(dtype)


@torch.no_grad()
def _update_running(module: BatchNorm, mean: torch.Tensor, var: torch.Tensor) -> None:
    if not module.track_running_stats or not module.training:
        return
    assert module.num_batches_tracked is not None and module.running_mean is not None
    module.num_batches_tracked.add_(1)
    weight = module.momentum if module.momentum is not None else 1.0 / float(module.num_batches_tracked)
    for running, new in ((module.running_mean, mean), (module.running_var, var)):
        assert running is not None
        running.copy_(running * (1 - weight) + new * weight)


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

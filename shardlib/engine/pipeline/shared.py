"""Tensors that several stages hold, such as an embedding that is also the output layer: one parameter all the same.

Each holder accumulates what its own stages contribute. Once a step, after the data axes, the contributions are summed
over the holders, which therefore step alike and keep the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardlib.engine import _torch
from shardlib.engine.held import Held, local_of
from shardlib.engine.lost import naming_lost_ranks

__all__ = ["Shared"]


@dataclass(eq=False)
class Shared:
    """One parameter that ranks of several stages hold.

    Attributes:
        held: it, on this rank.
        group: the ranks that hold the same part of it; None where this rank is none.
        is_first: whether this rank is on the first of the stages, which counts it in norms.
    """

    names: tuple[str, ...]
    held: Held | None
    group: dist.ProcessGroup | None
    is_first: bool
    prior: Any = None
    summed: bool = False

    def put_prior_aside(self) -> None:
        """What earlier steps have summed already must not be summed again."""
        if self.held is None:
            return
        param = self.held.param
        if param.grad is None:
            self.summed = False
        if self.summed and param.grad is not None:
            self.prior, param.grad = _copied(param.grad), None  # its memory is the bucket's, which is filled again

    def put_prior_back(self) -> None:
        """Nothing was summed: what this step gave is added as it is."""
        if self.held is not None and self.prior is not None:
            self.held.param.grad = _added(self.held.param.grad, self.prior)
            self.prior = None

    @naming_lost_ranks("backward")
    def sum_up(self) -> None:
        """The gradient of all holders, on all of them."""
        if self.held is None or self.group is None:
            return
        param = self.held.param
        if param.grad is None:
            param.grad = _nothing(self.held)
        local = local_of(param.grad)
        sent = local if local.is_contiguous() else local.contiguous()
        dist.all_reduce(sent, group=self.group)
        if sent is not local:
            local.copy_(sent)
        self.summed = True
        self.put_prior_back()


def _nothing(held: Held) -> Any:
    """A gradient of zeros, as the parameter's would lie."""
    if held.cut is None:
        return torch.zeros_like(held.param)
    return held.wrap(torch.zeros(held.part_shape, dtype=held.dtype, device=held.device))


def _copied(grad: torch.Tensor) -> torch.Tensor:
    return _torch.wrap(local_of(grad).clone(), _torch.spec_of(grad)) if isinstance(grad, DTensor) else grad.clone()


def _added(grad: torch.Tensor | None, prior: torch.Tensor) -> torch.Tensor:
    if grad is None:
        return prior
    local_of(grad).add_(local_of(prior))
    return grad

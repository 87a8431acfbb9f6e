"""A schedule of one's own: sharpness-aware minimisation (Foret et al., arXiv 2010.01412), two passes a step.

    torchrun --nproc_per_node 2 examples/own_modes/sharp.py

The first pass says where the loss grows fastest, and the parameters go there; the gradient of the second pass, taken
there, is what the step uses, from where the parameters were. Norms are those of all data ranks' gradient, so that any
number of ranks takes the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardlib as sl
from shardlib.trainer import NonPipelineSchedule, get_dataloader, initialize, launch_from_torch, register_schedule


@register_schedule("sharpness_aware")
class SharpnessAware(NonPipelineSchedule):
    """
    Args:
        rho: how far the parameters go.
    """

    def __init__(self, rho: float = 0.05) -> None:
        super().__init__()
        if not rho > 0:
            raise sl.errors.PlanError(f"SharpnessAware(rho={rho}): give a distance above 0.")
        self.rho = rho

    def forward_backward_step(
        self,
        engine: Any,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> tuple[Any, Any, Any]:
        asked = (forward_only, return_loss, return_output_label)
        if forward_only:
            return super().forward_backward_step(engine, data_iter, *asked)
        batch = next(data_iter)
        super().forward_backward_step(engine, iter([batch]), *asked)
        params = [param for param in engine.model.parameters() if param.grad is not None]
        scale = self.rho / (sl.booster.get_grad_norm(engine.model) + 1e-12)
        before = [param.detach().clone() for param in params]
        with torch.no_grad():
            for param in params:
                param.add_(param.grad * scale)
        engine.zero_grad()
        result = super().forward_backward_step(engine, iter([batch]), *asked)
        with torch.no_grad():
            for param, value in zip(params, before, strict=True):
                param.copy_(value)
        return result


CONFIG = {"schedule": {"type": "sharpness_aware", "rho": 0.05}}


def train(config: dict[str, Any], steps: int = 10) -> list[float]:
    """Losses of a small classifier on this rank's rows."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).double()
    x = torch.randn(16 * steps, 8, dtype=torch.float64)
    data = torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))
    loader = get_dataloader(data, batch_size=16 // dist.get_world_size())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    engine, loader, *_ = initialize(net, optimizer, nn.CrossEntropyLoss(), loader, config=config, verbose=False)
    batches, losses = iter(loader), []
    for _ in range(steps):
        engine.zero_grad()
        _, _, loss = engine.execute_schedule(batches)
        engine.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    launch_from_torch({}, backend="gloo")
    print(f"rank {dist.get_rank()}: losses {', '.join(f'{loss:.4f}' for loss in train(CONFIG))}")


if __name__ == "__main__":
    main()

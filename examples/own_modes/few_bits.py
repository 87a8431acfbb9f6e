"""A gradient handler that compresses: gradients travel in eight bits, and what rounding took away is sent a step later.

    torchrun --nproc_per_node 2 examples/own_modes/few_bits.py

Error feedback (Karimireddy et al., arXiv 1901.09847) keeps what a rank did not send and adds it to what it sends next;
so the sum over steps is right but for the last remainder, and training converges as without.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardlib.engine import GradientBucket
from shardlib.trainer import BaseGradientHandler, initialize, launch_from_torch, register_gradient_handler


@register_gradient_handler("few_bits")
class FewBits(BaseGradientHandler):
    """Sums what every rank rounds to 255 levels of its largest number; a quarter of float32's bytes.

    Args:
        feedback: keep what was rounded away.
    """

    def __init__(self, model: nn.Module, optimizer: Any, feedback: bool = True) -> None:
        super().__init__(model, optimizer)
        self.feedback = feedback
        self.kept: dict[tuple[str, ...], torch.Tensor] = {}

    def reduce(self, bucket: GradientBucket) -> None:
        wanted = bucket.tensor + self.kept.get(bucket.names, 0)
        scale = wanted.abs().max().clamp(min=torch.finfo(wanted.dtype).tiny) / 127
        sent = (wanted / scale).round().to(torch.int8)
        if self.feedback:
            self.kept[bucket.names] = wanted - sent * scale
        ranks = dist.get_world_size(bucket.group)
        levels, scales = sent.new_empty(ranks, len(sent)), scale.new_empty(ranks)
        dist.all_gather(list(levels), sent, group=bucket.group)
        dist.all_gather(list(scales.split(1)), scale[None], group=bucket.group)
        bucket.tensor.copy_((levels * scales[:, None]).sum(0))


CONFIG = {"gradient_handler": [{"type": "few_bits", "feedback": True}]}


def train(config: dict[str, Any], steps: int = 60) -> float:
    """The last loss of a small regression."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    engine, *_ = initialize(net, torch.optim.SGD(net.parameters(), lr=0.2), nn.MSELoss(), config=config, verbose=False)
    for step in range(steps):
        draw = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        x = torch.randn(32, 8, generator=draw)
        engine.zero_grad()
        loss = engine.criterion(engine(x), x.sum(1, keepdim=True).sin())
        engine.backward(loss)
        engine.step()
    return loss.item()


def main() -> None:
    launch_from_torch({}, backend="gloo")
    print(f"rank {dist.get_rank()}: in eight bits {train(CONFIG):.4f}, in 32 {train({}):.4f}")


if __name__ == "__main__":
    main()

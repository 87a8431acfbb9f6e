"""A small GPT that shards unevenly, and an optimizer that needs whole tensors. Importable on ranks of the pool."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.testing.models import Transformer
from shardlib.testing.strategies import ModelFactory

__all__ = ["GPT", "Lamb"]

# A dim that no rank count divides, a tied head, a fused qkv, heads split over tp; keys have no bias, whose gradient is
# zero in exact arithmetic, so that an optimizer that divides by it makes noise.
GPT = ModelFactory(
    Transformer, (("vocab", 7), ("heads", 2), ("head", 4), ("layers", 2), ("tied", True), ("bias", False))
)


class Lamb(torch.optim.Optimizer):
    """You et al., "Large Batch Optimization for Deep Learning", ICLR 2020, algorithm 2."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["t"] += 1
                m = state["m"].lerp_(p.grad, 0.1) / (1 - 0.9 ** state["t"])
                v = state["v"].lerp_(p.grad.square(), 0.01) / (1 - 0.99 ** state["t"])
                update = m / (v.sqrt() + 1e-6) + 0.01 * p
                p.add_(update * (p.norm() / update.norm()), alpha=-group["lr"])

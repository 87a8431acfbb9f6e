"""Models, rules and plans that several tests of the plan share. Importable by rank processes."""

from __future__ import annotations

from typing import Any

import torch
from gpt import GPT, GPTConfig
from torch import nn

from shardlib import layouts
from shardlib._plan import Plan, make_plan

__all__ = ["MLP_RULES", "gpt", "gpt_plan", "mlp", "tiny"]

TINY = GPTConfig(vocab_size=64, context=16, n_layer=2, n_head=4, d_model=32)
MLP_RULES = {"0": "colwise", "2": "rowwise"}


def tiny() -> GPT:
    """A GPT of two blocks, the same weights wherever it is built."""
    torch.manual_seed(0)
    return GPT(TINY)


def gpt(**changes: Any) -> GPT:
    """The example GPT on meta."""
    with torch.device("meta"):
        return GPT(GPTConfig(**changes))


def gpt_plan(mesh: str = "dp=2,tp=4", **changes: Any) -> Plan:
    return make_plan(gpt(**changes), mesh, layouts.load("example_gpt"))


def mlp(width: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 16))

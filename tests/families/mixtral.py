"""Mixtral on a mesh: a small model, its batches and its loss. Importable on ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import shardlib as sl
from tests.families.transformer_models import MIXTURE, transformers

__all__ = ["ROWS", "SEQ", "SETTINGS", "Case"]

ROWS, SEQ = 4, 6
# Fewer key heads than four ranks.
SETTINGS = {**MIXTURE, "num_local_experts": 5, "router_aux_loss_coef": 0.5}


@dataclass(frozen=True)
class Case:
    """`experts` is transformers' way of computing them: a loop over those that are hit, or one batched product."""

    mesh: str
    experts: str = "eager"
    balanced: bool = False  # the loss includes the router's, which makes experts equally popular
    compile: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = (self.mesh, self.experts, "balanced" if self.balanced else "", self.compile)
        return " ".join(str(part) for part in (*parts, *self.settings) if part)

    @property
    def world_size(self) -> int:
        return sl.MeshShape(self.mesh).world_size

    def make_model(self) -> nn.Module:
        cls = transformers.MixtralForCausalLM
        config = cls.config_class(**{**SETTINGS, **self.settings})
        model = cls._from_config(config, experts_implementation=self.experts).train()
        with torch.no_grad():  # far enough from where weights start that nothing is lost in the noise
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        return model

    def make_batch(self, step: int) -> Any:
        draw = torch.Generator().manual_seed(step)
        ids = torch.randint(3, MIXTURE["vocab_size"], (ROWS, SEQ), generator=draw)
        return (), {"input_ids": ids, "output_router_logits": self.balanced}

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        output = model(**batch[1])
        loss = output.logits.sin().mean() + output.logits.square().mean()
        return loss + 0.5 * output.aux_loss if self.balanced else loss

"""T5 on a mesh: a small model and its batches. Importable on ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import shardlib as sl
from tests.families.transformer_models import transformers

__all__ = ["Case"]

_VOCABULARY, _ROWS, _READ, _WRITTEN = 43, 4, 7, 5  # an odd vocabulary, and two lengths that no mesh divides
_SETTINGS = {
    "vocab_size": _VOCABULARY,
    "d_model": 20,
    "d_kv": 3,
    "d_ff": 18,  # on four ranks: 5, 5, 5, 3
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 6,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "use_cache": False,
}


@dataclass(frozen=True)
class Case:
    mesh: str
    model: str = "T5ForConditionalGeneration"
    attention: str = "eager"
    padding: bool = False
    compile: str | None = None
    mode: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = (self.mesh, self.model, self.attention, "padded" if self.padding else "", self.compile, self.mode)
        return " ".join(str(part) for part in (*parts, *self.settings) if part)

    @property
    def world_size(self) -> int:
        return sl.MeshShape(self.mesh).world_size

    def make_model(self) -> nn.Module:
        cls = getattr(transformers, self.model)
        config = cls.config_class(**{**_SETTINGS, **self.settings})
        model = cls._from_config(config, attn_implementation=self.attention).train()
        with torch.no_grad():  # far enough from where weights start that nothing is lost in the noise
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        return model

    def make_batch(self, step: int) -> Any:
        draw = torch.Generator().manual_seed(step)
        batch: dict[str, Any] = {"input_ids": torch.randint(3, _VOCABULARY, (_ROWS, _READ), generator=draw)}
        if self.padding:
            batch["attention_mask"] = (torch.arange(_READ) < torch.tensor([7, 4, 6, 5]).unsqueeze(1)).long()
        if "Encoder" not in self.model:
            batch["labels"] = torch.randint(3, _VOCABULARY, (_ROWS, _WRITTEN), generator=draw)
        return (), batch

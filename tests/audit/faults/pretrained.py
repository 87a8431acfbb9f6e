"""Small models of transformers for the cases whose library is transformers, Accelerate or Lightning.

transformers is imported by the functions, so that the folder imports quickly.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn

__all__ = ["from_folder", "make", "text"]

VOCABULARY = 64
_SIZES = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}


def make(model: str, *, attention: str = "eager", **settings: Any) -> nn.Module:
    """Return a small model of a class of transformers, with all parameters off zeros and ones, which hide mistakes."""
    import transformers

    cls = getattr(transformers, model)
    experts = {"experts_implementation": settings.pop("experts")} if "experts" in settings else {}
    config = cls.config_class(**{**_SIZES, **settings}, attn_implementation=attention)
    made = cls._from_config(config, attn_implementation=attention, **experts)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return made.train()


def from_folder(model: str, folder: str, **settings: Any) -> nn.Module:
    """Return the model of a folder, sharded while it is loaded: `distributed_config=DistributedConfig(**settings)`."""
    import transformers
    from transformers.distributed import DistributedConfig

    more = {name: settings.pop(name) for name in ("experts_implementation",) if name in settings}
    return (
        getattr(transformers, model)
        .from_pretrained(
            folder,
            dtype=torch.float64,
            attn_implementation="eager",
            distributed_config=DistributedConfig(**settings),
            **more,
        )
        .train()
    )


def text(step: int, rows: int = 4, length: int = 10) -> dict[str, torch.Tensor]:
    """Return ids of a global batch, which are the labels too: the model shifts them."""
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}

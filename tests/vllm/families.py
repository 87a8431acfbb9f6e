"""Small models of families, as vLLM takes them: heads of 32, a vocabulary that it pads, two key heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

__all__ = ["FAMILIES", "LORA", "PROMPTS", "model_of", "write"]

_SIZES = {
    "vocab_size": 200,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": False}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {}),
    "gemma3": ("Gemma3TextConfig", {}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, **_EXPERTS}),
    "qwen3-moe": ("Qwen3MoeConfig", {"num_experts": 4, "moe_intermediate_size": 64, **_EXPERTS}),
}
LORA = "llama-lora"
PROMPTS = ([5, 6, 7], [50, 60, 70, 1])


def model_of(family: str) -> transformers.PreTrainedModel:
    """Return a model in float32, with the same values each time."""
    if family == LORA:
        import peft

        layers = ["q_proj", "v_proj", "down_proj"]
        return peft.get_peft_model(
            model_of("llama"), peft.LoraConfig(r=4, target_modules=layers, init_lora_weights=False)
        )
    config, options = FAMILIES[family]
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**_SIZES, **options)).float()


def write(family: str, folder: Path) -> None:
    """Write the folder that vLLM starts from. Its weights are others than those of `model_of`."""
    model = model_of("llama" if family == LORA else family)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.01)
    model.save_pretrained(folder)

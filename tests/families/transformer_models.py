"""Small Hugging Face models with random weights, and batches for them. Importable on ranks of the pool.

Widths are small and the vocabulary is odd, so that no mesh divides it. Dropout is off unless a test turns it on.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from tests.torchvision_on_cpu import import_torchvision

import_torchvision()  # transformers imports it by the way

import transformers  # noqa: E402

__all__ = ["FAMILIES", "MIXTURE", "SETTINGS", "VOCABULARY", "build", "images", "small", "text", "transformers"]

VOCABULARY = 67
_SEQ = 10
_ROWS = 4

_TEXT = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LLAMA = {
    **_TEXT,
    "hidden_size": 32,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
_ENCODER = {
    "hidden_size": 32,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
# Of what mixtures of experts have in common.
MIXTURE: dict[str, Any] = {
    **_TEXT,
    "vocab_size": 43,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
    "use_cache": False,
}
_LATENT = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "num_key_value_heads": 4}
_GROUPS = {"n_routed_experts": 6, "n_shared_experts": 1, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1}
# Of each family of mixtures, besides. Five experts on two ranks: the first has one more than the second.
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 5, "router_aux_loss_coef": 0.5},
    "Qwen2Moe": {
        "num_experts": 4,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 12,
        "mlp_only_layers": [0],
    },
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 8, "head_dim": 4, "norm_topk_prob": True},
    "DeepseekV2": {**_LATENT, **_GROUPS, "moe_intermediate_size": 8, "q_lora_rank": None},
    "DeepseekV3": {**_LATENT, **_GROUPS, "moe_intermediate_size": 8, "q_lora_rank": 8},
}
_KIN = "Cohere Cohere2 Ernie4_5 Exaone4 Gemma Granite Helium HunYuanDenseV1 Ministral Qwen3 SmolLM3"
# What the names of a family's classes begin with -> settings of its configuration.
SETTINGS: dict[str, dict[str, Any]] = {
    "GPT2": {**_TEXT, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    | {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "Llama": _LLAMA,
    "Mistral": {**_LLAMA, "sliding_window": 6},
    "Qwen2": _LLAMA,
    "Mixtral": {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    **{family: {**_LLAMA, "head_dim": 8} for family in _KIN.split()},
    "Falcon": {**_TEXT, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_kv_heads": 2}
    | {"new_decoder_architecture": True, "alibi": False, "use_cache": False},
    "Bert": {**_TEXT, **_ENCODER, "max_position_embeddings": 32, "num_labels": 3},
    "ViT": {**_ENCODER, "image_size": 8, "patch_size": 4, "num_labels": 3},
}


def small(model: str, **settings: Any) -> Any:
    """The configuration of a small model of a class, with other settings where given."""
    family = max((prefix for prefix in SETTINGS if model.startswith(prefix)), key=len)
    return getattr(transformers, model).config_class(**{**SETTINGS[family], **settings})


def build(model: str, attention: str = "eager", **settings: Any) -> nn.Module:
    """A model of a class of transformers, in training mode, with weights that depend on the seed alone."""
    cls = getattr(transformers, model)
    made = cls._from_config(small(model, **settings), attn_implementation=attention)
    return _large(made).train()


def _large(model: nn.Module) -> nn.Module:
    """Weights far enough from where they start (0.02, 0 and 1) that nothing is lost in the noise."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def text(step: int, *, padding: str | None = None, labels: Any = None, classes: int = 3, **more: Any) -> Any:
    """A batch of token ids; `padding` "left" or "right" gives each row its own length and an attention mask.

    `labels` "tokens" or "class" has the model compute its loss. Every row has the same number of labels. `more` are
    further arguments of the model.
    """
    draw = torch.Generator().manual_seed(step)
    random = functools.partial(torch.randint, generator=draw)
    ids = random(3, VOCABULARY, (_ROWS, _SEQ))
    kwargs: dict[str, Any] = {"input_ids": ids}
    if padding:
        kept = torch.arange(_SEQ) < torch.tensor([_SEQ, 7, 8, 5]).unsqueeze(1)
        kwargs["attention_mask"] = (kept if padding == "right" else kept.flip(1)).long()
    if labels == "tokens":
        kwargs["labels"] = ids.clone().index_fill_(1, torch.tensor([0, 4]), -100)
    if labels == "class":
        kwargs["labels"] = random(classes, (_ROWS,))
    return (), kwargs | more


def images(step: int, *, labels: Any = None, classes: int = 3) -> Any:
    """A batch of images, and classes as labels."""
    draw = torch.Generator().manual_seed(step)
    kwargs = {"pixel_values": torch.randn(_ROWS, 3, 8, 8, generator=draw)}
    if labels:
        kwargs["labels"] = torch.randint(classes, (_ROWS,), generator=draw)
    return (), kwargs

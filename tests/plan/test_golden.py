"""Resolved tables of whole models are kept as files, so that a change of a layout is a readable change.

After an intended change write them anew with SHARDLIB_WRITE_GOLDEN=1 and read what changed.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardlib import layouts
from shardlib._plan import Plan, make_plan
from tests.plan.cases import gpt
from tests.torchvision_on_cpu import import_torchvision

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


_TEXT = {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2}
_HEADS = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8}
_GROUPED = {**_TEXT, **_HEADS, "num_key_value_heads": 2}


def _hugging_face(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import_torchvision()
        transformers = importlib.import_module("transformers")
        return getattr(transformers, model)(getattr(transformers, config)(**settings))

    return build


def _resnet() -> nn.Module:
    return import_torchvision().models.resnet18(num_classes=10)


# Golden file -> (model, layout file, mesh).
CASES: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "example_gpt": (gpt, "example_gpt", "dp=2,tp=2"),
    "gpt2": (_hugging_face("GPT2LMHeadModel", "GPT2Config", n_embd=64, n_layer=2, n_head=4, **_TEXT), "gpt2", "tp=4"),
    "llama": (_hugging_face("LlamaForCausalLM", "LlamaConfig", **_GROUPED), "llama", "dp=2,tp=2"),
    "llama_few_kv_heads": (_hugging_face("LlamaForCausalLM", "LlamaConfig", **_GROUPED), "llama", "dp=2,tp=4"),
    "bert": (_hugging_face("BertForMaskedLM", "BertConfig", **_TEXT, **_HEADS), "bert", "dp=2,tp=2"),
    "vit": (_hugging_face("ViTForImageClassification", "ViTConfig", **_HEADS), "vit", "dp=2,tp=2"),
    "t5": (
        _hugging_face("T5ForConditionalGeneration", "T5Config", vocab_size=128, d_model=64, d_ff=96, num_layers=2),
        "t5",
        "dp=2,tp=2",
    ),
    "resnet": (_resnet, "resnet", "dp=2,tp=2"),
    "qwen_moe": (
        _hugging_face(
            "Qwen2MoeForCausalLM",
            "Qwen2MoeConfig",
            num_experts=4,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=64,
            mlp_only_layers=[0],
            **_GROUPED,
        ),
        "qwen_moe",
        "dp=2,ep=2,tp=2",
    ),
    "deepseek": (
        _hugging_face(
            "DeepseekV3ForCausalLM",
            "DeepseekV3Config",
            n_routed_experts=4,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            **_TEXT,
            **_HEADS,
        ),
        "deepseek",
        "dp=2,ep=2,tp=2",
    ),
    "gpt_neox": (_hugging_face("GPTNeoXForCausalLM", "GPTNeoXConfig", **_TEXT, **_HEADS), "gpt_neox", "dp=2,tp=2"),
    "bart": (
        _hugging_face(
            "BartForConditionalGeneration",
            "BartConfig",
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            **_TEXT,
        ),
        "bart",
        "tp=2",
    ),
    "gpt_oss": (
        _hugging_face("GptOssForCausalLM", "GptOssConfig", num_local_experts=4, head_dim=8, **_GROUPED),
        "gpt_oss",
        "dp=2,ep=2,tp=2",
    ),
    "mixtral": (
        _hugging_face("MixtralForCausalLM", "MixtralConfig", num_local_experts=4, **_GROUPED),
        "mixtral",
        "tp=2",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_resolved_table_is_the_one_that_is_kept(name: str):
    build, layout, mesh = CASES[name]
    with torch.device("meta"):
        made = make_plan(build(), mesh, layouts.load(layout))
    file = GOLDEN / f"{name}.json"
    if os.environ.get("SHARDLIB_WRITE_GOLDEN"):
        file.write_text(made.to_json(), encoding="utf-8")
    kept = file.read_text(encoding="utf-8")
    assert Plan.from_json(kept).diff(made) == ""
    assert kept == made.to_json()

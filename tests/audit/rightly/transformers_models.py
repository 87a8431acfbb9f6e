"""Models that transformers shards rightly when it loads them: tiny ones of many architectures, from a saved folder."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardlib.testing.census import Entry, Result, read
from shardlib.testing.census._inputs import rows_of
from shardlib.testing.census._models import batch, build
from shardlib.testing.census._run import mean_loss, upcast_loss
from tests.audit.rightly import Case

__all__ = ["CASES", "CENSUS", "built", "case_of", "entry_of", "measured"]

CENSUS = Path(__file__).parents[3] / "benchmarks" / "results" / "census.jsonl"


@functools.cache
def measured() -> dict[str, Result]:
    """Return what the census found out of each architecture of transformers: its labels, inputs and sizes."""
    return {result.name: result for result in read(CENSUS) if result.library == "transformers" and result.built}


def entry_of(name: str) -> Entry:
    found = measured()[name]
    return Entry("transformers", name, found.cls, found.labels, found.share)


def built(entry: Entry) -> nn.Module:
    """Build a model in float64, as `from_pretrained` does: buffers that no checkpoint has are computed in it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return build(entry)
    finally:
        torch.set_default_dtype(before)


def by_auto_plan(folder: Path, mesh: DeviceMesh, *, cls: str) -> nn.Module:
    made = getattr(transformers, cls).from_pretrained(
        folder, tp_plan="auto", dtype=torch.float64, experts_implementation="eager"
    )
    return made.train()  # type: ignore[no-any-return]


def by_config(folder: Path, mesh: DeviceMesh, *, cls: str, **sizes: Any) -> nn.Module:
    config = transformers.distributed.DistributedConfig(**sizes)
    made = getattr(transformers, cls).from_pretrained(
        folder, distributed_config=config, dtype=torch.float64, experts_implementation="eager"
    )
    return made.train()  # type: ignore[no-any-return]


def case_of(name: str, how: str, mesh: str, shard: Any) -> Case:
    entry, found = entry_of(name), measured()[name]
    return Case(
        f"{entry.cls} ({name})", how, mesh, functools.partial(built, entry), shard,
        functools.partial(batch, entry, found.labels, found.extra), upcast_loss if found.upcast else mean_loss,
        split=rows_of,
    )  # fmt: skip


BY_PLAN = (
    "afmoe", "arcee", "aria", "aria_text", "audioflamingo3", "axk1", "axk2", "aya_vision", "bailing_hybrid", "beam",
    "cohere", "cohere2", "cohere2_moe", "cohere2_vision", "colpali", "colqwen2", "cosmos3_edge",
    "cosmos3_edge_text", "cwm", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_vl",
    "deepseek_vl_hybrid", "dots1", "ernie4_5", "eurobert", "exaone4", "exaone4_5", "exaone_moe", "flex_olmo",
    "flint", "gemma2", "gemma3", "gemma3_text", "gemma4_text", "gemma4_unified", "gemma4_unified_text", "glm",
    "glm4", "glm46v", "glm4_moe_lite", "glm4v", "glm4v_moe", "glm4v_moe_text", "glm4v_text", "glm_image",
    "glm_image_text", "glm_moe_dsa", "glm_ocr", "glm_ocr_text", "glmasr", "glmga", "got_ocr2", "granite",
    "granite_docling", "granite_docling_text", "granite_speech", "granite_speech_plus", "granite_swa", "granitemoe",
    "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "helium", "hy_v3", "hy_v4", "hyperclovax",
    "hyperclovax_vision_v2", "idefics3", "internlm3", "internvl", "iquestcoder", "jais2", "jamba", "janus",
    "kimi_k25", "kimi_linear", "kolibri1", "laguna", "lfm2_moe", "lighton_ocr", "llama", "llava", "llava_next",
    "llava_onevision", "mellum", "mimo_v2_flash", "minicpm3", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7",
    "minimax", "minimax_m2", "minimax_m3_vl", "minimax_m3_vl_text", "ministral", "ministral3", "mistral",
    "mistral3", "mistral_large4", "mistral_large4_text", "mixtral", "moss_transcribe_diarize", "muse_glimmer",
    "muse_glimmer_text", "muse_glimmer_vision", "muse_spark_text", "musicflamingo", "nanochat", "nemotron",
    "nemotron_h", "olmo", "olmo2", "olmo3", "olmoe", "ovis2", "paddleocr_vl", "paligemma", "phi", "phi3",
    "phi4_multimodal", "phimoe", "pp_chart2table", "qianfan_ocr", "qwen2", "qwen2_5_vl", "qwen2_5_vl_text",
    "qwen2_audio", "qwen2_moe", "qwen2_vl", "qwen2_vl_text", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_text",
    "qwen3_asr", "qwen3_moe", "qwen3_next", "qwen4_exp", "qwen4_exp_text", "seed_oss", "smollm3", "smolvlm",
    "solar_open", "starcoder2", "t5gemma", "ultrabert", "ultravbert", "unlimited_ocr", "vaultgemma", "vibevoice",
    "video_llama_3", "video_llava", "vipllava", "voxtral", "youtu",
)  # fmt: skip


BY_FSDP = (
    "aimv2_vision_model", "apertus", "aria_text", "axk1", "aya_vision", "bart", "beit", "bert-generation",
    "bigbird_pegasus", "bit", "blenderbot", "blip", "chinese_clip_vision_model", "clip_text_model", "cohere",
    "cohere2_moe", "cohere_compass_vision", "colqwen2", "convnext", "cosmos3_edge", "cosmos3_edge_vision", "cpmant",
    "data2vec-text", "deberta-v2", "deepseek_v2", "deepseek_v32", "deepseek_vl", "deit", "dinov2", "distilbert",
    "dots1", "electra", "encodec", "eomt", "ernie", "esm", "evolla", "exaone4_5", "falcon", "flaubert", "flint",
    "fnet",
)  # fmt: skip
BY_BOTH = (
    "cohere", "deepseek_v3", "gemma3_text", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen3", "qwen3_moe",
    "smollm3",
)  # fmt: skip

BY_EXPERTS = ("gpt_oss", "mixtral", "olmoe", "qwen3_moe")


def _cases() -> Iterator[Case]:
    for name in BY_PLAN:
        shard = functools.partial(by_auto_plan, cls=measured()[name].cls)
        yield case_of(name, 'tp_plan="auto"', "tp=2", shard)
    for name in BY_FSDP:
        yield case_of(
            name, "fsdp_size=2", "fsdp=2", functools.partial(by_config, cls=measured()[name].cls, fsdp_size=2)
        )
    for name in BY_BOTH:
        shard = functools.partial(by_config, cls=measured()[name].cls, fsdp_size=2, tp_size=2)
        yield case_of(name, "fsdp_size=2, tp_size=2", "fsdp=2,tp=2", shard)
    for name in BY_EXPERTS:
        shard = functools.partial(by_config, cls=measured()[name].cls, tp_size=2, ep_size=2)
        yield case_of(name, "tp_size=2, ep_size=2", "tp=2", shard)


CASES = tuple(_cases())

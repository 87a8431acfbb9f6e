"""Layout files and their modes, on a tiny model of every family that has one: the numbers are those of one device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib.testing import assert_equivalent
from tests.families.kin import Diffusion, Kin, Timm, kin_of
from tests.families.params import params

MESHES = {"sequence": "tp=2", "ulysses": "sp=2", "gather": "sp=2", "ring": "cp=2", "grid": "row=2,col=2"}
# Families that share a file, the first of each with all of the file's modes, the others with those that are named.
FILES: dict[str, list[str]] = {
    "llama": ["glm", "gemma2", "gemma3_text", "glm4", "olmo", "olmo2", "phi", "qwen3_5_text", "starcoder2", "stablelm"],
    "phi3": ["phi3"],
    "gpt_neox": ["gpt_neox", "bloom"],
    "falcon": ["falcon"],
    "opt": ["opt"],
    "bart": ["whisper/WhisperForConditionalGeneration", "bart/BartForConditionalGeneration", "mbart", "m2m_100"],
    "bert": ["roberta", "xlm-roberta", "electra"],
    "distilbert": ["distilbert"],
    "deberta": ["deberta", "deberta-v2"],
    "clip": ["siglip_vision_model", "clip_vision_model", "clip_text_model"],
    "vit": ["dinov2", "deit", "beit", "vit_mae"],
    "swin": ["swin"],
    "convnext": ["convnext", "convnextv2"],
    "mamba": ["mamba2", "mamba"],
    "bamba": ["bamba", "jamba"],
    "qwen_moe": ["qwen3_next", "olmoe"],
    "mixtral": ["mixtral"],
    "deepseek": ["deepseek_v32", "deepseek_v2"],
    "deepseek_v4": ["deepseek_v4"],
    "gpt_oss": ["gpt_oss"],
    "t5": ["t5", "umt5"],
    "llava": ["llava/+all"],
}
# One cell of each file; its other modes, and its other families, are deep.
CASES = [
    kin_of("glm", "tp=2", "sequence"),
    kin_of("starcoder2", "cp=2", "ring"),
    kin_of("phi3", "sp=2", "ulysses"),
    kin_of("gpt_neox", "dp=2,tp=2"),
    kin_of("bloom", "tp=2", "sequence"),
    kin_of("falcon", "sp=2", "ulysses"),
    kin_of("opt", "tp=2"),
    kin_of("whisper/WhisperForConditionalGeneration", "cp=2", "ring"),
    kin_of("roberta", "tp=2", "sequence"),
    kin_of("distilbert", "sp=2", "gather"),
    kin_of("deberta", "tp=2"),
    kin_of("siglip_vision_model", "tp=2", "sequence"),
    kin_of("dinov2", "sp=2", "ulysses"),
    kin_of("swin", "tp=2"),
    kin_of("convnext", "tp=2"),
    kin_of("mamba2", "tp=2"),
    kin_of("bamba", "tp=2"),
    kin_of("qwen3_next", "tp=2"),
    kin_of("mixtral", "cp=2", "ring"),
    kin_of("deepseek_v32", "tp=2"),
    kin_of("deepseek_v4", "tp=2", "sequence"),
    kin_of("gpt_oss", "dp=2,ep=2"),
    kin_of("t5", "sp=2", "ulysses"),
    kin_of("llava/+all", "tp=2", "sequence"),
]


def _cells() -> Iterator[Kin]:
    for file, families in FILES.items():
        modes = sl.layouts.load(file).modes
        for at, family in enumerate(families):
            yield from (kin_of(family, mesh) for mesh in ("tp=2", "dp=2,tp=2"))
            for mode in modes if at == 0 else [mode for mode in ("sequence", "ring") if mode in modes]:
                yield kin_of(family, MESHES[mode], "2d" if mode == "grid" else mode)
            if at == 0 and "ulysses" in modes:
                yield kin_of(family, "tp=2,sp=2", "ulysses")


EXPERTS = [
    kin_of(name, mesh)
    for name in ("deepseek_v4", "gpt_oss", "jamba", "olmoe", "qwen3_next", "qwen4_exp_text")
    for mesh in ("dp=2,ep=2", "ep=2,tp=2")
]
# Its residual streams end in another module than a norm, which the mode "sequence" names.
QWEN_4 = [
    kin_of("qwen4_exp_text", mesh, mode)
    for mesh, mode in (("tp=2", None), ("dp=2,tp=2", None), ("sp=2", "ulysses"), ("cp=2", "ring"))
]


@pytest.mark.parametrize(
    "case", params(CASES, deep=[case for case in (*_cells(), *EXPERTS, *QWEN_4) if case not in CASES])
)
def test_training_gives_the_numbers_of_one_device(case: Kin):
    rules = sl.layouts.for_model(case.make_model(), case.mode)
    assert_equivalent(case.make_model, case.make_batch, case.mesh, rules, loss=case.loss, steps=1)


@pytest.mark.parametrize("file", FILES)
def test_families_find_their_file(file: str):
    """By class, or else by the names of their modules; at least six tenths of a block's weights are sharded."""
    for family in FILES[file]:
        with torch.device("meta"):
            model = kin_of(family, "tp=2").make_model()
        assert sl.layouts.for_model(model) == sl.layouts.load(file), family
        rows = [row for row in sl.plan(model, "tp=2").rows if row.kind == "parameter" and ".0." in row.name]
        total, split = (
            sum(torch.Size(r.global_shape).numel() for r in of) for of in (rows, [r for r in rows if r.stored.axes])
        )
        assert split > 0.6 * total, (family, split / total)


# --- timm ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    params(
        [Timm("tp=2", "sequence")],
        deep=[
            Timm("tp=2"),
            Timm("dp=2,tp=2"),
            Timm("sp=2", "ulysses"),
            Timm("tp=2,sp=2", "ulysses"),
            Timm("cp=2", "ring"),
            Timm("row=2,col=2", "2d"),
            Timm(
                "tp=2", "sequence", (("reg_tokens", 2), ("qk_norm", True), ("init_values", 0.5), ("global_pool", "avg"))
            ),
        ],
    ),
)
def test_timm_trains_on_a_mesh_as_on_one_device(case: Timm):
    rules = sl.layouts.for_model(case.make_model(), case.mode)
    assert rules.models == ("timm.VisionTransformer",)
    assert_equivalent(case.make_model, case.make_batch, case.mesh, rules, steps=1)


# --- diffusers -----------------------------------------------------------------------------------------------------

DIFFUSION_FILES = {
    "UNet2DModel": "unet",
    "UNet2DConditionModel": "unet",
    "DiTTransformer2DModel": "dit",
    "PixArtTransformer2DModel": "dit",
}
UNET, TEXT_UNET, DIT, PIXART = DIFFUSION_FILES


@pytest.mark.parametrize(
    "case",
    params(
        [Diffusion(TEXT_UNET, "tp=2"), Diffusion(DIT, "tp=2", "sequence"), Diffusion(PIXART, "sp=2", "ulysses")],
        deep=[
            Diffusion(TEXT_UNET, "dp=2,tp=2"),
            Diffusion(TEXT_UNET, "tp=2", settings=(("use_linear_projection", True),)),
            Diffusion(TEXT_UNET, "tp=2", settings=(("resnet_time_scale_shift", "scale_shift"),)),
            *(Diffusion(UNET, mesh) for mesh in ("tp=2", "dp=2,tp=2")),
            Diffusion(UNET, "tp=2", settings=(("downsample_type", "resnet"), ("upsample_type", "resnet"))),
            *(Diffusion(name, mesh) for name in (DIT, PIXART) for mesh in ("tp=2", "dp=2,tp=2")),
            Diffusion(PIXART, "tp=2", "sequence"),
            Diffusion(DIT, "sp=2", "ulysses"),
            *(Diffusion(name, "tp=2,sp=2", "ulysses") for name in (DIT, PIXART)),
            *(Diffusion(name, "cp=2", "ring") for name in (DIT, PIXART)),
        ],
    ),
)
def test_a_model_of_diffusers_trains_on_a_mesh_as_on_one_device(case: Diffusion):
    rules = sl.layouts.for_model(case.make_model(), case.mode)
    assert_equivalent(case.make_model, case.make_batch, case.mesh, rules, loss=case.loss, steps=1)


@pytest.mark.parametrize("name", DIFFUSION_FILES)
def test_models_of_diffusers_find_their_file(name: str):
    with torch.device("meta"):
        model = Diffusion(name, "tp=2").make_model()
    assert sl.layouts.for_model(model) == sl.layouts.load(DIFFUSION_FILES[name])


# --- files that fit ------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, heads: str = "num_heads") -> None:
        super().__init__()
        self.self_attn = nn.ModuleDict({f"{name}_proj": nn.Linear(8, 8) for name in "qkvo"})
        self.self_attn.config = type("Config", (), {"num_attention_heads": 2, "num_key_value_heads": 2})
        self.mlp = nn.ModuleDict({f"{name}_proj": nn.Linear(8, 8) for name in ("gate", "up", "down")})


def _decoder(**more: nn.Module) -> nn.Module:
    return nn.ModuleDict({"embed_tokens": nn.Embedding(8, 8), "layers": nn.ModuleList([Layer()]), **more})


def test_a_model_of_ones_own_with_the_modules_of_a_family_takes_its_file():
    assert sl.layouts.for_model(_decoder(norm=nn.LayerNorm(8))) == sl.layouts.load("llama")


def test_one_parameter_that_the_file_does_not_name_and_it_does_not_fit():
    with pytest.warns(sl.layouts.SuggestedLayoutWarning):
        assert sl.layouts.for_model(_decoder(gate=nn.Linear(8, 8))) != sl.layouts.load("llama")

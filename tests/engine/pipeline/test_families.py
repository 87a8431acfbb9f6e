"""Models of transformers and torchvision, unchanged, on stages."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib.testing import assert_equivalent
from tests.families.kin import kin_of
from tests.families.transformer_models import FAMILIES, MIXTURE, build, images, text, transformers
from tests.torchvision_on_cpu import import_torchvision

_T5 = {"vocab_size": 67, "d_model": 20, "d_kv": 3, "d_ff": 18, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
_T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 6, "decoder_start_token_id": 0}
_MIXTRAL = {"vocab_size": 67, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
_MIXTRAL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 5, "num_experts_per_tok": 2}
_MIXTRAL |= {"max_position_embeddings": 32}


def t5(name: str = "T5ForConditionalGeneration", **settings: Any) -> nn.Module:
    return _large(getattr(transformers, name)(transformers.T5Config(**_T5 | settings)))


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**_MIXTRAL, attn_implementation="eager")
    return _large(transformers.MixtralForCausalLM._from_config(config, experts_implementation="eager"))


def _large(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model.train()


def padded(step: int) -> Any:
    return text(step, padding="right", use_cache=False)


def padded_alone(step: int) -> Any:
    return text(step, padding="right")


def pairs(step: int) -> Any:
    args, kwargs = padded(step)
    written = torch.randint(3, 67, (4, 5), generator=torch.Generator().manual_seed(step))
    return args, {**kwargs, "decoder_input_ids": written}


def no_cache(step: int) -> Any:
    return text(step, use_cache=False)


def logits(model: nn.Module, batch: Any) -> torch.Tensor:
    output = model(*batch[0], **batch[1]).logits
    weight = torch.linspace(0.5, 1.5, output[0].numel(), dtype=output.dtype).view(output.shape[1:])
    return (output.square() * weight + output.sin()).mean()


def small(name: str, **settings: Any) -> Any:
    return functools.partial(build, name, **settings)


CASES = {
    "gpt2": (
        small("GPT2LMHeadModel", n_layer=4),
        padded,
        "wte, wpe, h.0 | h.1 | h.2 | h.3, ln_f, lm_head",
        "interleaved",
    ),
    "llama": (small("LlamaForCausalLM", attention="sdpa"), padded, sl.rules.Balanced([1, 1]), ""),
    "bert": (small("BertForSequenceClassification"), padded, sl.rules.Balanced(), ""),
    "vit": (small("ViTForImageClassification"), images, sl.rules.Balanced(), ""),
    "mixtral": (mixtral, no_cache, sl.rules.Balanced([1, 2]), ""),
    "t5 between its parts": (t5, pairs, "encoder | decoder, lm_head", "gpipe"),
    "t5 in four": (
        t5,
        pairs,
        "encoder.embed_tokens, encoder.block.0 | encoder.block.1, encoder.final_layer_norm, decoder.embed_tokens, "
        "decoder.block.0 | decoder.block.1 | decoder.final_layer_norm, lm_head",
        "interleaved",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_family_on_stages(name: str):
    factory, batch, stages, schedule = CASES[name]
    rules = sl.Rules({"**": None}, stages=stages)
    assert_equivalent(factory, batch, "pp=2", rules, transforms=(sl.pipeline(schedule, 2),), steps=2, loss=logits)


def recomputing() -> nn.Module:
    model = build("LlamaForCausalLM", attention="sdpa")
    model.gradient_checkpointing_enable()
    return model


def test_with_a_model_that_computes_its_activations_again():
    """The layers of transformers wrap themselves, outside of what hooks and compilers see."""
    rules = sl.Rules({"**": None}, stages=sl.rules.Balanced([1, 1]))
    assert_equivalent(recomputing, padded, "pp=2", rules, steps=2, loss=logits)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_with_tensor_parallel_rules_of_its_layout_file(name: str):
    factory = small(name)
    rules = sl.layouts.for_model(factory()).with_stages(sl.rules.Balanced([1, 1]))
    assert_equivalent(factory, padded, "pp=2,tp=2", rules, steps=2, loss=logits)


def mixture(name: str) -> nn.Module:
    model = getattr(transformers, f"{name}Model")
    config = model.config_class(**{**MIXTURE, **FAMILIES[name]})
    return _large(model._from_config(config, experts_implementation="eager"))


def resnet() -> nn.Module:
    models = import_torchvision().models
    model = models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=3)
    model.fc = nn.Identity()
    return model.eval()  # in training, statistics are those of a microbatch


def few_words(step: int) -> Any:
    args, kwargs = text(step)
    return args, {"input_ids": kwargs["input_ids"] % MIXTURE["vocab_size"]}


def pictures(step: int) -> torch.Tensor:
    return torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(step))


def features(model: nn.Module, batch: Any) -> torch.Tensor:
    output = model(batch) if isinstance(batch, torch.Tensor) else model(*batch[0], **batch[1]).last_hidden_state
    weight = torch.linspace(0.5, 1.5, output[0].numel(), dtype=output.dtype).view(output.shape[1:])
    return (output.square() * weight + output.sin()).mean()


# Models without a head of layout files; that of examples/gpt.py always has one.
HEADLESS = {
    "bert": (small("BertModel"), padded_alone, sl.rules.Balanced()),
    "deepseek": (functools.partial(mixture, "DeepseekV3"), few_words, sl.rules.Balanced()),
    "gpt2": (small("GPT2Model"), padded, sl.rules.Balanced()),
    "llama": (small("LlamaModel"), padded, sl.rules.Balanced()),
    "mixtral": (functools.partial(mixture, "Mixtral"), few_words, sl.rules.Balanced()),
    "qwen_moe": (functools.partial(mixture, "Qwen3Moe"), few_words, sl.rules.Balanced()),
    "resnet": (resnet, pictures, "conv1, bn1, layer1, layer2, layer3 | layer4"),
    "t5": (functools.partial(t5, "T5Model"), pairs, "encoder | decoder"),
    # The vocabulary outweighs the blocks, and `shared` is only a name of what encoder.embed_tokens reads.
    "t5 encoder": (functools.partial(t5, "T5EncoderModel", vocab_size=300), padded_alone, sl.rules.Balanced()),
    "vit": (small("ViTModel"), images, sl.rules.Balanced()),
}


# Models of the other files, with their heads, and their stages where modules do not run in the order of registration.
OPT = (
    "model.decoder.embed_tokens, model.decoder.embed_positions, model.decoder.layers.0 | "
    "model.decoder.layers.1, model.decoder.final_layer_norm, lm_head"
)
KIN_STAGES = {"bart": "model.encoder | model.decoder, lm_head", "opt": OPT}
KIN = {
    "bamba": "bamba",
    "bart": "bart/BartForConditionalGeneration",
    "clip": "clip_vision_model",
    "convnext": "convnext",
    "deberta": "deberta",
    "deepseek_v4": "deepseek_v4",
    "distilbert": "distilbert",
    "falcon": "falcon",
    "gpt_neox": "gpt_neox",
    "gpt_oss": "gpt_oss",
    "mamba": "mamba2",
    "opt": "opt",
    "phi3": "phi3",
    "swin": "swin",
}


def test_every_family_is_tried_on_stages():
    tried = {*(name.partition(" ")[0] for name in HEADLESS), *KIN, "dit", "example_gpt", "llava", "timm_vit", "unet"}
    assert tried == {*sl.layouts.available()}


@pytest.mark.deep
@pytest.mark.parametrize("file", KIN)
def test_a_model_of_the_census_on_stages(file: str):
    run = kin_of(KIN[file], "pp=2")
    rules = sl.Rules({"**": None}, stages=KIN_STAGES.get(file, sl.rules.Balanced()))
    assert_equivalent(
        run.make_model, run.make_batch, "pp=2", rules, transforms=(sl.pipeline("1f1b", 2),), steps=2, loss=run.loss
    )


@pytest.mark.covering
@pytest.mark.parametrize("name", HEADLESS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_family_without_a_head(name: str, stage: int):
    factory, batch, stages = HEADLESS[name]
    transforms = (sl.pipeline("1f1b", 2), *([sl.zero(stage)] if stage else []))
    rules = sl.Rules({"**": None}, stages=stages)
    assert_equivalent(factory, batch, "dp=2,pp=2", rules, transforms=transforms, steps=2, loss=features)


@pytest.mark.parametrize("mode", ["sequence", pytest.param("ulysses", marks=pytest.mark.deep)])
def test_a_split_sequence_without_a_head(mode: str):
    factory, batch, _ = HEADLESS["llama"]
    rules = sl.layouts.for_model(factory(), mode).with_stages(sl.rules.Balanced())
    mesh = "pp=2,tp=2" if mode == "sequence" else "pp=2,sp=2"
    assert_equivalent(factory, batch, mesh, rules, transforms=(sl.pipeline("1f1b", 2),), steps=2, loss=features)

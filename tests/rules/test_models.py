"""Rules on models of the size and kind that people have; all on `meta`, where nothing is allocated."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import nn

from shardlib import MeshShape, layouts
from shardlib.rules import Rules
from shardlib.rules._resolve import Resolver
from tests.families.transformer_models import transformers


def llama_405b() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


def test_a_layout_is_made_once_for_all_blocks_of_a_large_model() -> None:
    mesh = MeshShape("pp=8,dp=8,fsdp=16,tp=16")
    resolver = Resolver(layouts.load("llama"), llama_405b(), mesh)
    tensors = resolver.resolution().tensors
    assert len(tensors) == 126 * 9 + 3 + 2
    assert sum(t.global_bytes for t in tensors.values() if t.kind == "parameter") == 405_853_388_800 * 4
    assert str(tensors["model.layers.125.self_attn.k_proj.weight"].layout) == "(kv_heads head) in"
    assert str(tensors["model.layers.125.self_attn.q_proj.weight"].layout) == "(heads@tp head) in"
    # Seven projections; embedding and output layer; norms in blocks, and the last one.
    assert len(resolver.maker._made) == 11


def test_many_experts_as_modules_of_their_own() -> None:
    with torch.device("meta"):
        experts = nn.ModuleList(nn.ModuleDict({n: nn.Linear(8, 8) for n in ("w1", "w2", "w3")}) for _ in range(64))
        model = nn.ModuleDict({"layers": nn.ModuleList(nn.ModuleDict({"experts": experts}) for _ in range(2))})
    rules = Rules({"experts.*.w[13]": "colwise", "experts.*.w2": "rowwise"})
    resolution = rules.resolve(model, "tp=2")
    shared = resolution.tensors["layers.0.experts.63.w2.weight"]
    assert shared.tied == ("layers.0.experts.63.w2.weight", "layers.1.experts.63.w2.weight")
    assert len(resolution.tensors) == 64 * 6
    assert [key for key in resolution.borders if "w2" not in key[0]] == []


CHANNELS = {"conv1": "colwise", "bn1": "colwise", "conv2": "rowwise", "bn2": None, "downsample.*": None, "fc": None}


def test_channels_of_a_residual_network(torchvision: ModuleType) -> None:
    with torch.device("meta"):
        model = torchvision.models.resnet18()
    rules = Rules({**CHANNELS, "^conv1": None, "^bn1": None}, override=("^conv1", "^bn1"))
    resolution = rules.resolve(model, "dp=2,tp=2")
    split = {name: str(tensor.layout) for name, tensor in resolution.tensors.items() if name.startswith("layer1.0")}
    assert {name: layout for name, layout in split.items() if "@" in layout} == {
        "layer1.0.conv1.weight": "out@tp in _ _",
        "layer1.0.bn1.weight": "channel@tp",
        "layer1.0.bn1.bias": "channel@tp",
        "layer1.0.bn1.running_mean": "channel@tp",
        "layer1.0.bn1.running_var": "channel@tp",
        "layer1.0.conv2.weight": "out in@tp _ _",
    }
    assert resolution.borders["layer1.0.conv2", "output"].reason == "sum over tp of a row-parallel output"
    assert resolution.tensors["bn1.running_mean"].layout.axes == frozenset()


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_output_layers(tied: bool) -> None:
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=67, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    tensors = layouts.load("gpt2").resolve(model, "tp=2").tensors
    assert tensors["transformer.wte.weight"].tied == ("transformer.wte.weight", "lm_head.weight")[: 1 + tied]
    assert ("lm_head.weight" in tensors) is not tied

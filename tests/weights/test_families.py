"""Weights of real models on the move: key heads, experts, adapters, tied heads and padded vocabularies."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib.errors import PlanError
from shardlib.testing import shared_pool
from tests.families.mixtral import Case
from tests.families.transformer_models import build
from tests.weights.language import adam, difference, mine

peft: Any = importlib.import_module("peft")  # after transformers, which needs torchvision to have been imported so

# peft 0.21 asks transformers 5 by a former name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

LLAMA, GPT2, QWEN, MIXTRAL = "LlamaForCausalLM", "GPT2LMHeadModel", "Qwen2ForCausalLM", "MixtralForCausalLM"
LIMIT = 1e-12


def _made(kind: str, seed: int = 0, **settings: Any) -> nn.Module:
    torch.manual_seed(seed)
    model = Case("", settings=settings).make_model() if kind == MIXTRAL else build(kind, "sdpa", **settings)
    return model.double()


def _sharded(model: nn.Module, mesh: str, *transforms: Any, mode: str | None = None) -> nn.Module:
    rules = sl.layouts.for_model(model, mode=mode)
    rules = rules.with_stages(sl.rules.Balanced()) if "pp" in mesh else rules
    return sl.shard_model(model, mesh, rules, transforms=transforms)


def _with_adapters(model: nn.Module) -> nn.Module:
    layers = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    return peft.get_peft_model(
        model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=layers, init_lora_weights=False)
    )


# --- reshard ----------------------------------------------------------------------------------------------------------


def _trained(kind: str, meshes: list[str], transforms: Any, mode: str | None, settings: Any, adapters: bool) -> float:
    """Train on meshes in turn; return the largest difference from one device."""
    single = _made(kind, **settings)
    single = _with_adapters(single).double() if adapters else single
    model = copy.deepcopy(single)
    rules = sl.layouts.for_model(model, mode=mode)
    if any("pp" in mesh for mesh in meshes):
        rules = rules.with_stages(sl.rules.Balanced())
    model = sl.shard_model(model, meshes[0], rules, transforms=transforms)
    optimizer, alone = adam(model), adam(single)
    off = 0.0
    for step, mesh in enumerate(meshes):
        if step:
            sl.reshard(model, mesh, optimizer)
        ids = torch.randint(3, 40, (4, 8), generator=torch.Generator().manual_seed(step))
        batch = {"input_ids": mine(ids, model), "use_cache": False}
        sl.pipeline_step(model, batch, lambda output, _: output.logits.square().mean(), microbatches=1)
        single(input_ids=ids, use_cache=False).logits.square().mean().backward()
        for each in (optimizer, alone):
            each.step()
            each.zero_grad()
        off = max(off, difference(model, single))
    return off


@pytest.mark.parametrize(
    ("kind", "meshes", "options"),
    [
        # Both last meshes have a sub-mesh "tp" of ranks 0 and 1, and these are equal.
        pytest.param(LLAMA, ["dp=2,tp=2", "tp=4", "pp=2,tp=2"], {}, id="two key heads on four ranks"),
        pytest.param(LLAMA, ["dp=4", "pp=2,tp=2", "dp=2,tp=2"], {"settings": {"tie_word_embeddings": True}}, id="tied"),
        pytest.param(LLAMA, ["pp=4", "pp=2,dp=2", "dp=4"], {"settings": {"num_hidden_layers": 4}}, id="stages"),
        pytest.param(GPT2, ["tp=4", "dp=4", "pp=2,tp=2"], {}, id="fused"),
        pytest.param(MIXTRAL, ["ep=4", "ep=2,tp=2", "tp=4", "dp=4"], {"transforms": [sl.zero(1)]}, id="experts"),
        pytest.param(LLAMA, ["dp=2,sp=2", "dp=1,sp=4"], {"mode": "ulysses"}, id="split sequences"),
        pytest.param(LLAMA, ["dp=2,cp=2", "dp=1,cp=4"], {"mode": "ring"}, id="a ring"),
        pytest.param(LLAMA, ["dp=4", "dp=2,tp=2"], {"adapters": True, "transforms": [sl.zero(3)]}, id="adapters"),
        pytest.param(LLAMA, ["pp=2,dp=2", "tp=4"], {"adapters": True}, id="adapters in stages"),
    ],
)
def test_training_goes_on_as_on_one_device(kind: str, meshes: list[str], options: Any):
    given = {"transforms": [], "mode": None, "settings": {}, "adapters": False, **options}
    for off in shared_pool(4).run(_trained, kind, meshes, **given):
        assert off < LIMIT


# --- transfer ---------------------------------------------------------------------------------------------------------


def _transferred(kind: str, here: str, there: str, transforms: Any, settings: Any) -> bool:
    source = _sharded(_made(kind, **settings), here, *transforms)
    target = _sharded(_made(kind, 1, **settings), there)
    full = sl.full_state_dict(source)
    sl.transfer(source, target)
    return all(torch.equal(value, full[name]) for name, value in sl.full_state_dict(target).items())


@pytest.mark.parametrize(
    ("kind", "here", "there", "options"),
    [
        pytest.param(LLAMA, "tp=4", "dp=2,tp=2", {}, id="key heads that the source replicates"),
        pytest.param(LLAMA, "dp=2,tp=2", "pp=2,tp=2", {}, id="meshes with equal sub-meshes"),
        pytest.param(LLAMA, "dp=4", "tp=4", {"settings": {"num_key_value_heads": 1}}, id="one key head"),
        pytest.param(LLAMA, "pp=2,dp=2", "tp=4", {"settings": {"tie_word_embeddings": True}}, id="tied"),
        pytest.param(QWEN, "dp=4", "tp=4", {"transforms": [sl.fsdp()]}, id="biases of heads"),
        pytest.param(GPT2, "dp=2,tp=2", "tp=4", {"transforms": [sl.zero(3)]}, id="a fused weight"),
        pytest.param(MIXTRAL, "ep=4", "tp=4", {}, id="experts to tp"),
        pytest.param(MIXTRAL, "dp=2,ep=2", "ep=2,tp=2", {"transforms": [sl.zero(3)]}, id="experts to both"),
    ],
)
def test_weights_come_whole(kind: str, here: str, there: str, options: Any):
    given = {"transforms": [], "settings": {}, **options}
    assert all(shared_pool(4).run(_transferred, kind, here, there, **given))


def _tied(kind: str) -> str:
    """Transfer between a model with a tied head and one without."""
    tied, apart = (_sharded(_made(LLAMA, i, tie_word_embeddings=not i), "tp=2") for i in (0, 1))
    head, embed = "lm_head.weight", "model.embed_tokens.weight"
    if kind == "to apart":
        sl.transfer(tied, apart)
        full = sl.full_state_dict(apart)
        return str(torch.equal(full[head], full[embed]))
    if kind == "to tied":
        with pytest.raises(PlanError) as caught:
            sl.transfer(apart, tied)
        return str(caught.value)
    sl.transfer(apart, tied, names={head: None})
    return str(torch.equal(sl.full_state_dict(tied)[head], sl.full_state_dict(apart)[embed]))


@pytest.mark.parametrize(
    ("kind", "said"), [("to apart", "True"), ("to tied", "are 2 tensors in the source, and one in"), ("one", "True")]
)
def test_a_tied_head_beside_one_of_its_own(kind: str, said: str):
    for told in shared_pool(2).run(_tied, kind):
        assert said in told


def _padded(rows: int) -> bool:
    source, target = _sharded(_made(LLAMA), "tp=4"), _sharded(_made(LLAMA, 1, vocab_size=rows), "dp=2,tp=2")
    before = sl.full_state_dict(target)
    long = ["model.embed_tokens.weight", "lm_head.weight"]
    sl.transfer(source, target, padded=long)
    full, got = sl.full_state_dict(source), sl.full_state_dict(target)
    kept = all(torch.equal(got[name][len(full[name]) :], before[name][len(full[name]) :]) for name in long)
    return kept and all(torch.equal(got[name][: len(full[name])], full[name]) for name in got)


def test_a_padded_vocabulary():
    assert all(shared_pool(4).run(_padded, 72))


def _plain_name(name: str) -> str | None:
    return None if ".lora_" in name else name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _merged(here: str, there: str, transforms: Any) -> tuple[float, float]:
    """Return how far merged weights are from those of one device: transferred, and streamed."""
    single = _with_adapters(_made(LLAMA)).double()
    source, target = _sharded(copy.deepcopy(single), here, *transforms), _made(LLAMA, 1)
    target = _sharded(target, there) if there else target
    want = single.merge_and_unload().state_dict()
    source.merge_adapter()
    sl.transfer(source, target, names=_plain_name)
    streamed = dict(sl.stream_weights(source, names=_plain_name))
    source.unmerge_adapter()
    assert streamed.keys() == want.keys()
    return difference(target, _loaded(want)), max(float((streamed[n] - want[n]).abs().max()) for n in want)


def _loaded(state: Any) -> nn.Module:
    model = _made(LLAMA)
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize(
    ("here", "there", "transforms"),
    [
        ("dp=2,tp=2", "tp=4", [sl.zero(3)]),
        ("tp=4", "", []),
        ("pp=2,dp=2", "tp=4", []),
    ],
)
def test_merged_adapters_reach_a_plain_model(here: str, there: str, transforms: Any):
    for off in shared_pool(4).run(_merged, here, there, transforms):
        assert max(off) < LIMIT

"""Hugging Face models of four families train, generate and save on a mesh as they do on one device."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import shardlib as sl
from shardlib.engine.model.lazy_full_tensor import LazyFullTensor
from tests.families.cases import BERT, GPT2, LLAMA, VIT, Case, prove
from tests.families.params import params
from tests.families.transformer_models import small, text, transformers

TOLERANCE = 1e-10  # of float64; sums in another order differ by some 1e-15
# Where two heads of keys meet four ranks of queries, or three meet two, the gradient of `repeat_kv` regroups heads
# across ranks.
_REPEATED = ("aten.view.default",)
TP2, TP4, BOTH = "tp=2", "tp=4", "dp=2,tp=2"
_UNEVEN = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}

# Each family on each mesh, and once with two layers; with each kind of attention, and of padding; with labels, dropout
# and without.
CASES = [
    Case(GPT2, "sdpa", TP2, padding="right", labels="tokens", dropout=True, layers=2),
    Case(GPT2, "eager", TP4, padding="left", settings={"add_cross_attention": True}),
    Case("GPT2ForSequenceClassification", "sdpa", BOTH, padding="right", labels="class", settings={"num_labels": 3}),
    # float64 softmax of a row that sees nothing is NaN in float32: no padding on the left where attention is eager.
    Case(LLAMA, "eager", TP4, padding="right", gathers=_REPEATED),
    Case(LLAMA, "sdpa", BOTH, padding="left", labels="tokens", layers=2),
    Case(LLAMA, "sdpa", TP2, padding="left", compile="auto", dropout=True),
    Case("LlamaModel", "sdpa", TP2, dropout=True, settings=_UNEVEN, gathers=_REPEATED),
    Case("MistralForCausalLM", "sdpa", TP4, gathers=_REPEATED),  # a sliding window shorter than the text
    Case("Qwen3ForCausalLM", "eager", TP2, settings={"tie_word_embeddings": True}),
    Case(BERT, "sdpa", TP2, padding="left", labels="tokens", dropout=True),
    Case(BERT, "eager", BOTH, padding="right", layers=2),
    Case("BertForSequenceClassification", "sdpa", TP4, labels="class"),
    Case(VIT, "eager", TP2, labels="class", dropout=True, layers=2),
    Case(VIT, "sdpa", BOTH, labels="class"),
    Case("ViTModel", "sdpa", TP4),
]
# The rest of families, kinds of attention and meshes.
MORE = [
    Case(GPT2, "eager", BOTH, labels="tokens"),
    Case(GPT2, "eager", BOTH, padding="left", compile="auto"),
    Case("GPT2Model", "sdpa", TP2),
    Case(GPT2, "eager", TP2, padding="left", dropout=True),
    Case(GPT2, "eager", TP2, compile="auto", dropout=True),
    Case(GPT2, "sdpa", TP4, padding="left"),
    Case(GPT2, "sdpa", BOTH, padding="left"),
    Case(GPT2, "sdpa", TP2, compile="auto"),
    Case(LLAMA, "eager", TP2, padding="right", dropout=True),
    Case(LLAMA, "sdpa", TP2, labels="tokens"),
    Case(LLAMA, "sdpa", TP4),
    Case(LLAMA, "eager", BOTH),
    Case(LLAMA, "sdpa", TP4, compile="auto"),
    Case("Qwen2ForCausalLM", "sdpa", TP2, settings={"tie_word_embeddings": True}),
    Case("Qwen3ForCausalLM", "eager", TP4, gathers=_REPEATED),
    Case(BERT, "eager", TP2, padding="right", dropout=True),
    Case(BERT, "eager", TP4),
    Case(BERT, "sdpa", TP4, padding="right"),
    Case(BERT, "eager", BOTH, labels="tokens"),
    Case(BERT, "sdpa", BOTH, padding="right", compile="auto"),
    Case(BERT, "sdpa", TP2, padding="right", compile="auto"),
    Case("BertModel", "sdpa", TP2, padding="right"),
    Case("BertForSequenceClassification", "sdpa", BOTH, labels="class"),
    Case(VIT, "sdpa", TP2, labels="class", dropout=True),
    Case(VIT, "eager", TP4, labels="class"),
    Case(VIT, "eager", BOTH),
    Case(VIT, "sdpa", TP2, compile="auto"),
]
# Their modules have the same names as Llama's.
_FAMILIES = "Cohere Cohere2 Ernie4_5 Exaone4 Gemma Granite Helium HunYuanDenseV1 Ministral SmolLM3"
_KIN = [Case(f"{family}ForCausalLM", "sdpa", TP4) for family in _FAMILIES.split()]


@pytest.mark.parametrize("case", params(CASES, deep=[*MORE, *_KIN]))
def test_training_gives_the_numbers_of_one_device(case: Case):
    prove(case)


def test_what_a_split_module_gave_may_be_added_to_in_place():
    """Falcon does so: `mlp_output += attention_output`."""
    split = {"query_key_value": "(groups@tp each head)", "dense_h_to_4h": "colwise"}
    summed = {"dense": "rowwise", "dense_4h_to_h": "rowwise"}
    rules = sl.Rules({**split, **summed}, sizes={"groups": 2, "each": 4}, unmatched="replicate")
    prove(Case("FalconForCausalLM", "sdpa", TP2), rules=rules, steps=1)


# --- communication -------------------------------------------------------------------------------------------------


def _collectives(case: Case) -> list[dict[str, int]]:
    """Of the forward pass, and of forward and backward."""
    model = sl.shard_model(case.make_model(), case.mesh, compile=case.compile)
    _, batch = case.make_batch(0)
    model(**batch).logits.square().mean().backward()
    with CommDebugMode() as mode:
        loss = model(**batch).logits.square().mean()
        forward = _counts(mode)
        loss.backward()
    return [forward, _counts(mode)]


def _counts(mode: CommDebugMode) -> dict[str, int]:
    return {str(op).rpartition(".")[2]: count for op, count in mode.get_comm_counts().items()}


@pytest.mark.parametrize(
    "case",
    params(
        [Case(GPT2, "eager", TP2, layers=2)],
        deep=[Case(model, "sdpa", TP2, compile="auto") for model in (GPT2, LLAMA)]
        + [Case(LLAMA, "eager", TP2, layers=2)],
    ),
)
def test_a_block_costs_four_all_reduces_a_step(ranks, case: Case):
    """Megatron's count. Beside the blocks: the embedding's sum, the head's input gradient, the logits made whole."""
    blocks = 2
    for forward, both in ranks(2).run(_collectives, case):
        assert forward == {"all_reduce": 2 * blocks + 1, "all_gather_into_tensor": 1}
        assert both == {"all_reduce": 4 * blocks + 2, "all_gather_into_tensor": 1}


# --- inference -----------------------------------------------------------------------------------------------------


def _pair(case: Case) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    alone = case.make_model().double().eval()
    return alone, sl.shard_model(copy.deepcopy(alone), case.mesh, compile=case.compile)


def _generate(case: Case) -> None:
    alone, sharded = _pair(case)
    _, batch = case.make_batch(0)
    want, got = (
        model.generate(batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=8, do_sample=False)
        for model in (alone, sharded)
    )
    assert torch.equal(got, want), (got, want)
    assert len(want[:, -8:].unique()) > 4  # not one token again and again


@pytest.mark.parametrize(
    "case",
    params(
        [Case(GPT2, "eager", TP4, padding="left"), Case(LLAMA, "sdpa", TP4, padding="left")],
        deep=[
            Case(GPT2, "sdpa", TP2, padding="left", compile="auto"),
            Case(LLAMA, "sdpa", TP2, padding="left"),
            Case(LLAMA, "sdpa", TP4, padding="left", compile="auto"),
        ],
    ),
)
def test_generation_chooses_the_same_tokens(ranks, case: Case):
    ranks(case.world_size).run(_generate, case)


def _continue_from_cache(case: Case) -> None:
    alone, sharded = _pair(case)
    _, batch = case.make_batch(0)
    ids = batch["input_ids"]
    with torch.no_grad():
        want = alone(ids).logits
        first = sharded(ids[:, :6], use_cache=True)
        second = sharded(ids[:, 6:], past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), want, rtol=TOLERANCE, atol=TOLERANCE)
    keys = second.past_key_values.layers[0].keys
    assert isinstance(keys, DTensor) and keys.shape == (4, alone.config.num_key_value_heads, 10, 8)
    assert keys.to_local().shape[1] == alone.config.num_key_value_heads // 2  # each rank keeps its own heads


def test_a_cache_holds_each_ranks_own_heads(ranks):
    ranks(2).run(_continue_from_cache, Case(LLAMA, "sdpa", TP2, layers=2))


@pytest.mark.compiled
def test_a_cache_is_filled_by_eager_blocks():
    """Models of transformers fill a cache in training too, unless told not to; such blocks are not compiled."""
    report = prove(Case(LLAMA, "sdpa", TP2, layers=2), batch=text, compile="auto")
    assert [warning for warning in report.warnings if "eagerly" in warning] == [
        '"model.layers.0" and blocks like it run eagerly: it was given a DynamicCache, in which it can leave tensors '
        "behind. Call the model without it (use_cache=False for models of Hugging Face), or pass compile=None to "
        "shard_model."
    ]


def _checkpointed(case: Case, reentrant: bool) -> nn.Module:
    model = case.make_model()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "case",
    params(
        [Case(BERT, "sdpa", TP2, layers=2)],
        deep=[Case(VIT, "eager", TP2, layers=2), Case(VIT, "eager", TP2, compile="auto")],
    ),
)
def test_blocks_may_be_computed_again_in_backward(case: Case, reentrant: bool):
    prove(case, model=functools.partial(_checkpointed, case, reentrant))


def _attention_weights(case: Case) -> None:
    alone, sharded = _pair(case)
    _, batch = case.make_batch(0)
    want, got = (model(**batch, output_attentions=True) for model in (alone, sharded))
    for ours, theirs in zip(got.attentions, want.attentions, strict=True):
        assert type(ours) is torch.Tensor
        torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)
    for output in (want, got):
        sum(weights.square().sum(-1).mean() for weights in output.attentions).backward()
    ours, theirs = (model.get_parameter("transformer.h.0.attn.c_attn.weight").grad for model in (sharded, alone))
    torch.testing.assert_close(ours.full_tensor(), theirs, rtol=TOLERANCE, atol=TOLERANCE)


def test_attention_weights_come_out_whole_when_asked_for(ranks):
    ranks(2).run(_attention_weights, Case(GPT2, "eager", TP2, layers=2))


def _unread_weights(case: Case) -> None:
    _, sharded = _pair(case)
    seen: list[Any] = []
    sharded.transformer.h[0].attn.register_forward_hook(lambda _module, _args, output: seen.append(output[1]))
    sharded(**case.make_batch(0)[1])
    (weights,) = seen
    assert isinstance(weights, LazyFullTensor) and weights.shape == (4, 4, 10, 10) and weights.requires_grad
    assert repr(weights) == "LazyFullTensor(shape=(4, 4, 10, 10), dtype=torch.float64, placements=(Shard(dim=1),))"
    assert [tuple(half.shape) for half in weights.split(2, dim=1)] == [(4, 2, 10, 10)] * 2  # a method of Tensor
    assert type(weights * 2) is torch.Tensor


def test_attention_weights_that_nobody_reads_stay_split(ranks):
    ranks(2).run(_unread_weights, Case(GPT2, "eager", TP2))


# --- checkpoints ---------------------------------------------------------------------------------------------------


def _save_and_load(case: Case) -> None:
    alone, sharded = _pair(case)
    plain = alone.state_dict()
    assert list(sharded.state_dict()) == list(plain)
    assert all(torch.equal(full, plain[name]) for name, full in sl.full_state_dict(sharded).items())
    other = sl.shard_model(case.make_model().double(), case.mesh, compile=None)
    for state in (plain, sharded.state_dict()):
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert other.load_state_dict(state).missing_keys == []
        assert all(torch.equal(full, plain[name]) for name, full in sl.full_state_dict(other).items())


@pytest.mark.parametrize("model", [GPT2, BERT, *(pytest.param(each, marks=pytest.mark.deep) for each in (LLAMA, VIT))])
def test_state_dicts_of_one_device_and_of_a_mesh_are_the_same(ranks, model: str):
    ranks(2).run(_save_and_load, Case(model, "sdpa", TP2, layers=2))


# --- layout files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["gpt2", "llama", "bert", "vit"])
def test_each_class_that_a_file_is_for_finds_it_and_fits_it(file: str):
    rules = sl.layouts.load(file)
    for entry in rules.models:
        with torch.device("meta"):
            name = entry.rpartition(".")[2]
            made = getattr(transformers, name)(small(name))
        assert sl.layouts.for_model(made) == rules, entry
        split = [name for name, row in rules.resolve(made, "dp=2,tp=2").tensors.items() if row.layout.axes]
        assert len(split) >= 10, entry

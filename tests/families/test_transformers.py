"""Hugging Face models of four families train, generate and save on a mesh as they do on one device."""

from __future__ import annotations

import copy
import functools
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import shardlib as sl
from shardlib.engine import ops
from shardlib.engine.ungathered import Ungathered
from tests.engine.same_numbers import TOLERANCE, differences, whole
from tests.families.transformer_models import build, images, small, text, transformers

# The gradient of a key's bias is zero in exact arithmetic, and AdamW divides the noise that is there instead by itself
# plus eps: with the usual 1e-8 a noise of 1e-17 moves the bias by 1e-11.
_ADAMW = functools.partial(torch.optim.AdamW, eps=1e-5)

# Causal language models of transformers compute their own loss in float32, a mean over other rows on each data rank.
_FLOAT32 = 1e-6


@dataclass(frozen=True)
class Case:
    """One training run: a model class, its kind of attention, a mesh, a batch."""

    model: str
    attention: str
    mesh: str
    padding: str | None = None
    labels: str | None = None  # "tokens" or "class": the model computes its loss
    compile: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    gathers: tuple[str, ...] = ()  # ops that have no sharding rule for what they meet

    def __str__(self) -> str:
        parts = (self.model, self.attention, self.mesh, self.padding, self.labels, self.compile)
        return " ".join(str(part) for part in (*parts, *self.settings) if part)

    @property
    def world_size(self) -> int:
        return sl.MeshShape(self.mesh).world_size

    def make_model(self) -> torch.nn.Module:
        return build(self.model, self.attention, **self.settings)

    def make_batch(self, step: int) -> Any:
        if self.model.startswith("ViT"):
            return images(step, labels=self.labels)
        # A compiled block fills no cache; see `test_a_cache_is_filled_by_eager_blocks`.
        more: dict[str, Any] = {"use_cache": False} if self.compile and not self.model.startswith("Bert") else {}
        if self.settings.get("add_cross_attention"):
            draw = torch.Generator().manual_seed(step)
            more["encoder_hidden_states"] = torch.randn(4, 5, 32, generator=draw)
        return text(step, padding=self.padding, labels=self.labels, **more)

    def loss(self, output: Any) -> torch.Tensor:
        if self.labels:
            return output.loss
        main = output.logits if "logits" in output else output.last_hidden_state
        loss = main.sin().mean() + main.square().mean()
        pooled = output.get("pooler_output")
        return loss if pooled is None else loss + pooled.square().mean()


# Where two heads of keys meet four ranks of queries, the gradient of `repeat_kv` regroups heads across ranks.
_REPEATED = ("aten.view.default",)
TP2, TP4, BOTH = "tp=2", "tp=4", "dp=2,tp=2"
GPT2, LLAMA, BERT, VIT = "GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM", "ViTForImageClassification"

CASES = [
    Case(GPT2, "sdpa", TP2, padding="right", labels="tokens"),
    Case(GPT2, "sdpa", TP4, padding="left"),
    Case(GPT2, "eager", BOTH, labels="tokens"),
    Case(GPT2, "eager", BOTH, padding="left", compile="auto"),
    Case("GPT2Model", "sdpa", TP2),
    Case(GPT2, "eager", TP2, settings={"add_cross_attention": True}),
    Case("GPT2ForSequenceClassification", "sdpa", BOTH, padding="right", labels="class", settings={"num_labels": 3}),
    # float64 softmax of a row that sees nothing is NaN in float32: no padding on the left where attention is eager.
    Case(LLAMA, "eager", TP4, padding="right", gathers=_REPEATED),
    Case(LLAMA, "sdpa", BOTH, padding="left", labels="tokens"),
    Case(LLAMA, "sdpa", TP2, padding="left", compile="auto"),
    Case(LLAMA, "sdpa", TP2, settings={"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}),
    Case("LlamaModel", "sdpa", TP2),
    Case("MistralForCausalLM", "sdpa", TP4, gathers=_REPEATED),  # a sliding window shorter than the text
    Case("Qwen2ForCausalLM", "sdpa", TP2, settings={"tie_word_embeddings": True}),
    Case("Qwen3ForCausalLM", "eager", TP4, gathers=_REPEATED),
    Case(BERT, "sdpa", TP2, padding="left", labels="tokens"),
    Case(BERT, "eager", BOTH, labels="tokens"),
    Case(BERT, "sdpa", TP2, padding="right", compile="auto"),
    Case("BertModel", "sdpa", TP2, padding="right"),
    Case("BertForSequenceClassification", "sdpa", BOTH, labels="class"),
    Case(VIT, "eager", TP4, labels="class"),
    Case(VIT, "sdpa", BOTH, labels="class"),
    Case(VIT, "sdpa", TP2, compile="auto"),
    Case("ViTModel", "sdpa", TP2),
]
# The rest of families, kinds of attention and meshes; above, each of them is met once at least.
MORE = [
    Case(GPT2, "eager", TP2, padding="left"),
    Case(GPT2, "eager", TP4),
    Case(GPT2, "sdpa", BOTH, padding="left"),
    Case(GPT2, "sdpa", TP2, compile="auto"),
    Case(LLAMA, "eager", TP2, padding="right"),
    Case(LLAMA, "sdpa", TP2, labels="tokens"),
    Case(LLAMA, "sdpa", TP4),
    Case(LLAMA, "eager", BOTH),
    Case(LLAMA, "sdpa", TP4, compile="auto"),
    Case(BERT, "eager", TP2, padding="right"),
    Case(BERT, "eager", TP4),
    Case(BERT, "sdpa", TP4, padding="right"),
    Case(BERT, "sdpa", BOTH),
    Case(BERT, "sdpa", BOTH, padding="right", compile="auto"),
    Case(VIT, "eager", TP2),
    Case(VIT, "sdpa", TP2, labels="class"),
    Case(VIT, "sdpa", TP4),
    Case(VIT, "eager", BOTH),
]


def _train(case: Case) -> None:
    with ops.record() as gathered:
        found = differences(
            case.make_model, case.make_batch, case.loss, case.mesh, None, compile=case.compile, optimizer=_ADAMW
        )
    assert {call.op for call in gathered} == set(case.gathers)
    float32 = case.labels == "tokens" and "dp" in case.mesh
    wrong = {k: v for k, v in found.items() if v > (_FLOAT32 if float32 and k.startswith("loss") else TOLERANCE)}
    assert not wrong, wrong


# Their modules have the same names as Llama's.
_FAMILIES = "Cohere Cohere2 Ernie4_5 Exaone4 Gemma Granite Helium HunYuanDenseV1 Ministral SmolLM3"
KIN = [Case(f"{family}ForCausalLM", "sdpa", TP4) for family in _FAMILIES.split()]
DEEP = [pytest.param(case, marks=pytest.mark.deep) for case in (*MORE, *KIN)]


@pytest.mark.parametrize("case", [*CASES, *DEEP], ids=str)
def test_training_gives_the_numbers_of_one_device(ranks, case: Case):
    ranks(case.world_size).run(_train, case)


# --- dropout -------------------------------------------------------------------------------------------------------

_DROPOUT = {
    GPT2: {"attn_pdrop": 0.2, "embd_pdrop": 0.2, "resid_pdrop": 0.2},
    LLAMA: {"attention_dropout": 0.2},
    BERT: {"attention_probs_dropout_prob": 0.2, "hidden_dropout_prob": 0.2},
    VIT: {"attention_probs_dropout_prob": 0.2, "hidden_dropout_prob": 0.2},
}


def _train_with_dropout(case: Case) -> None:
    def seeded() -> torch.nn.Module:
        model = case.make_model()
        model.register_forward_pre_hook(lambda *_: torch.manual_seed(7) and None)
        return model

    with warnings.catch_warnings(action="error" if case.compile is None else "default"), ops.record() as gathered:
        found = differences(seeded, case.make_batch, case.loss, case.mesh, None, compile=case.compile, optimizer=_ADAMW)
    assert gathered == []
    assert max(found.values()) <= TOLERANCE, {k: v for k, v in found.items() if v > TOLERANCE}


@pytest.mark.covering
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("model", _DROPOUT)
def test_dropout_drops_what_one_device_drops(ranks, model: str, attention: str):
    ranks(2).run(_train_with_dropout, Case(model, attention, TP2, settings=_DROPOUT[model]))


def test_dropout_in_compiled_blocks_drops_what_one_device_drops(ranks):
    ranks(2).run(_train_with_dropout, Case(GPT2, "eager", TP2, compile="auto", settings=_DROPOUT[GPT2]))


# --- communication -------------------------------------------------------------------------------------------------


def _collectives(case: Case) -> list[dict[str, int]]:
    """Of the forward pass, and of forward and backward."""
    model = sl.shard_model(case.make_model(), case.mesh, compile=case.compile)
    args, kwargs = case.make_batch(0)
    case.loss(model(*args, **kwargs)).backward()
    with CommDebugMode() as mode:
        loss = case.loss(model(*args, **kwargs))
        forward = _counts(mode)
        loss.backward()
    return [forward, _counts(mode)]


def _counts(mode: CommDebugMode) -> dict[str, int]:
    return {str(op).rpartition(".")[2]: count for op, count in mode.get_comm_counts().items()}


@pytest.mark.covering
@pytest.mark.parametrize("compile", [None, "auto"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("model", [GPT2, LLAMA])
def test_a_block_costs_four_all_reduces_a_step(ranks, model: str, attention: str, compile: str | None):
    """Megatron's count. Beside the blocks: the embedding's sum, the head's input gradient, the logits made whole."""
    blocks = 2
    for forward, both in ranks(2).run(_collectives, Case(model, attention, TP2, compile=compile)):
        assert forward == {"all_reduce": 2 * blocks + 1, "all_gather_into_tensor": 1}
        assert both == {"all_reduce": 4 * blocks + 2, "all_gather_into_tensor": 1}


# --- inference -----------------------------------------------------------------------------------------------------


def _pair(case: Case) -> tuple[torch.nn.Module, torch.nn.Module]:
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
    [
        pytest.param(Case(GPT2, "sdpa", TP2, padding="left", compile="auto"), marks=pytest.mark.deep),
        Case(GPT2, "eager", TP4, padding="left"),
        pytest.param(Case(LLAMA, "sdpa", TP2, padding="left"), marks=pytest.mark.deep),
        Case(LLAMA, "sdpa", TP4, padding="left", compile="auto"),
    ],
    ids=str,
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
    ranks(2).run(_continue_from_cache, Case(LLAMA, "sdpa", TP2))


def _train_with_cache(case: Case) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = differences(case.make_model, text, case.loss, case.mesh, None, compile="auto", optimizer=_ADAMW)
    assert max(found.values()) <= TOLERANCE
    return [str(w.message) for w in caught if "eagerly" in str(w.message)]


def test_a_cache_is_filled_by_eager_blocks(ranks):
    """Models of transformers fill a cache in training too, unless told not to; such blocks are not compiled."""
    for said in ranks(2).run(_train_with_cache, Case(LLAMA, "sdpa", TP2)):
        assert said == [
            '"model.layers.0" and blocks like it run eagerly: it was given a DynamicCache, in which it can leave '
            "tensors behind. Call the model without it to train compiled blocks (use_cache=False for models of Hugging "
            "Face), or pass compile=None to shard_model."
        ]


def _train_with_checkpoints(case: Case, reentrant: bool) -> None:
    def checkpointed() -> torch.nn.Module:
        model = case.make_model()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model

    found = differences(
        checkpointed, case.make_batch, case.loss, case.mesh, None, compile=case.compile, optimizer=_ADAMW, steps=2
    )
    assert max(found.values()) <= TOLERANCE, {k: v for k, v in found.items() if v > TOLERANCE}


@pytest.mark.parametrize(
    ("case", "reentrant"),
    [
        (Case(BERT, "sdpa", TP2), True),
        (Case(BERT, "sdpa", TP2), False),
        (Case(VIT, "eager", TP2, compile="auto"), False),
    ],
    ids=str,
)
def test_blocks_may_be_computed_again_in_backward(ranks, case: Case, reentrant: bool):
    ranks(2).run(_train_with_checkpoints, case, reentrant)


def _attention_weights(case: Case) -> None:
    alone, sharded = _pair(case)
    _, batch = case.make_batch(0)
    want, got = (model(**batch, output_attentions=True) for model in (alone, sharded))
    for ours, theirs in zip(got.attentions, want.attentions, strict=True):
        assert type(ours) is torch.Tensor
        torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)
    for output, model in ((want, alone), (got, sharded)):
        sum(weights.square().sum(-1).mean() for weights in output.attentions).backward()
        model.wanted = whole(model.get_submodule("transformer.h.0.attn.c_attn").weight.grad)
    torch.testing.assert_close(sharded.wanted, alone.wanted, rtol=TOLERANCE, atol=TOLERANCE)


def test_attention_weights_come_out_whole_when_asked_for(ranks):
    ranks(2).run(_attention_weights, Case(GPT2, "eager", TP2))


def _unread_weights(case: Case) -> None:
    _, sharded = _pair(case)
    seen: list[Any] = []
    sharded.transformer.h[0].attn.register_forward_hook(lambda _module, _args, output: seen.append(output[1]))
    sharded(**case.make_batch(0)[1])
    (weights,) = seen
    assert isinstance(weights, Ungathered) and weights.shape == (4, 4, 10, 10) and weights.requires_grad
    assert repr(weights) == "Ungathered(shape=(4, 4, 10, 10), dtype=torch.float64, placements=(Shard(dim=1),))"
    assert type(weights * 2) is torch.Tensor


def test_attention_weights_that_nobody_reads_stay_split(ranks):
    ranks(2).run(_unread_weights, Case(GPT2, "eager", TP2))


# --- checkpoints ---------------------------------------------------------------------------------------------------


def _save_and_load(case: Case) -> None:
    alone, sharded = _pair(case)
    plain = alone.state_dict()
    assert list(sharded.state_dict()) == list(plain)
    full = sl.full_state_dict(sharded)
    assert all(torch.equal(full[name], plain[name]) for name in plain)
    other = sl.shard_model(case.make_model().double(), case.mesh, compile=None)
    for state in (plain, sharded.state_dict()):
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert other.load_state_dict(state).missing_keys == []
        assert all(torch.equal(whole(t), plain[name]) for name, t in other.state_dict().items())


@pytest.mark.parametrize("model", [GPT2, LLAMA, BERT, VIT])
def test_state_dicts_of_one_device_and_of_a_mesh_are_the_same(ranks, model: str):
    ranks(2).run(_save_and_load, Case(model, "sdpa", TP2))


# --- layout files --------------------------------------------------------------------------------------------------

_FILES = {name: sl.layouts.load(name) for name in ("gpt2", "llama", "bert", "vit")}


@pytest.mark.parametrize(
    ("file", "model"),
    [(name, entry.rpartition(".")[2]) for name, rules in _FILES.items() for entry in rules.models],
)
def test_each_class_that_a_file_is_for_finds_it_and_fits_it(file: str, model: str):
    with torch.device("meta"):
        made = getattr(transformers, model)(small(model))
    assert sl.layouts.for_model(made) == _FILES[file]
    split = [name for name, row in _FILES[file].resolve(made, "dp=2,tp=2").tensors.items() if row.layout.axes]
    assert len(split) >= 10

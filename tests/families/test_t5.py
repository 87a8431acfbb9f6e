"""T5 on a mesh: heads with their own relative bias, tied vocabulary, plain and gated MLPs, cross attention."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib.engine import ops
from shardlib.engine.recording import record_collectives
from tests.engine.same_numbers import TOLERANCE, assert_same_numbers, whole
from tests.torchvision_on_cpu import import_torchvision

import_torchvision()  # transformers imports it by the way

import transformers  # noqa: E402

_VOCABULARY, _ROWS, _READ, _WRITTEN = 43, 4, 7, 5  # an odd vocabulary, and two lengths that no mesh divides
_SETTINGS = {
    "vocab_size": _VOCABULARY,
    "d_model": 20,
    "d_kv": 3,
    "d_ff": 18,  # on four ranks: 5, 5, 5, 3
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 6,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "use_cache": False,
}
_GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
# Gradients that are zero in exact arithmetic are noise, which AdamW divides by itself plus eps.
_ADAMW = functools.partial(torch.optim.AdamW, eps=1e-5)


@dataclass(frozen=True)
class Case:
    mesh: str
    model: str = "T5ForConditionalGeneration"
    attention: str = "eager"
    padding: bool = False
    compile: str | None = None
    mode: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = (self.mesh, self.model, self.attention, "padded" if self.padding else "", self.compile, self.mode)
        return " ".join(str(part) for part in (*parts, *self.settings) if part)

    @property
    def world_size(self) -> int:
        return sl.MeshShape(self.mesh).world_size

    def make_model(self) -> nn.Module:
        cls = getattr(transformers, self.model)
        config = cls.config_class(**{**_SETTINGS, **self.settings})
        model = cls._from_config(config, attn_implementation=self.attention).train()
        with torch.no_grad():  # far enough from where weights start that nothing is lost in the noise
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        return model

    def make_batch(self, step: int) -> Any:
        draw = torch.Generator().manual_seed(step)
        batch: dict[str, Any] = {"input_ids": torch.randint(3, _VOCABULARY, (_ROWS, _READ), generator=draw)}
        if self.padding:
            batch["attention_mask"] = (torch.arange(_READ) < torch.tensor([7, 4, 6, 5]).unsqueeze(1)).long()
        if "Encoder" not in self.model:
            batch["labels"] = torch.randint(3, _VOCABULARY, (_ROWS, _WRITTEN), generator=draw)
        return (), batch


def _loss(output: Any) -> torch.Tensor:
    if "loss" in output:
        return output.loss
    return output.last_hidden_state.sin().mean() + output.last_hidden_state.square().mean()


TP2, TP4, BOTH = "tp=2", "tp=4", "dp=2,tp=2"
CASES = [
    pytest.param(Case(TP2, padding=True), marks=pytest.mark.deep),
    pytest.param(Case(TP2, attention="sdpa"), marks=pytest.mark.deep),
    pytest.param(Case(TP4, padding=True, settings=_GATED), marks=pytest.mark.deep),
    Case(TP4, attention="sdpa"),
    Case(BOTH),
    Case(BOTH, attention="sdpa", padding=True, settings=_GATED),
    Case(TP2, attention="sdpa", padding=True, compile="auto", settings=_GATED),
    Case(TP2, "T5EncoderModel", padding=True),
    Case(TP2, "MT5ForConditionalGeneration"),
    Case(TP2, padding=True, mode="sequence"),
    Case(BOTH, attention="sdpa", mode="sequence", settings=_GATED),
    pytest.param(Case(TP2, compile="auto", mode="sequence"), marks=pytest.mark.deep),
    pytest.param(Case(TP4, mode="sequence"), marks=pytest.mark.deep),
]


def _train(case: Case) -> list[Any]:
    with ops.record() as gathered:
        rules = sl.layouts.for_model(case.make_model(), case.mode)
        assert_same_numbers(
            case.make_model, case.make_batch, _loss, case.mesh, rules, compile=case.compile, optimizer=_ADAMW
        )
    return gathered


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_gives_the_numbers_of_one_device(ranks, case: Case):
    for gathered in ranks(case.world_size).run(_train, case):
        assert gathered == []


def _train_with_dropout(case: Case) -> None:
    def seeded() -> nn.Module:
        model = case.make_model()
        model.register_forward_pre_hook(lambda *_: torch.manual_seed(7) and None)
        return model

    assert_same_numbers(seeded, case.make_batch, _loss, case.mesh, None, compile=case.compile, optimizer=_ADAMW)


def test_dropout_drops_what_one_device_drops(ranks):
    ranks(2).run(_train_with_dropout, Case(TP2, settings={"dropout_rate": 0.2}))


# --- communication -------------------------------------------------------------------------------------------------


def _collectives(case: Case) -> Counter[tuple[str, str]]:
    """How many of each kind, by phase, in a step after the first."""
    model = sl.shard_model(case.make_model(), case.mesh, compile=case.compile)
    batch = case.make_batch(0)[1]
    _loss(model(**batch)).backward()
    with record_collectives(model) as log:
        _loss(model(**batch)).backward()
    return Counter((each.kind, each.phase) for each in log.collectives)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_block_costs_two_all_reduces_a_step_for_each_part(ranks, attention: str):
    """Megatron's count: attention, cross attention and MLP are summed once forward and once backward.

    Beside the blocks: the sums of both look-ups forward; backward the gradients of what the head and all cross
    attentions together read; and the logits made whole. The position bias is handed on without any.
    """
    parts = 2 * 2 + 2 * 3
    for counted in ranks(2).run(_collectives, Case(TP2, attention=attention)):
        assert counted == {
            ("all_reduce", "forward"): parts + 2,
            ("all_gather", "forward"): 1,
            ("all_reduce", "backward"): parts + 2,
        }


# --- inference, checkpoints ----------------------------------------------------------------------------------------


def _pair(case: Case) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    alone = case.make_model().double().eval()
    return alone, sl.shard_model(copy.deepcopy(alone), case.mesh, compile=case.compile)


def _generate(case: Case) -> None:
    alone, sharded = _pair(case)
    batch = case.make_batch(0)[1]
    batch.pop("labels")
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    want, got = (model.generate(**batch, **options) for model in (alone, sharded))
    assert torch.equal(got.sequences, want.sequences)
    for ours, theirs in zip(got.logits, want.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)  # transformers makes them float32


def test_generation_chooses_the_same_tokens(ranks):
    ranks(2).run(_generate, Case(TP2, attention="sdpa", padding=True, settings={"use_cache": True}))


def _save_and_load(case: Case) -> None:
    alone, sharded = _pair(case)
    plain = alone.state_dict()
    assert list(sharded.state_dict()) == list(plain)
    assert all(torch.equal(t, plain[name]) for name, t in sl.full_state_dict(sharded).items())
    other = sl.shard_model(case.make_model().double(), case.mesh, compile=None)
    assert other.load_state_dict(plain).missing_keys == []
    assert all(torch.equal(whole(t), plain[name]) for name, t in other.state_dict().items())
    assert other.shared.weight is other.lm_head.weight is other.encoder.embed_tokens.weight
    want, got = (model(**case.make_batch(1)[1]).logits for model in (alone, other))
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)


def test_state_dicts_of_one_device_and_of_a_mesh_are_the_same(ranks):
    ranks(2).run(_save_and_load, Case(TP2))


# --- the layout file -----------------------------------------------------------------------------------------------

_FILE = sl.layouts.load("t5")


@pytest.mark.parametrize("model", [entry.rpartition(".")[2] for entry in _FILE.models])
def test_each_class_that_the_file_is_for_finds_it_and_fits_it(model: str):
    with torch.device("meta"):
        made = Case(TP2, model).make_model()
    assert sl.layouts.for_model(made) == _FILE
    split = {name: str(row.layout) for name, row in _FILE.resolve(made, "dp=2,tp=2").tensors.items() if row.layout.axes}
    bias = next(name for name in split if name.endswith("relative_attention_bias.weight"))
    assert split[bias] == "vocab heads@tp"
    assert len(split) >= 14

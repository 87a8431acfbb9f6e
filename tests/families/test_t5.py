"""T5 on a mesh: heads with their own relative bias, tied vocabulary, plain and gated MLPs, cross attention."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib.engine.feature.recording import record_collectives
from shardlib.testing import assert_equivalent
from tests.families.params import params
from tests.families.t5 import Case

TOLERANCE = 1e-10  # of float64; sums in another order differ by some 1e-15
_GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}


TP2, TP4, BOTH = "tp=2", "tp=4", "dp=2,tp=2"
CASES = [
    Case(TP2, padding=True, settings={"dropout_rate": 0.2}),
    Case(TP4, attention="sdpa"),
    Case(BOTH, attention="sdpa", padding=True, settings=_GATED),
    Case(BOTH, mode="sequence"),
]
MORE = [
    Case(TP2, padding=True),
    Case(TP2, attention="sdpa"),
    Case(TP4, padding=True, settings=_GATED),
    Case(BOTH),
    Case(TP2, attention="sdpa", padding=True, compile="auto", settings=_GATED),
    Case(TP2, "T5EncoderModel", padding=True),
    Case(TP2, "MT5ForConditionalGeneration"),
    Case(TP2, padding=True, mode="sequence"),
    Case(BOTH, attention="sdpa", mode="sequence", settings=_GATED),
    Case(TP2, compile="auto", mode="sequence"),
    Case(TP4, mode="sequence"),
]


@pytest.mark.parametrize("case", params(CASES, deep=MORE))
def test_training_gives_the_numbers_of_one_device(case: Case):
    """With dropout too: the sharded run draws what one device draws."""
    rules = sl.layouts.for_model(case.make_model(), case.mode)
    given = {"compile": case.compile, "rng": "fast", "steps": 2}
    assert assert_equivalent(case.make_model, case.make_batch, case.mesh, rules, **given).gathered == ()


# --- communication -------------------------------------------------------------------------------------------------


def _collectives(case: Case) -> Counter[tuple[str, str]]:
    """How many of each kind, by phase, in a step after the first."""
    model = sl.shard_model(case.make_model(), case.mesh, compile=case.compile)
    batch = case.make_batch(0)[1]
    model(**batch).loss.backward()
    with record_collectives(model) as log:
        model(**batch).loss.backward()
    return Counter((each.kind, each.phase) for each in log.collectives)


@pytest.mark.parametrize("attention", ["eager", pytest.param("sdpa", marks=pytest.mark.deep)])
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
    other = sl.shard_model(case.make_model().double(), case.mesh)
    assert other.load_state_dict(plain).missing_keys == []
    assert all(torch.equal(t, plain[name]) for name, t in sl.full_state_dict(other).items())
    assert other.shared.weight is other.lm_head.weight is other.encoder.embed_tokens.weight
    want, got = (model(**case.make_batch(1)[1]).logits for model in (alone, other))
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)


def test_state_dicts_of_one_device_and_of_a_mesh_are_the_same(ranks):
    ranks(2).run(_save_and_load, Case(TP2))


# --- the layout file -----------------------------------------------------------------------------------------------


def test_each_class_that_the_file_is_for_finds_it_and_fits_it():
    file = sl.layouts.load("t5")
    for entry in file.models:
        with torch.device("meta"):
            made = Case(TP2, entry.rpartition(".")[2]).make_model()
        assert sl.layouts.for_model(made) == file, entry
        split = {n: str(row.layout) for n, row in file.resolve(made, "dp=2,tp=2").tensors.items() if row.layout.axes}
        bias = next(name for name in split if name.endswith("relative_attention_bias.weight"))
        assert split[bias] == "vocab heads@tp", entry
        assert len(split) >= 14, entry

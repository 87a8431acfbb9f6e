"""Mixtral on a mesh: every rank has its slice of every expert, and tokens go where they go on one device."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib.engine import ops
from shardlib.engine.feature.recording import record_collectives
from shardlib.testing import Report, assert_equivalent
from tests.engine.whole import gradients
from tests.families.mixtral import ROWS, SEQ, SETTINGS, Case
from tests.families.params import params
from tests.families.transformer_models import MIXTURE, transformers

TOLERANCE = 1e-10  # of float64; sums in another order differ by some 1e-15
TP2, TP4, BOTH = "tp=2", "tp=4", "dp=2,tp=2"
_ONE_LAYER = {"num_hidden_layers": 1}
CASES = [
    Case(TP2, balanced=True),
    Case(TP4, "batched_mm", settings=_ONE_LAYER),
    Case(BOTH, settings=_ONE_LAYER),
]
MORE = [
    Case(TP2),
    Case(TP4, balanced=True),
    Case(BOTH, "batched_mm", settings={"num_key_value_heads": 4}),
    Case(TP2, "batched_mm", compile="auto"),
]


def _prove(case: Case, **changes: Any) -> Report:
    given = {"compile": case.compile, "rng": "fast", "steps": 2, **changes}
    return assert_equivalent(case.make_model, case.make_batch, case.mesh, loss=case.loss, **given)


@pytest.mark.parametrize("case", params(CASES, deep=MORE))
def test_training_gives_the_numbers_of_one_device(case: Case):
    assert _prove(case).gathered == ()


def _in_float32(case: Case) -> set[str]:
    """The loss and gradients of one pass beside those of one device; the ops that were gathered."""
    torch.manual_seed(0)
    alone = case.make_model()
    sharded = sl.shard_model(copy.deepcopy(alone), case.mesh, compile=case.compile)
    batch = case.make_batch(0)
    with ops.record() as gathered:
        got = case.loss(sharded, batch)
        got.backward()
    want = case.loss(alone, batch)
    want.backward()
    # Rounding is 6e-8 of a result, and some ten layers of sums of a hundred terms reorder. A bug is of order one.
    torch.testing.assert_close(got, want, rtol=1e-4, atol=0)
    expected = gradients(alone)
    for name, grad in gradients(sharded).items():
        assert (grad - expected[name]).abs().max() <= 1e-4 * expected[name].abs().max(), name
    return {each.op for each in gathered}


@pytest.mark.parametrize("compile", [None, pytest.param("auto", marks=[pytest.mark.compiled, pytest.mark.deep])])
def test_grouped_products_are_taken_on_slices(ranks, compile: str | None):
    """The kernel that transformers chooses by itself; it refuses float64. Its rows are multiples of 16 bytes."""
    case = Case(TP2, "grouped_mm", compile=compile, settings={"intermediate_size": 32})
    assert ranks(2).run(_in_float32, case) == [set(), set()]


def _routes(case: Case) -> None:
    torch.manual_seed(0)
    alone = case.make_model().double()
    sharded = sl.shard_model(copy.deepcopy(alone), case.mesh)
    chosen: dict[nn.Module, list[torch.Tensor]] = {alone: [], sharded: []}
    for model, seen in chosen.items():
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(lambda _module, _args, out, seen=seen: seen.append(out[2]))
        model(**case.make_batch(0)[1])
    assert all(torch.equal(a, b) for a, b in zip(chosen[alone], chosen[sharded], strict=True))
    assert all(len(experts.unique()) > 2 for experts in chosen[alone])


def test_tokens_go_to_the_experts_that_one_device_chooses(ranks):
    ranks(4).run(_routes, Case(TP4))


# --- communication -------------------------------------------------------------------------------------------------


def _collectives(case: Case) -> list[Any]:
    """Kind, bytes and phase of each in a step after the first."""
    model = sl.shard_model(case.make_model(), case.mesh, compile=case.compile)
    batch = case.make_batch(0)[1]
    model(**batch).logits.square().mean().backward()
    with record_collectives(model) as log:
        model(**batch).logits.square().mean().backward()
    return [(each.kind, each.bytes, each.phase) for each in log.collectives]


def test_experts_are_summed_once_a_layer(ranks):
    """A layer costs Megatron's four all-reduces, and one of the gradients of the weights that the router gave.

    Beside the layers: the embedding's sum, the head's input gradient, the logits made whole.
    """
    layers, activation, weights = 2, ROWS * SEQ * 16 * 4, ROWS * SEQ * 2 * 4
    logits = ROWS * SEQ * -(-MIXTURE["vocab_size"] // 2) * 4
    for counted in ranks(2).run(_collectives, Case(TP2, "batched_mm")):
        assert Counter(counted) == {
            ("all_reduce", activation, "forward"): 2 * layers + 1,
            ("all_gather", logits, "forward"): 1,
            ("all_reduce", activation, "backward"): 2 * layers + 1,
            ("all_reduce", weights, "backward"): layers,
        }


def test_a_loop_over_experts_is_summed_expert_by_expert(ranks):
    """It adds each expert's output to a whole tensor in place; all of them together are two outputs for each token."""
    layers, activation = 1, ROWS * SEQ * 16 * 4
    for counted in ranks(2).run(_collectives, Case(TP2, "eager", settings=_ONE_LAYER)):
        forward = sum(size for kind, size, phase in counted if (kind, phase) == ("all_reduce", "forward"))
        assert forward == (layers * (1 + 2) + 1) * activation
        assert Counter(phase for kind, _, phase in counted if kind == "all_reduce")["backward"] == 3 * layers + 1


# --- checkpoints, the layout file ----------------------------------------------------------------------------------


def _save_and_load(case: Case) -> None:
    torch.manual_seed(0)
    alone = case.make_model().double()
    plain = alone.state_dict()
    sharded = sl.shard_model(copy.deepcopy(alone), case.mesh)
    assert all(torch.equal(t, plain[name]) for name, t in sl.full_state_dict(sharded).items())
    other = sl.shard_model(case.make_model().double(), case.mesh)
    assert other.load_state_dict(plain).missing_keys == []
    assert all(torch.equal(t, plain[name]) for name, t in sl.full_state_dict(other).items())
    want, got = (model(**case.make_batch(1)[1]).logits for model in (alone, other))
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)


def test_state_dicts_of_one_device_and_of_a_mesh_are_the_same(ranks):
    ranks(2).run(_save_and_load, Case(TP2))


def test_each_class_that_the_file_is_for_finds_it_and_fits_it():
    file = sl.layouts.load("mixtral")
    for entry in file.models:
        cls = getattr(transformers, entry.rpartition(".")[2])
        with torch.device("meta"):
            made = cls(cls.config_class(**SETTINGS))
        assert sl.layouts.for_model(made) == file, entry
        found = {name.removeprefix("model."): str(t.layout) for name, t in file.resolve(made, "tp=4").tensors.items()}
        assert found["layers.0.mlp.experts.gate_up_proj"] == "expert (gate_up ff@tp) embed", entry
        assert found["layers.0.mlp.experts.down_proj"] == "expert embed ff@tp", entry
        assert found["layers.0.self_attn.k_proj.weight"] == "(kv_heads head) in", entry

"""Mixtral on a mesh: every rank has its slice of every expert, and tokens go where they go on one device."""

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
from tests.engine.same_numbers import TOLERANCE, assert_same_numbers, differences, whole
from tests.families.transformer_models import MIXTURE, transformers

_ROWS, _SEQ = 4, 6
# Fewer key heads than four ranks.
_SETTINGS = {**MIXTURE, "num_local_experts": 5, "router_aux_loss_coef": 0.5}
# Gradients that are zero in exact arithmetic are noise, which AdamW divides by itself plus eps.
_ADAMW = functools.partial(torch.optim.AdamW, eps=1e-5)


@dataclass(frozen=True)
class Case:
    """`experts` is transformers' way of computing them: a loop over those that are hit, or one batched product."""

    mesh: str
    experts: str = "eager"
    balanced: bool = False  # the loss includes the router's, which makes experts equally popular
    compile: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = (self.mesh, self.experts, "balanced" if self.balanced else "", self.compile)
        return " ".join(str(part) for part in (*parts, *self.settings) if part)

    @property
    def world_size(self) -> int:
        return sl.MeshShape(self.mesh).world_size

    def make_model(self) -> nn.Module:
        cls = transformers.MixtralForCausalLM
        config = cls.config_class(**{**_SETTINGS, **self.settings})
        model = cls._from_config(config, experts_implementation=self.experts).train()
        with torch.no_grad():  # far enough from where weights start that nothing is lost in the noise
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        return model

    def make_batch(self, step: int) -> Any:
        draw = torch.Generator().manual_seed(step)
        ids = torch.randint(3, MIXTURE["vocab_size"], (_ROWS, _SEQ), generator=draw)
        return (), {"input_ids": ids, "output_router_logits": self.balanced}

    def loss(self, output: Any) -> torch.Tensor:
        loss = output.logits.sin().mean() + output.logits.square().mean()
        return loss + 0.5 * output.aux_loss if self.balanced else loss


TP2, TP4, BOTH = "tp=2", "tp=4", "dp=2,tp=2"
CASES = [
    pytest.param(Case(TP2), marks=pytest.mark.deep),
    Case(TP2, balanced=True),
    pytest.param(Case(TP4, balanced=True), marks=pytest.mark.deep),
    Case(TP4, "batched_mm"),
    Case(BOTH),
    Case(BOTH, "batched_mm", settings={"num_key_value_heads": 4}),
    Case(TP2, "batched_mm", compile="auto"),
]


def _train(case: Case) -> list[Any]:
    with ops.record() as gathered:
        assert_same_numbers(
            case.make_model, case.make_batch, case.loss, case.mesh, None, compile=case.compile, optimizer=_ADAMW
        )
    return gathered


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_gives_the_numbers_of_one_device(ranks, case: Case):
    for gathered in ranks(case.world_size).run(_train, case):
        assert gathered == []


def _train_in_float32(case: Case) -> list[Any]:
    with ops.record() as gathered:
        found = differences(
            case.make_model, case.make_batch, case.loss, case.mesh, None,
            compile=case.compile, optimizer=torch.optim.SGD, dtype=torch.float32,
        )  # fmt: skip
    # Rounding is 6e-8 of a result, and some ten layers of sums of a hundred terms reorder. A bug is of order one.
    assert max(found.values()) <= 1e-4, {k: v for k, v in found.items() if v > 1e-4}
    return gathered


@pytest.mark.parametrize("compile", [None, "auto"])
def test_grouped_products_are_taken_on_slices(ranks, compile: str | None):
    """The kernel that transformers chooses by itself; it refuses float64. Its rows are multiples of 16 bytes."""
    case = Case(TP2, "grouped_mm", compile=compile, settings={"intermediate_size": 32})
    for gathered in ranks(2).run(_train_in_float32, case):
        assert gathered == []


def _routes(case: Case) -> None:
    torch.manual_seed(0)
    alone = case.make_model().double()
    sharded = sl.shard_model(copy.deepcopy(alone), case.mesh, compile=None)
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
    case.loss(model(**batch)).backward()
    with record_collectives(model) as log:
        case.loss(model(**batch)).backward()
    return [(each.kind, each.bytes, each.phase) for each in log.collectives]


def test_experts_are_summed_once_a_layer(ranks):
    """A layer costs Megatron's four all-reduces, and one of the gradients of the weights that the router gave.

    Beside the layers: the embedding's sum, the head's input gradient, the logits made whole.
    """
    layers, activation, weights = 2, _ROWS * _SEQ * 16 * 4, _ROWS * _SEQ * 2 * 4
    logits = _ROWS * _SEQ * -(-MIXTURE["vocab_size"] // 2) * 4
    for counted in ranks(2).run(_collectives, Case(TP2, "batched_mm")):
        assert Counter(counted) == {
            ("all_reduce", activation, "forward"): 2 * layers + 1,
            ("all_gather", logits, "forward"): 1,
            ("all_reduce", activation, "backward"): 2 * layers + 1,
            ("all_reduce", weights, "backward"): layers,
        }


def test_a_loop_over_experts_is_summed_expert_by_expert(ranks):
    """It adds each expert's output to a whole tensor in place; all of them together are two outputs for each token."""
    layers, activation = 2, _ROWS * _SEQ * 16 * 4
    for counted in ranks(2).run(_collectives, Case(TP2, "eager")):
        forward = sum(size for kind, size, phase in counted if (kind, phase) == ("all_reduce", "forward"))
        assert forward == (layers * (1 + 2) + 1) * activation
        assert Counter(phase for kind, _, phase in counted if kind == "all_reduce")["backward"] == 3 * layers + 1


# --- checkpoints, the layout file ----------------------------------------------------------------------------------


def _save_and_load(case: Case) -> None:
    torch.manual_seed(0)
    alone = case.make_model().double()
    plain = alone.state_dict()
    sharded = sl.shard_model(copy.deepcopy(alone), case.mesh, compile=None)
    assert all(torch.equal(t, plain[name]) for name, t in sl.full_state_dict(sharded).items())
    other = sl.shard_model(case.make_model().double(), case.mesh, compile=None)
    assert other.load_state_dict(plain).missing_keys == []
    assert all(torch.equal(whole(t), plain[name]) for name, t in other.state_dict().items())
    want, got = (model(**case.make_batch(1)[1]).logits for model in (alone, other))
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)


def test_state_dicts_of_one_device_and_of_a_mesh_are_the_same(ranks):
    ranks(2).run(_save_and_load, Case(TP2))


_FILE = sl.layouts.load("mixtral")


@pytest.mark.parametrize("model", [entry.rpartition(".")[2] for entry in _FILE.models])
def test_each_class_that_the_file_is_for_finds_it_and_fits_it(model: str):
    cls = getattr(transformers, model)
    with torch.device("meta"):
        made = cls(cls.config_class(**_SETTINGS))
    assert sl.layouts.for_model(made) == _FILE
    layouts = {name.removeprefix("model."): str(t.layout) for name, t in _FILE.resolve(made, "tp=4").tensors.items()}
    assert layouts["layers.0.mlp.experts.gate_up_proj"] == "expert (gate_up ff@tp) embed"
    assert layouts["layers.0.mlp.experts.down_proj"] == "expert embed ff@tp"
    assert layouts["layers.0.self_attn.k_proj.weight"] == "(kv_heads head) in"

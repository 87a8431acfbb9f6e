"""Models that people use, proved as their users would: no rules, their own loss, dropout on; and mistakes in them.

The sharded run finds the layout file by the model's class. Attention, embeddings and experts come from transformers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from shardlib.testing.equivalence import Report, assert_equivalent, equivalent
from shardlib.testing.mutants._mutant import after_sharding
from tests.families.mixtral import Case as Mixtral
from tests.families.transformer_models import build, images, text

GPT2_DROPOUT = {"attn_pdrop": 0.2, "embd_pdrop": 0.2, "resid_pdrop": 0.2}
VIT_DROPOUT = {"attention_probs_dropout_prob": 0.2, "hidden_dropout_prob": 0.2}


def _routed(step: int) -> Any:
    _, batch = Mixtral("tp=2").make_batch(step)
    return (), {**batch, "labels": batch["input_ids"]}


@dataclass(frozen=True)
class Real:
    """A model, what it is given, and a module of it that a mistake is planted in."""

    name: str
    mesh: str
    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    spoilt: str

    def __str__(self) -> str:
        return f"{self.name} {self.mesh}"

    def arguments(self, steps: int = 2) -> dict[str, Any]:
        return {"model": self.model, "batch": self.batch, "mesh": self.mesh, "steps": steps}


_PADDED = functools.partial(text, labels="tokens", padding="right")
CASES = [
    Real(
        "GPT-2", "dp=2,tp=2", functools.partial(build, "GPT2LMHeadModel", "eager", **GPT2_DROPOUT), _PADDED,
        "transformer.h.1.mlp.c_fc",
    ),
    Real(
        "Llama", "tp=2", functools.partial(build, "LlamaForCausalLM", "sdpa", attention_dropout=0.2), _PADDED,
        "model.layers.0.self_attn.v_proj",
    ),
    Real(
        "ViT", "dp=2,tp=2", functools.partial(build, "ViTForImageClassification", "sdpa", **VIT_DROPOUT),
        functools.partial(images, labels="class"), "vit.layers.1.mlp.fc1",
    ),
    Real("Mixtral", "dp=2", Mixtral("dp=2").make_model, _routed, "model.layers.1.post_attention_layernorm"),
]  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(CASES[0], marks=pytest.mark.deep), *CASES[1:]], ids=str)
def test_a_real_model_is_equivalent_without_a_rule(case: Real):
    report = assert_equivalent(**case.arguments())
    assert {"output", "loss", "gradient", "norm", "state", "parameter"} <= set(report.worst())


# --- mistakes -------------------------------------------------------------------------------------------------------


def _spoil_output(name: str, model: nn.Module) -> None:
    model.get_submodule(name).register_forward_hook(lambda _module, _args, output: output * 1.001)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * 1.001


def _spoil_gradient(name: str, model: nn.Module) -> None:
    model.get_submodule(name).register_forward_pre_hook(lambda _module, args: (_Scaled.apply(args[0]), *args[1:]))


def _spoil_weight(name: str, model: nn.Module) -> None:
    model.get_parameter(f"{name}.weight").register_hook(lambda grad: grad * 1.001)


def _spoilt(plant: Callable[[], AbstractContextManager[Any]], arguments: dict[str, Any]) -> Report:
    with plant():
        return equivalent(**arguments)


@pytest.mark.covering
@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (_spoil_output, "the output of {}"),
        (_spoil_gradient, "the gradient that {} passes on to its input"),
        (_spoil_weight, "the gradient of {}.weight"),
    ],
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_mistake_in_a_real_model_is_named(ranks, case: Real, spoil: Callable[[str, nn.Module], None], what: str):
    world = 4 if case.mesh == "dp=2,tp=2" else 2
    plant = after_sharding(functools.partial(spoil, case.spoilt))
    report = ranks(world).run(_spoilt, plant, case.arguments(steps=1))[0]
    assert not report and report.origin is not None
    assert report.origin.module == case.spoilt
    assert report.origin.what.partition(" (")[0] == what.format(case.spoilt)

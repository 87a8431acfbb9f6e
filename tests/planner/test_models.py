"""The models of the published measurements: their sizes, what they keep for the backward pass, and their rules."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardlib as sl
from shardlib.testing import assert_equivalent
from tests.planner import models
from tests.planner.models import MEGATRON_RULES, MegatronGPT, megatron_gpt, parameters
from tests.planner.publications import FILES, build, load

HIDDEN, HEADS, SEQ, VOCAB, ROWS = 16, 4, 8, 24, 4


def _tiny(*, layers: int = 1, dtype: torch.dtype = torch.float64, device: str = "cpu", **options: Any) -> MegatronGPT:
    return megatron_gpt(HIDDEN, HEADS, layers, SEQ, VOCAB, dtype=dtype, device=device, **options)


def _batch(step: int) -> dict[str, Tensor]:
    return models.batch(ROWS, SEQ, VOCAB, step=step, device="cpu")


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("mode", [None, "sequence"])
def test_the_rules_of_megatron_give_the_numbers_of_one_device(mode: str | None, dropout: float):
    rules = sl.layouts.load(MEGATRON_RULES, mode)
    report = assert_equivalent(functools.partial(_tiny, dropout=dropout), _batch, "tp=2", rules, loss=_loss)
    assert report.gathered == ()


def test_an_untied_output_layer_follows_its_own_rule():
    rules = sl.layouts.load(MEGATRON_RULES)
    assert_equivalent(functools.partial(_tiny, dropout=0.0, tied=False), _batch, "tp=2", rules, loss=_loss)


def _published() -> list[Any]:
    return [pytest.param(model, id=f"{file} {model['name']}") for file in FILES for model in load(file)["models"]]


def _rounded(parameters: int, as_published: str) -> str:
    unit = as_published[-1]
    digits = len(as_published.partition(".")[2]) - 1 if "." in as_published else 0
    return f"{parameters / {'B': 1e9, 'T': 1e12}[unit]:.{digits}f}{unit}"


@pytest.mark.parametrize("model", _published())
def test_models_have_as_many_parameters_as_published(model: dict[str, Any]):
    count = parameters(build(model))
    if "parameter_count" in model:
        assert count == model["parameter_count"]
    else:
        published = model.get("derived_parameters", model["parameters"])
        assert _rounded(count, published) == published


def _kept_bytes(model: nn.Module, batch: dict[str, Tensor]) -> int:
    """Bytes of all tensors that autograd keeps for the backward pass, parameters and inputs aside."""
    ours = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *batch.values())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(**batch)
    sizes = {at: tensor.untyped_storage().nbytes() for at, tensor in kept.items() if at not in ours}
    del loss
    return sum(sizes.values())


def test_a_layer_keeps_the_bytes_that_the_paper_counts():
    # Equation 1 of arXiv 2205.05198 leaves out small buffers: mean and deviation of two layer norms, and causal masks.
    one, two = (_kept_bytes(_tiny(layers=layers, dtype=torch.bfloat16), _batch(0)) for layers in (1, 2))
    s, b, h, a = SEQ, ROWS, HIDDEN, HEADS
    equation = load("megatron_2205_05198")["formulas"]["per_layer"]["no_parallelism"]
    counted = eval(equation, {"s": s, "b": b, "h": h, "a": a})
    statistics, mask = 2 * 2 * s * b * 2, s * s
    assert two - one == counted + statistics + mask

"""The models of the published measurements: their sizes, what they keep for the backward pass, and their rules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardlib as sl
from shardlib._plan import DryRun
from shardlib.testing import assert_equivalent
from tests.planner import models
from tests.planner.models import MEGATRON_RULES, MegatronGPT, megatron_gpt, parameters
from tests.planner.publications import FILES, build, evaluate, load, symbols
from tests.planner.publications import models as published_models

_PER_LAYER = load("megatron_2205_05198")["formulas"]["per_layer"]
_LARGE = published_models("megatron_2205_05198")["22B"]
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
    counted = evaluate(_PER_LAYER["no_parallelism"], {"s": s, "b": b, "h": h, "a": a})
    statistics, mask = 2 * 2 * s * b * 2, s * s
    assert two - one == counted + statistics + mask


@functools.cache
def _dry_run(mode: str | None, layers: int) -> DryRun:
    """One step of the 22B model's first layers, tp=8, microbatch 4."""
    model = megatron_gpt(_LARGE["hidden"], _LARGE["heads"], layers)
    example = models.batch(4, _LARGE["seq"], _LARGE["vocab"])
    report = sl.plan(model, "tp=8", sl.layouts.load(MEGATRON_RULES, mode), example=example).report
    assert report is not None and report.gathered == ()
    return report


def _of_a_layer(mode: str | None, of: Callable[[DryRun], int]) -> int:
    return of(_dry_run(mode, 2)) - of(_dry_run(mode, 1))


@pytest.mark.parametrize("mode", [None, "sequence"])
def test_a_layer_over_tp_keeps_the_bytes_that_the_paper_counts(mode: str | None):
    s, b, h, t = _LARGE["seq"], 4, _LARGE["hidden"], 8
    key = "tensor_and_sequence_parallel" if mode else "tensor_parallel"
    counted = round(evaluate(_PER_LAYER[key], symbols(_LARGE, b=b, t=t)))
    statistics, mask = 2 * 2 * s * b * 2 // (t if mode else 1), s * s
    # Megatron keeps the outputs of both layer norms sharded, and gathers them again in backward (section 4.2.2). The
    # engine keeps them as they were gathered.
    gathered = 2 * (2 * s * b * h) * (t - 1) // t if mode else 0
    assert _of_a_layer(mode, lambda run: run.activation_bytes) == counted + statistics + mask + gathered


@pytest.mark.parametrize(
    "mode, sent", [(None, {"all_reduce": 2}), ("sequence", {"all_gather": 2, "reduce_scatter": 2})]
)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_layer_over_tp_sends_what_the_paper_says(mode: str | None, sent: dict[str, int], phase: Any):
    kinds = ("all_reduce", "all_gather", "reduce_scatter")
    counts = {kind: _of_a_layer(mode, functools.partial(DryRun.count, kind=kind, phase=phase)) for kind in kinds}
    assert counts == {"all_reduce": 0, "all_gather": 0, "reduce_scatter": 0, **sent}


@pytest.mark.parametrize("mode", [None, "sequence"])
def test_logits_are_not_gathered(mode: str | None):
    logits = 4 * _LARGE["seq"] * _LARGE["vocab"] // 8 * 2
    assert logits not in {sent.bytes for sent in _dry_run(mode, 1).collectives}

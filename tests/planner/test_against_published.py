"""The planner's predictions against published tables. `benchmarks/planner_published.py` prints them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import shardlib as sl
from tests.planner.comparisons import (
    Compared,
    gather_rates,
    layer_memory,
    layer_times,
    stage_memory,
    step_times,
    stored_memory,
    throughput,
    titan_runs,
    tokens,
)
from tests.planner.models import llama
from tests.planner.publications import runs

A100 = sl.Cluster.preset("a100-80")
MODELS = ("22B", "175B", "530B", "1T")
SOME = [pytest.param(name, marks=[pytest.mark.deep] * (name in ("175B", "530B"))) for name in MODELS]


@pytest.mark.parametrize("name", [MODELS[0], *(pytest.param(name, marks=pytest.mark.deep) for name in MODELS[1:])])
def test_activations_of_a_layer_are_those_of_megatron(name: str):
    for row in layer_memory([name]):
        assert row.predicted == round(row.published + row.derived), row.what


@pytest.mark.parametrize("name", SOME)
def test_parameters_gradients_and_state_of_a_stage_are_18_bytes_a_parameter(name: str):
    (row,) = stored_memory([name])
    assert row.predicted == row.published + row.derived


@pytest.mark.parametrize("name", SOME)
def test_activations_of_the_first_stage_are_those_of_megatron(name: str):
    for row in stage_memory([name], A100):
        assert abs(row.unexplained) < 0.05, row


# --- times on A100 ----------------------------------------------------------------------------------------------------


def test_the_rate_of_products_is_calibrated_on_the_times_of_a_layer():
    rows = [*layer_times(A100)]
    mean = sum(math.log(row.predicted / row.published) for row in rows) / len(rows)
    assert abs(mean) < 0.01
    assert max(abs(row.error) for row in rows) < 0.15


@pytest.mark.parametrize("name", ["22B", "175B", pytest.param("530B", marks=pytest.mark.deep), "1T"])
def test_steps_take_as_long_as_those_of_megatron(name: str):
    for row in step_times(A100, model=name):
        assert abs(row.error) < 0.15, row


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(run, id=run["model"], marks=[pytest.mark.deep] * (run["model"] not in ("1.7B", "39.1B", "310.1B")))
        for run in runs("megatron_2104_04473", where="table 1")
    ],
)
def test_throughput_of_weak_scaling_is_that_of_megatron(run: dict[str, Any]):
    (row,) = throughput(A100, where="table 1", model=run["model"])
    # The two models with one or two tensor parallel ranks miss by 15% to 18%. Why is not known.
    assert abs(row.error) < (0.15 if "tp=8" in run["mesh"] or "tp=4" in run["mesh"] else 0.2), row


def _of_scheme(model: str, scheme: str) -> list[Compared]:
    return [*throughput(A100, where="table 2", model=model, scheme=scheme)]


@pytest.mark.parametrize("model", ["174.6B", pytest.param("529.6B", marks=pytest.mark.deep)])
def test_the_gap_between_zero_3_and_pipelines_grows_with_gpus(model: str):
    zero3, staged = _of_scheme(model, "zero3"), _of_scheme(model, "PTD-P")
    ratios = [b.predicted / a.predicted for a, b in zip(zero3, staged, strict=True)]
    published = [b.published / a.published for a, b in zip(zero3, staged, strict=True)]
    assert ratios == sorted(ratios) and published == sorted(published)
    assert ratios[-1] > 1 and published[-1] > 1
    assert all(abs(row.error) < 0.15 for row in staged)


def test_zero_3_of_the_table_sent_at_a_rate_far_below_that_of_its_network():
    # With one or two rows a microbatch, halving the work did not change the time of a step: sending bounds it. All of
    # these rows give one rate, of less than a tenth of what rings over eight adapters reach.
    rates = [rate for _, rows, rate in gather_rates() if rows <= 2]
    network = 8 * A100.links[1].bandwidth.sustained
    assert max(rates) < 1.3 * min(rates) and max(rates) < 0.1 * network


# --- Llama 3 ----------------------------------------------------------------------------------------------------------


def _of_titan() -> list[Any]:
    """Return all runs; those of the paper, and those that differ from others by their ranks alone, are deep."""
    known = set[tuple[Any, ...]]()
    params = []
    for run in titan_runs():
        kind = run["model"], run["gpu"], run["recompute"], run.get("compile")
        again = run["where"].startswith("arXiv") or kind in known
        known.add(kind)
        name = f"{run['model']} {run['mesh']} {run['recompute']}"
        params.append(pytest.param(run, id=name, marks=[pytest.mark.deep] * again))
    return params


@pytest.mark.parametrize("run", _of_titan())
def test_tokens_are_those_of_torchtitan(run: dict[str, Any]):
    ((rate, memory),) = tokens([run])
    # Whether rows of docs/performance.md were compiled is not stated; they are priced without it. 405B misses by 16.5%,
    # and by 13.7% if it was compiled.
    assert abs(rate.error) < (0.15 if run["model"] != "405B" else 0.2), rate
    assert memory is None or abs(memory.error) < 0.15, memory


def _search(run: dict[str, Any], **options: Any) -> sl.planner.BestPlans:
    """Search plans for a published run of Llama 3 405B on H100."""
    batch = dict(sl.MeshShape(run["mesh"]).items())["dp"] * run["rows_per_dp"]
    model = llama("405B", seq=run["seq"], dtype=torch.float32)
    return sl.best_plans(
        model, "h100", world=run["gpus"], batch=batch, seq=run["seq"], compiled=True, **options
    )  # fmt: skip


def _named(mesh: sl.MeshShape) -> dict[str, int]:
    return {axis: size for axis, size in mesh.items() if size > 1}


SHORT = [run for run in runs("llama3_405b") if run["seq"] == 8192]


@pytest.mark.deep
def test_the_published_mesh_of_405b_fits():
    (best, *_) = _search(SHORT[1], axes="tp=8,pp=16")
    assert _named(best.mesh) == _named(sl.MeshShape(SHORT[1]["mesh"]))


@pytest.mark.deep
@pytest.mark.parametrize("run", SHORT, ids=lambda run: str(run["gpus"]))
def test_the_published_mesh_of_405b_is_among_the_best_five_of_all(run: dict[str, Any]):
    found = _search(run)
    assert _named(sl.MeshShape(run["mesh"])) in [_named(each.mesh) for each in found]


@pytest.mark.deep
def test_the_published_mesh_of_405b_with_long_rows_is_the_best():
    (run,) = runs("llama3_405b", seq=131072)
    # The model returns its logits, so that the engine gathers those of a row on the last stage and makes them float32:
    # 63 GiB. What is left free is less than a tenth of the memory, the margin by default.
    logits = 131072 * 128256 * 4
    (best, *_) = _search(run, axes="tp=8,pp=16", margin=0.05)
    assert _named(best.mesh) == _named(sl.MeshShape(run["mesh"]))
    assert logits < best.time.memory.activations < 1.1 * logits

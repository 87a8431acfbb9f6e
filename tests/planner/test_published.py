"""The published numbers agree with each other, as far as they were published to agree: a typing error would not.

A published number stands for all that round to it, so a bound is the arithmetic at both ends of the rounded inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import shardlib as sl
from tests.planner.publications import FILES, evaluate, load, models, runs, symbols

M2022, M2021, OTHERS, TITAN, LLAMA3 = (
    "megatron_2205_05198",
    "megatron_2104_04473",
    "others",
    "torchtitan",
    "llama3_405b",
)
TERA = 1e12


def _ends(value: float, unit: float) -> tuple[float, float]:
    """Return the least and the greatest number that rounds to a published one; `unit` is that of its last digit."""
    return value - unit / 2, value + unit / 2


def _agrees(published: float, unit: float, of: Callable[[float], float], given: tuple[float, float]) -> bool:
    """Return whether a function of a rounded number can have a published value, rounded as well."""
    least, most = sorted(of(end) for end in given)
    low, high = _ends(published, unit)
    return least <= high * (1 + 1e-12) and low <= most * (1 + 1e-12)


@pytest.mark.parametrize("file", FILES)
def test_every_run_has_a_place_a_model_and_a_mesh_of_its_gpus(file: str):
    known = models(file)
    for run in runs(file):
        assert run["where"] and run["model"] in known
        shape = sl.MeshShape(run["mesh"])
        assert shape.world_size == run["gpus"]
        rows, replicas = run.get("global_batch"), dict(shape.items()).get("dp", 1)
        if rows is not None:
            assert rows % (replicas * run.get("microbatch", 1)) == 0
        stages = dict(shape.items()).get("pp", 1) * run.get("interleaving", 1)
        if "ffn" not in known[run["model"]]:
            assert known[run["model"]]["layers"] % stages == 0


def _flops(file: str, formula: str, run: dict[str, Any]) -> float:
    return evaluate(formula, symbols(models(file)[run["model"]], B=run["global_batch"]))


@pytest.mark.parametrize("run", [run for run in runs(M2022) if "model_flops_utilization_percent" in run])
def test_utilization_of_table_5_is_flops_over_time(run: dict[str, Any]):
    peak, formulas = run["gpus"] * load(M2022)["hardware"]["peak_tflops"] * TERA, load(M2022)["formulas"]["flops"]
    given = _ends(run["iteration_seconds"], 0.01)
    for key, formula in (("model", formulas["model"]), ("hardware", formulas["hardware_selective"])):
        percent = 100 * _flops(M2022, formula, run) / peak
        published = run.get(f"{key}_flops_utilization_percent")
        assert published is None or _agrees(published, 0.1, percent.__truediv__, given)


def test_gains_of_table_5_are_ratios_of_its_times():
    for full in runs(M2022, recompute="full"):
        (present,) = runs(M2022, recompute="selective", model=full["model"], where="table 5")
        slow, fast = _ends(full["iteration_seconds"], 0.01), _ends(present["iteration_seconds"], 0.01)
        gain = present["throughput_increase_percent"]
        assert 100 * (slow[0] / fast[1] - 1) <= gain + 0.05 and gain - 0.05 <= 100 * (slow[1] / fast[0] - 1)


def test_layer_times_of_table_4_add_up():
    baseline, *others = load(M2022)["layer_times"]
    for row in (baseline, *others):
        # Three roundings to 0.1 ms.
        assert row["combined_ms"] == pytest.approx(row["forward_ms"] + row["backward_ms"], abs=0.15)
    for row in others:
        overhead = 100 * (row["combined_ms"] / baseline["combined_ms"] - 1)
        assert overhead == pytest.approx(row["overhead_percent"], abs=0.5 + 100 * 0.1 / baseline["combined_ms"])


def test_bars_of_figure_7_are_those_of_the_formulas():
    layer = load(M2022)["formulas"]["per_layer"]
    for row in load(M2022)["activation_percent"]:
        values = symbols(models(M2022)[row["model"]], b=1, t=8)
        whole = evaluate(layer["tensor_parallel"], values)
        for technique, bar in row["bars"].items():
            # A bar was read from a picture: a pixel of its height is some 0.1.
            assert 100 * evaluate(layer[technique], values) / whole == pytest.approx(bar, abs=0.2)


def test_derived_memory_of_figure_1_is_that_of_the_formulas():
    formulas = load(M2022)["formulas"]
    for row in load(M2022)["memory"]:
        run = runs(M2022, model=row["model"], recompute="full")[0]
        stages, interleaving = dict(sl.MeshShape(run["mesh"]).items())["pp"], run["interleaving"]
        values = symbols(models(M2022)[row["model"]], b=run["microbatch"], t=8, p=stages, m=interleaving)
        more = evaluate(formulas["first_stage"]["interleaving_factor"], values) if interleaving > 1 else 1.0
        for technique, gib in row["derived_activations_gib"].items():
            assert evaluate(formulas["per_layer"][technique], values) * values["L"] * more / 2**30 == gib
        assert 18 * 12 * values["h"] ** 2 * values["L"] / (8 * stages) / 2**30 == row["derived_state_gib"]
        assert row["derived_state_gib"] + row["derived_activations_gib"]["tensor_parallel"] > 80 * 1e9 / 2**30


def test_the_saving_of_appendix_b_is_in_gib():
    formula = load(M2022)["formulas"]["first_stage"]["output_tensor_deallocation"]
    assert evaluate(formula, symbols(models(M2022)["530B"], b=1, p=35)) / 2**30 == pytest.approx(2.73, abs=0.005)


@pytest.mark.parametrize("run", runs(M2021, where="table 1"))
def test_columns_of_table_1_agree(run: dict[str, Any]):
    given = _ends(run["tflops_per_gpu"], 1)
    assert _agrees(run["percent_of_peak"], 1, lambda tflops: 100 * tflops / 312, given)
    assert _agrees(run["aggregate_pflops"], 0.1, lambda tflops: tflops * run["gpus"] / 1000, given)


@pytest.mark.parametrize("run", runs(M2021, where="table 2"))
def test_days_of_table_2_follow_from_its_rates(run: dict[str, Any]):
    tokens = run["global_batch"] * models(M2021)[run["model"]]["seq"]
    flops = _flops(M2021, load(M2021)["formulas"]["flops"], run) * 300e9 / tokens

    def days(tflops: float) -> float:
        return flops / (tflops * TERA * run["gpus"]) / 86400

    # Some days are rounded and some cut off.
    assert any(
        _agrees(run["days_for_300B_tokens"] + cut, 1, days, _ends(run["tflops_per_gpu"], 1)) for cut in (0.0, 0.5)
    )


@pytest.mark.parametrize("run", runs(OTHERS, publication="megatron_core"))
def test_columns_of_megatron_core_agree(run: dict[str, Any]):
    given = _ends(run["tflops_per_gpu"], 0.1)
    assert _agrees(run["model_flops_utilization_percent"], 1, lambda tflops: 100 * tflops / 989, given)
    assert _agrees(run["aggregate_pflops"], 0.1, lambda tflops: tflops * run["gpus"] / 1000, given)


@pytest.mark.parametrize("run", runs(OTHERS, publication="megascale"))
def test_columns_of_megascale_agree(run: dict[str, Any]):
    tokens = run["global_batch"] * models(OTHERS)[run["model"]]["seq"]
    unit = 0.01 if run["global_batch"] == 6144 else 0.1  # digits of the times
    time, rate = run["iteration_seconds"], run["throughput_tokens_per_second"]
    # Some times are rounded and some cut off: 8.57 s is published of 8.578.
    assert _agrees(rate, 100, lambda time: tokens / time, (time - unit / 2, time + unit))
    assert _agrees(run["days_for_300B_tokens"], 0.01, lambda rate: 300e9 / rate / 86400, _ends(rate, 100))


@pytest.mark.parametrize("run", runs(OTHERS, publication="mt_nlg"))
def test_rates_of_mt_nlg_are_flops_over_time(run: dict[str, Any]):
    flops = _flops(OTHERS, load(M2021)["formulas"]["flops"], run)
    given = _ends(run["iteration_seconds"], 0.1)
    assert _agrees(run["tflops_per_gpu"], 1, lambda time: flops / time / run["gpus"] / TERA, given)


@pytest.mark.parametrize("run", [run for run in runs(TITAN) if "model_flops_utilization_percent" in run])
def test_utilization_of_torchtitan_is_flops_over_time(run: dict[str, Any]):
    model = models(TITAN)[run["model"]]
    counted = model["parameter_count"] - (model["vocab"] * model["hidden"] if run["model"] == "405B" else 0)
    flops = 6 * counted + 12 * model["layers"] * model["hidden"] * run["seq"]
    peak = 312 if run["gpu"].startswith("A100") else 1979 if run["float8"] else 989
    unit = 0.1 if run["model_flops_utilization_percent"] * 10 % 1 < 1e-6 else 0.01
    given = _ends(run["tokens_per_second_per_gpu"], 1)
    published = run["model_flops_utilization_percent"]
    assert _agrees(published, unit, lambda tokens: 100 * tokens * flops / (peak * TERA), given)


@pytest.mark.parametrize("run", runs(LLAMA3))
def test_columns_of_llama_3_agree(run: dict[str, Any]):
    replicas = dict(sl.MeshShape(run["mesh"]).items())["dp"]
    assert replicas * run["rows_per_dp"] * run["seq"] == 2**24
    peak = load(LLAMA3)["hardware"]["peak_tflops"]
    given = _ends(run["tflops_per_gpu"], 10)
    assert _agrees(run["model_flops_utilization_percent"], 1, lambda tflops: 100 * tflops / peak, given)

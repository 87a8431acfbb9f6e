"""`shardlib calibrate`: what it writes, and that fits of times find the figures that made them. No time decides."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlib._plan import KINDS, Cluster, Rate, ring_bytes, ring_steps
from shardlib.cli import main
from shardlib.cli.measure import Effort, Timing, fit, link_of, measure_job
from tests.house.source import ROOT
from tests.scripts import run_shell

SIZES = [4**power for power in range(5, 13)]
TINY = Effort((16,), 8, 2**16, (1024, 4096), 1, 0.001)
latencies, bandwidths = st.floats(1e-7, 1e-2), st.floats(1e7, 1e12)


@given(latencies, bandwidths, st.integers(2, 16))
def test_a_fit_finds_the_figures_that_made_the_times(latency: float, bandwidth: float, size: int):
    steps = [ring_steps(kind, size) for kind in KINDS for _ in SIZES]
    sent = [ring_bytes(kind, payload, size) for kind in KINDS for payload in SIZES]
    seconds = [n * latency + m / bandwidth for n, m in zip(steps, sent, strict=True)]
    found = fit(steps, sent, seconds)
    # A figure that no time shows is not found: there each time is within a part in a million all the same.
    again = [n * found[0] + m / found[1] for n, m in zip(steps, sent, strict=True)]
    assert again == pytest.approx(seconds, rel=1e-6)
    if 1e-3 < latency * bandwidth / 1e5 < 1e3:
        assert found == pytest.approx((latency, bandwidth), rel=1e-4)


@given(latencies, bandwidths, st.lists(st.floats(0.5, 2.0), min_size=len(SIZES), max_size=len(SIZES)))
def test_a_fit_of_noisy_times_has_figures_that_a_cluster_takes(latency: float, bandwidth: float, noise: list[float]):
    seconds = [(latency + m / bandwidth) * by for m, by in zip(SIZES, noise, strict=True)]
    found = fit([1] * len(SIZES), SIZES, seconds)
    assert found[0] >= 0 and 0 < found[1] < math.inf


def test_times_without_a_latency_or_without_a_bandwidth_have_figures_too():
    assert fit([1, 1], [1000, 2000], [1e-6, 3e-6]) == (0.0, pytest.approx(8e8, rel=0.2))
    latency, bandwidth = fit([1, 1], [1000, 2000], [3e-6, 1e-6])
    assert latency > 0 and bandwidth == pytest.approx(2e9)
    assert all(map(math.isfinite, fit([1], [1000], [-1e-6])))  # shorter than a launch


def test_a_link_has_figures_for_each_kind():
    made = [Timing(kind, payload, 2e-6 + payload / 1e9) for kind in ("all_gather", "send") for payload in SIZES]
    link = link_of("node", 4, made, 2, 1e-6)
    assert [each.kind for each in link.kinds] == ["all_gather", "send"]
    assert link.latency_of("all_gather") == pytest.approx(1e-6) and link.latency_of("send") == pytest.approx(1e-6)
    assert link.bandwidth == Rate(1e9, source="calibrated") and link.ranks == 4


def test_ranks_of_two_nodes_have_two_levels(ranks):
    first, *others = ranks(4).run(measure_job, torch.device("cpu"), TINY, 2)
    assert [(link.name, link.ranks) for link in first["links"]] == [("node", 2), ("network", 0)]
    assert all([each.kind for each in link.kinds] == list(KINDS) for link in first["links"])
    assert {*map(len, others)} == {len(first)}
    assert [dtype for dtype, _ in first["products"]] == ["bfloat16", "float16", "float32", "float64"]


def test_it_writes_a_file_that_is_a_cluster(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(Effort, "of", lambda **_: TINY)
    path = tmp_path / "here.toml"
    assert main(["calibrate", "--quick", "--ranks", "2", "--name", "here", "-o", str(path)]) == 0
    cluster = Cluster.load(path)
    assert cluster.name == "here" and cluster.devices == 2 and [link.ranks for link in cluster.links] == [0]
    assert cluster.source == cluster.links[0].source == "calibrated"
    assert 0 < cluster.launch < 1 and cluster.memory > 2**20
    assert capsys.readouterr().out == f"{cluster}\n\nWrote {path}.\n"
    assert main(["calibrate", "--quick", "-o", str(path)]) == 2
    assert "is there already" in capsys.readouterr().err


def test_one_rank_has_no_links(monkeypatch, capsys):
    monkeypatch.setattr(Effort, "of", lambda **_: TINY)
    assert main(["calibrate", "--ranks", "1", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["file"] is None and Cluster.from_toml(printed["toml"]).links == ()


def test_ranks_of_torchrun_measure_and_the_first_one_writes(tmp_path: Path):
    line = "torchrun --nproc_per_node 2 -m shardlib calibrate --quick --name job -o job.toml"
    printed = run_shell(line, tmp_path, library=ROOT)
    cluster = Cluster.load(tmp_path / "job.toml")
    assert cluster.devices == 2 and [(link.name, link.ranks) for link in cluster.links] == [("node", 0)]
    assert printed == f"{cluster}\n\nWrote job.toml.\n"


def test_sizes_are_larger_on_accelerators_and_fewer_when_it_is_quick():
    cpu, gpu = (Effort.of(accelerator=accelerator, quick=False) for accelerator in (False, True))
    assert max(gpu.products) > max(cpu.products) and max(gpu.payloads) > max(cpu.payloads)
    quick = Effort.of(accelerator=False, quick=True)
    assert {*quick.payloads} < {*cpu.payloads} and quick.repeats < cpu.repeats

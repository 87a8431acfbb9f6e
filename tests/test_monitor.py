"""`Monitor`: what a loop reports, of all ranks together, written by the first."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardlib as sl
from shardlib.errors import InputError, LaunchError
from shardlib.monitor import Monitor


def _watched(folder: str) -> list[tuple[int, dict[str, float]]]:
    written: list[tuple[int, dict[str, float]]] = []
    mesh = sl.mesh("dp=2,tp=2")
    data = mesh["dp"].get_local_rank()
    with Monitor(mesh, 4, every=2, tensorboard=folder, write=lambda *one: written.append(one)) as monitor:
        for step in range(4):
            monitor.step(loss=torch.tensor(10.0 * data + step), norm=float(step), tokens=3 + data)
    return written


def test_a_report_is_of_all_ranks(ranks, tmp_path: Path):
    first, *others = ranks(4).run(_watched, str(tmp_path / "logs"))
    assert others == [[], [], []]
    assert [(step, values["loss"], values["norm"]) for step, values in first] == [(2, 5.5, 0.5), (4, 7.5, 2.5)]
    for _, values in first:
        assert values["tokens_per_second"] == pytest.approx(7 * values["steps_per_second"])  # 3 + 4 tokens a step
        assert values["peak_gib"] > 0.01
    assert len(list((tmp_path / "logs").iterdir())) == 1  # one rank writes


def _sharded_norm() -> list[float]:
    norms: list[float] = []
    torch.manual_seed(0)
    model = sl.shard_model(nn.Linear(4, 4), mesh := sl.mesh("tp=2"), {"**": "colwise"})
    model(torch.ones(2, 4)).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with Monitor(mesh, 1, every=1, write=lambda step, values: norms.append(values["norm"])) as monitor:
        monitor.step(norm=norm)
    return norms or [float(norm) if dist.get_rank() else 0.0]


def test_a_norm_of_sharded_gradients_is_the_global_one(ranks):
    first, second = ranks(2).run(_sharded_norm)
    assert first == pytest.approx(second)


def test_a_run_that_is_resumed_counts_on():
    """Its first report is of the steps since it was resumed."""
    written: list[tuple[int, float]] = []
    with Monitor(
        sl.mesh("dp=1"), 8, start=3, every=2, write=lambda s, values: written.append((s, values["loss"]))
    ) as m:
        for step in range(3, 8):
            m.step(loss=float(step))
        assert m._progress.done == 8
    assert written == [(4, 3.0), (6, 4.5), (8, 6.5)]
    with pytest.raises(InputError, match=r"start=9 was given, of steps=8; give the steps that were done before"):
        Monitor(sl.mesh("dp=1"), 8, start=9)


def test_a_line_is_printed_beside_the_bar(capsys: pytest.CaptureFixture[str]):
    with Monitor(sl.mesh("dp=1"), steps=2, every=1) as monitor:
        monitor.step(loss=1.5)
    assert "step 1: loss 1.5, steps_per_second " in capsys.readouterr().out


def test_a_long_line_stays_one_line(capsys: pytest.CaptureFixture[str]):
    """Output that is not a terminal's counts as 80 columns wide."""
    with Monitor(sl.mesh("dp=1"), steps=1, every=1) as monitor:
        monitor.step(**{f"loss_of_the_head_number_{head}": float(head) for head in range(6)}, tokens=3)
    (line,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith("step 1:")]
    assert line.endswith("peak_gib " + line.split()[-1]) and "number_5 5, steps_per_second" in line


def test_without_tensorboard_every_rank_says_so(ranks, tmp_path: Path):
    assert set(ranks(2).run(_without_tensorboard, str(tmp_path))) == {
        "Monitor(tensorboard=...) needs the package tensorboard, which is not installed: pip install "
        "'shardlib[tensorboard]'."
    }


def _without_tensorboard(folder: str) -> str:
    with mock.patch.dict(sys.modules, {"torch.utils.tensorboard": None}), pytest.raises(LaunchError) as caught:
        Monitor(sl.mesh("dp=2"), 1, tensorboard=folder)
    return str(caught.value)


def test_a_line_goes_above_the_bar_of_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("shardlib._progress.is_terminal", lambda stream: True)
    monkeypatch.setenv("COLUMNS", "120")
    with Monitor(sl.mesh("dp=1"), steps=2, every=2) as monitor:
        monitor.step(loss=1.5)
        monitor.step(loss=2.5)
    said = capsys.readouterr()
    assert said.out == ""  # it is on the terminal that has the bar
    before, _, after = said.err.partition("step 2: loss 2, steps_per_second ")
    assert "training" in before and "0/2 steps" in before and "2/2 steps" in after


@pytest.mark.parametrize("numbers", [{"steps": 0}, {"steps": 2, "every": 0}])
def test_numbers_are_positive(numbers: dict[str, int]):
    with pytest.raises(InputError, match="give positive numbers"):
        Monitor(sl.mesh("dp=1"), **numbers)

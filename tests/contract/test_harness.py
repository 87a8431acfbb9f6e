"""The harness notices: numbers that differ, what is missing, errors, and declarations that are not true any more."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed.tensor as dt

from tests.contract import declare
from tests.contract.cells import wrong
from tests.contract.declare import Habit, Verdict, habits_of, modules
from tests.contract.harness import KINDS, Finding, OfRanks, Part, Shard, compare

_ONE = [Part(values={"loss": OfRanks("mean", torch.tensor(2.0).double()), "w": torch.ones(2).double(), "n": 3})]


def _ranks(*losses: float, **others: object) -> list[Part]:
    same = {"w": torch.ones(2).double(), "n": 3} | others
    return [Part(i, {"loss": OfRanks("mean", torch.tensor(loss).double()), **same}) for i, loss in enumerate(losses)]


def test_means_of_data_ranks_are_those_of_one_device():
    assert compare(_ranks(1.0, 3.0), _ONE) == Finding("same")
    assert compare(_ranks(1.0, 3.1), _ONE).how.startswith("loss on rank 0: off by 0.05")


@pytest.mark.parametrize(
    ("others", "how"),
    [
        ({"w": torch.tensor([1.0, 1 + 1e-8], dtype=torch.float64)}, "w on rank 0: off by 1e-08"),
        ({"w": torch.ones(2)}, "w on rank 0: torch.float32 [2] is not torch.float64 [2]"),
        ({"w": torch.ones(3).double()}, "w on rank 0: torch.float64 [3] is not torch.float64 [2]"),
        ({"w": None}, "w on rank 0: None is not [1, 1]"),
        ({"n": 4}, "n on rank 0: 4 is not 3"),
        ({"n": 3.0}, "n on rank 0: 3.0 is not 3"),
        ({"m": 1}, "rank 0 has m, which one device has not"),
    ],
)
def test_what_differs_is_named(others: dict[str, object], how: str):
    assert compare(_ranks(2.0, 2.0, **others), _ONE).how.startswith(how)


def test_a_shard_is_compared_with_the_same_shard_of_one_device():
    def parts(*locals_: torch.Tensor, of: int = 4) -> list[Part]:
        shards = [Shard(local, (of,), (dt.Shard(0),), "tp=2", rank) for rank, local in enumerate(locals_)]
        return [Part(rank, {"w": shard}) for rank, shard in enumerate(shards)]

    first, second = torch.arange(4.0).double().chunk(2)
    one = [Part(values={"w": torch.arange(4.0).double()})]
    assert compare(parts(first, second), one) == Finding("same")
    assert compare(parts(first, second + 1e-8), one).how.startswith("w on rank 1: off by 1e-08")
    assert compare(parts(second, first), one).how.startswith("w on rank 0: off by 2")
    assert compare(parts(first, second, of=5), one).how == "w on rank 0: [5] is not [4]"


def test_a_rank_without_a_value_is_noticed_and_a_stage_may_lack_it():
    parts = _ranks(2.0, 2.0)
    del parts[1].values["w"]
    assert compare(parts, _ONE).how == "no rank has w"
    assert compare(parts, _ONE, staged=True) == Finding("same")


def test_rows_and_vectors_of_stages_are_put_together():
    one = [Part(values={"x": OfRanks("rows", torch.arange(4.0)), "v": OfRanks("stages", torch.arange(2.0))})]
    two = [
        Part(i, {"x": OfRanks("rows", x), "v": OfRanks("stages", v)})
        for i, (x, v) in enumerate(zip(torch.arange(4.0).chunk(2), torch.arange(2.0).chunk(2), strict=True))
    ]
    assert compare(two, one, staged=True) == Finding("same")
    assert compare(two[::-1], one, staged=True).what == "differs"


def test_an_error_of_ours_is_a_refusal_and_another_one_is_not():
    ours, other = Part(error="PlanError: no", refused=True), Part(error="KeyError: no")
    assert compare([ours, ours], _ONE) == Finding("refused", "PlanError: no")
    assert compare([ours, other], _ONE).what == "raised"


_SAME, _DIFFERS, _REFUSED = Finding("same"), Finding("differs", "x"), Finding("refused", "PlanError: write y")


@pytest.mark.parametrize(
    ("declared", "good"),
    [
        (None, [_SAME]),
        (Verdict("refused", "write y"), [_REFUSED]),
        (Verdict("refused", "write z"), []),
        (Verdict("noticed", "write y"), [_REFUSED]),
        (Verdict("as DDP", "why"), [_SAME]),
        (Verdict("own part", "why"), [_DIFFERS, _REFUSED, Finding("raised"), Finding("hung")]),
        (Verdict("broken", "why"), [_DIFFERS, Finding("raised"), Finding("hung")]),
    ],
)
def test_a_declaration_that_is_not_true_is_said(declared: Verdict | None, good: list[Finding]):
    habit = Habit("does", "Does.", {"tp": declared} if declared else {})
    for found in (_SAME, _DIFFERS, _REFUSED, Finding("raised"), Finding("hung")):
        assert bool(wrong(habit, "tp", found)) == (found not in good)


def test_there_are_many_habits_and_each_has_a_sentence_of_its_own():
    habits = [habit for module in modules() for habit in habits_of(module)]
    assert len(habits) >= 150
    assert len({habit.sentence for habit in habits}) == len(habits)
    assert not any(all(map(habit.is_deep, ("replicate", "zero(1)", "zero(2)"))) for habit in habits)


def test_a_kind_that_is_not_there_cannot_be_declared():
    with pytest.raises(AssertionError, match="there are " + next(iter(KINDS))):
        declare.refused("zero(7)", "no")


@pytest.mark.deep
def test_the_command_for_gpus_runs_on_a_cpu():
    command = [sys.executable, "-m", "tests.contract.on_gpu", "zero(2)", "tp", "--habits", "uneven_batches_by_counts"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "zero(2): 1 habits, 0 not as declared" in ran.stdout and "tp: 1 habits, 0 not as declared" in ran.stdout

"""Stages that compute equally much: weighed by operations, or by a clock."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib.engine.pipeline import weigh
from shardlib.errors import PlanError, RuleError, ShardlibError

ROWS = torch.ones(6, 8)


class Heavy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x)))


class Lopsided(nn.Module):
    """Most parameters are in the embedding, most operations in the last block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 8)
        self.blocks = nn.ModuleList([*(nn.Linear(8, 8) for _ in range(3)), Heavy()])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x


IDS = torch.zeros(6, 5, dtype=torch.long)


def cut(by: str) -> Any:
    return sl.Rules({"**": None}, stages=sl.rules.Balanced(by=by))  # type: ignore[arg-type]


def modules_of(plan: sl.Plan) -> list[tuple[str, ...]]:
    return [stage.modules for stage in plan.stages]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_by_operations(device: str):
    with torch.device(device):
        model = Lopsided()
    assert modules_of(sl.plan(model, "pp=2", cut("params"))) == [
        ("embed",),
        ("blocks.0", "blocks.1", "blocks.2", "blocks.3"),
    ]
    made = sl.plan(model, "pp=2", cut("flops"), example=IDS)
    assert modules_of(made) == [("embed", "blocks.0", "blocks.1", "blocks.2"), ("blocks.3",)]


def test_operations_are_those_of_the_formula():
    """2 (in) (out) for each row of a Linear: 6 x 5 rows."""
    names = ["embed", "blocks.0", "blocks.3"]
    found = weigh._operations(Lopsided(), names, {"ids": IDS}, torch.device("cpu"))
    assert found == [0, 2 * 8 * 8 * 30, 3 * 2 * 8 * 8 * 30]


def _by_time() -> tuple[list[tuple[str, ...]], list[float]]:
    model, before = Lopsided(), torch.random.get_rng_state()
    mine = [1.0, 1.0, 1.0, 1.0, 4.0] if torch.distributed.get_rank() == 0 else [9.0, 1.0, 1.0, 1.0, 1.0]
    measured = weigh._seconds(model, ["embed", "blocks.0", "blocks.1", "blocks.3"], IDS, torch.device("cpu"))
    assert torch.equal(before, torch.random.get_rng_state())
    real, weigh._seconds = weigh._seconds, lambda *_: mine  # type: ignore[assignment]
    try:
        sl.shard_model(model, "pp=2", cut("time"), example=IDS)
    finally:
        weigh._seconds = real
    return modules_of(sl.get_plan(model)), measured


def test_the_clock_of_the_first_rank_counts(ranks):
    for stages, measured in ranks(2).run(_by_time):
        assert stages == [("embed", "blocks.0", "blocks.1", "blocks.2"), ("blocks.3",)]
        assert min(measured) > 0 and measured[1] == measured[2]  # alike, and so measured once


class Fails(Lopsided):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) if torch.distributed.get_rank() else self.embed(ids, ids)


def _time_that_fails() -> str:
    try:
        sl.shard_model(Fails(), "pp=2", cut("time"), example=IDS)
    except RuleError as error:
        return str(error)
    return ""


def test_what_the_first_rank_cannot_measure_all_hear_of(ranks):
    said = ranks(2).run(_time_that_fails)
    assert said[0] == said[1]
    assert said[0].startswith('Balanced(by="time"): rank 0 could not measure the modules, it raised TypeError: ')


class Looking(Lopsided):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids[: int(ids.max()) + 1])


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda: sl.rules.Balanced(by="flop"), RuleError, 'give "params", "flops" or "time"'),  # type: ignore[arg-type]
        (lambda: sl.rules.Balanced([1, 2], by="flops"), RuleError, "by='flops' and counts"),
        (lambda: sl.plan(Lopsided(), "pp=2", cut("flops")), RuleError, "no example was given"),
        (lambda: sl.plan(Lopsided(), "pp=2", cut("time"), example=IDS), RuleError, "a plan knows none"),
        (lambda: sl.plan(Looking(), "pp=2", cut("flops"), example=IDS), RuleError, "depends on values"),
        (
            lambda: sl.plan(nn.Sequential(nn.PReLU(), nn.PReLU()), "pp=2", cut("flops"), example=ROWS),
            RuleError,
            "computes anything",
        ),
        (lambda: sl.shard_model(Lopsided(), "dp=1", cut("params"), example=IDS), PlanError, "rules have none that are"),
    ],
)
def test_what_is_refused(call: Any, kind: type[ShardlibError], said: str):
    with pytest.raises(kind) as caught:
        call()
    assert said in str(caught.value)

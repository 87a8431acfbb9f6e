"""Lightning trains sharded models with the numbers that it has on one process without shardlib."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tests.integrations.lightning_training import CASES, KINDS, Trained, grid, trained

# Sums reordered by another mesh differ by roundings.
TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}


def alone(cases: list[str], folder: str) -> dict[str, Trained]:
    found = {case: trained(case, folder, None) for case in cases}
    found["resumed"] = trained("plain", folder, None, resume=found["plain"].checkpoint, max_epochs=2)
    return found


def assert_equal(run: Any, exact: Any, where: str) -> None:
    for name in ("losses", "metrics", "rates", "weights", "steps"):
        told = functools.partial("{}, {}: {}".format, where, name)
        torch.testing.assert_close(getattr(run, name), getattr(exact, name), **TOLERANCE, msg=told)
    first, step = run.share
    torch.testing.assert_close(run.predicted, exact.predicted[first::step], **TOLERANCE)


def test_each_kind_of_sharding_has_the_numbers_of_one_process(ranks, tmp_path):
    (exact,) = ranks(1).run(alone, [*CASES], str(tmp_path / "alone"), timeout=300)
    for rank, found in enumerate(ranks(2).run(grid, [*KINDS], [*CASES], str(tmp_path / "ranks"), timeout=500)):
        for kind, runs in found.items():
            for case, run in runs.items():
                assert_equal(run, exact[case], f"{kind}, {case}, rank {rank}")

"""Causes that are named for differences made by hand, one kind at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardlib import Layout, MeshShape
from shardlib.testing.equivalence.case import Case
from shardlib.testing.equivalence.cause import Evidence, likely, of_losses, of_norm, of_updates
from shardlib.testing.equivalence.parts import RankCoordinate


def _case(mesh: str, accumulate: int = 1) -> Case:
    return Case(lambda: torch.nn.Linear(1, 1), lambda step: step, MeshShape(mesh), accumulate=accumulate)


def _said(
    mesh: str, got: Any, layout: str = "batch feature", own: dict[str, Any] | None = None, **case: Any
) -> tuple[str, ...]:
    """`got(rank, its part of the whole, the whole)` is what each rank holds of a tensor laid out so."""
    shape = MeshShape(mesh)
    whole = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    evidence = []
    for rank in range(shape.world_size):
        part = Layout.parse(layout).take(whole, shape, shape.coordinate(rank))
        evidence.append(Evidence(shape.coordinate(rank), got(rank, part.clone(), whole), part))
    return likely(evidence, _case(mesh, **case), own or {})


BIAS = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)


def _summand(rank: int, ranks: int, whole: torch.Tensor) -> torch.Tensor:
    noise = torch.randn(whole.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return noise if rank % ranks else whole - noise * (ranks - 1)


@pytest.mark.parametrize(
    ("mesh", "layout", "got", "said"),
    [
        (
            "tp=2", "batch feature", lambda rank, part, whole: part * 2,
            "2 times a single device's (tp=2): looks like a reduction over tp that is done twice, or a sum where a "
            "mean is due",
        ),
        (
            "dp=3,tp=2", "batch feature", lambda rank, part, whole: part / 3,
            "1/3 of a single device's (dp=3): looks like a reduction over dp that is missing, or a mean where a sum is "
            "due",
        ),
        ("tp=2", "batch feature", lambda rank, part, whole: part * 1.25, "1.25 times a single device's"),
        ("tp=2", "batch feature", lambda rank, part, whole: -part, "-1 times a single device's"),
        (
            "dp=2,tp=2", "batch feature", lambda rank, part, whole: _summand(rank, 2, whole),
            "the sum of what the ranks of tp hold is right: a reduction over tp is missing",
        ),
        (
            "tp=2", "batch feature", lambda rank, part, whole: _summand(rank, 2, whole) * 2,
            "the mean of what the ranks of tp hold is right: a reduction over tp is missing",
        ),
        (
            "tp=2", "batch feature", lambda rank, part, whole: _summand(rank, 2, whole - BIAS) + BIAS,
            "without the bias, which each rank has added, the sum of what the ranks of tp hold is right: a reduction "
            "over tp is missing",
        ),
        (
            "tp=4", "batch feature", lambda rank, part, whole: part + 3 * BIAS,
            "the bias is in it 4 times (tp=4): it was added on every rank before the sum",
        ),
        ("tp=4", "batch feature", lambda rank, part, whole: part - BIAS, "1 of the bias is missing from it"),
        (
            "tp=2", "batch@tp feature", lambda rank, part, whole: whole.chunk(2)[1 - rank],
            "shards in the wrong place: rank 0 holds rank 1's, rank 1 holds rank 0's",
        ),
        (
            "tp=2", "batch@tp feature", lambda rank, part, whole: whole.chunk(2)[0],
            "shards in the wrong place: rank 1 holds rank 0's",
        ),
        (
            "tp=2", "batch@tp feature", lambda rank, part, whole: whole.view(3, 2, 4)[:, rank],
            "the right numbers in wrong places over all ranks: looks like wrong sharding of a fused or reordered dim",
        ),
        (
            "tp=2", "batch feature", lambda rank, part, whole: part.flip(1),
            "dim 1 in another order: looks like wrong sharding of a fused or reordered dim",
        ),
        (
            "tp=2", "batch feature", lambda rank, part, whole: part * 0,
            "all zeros on ranks 0, 1: never written, or truncated",
        ),
        (
            "tp=2", "batch feature", lambda rank, part, whole: part * float("nan"),
            "infinite or not a number on ranks 0, 1",
        ),
        (
            "tp=2", "batch feature", lambda rank, part, whole: None,
            "there is none on ranks 0, 1, where the single device has one",
        ),
        (
            "tp=2", "batch@tp feature", lambda rank, part, whole: whole,
            "rank 0 holds local shape (6, 4); expected (3, 4)",
        ),
        (
            "tp=2", "batch feature", lambda rank, part, whole: torch.exp(part),
            "no pattern: most elements, on all ranks",
        ),
    ],
)  # fmt: skip
def test_one_kind(mesh: str, layout: str, got: Any, said: str):
    assert _said(mesh, got, layout, {"bias": BIAS})[0] == said


def test_accumulation_is_a_factor_too():
    assert _said("tp=2", lambda rank, part, whole: part / 3, accumulate=3)[0] == (
        "1/3 of a single device's (3 backward passes are accumulated): looks like accumulation that averages wrongly"
    )


def test_some_ranks_and_some_elements():
    def last_rank(rank: int, part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        return part + torch.tensor([0, 1.0, 0, 0], dtype=torch.float64) if rank in (2, 5) else part

    assert _said("dp=2,tp=3", last_rank) == (
        "only the ranks at tp=2",
        "on rank 2 only at 1 of 4 in dim 1",
    )
    assert _said("dp=2,tp=3", lambda r, part, whole: torch.exp(part) if r in (0, 4) else part)[-1] == "only ranks 0, 4"


def test_random_masks():
    def masked(seed: int, x: torch.Tensor) -> torch.Tensor:
        return x * (torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) > 0.5)

    whole = torch.randn(8, 16, dtype=torch.float64)
    one = masked(3, whole[:4])
    evidence = [
        Evidence({"dp": rank}, one if rank == 0 else masked(3, whole[4:]), one if rank == 0 else masked(4, whole[4:]))
        for rank in (0, 1)
    ]
    assert likely(evidence, _case("dp=2"), {})[0] == (
        "ranks 0 and 1 drew one random mask, where a single device draws two"
    )
    evidence[1] = Evidence({"dp": 1}, masked(5, whole[4:]), evidence[1].want)
    assert likely(evidence, _case("dp=2"), {})[0] == "zeros in other places: another random mask than a single device's"


def test_norms():
    split, whole = torch.tensor([3.0, 4.0], dtype=torch.float64), torch.tensor([12.0], dtype=torch.float64)
    single, mine = {"a": split, "b": whole}, {"a": split[:1], "b": whole}
    rank_coordinate = RankCoordinate(MeshShape("tp=2"), {"tp": 0})

    def said(square: float) -> str:
        return of_norm(
            single, mine, torch.tensor(13.0), torch.tensor(square, dtype=torch.float64).sqrt(), rank_coordinate
        )[0]

    assert said(9 + 144).startswith("it counts this rank's shards alone")
    assert said(25 + 2 * 144) == "gradients that are replicated are counted 2 times (tp)"
    assert said(2 * 25 + 144) == "gradients that are sharded are counted 2 times (tp)"
    assert said(2 * 169) == "its square is 2 times too large (tp): all gradients are counted on every rank of it"
    assert said(100) == "its square is 0.591716 times the single device's"


def test_the_last_rank_of_an_uneven_split():
    wants = torch.arange(1.0, 6.0).split(3)
    evidence = [Evidence({"tp": rank}, want * (1 + 2 * rank), want) for rank, want in enumerate(wants)]
    said = likely(evidence, _case("tp=2"), {})
    assert said[1] == "only the ranks at tp=1, the last, where the shards are uneven"


def test_what_is_off_by_less_than_any_pattern_shows():
    said = _said("tp=2", lambda _rank, part, _whole: part.float().double())
    assert len(said) == 1 and said[0].endswith("looks like rounding to a coarser dtype on the way")


def test_rows_in_another_order_are_no_random_mask():
    ids = torch.tensor([[0, 1, 2, 3], [4, 0, 5, 6]])
    evidence = [Evidence({"dp": rank}, ids.roll(1, -1), ids) for rank in range(2)]
    assert likely(evidence, _case("dp=2"), {})[0].startswith("dim 1 in another order")


def test_losses_of_ranks():
    shape = MeshShape("dp=2")
    assert of_losses([1.0, 4.0], 2.0, [1.0, 4.0], shape)[0].startswith("each rank's loss is right for its rows")
    assert of_losses([2.0, 6.0], 2.0, [1.0, 3.0], shape) == ("2 times a single device's (dp=2)",)
    assert of_losses([1.0, 5.0], 2.0, [1.0, 3.0], shape) == ("only rank 1",)
    assert of_losses([2.0, 5.0], 2.0, [1.0, 3.0], shape) == ("the mean over ranks is 3.5, where a single device has 2",)


def test_the_size_of_an_update():
    change = torch.tensor([0.1, -0.2, 0.3], dtype=torch.float64)

    def said(*factors: float) -> tuple[str, ...]:
        return of_updates([Evidence({"dp": i}, change * f, change) for i, f in enumerate(factors)], _case("dp=2"))

    assert said(2.0, 2.0) == ("its change in this step is 2 times a single device's: look at the learning rate",)
    assert said(1.0, 0.5)[1] == "only the ranks at dp=1"
    assert said(1.0, 1.0) == ()

"""The figures of the ZeRO paper, from the table alone.

Rajbhandari, Rasley, Ruwase, He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020: figure 1
and table 1 (7.5 billion parameters, 64 ranks, mixed precision and Adam), and section 7 for what is sent.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from shardlib._plan import Plan, make_plan
from shardlib.transforms import Transform, accumulate, fsdp, precision, replicate, zero

RANKS = 64
COUNT = 7_500_000_000


@cache
def _whole(mesh: str = f"dp={RANKS}") -> Plan:
    """75 tensors of a hundred million elements; 64 divides their first dim."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(15625, 6400, bias=False) for _ in range(75)))
    return make_plan(model, mesh, {"**": "replicate"})


def _gigabytes(made: Plan) -> float:
    return made.memory().total / 1e9


@pytest.mark.parametrize(
    ("transform", "published"), [(replicate(), 120), (zero(1), 31.4), (zero(2), 16.6), (zero(3), 1.88)]
)
def test_memory_in_mixed_precision(transform: Transform, published: float):
    assert _gigabytes(_whole() | precision("bf16", grads="bfloat16") | transform) == pytest.approx(published, abs=0.05)


@pytest.mark.parametrize(
    ("transform", "each", "divided"),
    [(replicate(), 16, 0), (zero(1), 8, 8), (zero(2), 4, 12), (zero(3), 0, 16)],
)
def test_memory_in_float32(transform: Transform, each: int, divided: int):
    """Parameters and gradients take 4 bytes an element each, Adam's two tensors 8."""
    assert (_whole() | transform).memory().total == COUNT * each + COUNT * divided // RANKS


@pytest.mark.parametrize("ranks", [4, 16, 64, 256])
def test_memory_falls_with_ranks_as_in_table_one(ranks: int):
    """(2 + 2 + 12 / N) P bytes, (2 + 14 / N) P, 16 / N P."""
    made = _whole(f"dp={ranks}") | precision("bf16", grads="bfloat16")
    expected = {1: 4 + 12 / ranks, 2: 2 + 14 / ranks, 3: 16 / ranks}
    for stage, factor in expected.items():
        assert (made | zero(stage)).memory().total == COUNT * factor


@pytest.mark.parametrize("ranks", [4, 64])
def test_gradients_of_float32_take_two_bytes_more(ranks: int):
    made = _whole(f"dp={ranks}") | precision("bf16")
    expected = {1: 6 + 12 / ranks, 2: 2 + 16 / ranks, 3: 18 / ranks}
    for stage, factor in expected.items():
        assert (made | zero(stage)).memory().total == COUNT * factor


@pytest.mark.parametrize(("low", "size"), [("fp32", 4), ("bf16", 2)])
@pytest.mark.parametrize(
    ("transform", "passes"),
    [(replicate(), 2), (zero(1), 2), (zero(2), 2), (zero(3), 3), (fsdp(), 2), (fsdp(reshard_after_forward=True), 3)],
)
def test_what_is_sent(low: str, size: int, transform: Transform, passes: int):
    """2 P (N-1)/N elements for plain data parallelism and stages 1 and 2, 3 P (N-1)/N for stage 3."""
    made = _whole() | precision(low) | transform
    assert sum(each.bytes for each in made.traffic()) == size * passes * COUNT * (RANKS - 1) // RANKS


@pytest.mark.parametrize(
    ("transform", "kinds"),
    [
        (replicate(), {("gradients", "all_reduce")}),
        (zero(1), {("gradients", "reduce_scatter"), ("updated parameters", "all_gather")}),
        (zero(2), {("gradients", "reduce_scatter"), ("updated parameters", "all_gather")}),
        (
            zero(3),
            {
                ("gradients", "reduce_scatter"),
                ("parameters, forward", "all_gather"),
                ("parameters, backward", "all_gather"),
            },
        ),
    ],
)
def test_what_is_sent_for_what(transform: Transform, kinds: set[tuple[str, str]]):
    traffic = (_whole() | transform).traffic()
    assert {(each.what, each.kind) for each in traffic} == kinds
    assert {(each.axes, each.tensors, each.times) for each in traffic} == {(("dp",), 75, 1)}


@pytest.mark.parametrize(("transform", "passes"), [(replicate(), 2), (zero(1), 2), (zero(2), 4 + 1), (zero(3), 3 * 4)])
def test_whole_gradients_are_reduced_once_a_step_and_split_ones_at_every_microbatch(transform: Transform, passes: int):
    made = _whole() | transform | accumulate(4)
    assert sum(each.bytes for each in made.traffic()) == 4 * passes * COUNT * (RANKS - 1) // RANKS


def test_gradients_travel_in_the_dtype_that_is_asked_for():
    made = _whole() | precision("bf16", reduce="float32") | zero(1)
    sent = {each.what: each.bytes for each in made.traffic()}
    assert sent["gradients"] == 2 * sent["updated parameters"]

"""What is held for backward while a schedule runs: of as many microbatches as the plan says."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib._plan.schedules import in_flight, order

MICROBATCHES = 6


class Stack(nn.Module):
    """Blocks that keep equally much, so that stages do."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x


class Saved:
    """Bytes that autograd has saved and still holds, parameters apart."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def pack(self, tensor: torch.Tensor) -> list[torch.Tensor] | torch.Tensor:
        if isinstance(tensor, nn.Parameter) or tensor.shape == (4, 4):  # a weight, or its transpose
            return tensor
        held = _Box([tensor])
        self.now, self.peak = self.now + tensor.nbytes, max(self.peak, self.now + tensor.nbytes)
        weakref.finalize(held, self._drop, tensor.nbytes)
        return held

    def _drop(self, size: int) -> None:
        self.now -= size

    @staticmethod
    def unpack(held: list[torch.Tensor] | torch.Tensor) -> torch.Tensor:
        return held[0] if isinstance(held, list) else held


class _Box(list[torch.Tensor]):
    """A list that can be referred to weakly."""


ONE = 2 * 3 * 4 * 4  # of a microbatch: Linear keeps its input, tanh its output, three rows of four float32 each


def _held(schedule: str, stages: int) -> tuple[int, int]:
    """The most bytes that are held at a time, and what is held in the end."""
    rules = sl.Rules({"**": None}, stages=" | ".join(f"blocks.{i}" for i in range(stages)))
    model = sl.shard_model(Stack(stages), "pp=2", rules, transforms=[sl.pipeline(schedule, MICROBATCHES)])
    saved = Saved()
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
        sl.pipeline_step(model, torch.ones(3 * MICROBATCHES, 4), lambda y, x: y.sum())
    return saved.peak, saved.now


@pytest.mark.parametrize(("schedule", "stages"), [("gpipe", 2), ("1f1b", 2), ("interleaved", 4)])
def test_activations_follow_microbatches_in_flight(ranks, schedule: str, stages: int):
    want = [in_flight(actions) for actions in order(schedule, 2, stages, MICROBATCHES)]
    if stages == 2:
        assert want == {"gpipe": [MICROBATCHES] * 2, "1f1b": [2, 1]}[schedule]  # m of them, and p - rank
    assert ranks(2).run(_held, schedule, stages) == [(each * ONE, 0) for each in want]

"""Repeated blocks are compiled in one graph or run eagerly, with the numbers of one device, and the plan says which."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable

import torch
from torch import nn

import shardlib as sl
from tests.engine import models
from tests.engine.same_numbers import TOLERANCE, relative


class _Breaking(nn.Module):
    """A block that no compiler traces in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = models.MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + nn.functional.pad(self.mlp(x), (0, 1)) * float(x.sum().item() > -1e9)


class _Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Breaking() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _compare(reference: nn.Module, sharded: nn.Module, inputs: Iterable[torch.Tensor]) -> list[str]:
    """Outputs and gradients of both on each input; the warnings that said something of compilation."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x in inputs:
            wanted, found = reference(x), sharded(x)
            assert relative(found, wanted) <= TOLERANCE
            models.spread(wanted).backward()
            models.spread(found).backward()
    for have, want in zip(sharded.parameters(), reference.parameters(), strict=True):
        assert have.grad is not None
        assert want.grad is not None
        full = have.grad.full_tensor() if hasattr(have.grad, "full_tensor") else have.grad
        assert relative(full, want.grad) <= TOLERANCE
    return [str(warning.message) for warning in caught if "eagerly" in str(warning.message)]


def _graph_breaks() -> tuple[list[str], tuple[str, ...]]:
    torch.manual_seed(0)
    reference = _Stack().double()
    sharded = sl.shard_model(copy.deepcopy(reference), "tp=2", models.MLP_RULES, compile="auto")
    said = _compare(reference, sharded, [models.rows(step)[0][0] for step in range(2)])
    return said, sl.plan_of(sharded).notes


def test_a_block_that_breaks_the_graph_runs_eagerly_and_those_like_it_too(ranks):
    (said, notes), _ = ranks(2).run(_graph_breaks)
    reason = "Call to `torch._dynamo.graph_break()`"
    assert said == [f'"blocks.0" and the 2 blocks like it cannot be compiled and run eagerly: {reason}']
    assert [f"blocks.{i} runs eagerly: {reason}" for i in range(3)] == [n for n in notes if "eagerly" in n]


def _lengths() -> tuple[list[str], tuple[str, ...]]:
    rules = sl.Rules(models.GPT_RULES, sizes=models.GPT_SIZES)
    torch.manual_seed(0)
    reference = models.gpt().double()
    sharded = sl.shard_model(copy.deepcopy(reference), "tp=2", rules)
    said = _compare(reference, sharded, [models.tokens(0)[0][0][:, :length] for length in (3, 4, 5, 6, 7, 8, 3, 8)])
    return said, sl.plan_of(sharded).notes


def test_blocks_are_compiled_for_a_few_lengths_of_sequences(ranks):
    (said, notes), _ = ranks(2).run(_lengths)
    compiled = '"blocks.0" and the 1 blocks like it are compiled for 4 shapes of inputs'
    assert said == [
        f"{compiled}, and run eagerly on others. Pad batches to few lengths, or pass compile=None to shard_model."
    ]
    assert "Compiled with aot_eager: blocks.0, blocks.1." in notes
    assert f"{compiled} and run eagerly on others." in notes

"""Repeated blocks are compiled in one graph or run eagerly, with the numbers of one device, and the plan says which."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import shardlib as sl
from shardlib.engine import _torch
from shardlib.engine.feature import compile as compiling
from shardlib.engine.feature.recording import record_collectives
from shardlib.errors import ShardingError
from shardlib.testing.models import MLP, Numbers, Tokens, Transformer, rules_for
from tests.engine.whole import whole
from tests.logged import progress_logged

pytestmark = pytest.mark.compiled
GPT = functools.partial(Transformer, vocab=15, heads=4, layers=2, tied=True)
_close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


class _Breaking(nn.Module):
    """A block that no compiler traces in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP(width=7)

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
            _close(found, wanted)
            wanted.square().mean().backward()
            found.square().mean().backward()
    for have, want in zip(sharded.parameters(), reference.parameters(), strict=True):
        _close(whole(have.grad), want.grad)
    return [str(warning.message) for warning in caught if "eagerly" in str(warning.message)]


def _graph_breaks() -> tuple[list[str], tuple[str, ...]]:
    torch.manual_seed(0)
    reference = _Stack().double()
    sharded = sl.shard_model(copy.deepcopy(reference), "tp=2", rules_for(MLP()), compile="auto")
    said = _compare(reference, sharded, map(Numbers((8, 6)), range(2)))
    return said, sl.get_plan(sharded).notes


def test_a_block_that_breaks_the_graph_runs_eagerly_and_those_like_it_too(ranks):
    (said, notes), _ = ranks(2).run(_graph_breaks)
    reason = "Call to `torch._dynamo.graph_break()`"
    assert said == [f'"blocks.0" and the 2 blocks like it cannot be compiled and run eagerly: {reason}']
    assert [f"blocks.{i} runs eagerly: {reason}" for i in range(3)] == [n for n in notes if "eagerly" in n]


def _lengths() -> tuple[list[str], tuple[str, ...], list[str]]:
    torch.manual_seed(0)
    reference = GPT().double()
    sharded = sl.shard_model(copy.deepcopy(reference), "tp=2", rules_for(reference))
    with mock.patch.object(compiling, "MAX_SHAPES", 2), progress_logged() as logged:
        said = _compare(reference, sharded, [Tokens(4, length, 15)(0) for length in (3, 4, 5, 3, 5)])
    with record_collectives(sharded) as log:  # a mode of dispatch, under which dynamo leaves a block alone
        _compare(reference, sharded, [Tokens(4, 3, 15)(0)])
    assert log.collectives
    return said, sl.get_plan(sharded).notes, logged


def test_blocks_are_compiled_for_a_few_lengths_of_sequences(ranks):
    (said, notes, logged), _ = ranks(2).run(_lengths)
    assert logged == ['compiling "blocks.0"'] * 2  # for lengths 3 and 4
    compiled = '"blocks.0" and the 1 blocks like it are compiled for 2 shapes of inputs'
    assert said == [
        f"{compiled}, and run eagerly on others. Pad batches to few lengths, or pass compile=None to shard_model."
    ]
    assert "Compiled with aot_eager: blocks.0, blocks.1." in notes
    assert f"{compiled} and run eagerly on others." in notes


def _compiled_by_the_user() -> tuple[list[int], list[str]]:
    """The graphs of a block that the user compiled before and after sharding and of the model; what was said."""
    graphs: list[int] = []

    def count(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    torch.manual_seed(0)
    reference = _Stack().double()
    reference.blocks = nn.ModuleList(MLP(outs=6).double() for _ in range(2))
    given, seen = copy.deepcopy(reference), []
    given.blocks[0].compile(backend=count)
    sharded = sl.shard_model(given, "dp=2", transforms=[sl.fsdp()], rules={"**": None})
    x = Numbers((8, 6))
    seen.append(_graphs_of(graphs, lambda: _compare(reference, sharded, [x(0)])))
    sharded.blocks[1].compile(backend=count)
    seen.append(_graphs_of(graphs, lambda: _compare(reference, sharded, [x(1)])))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sharded.compile(backend=count)
        seen.append(_graphs_of(graphs, lambda: torch.compile(sharded, backend=count)(x(2))))
    return seen, [str(warning.message) for warning in caught if "torch.compile" in str(warning.message)]


def _graphs_of(graphs: list[int], run: Callable[[], Any]) -> int:
    before = len(graphs)
    run()
    return len(graphs) - before


def test_blocks_that_the_user_compiles_stay_compiled_inside_of_units_and_the_model_does_not(ranks):
    for graphs, said in ranks(2).run(_compiled_by_the_user):
        assert graphs == [1, 1, 0]
        assert len(said) == 2
        assert all("a model whose parameters are sharded, and a graph cannot hold them" in text for text in said)


class _Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLP(outs=6) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _compiled_by_inductor(folder: str) -> tuple[dict[str, int], list[torch.Tensor]]:
    torch.manual_seed(0)
    sharded = sl.shard_model(_Blocks(), "tp=2", rules_for(MLP()), compile="inductor")
    with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
        sharded(torch.randn(8, 6)).sum().backward()
    counters = torch._dynamo.utils.counters
    counts = {**counters["aot_autograd"], **counters["inductor"]}
    return counts, [_torch.local_of(p.grad) if isinstance(p.grad, DTensor) else p.grad for p in sharded.parameters()]


_JOB = """
import sys, torch
from shardlib import testing
from tests.engine.test_compile import _compiled_by_inductor
if __name__ == "__main__":
    with testing.ranks(2) as ranks:
        torch.save(ranks.run(_compiled_by_inductor, sys.argv[1], timeout=300), sys.argv[2])
"""


@pytest.mark.deep
def test_compiled_blocks_are_read_from_the_cache_on_disk_by_the_next_job(tmp_path):
    jobs = []
    for job in ("first", "second"):  # hashes of strings are other ones in each
        result = tmp_path / job
        subprocess.run([sys.executable, "-c", _JOB, str(tmp_path / "cache"), str(result)], check=True, timeout=300)
        jobs.append(torch.load(result))
    for (first, grads), (second, grads_again) in zip(*jobs, strict=True):
        assert first["fxgraph_cache_miss"] and "autograd_cache_bypass" not in first
        assert second["fxgraph_cache_hit"] and "fxgraph_cache_miss" not in second
        assert all(map(torch.equal, grads, grads_again))


class _Checkpointed(nn.Module):
    """A block that recomputes itself, which torch cannot compile with DTensors: it says so after forward has run."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 8), nn.Linear(8, 6), nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._forward, x, use_reentrant=False)

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(nn.functional.dropout(self.down(self.up(x).tanh()), 0.3))


_SPLIT = sl.Rules({"**.up": "colwise", "**.down": "rowwise"}, unmatched="replicate")


def _fails_after_it_ran() -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.ModuleList(_Checkpointed() for _ in range(2))).double()
    reference.forward = lambda x: reference[0][1](reference[0][0](x))  # type: ignore[method-assign]
    sharded = nn.Sequential(copy.deepcopy(reference[0]))
    sharded.forward = lambda x: sharded[0][1](sharded[0][0](x))  # type: ignore[method-assign]
    sl.shard_model(sharded, "tp=2", _SPLIT)
    x, found = torch.randn(5, 6, dtype=torch.float64), []
    with pytest.warns(UserWarning, match="cannot be compiled and run eagerly"):
        for net in (reference, sharded):
            torch.manual_seed(3)
            found.append([*(whole(t.detach().clone()) for t in (net(x), *net.buffers())), torch.rand(1)])
    for have, want in zip(found[1], found[0], strict=True):
        _close(have, want)


def test_a_block_that_fails_after_it_ran_has_drawn_and_counted_once(ranks):
    ranks(2).run(_fails_after_it_ran)


class _Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        return self.down(torch.cond(hidden.sum() > 0, torch.sin, torch.cos, (hidden,)))


def _branches() -> str:
    model = sl.shard_model(_Branching(), "tp=2", _SPLIT, compile=None)
    with pytest.raises(ShardingError) as raised:
        model(torch.ones(2, 6))
    return str(raised.value)


def test_ops_that_take_functions_are_refused(ranks):
    for said in ranks(2).run(_branches):
        assert said.startswith("The forward compiles a function, or calls an op that takes functions, such as flex_")
        assert said.endswith('("replicate"), so that it is given plain tensors.')

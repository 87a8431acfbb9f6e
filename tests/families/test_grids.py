"""2D, 2.5D and 3D tensor parallelism: files of `layouts/modes`, for the families that name all their dims."""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import shardlib as sl
from examples.gpt import GPT, GPTConfig
from shardlib.engine.feature.recording import record_collectives
from shardlib.testing import assert_equivalent
from shardlib.testing.models import Tokens, perturb
from tests.families.cases import BERT, GPT2, LLAMA, VIT, Case, prove
from tests.families.params import params

SQUARE, CUBE = "row=2,col=2", "depth=2,row=2,col=2"

CASES = [
    Case(GPT2, "sdpa", SQUARE, "2d", padding="right", layers=2),
    Case(LLAMA, "sdpa", SQUARE, "2d", padding="left", layers=2),
    Case(BERT, "sdpa", SQUARE, "2d", padding="right"),
    Case(VIT, "sdpa", SQUARE, "2d"),
]
MORE = [
    Case(GPT2, "eager", SQUARE, "2d", compile="auto"),
    Case(LLAMA, "sdpa", "dp=2,row=2,col=2", "2d", padding="right"),
    Case(LLAMA, "sdpa", CUBE, "2.5d"),
    Case(VIT, "sdpa", CUBE, "2.5d"),
    Case(GPT2, "sdpa", CUBE, "2.5d", padding="left"),
    Case(GPT2, "sdpa", CUBE, "3d"),
    Case(LLAMA, "sdpa", CUBE, "3d", padding="right"),
    Case(BERT, "sdpa", CUBE, "3d", padding="left"),
    Case(VIT, "sdpa", CUBE, "3d"),
]


def _model(case: Case) -> nn.Module:
    made = case.make_model()
    for module in made.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            # Its own forward is in float32, where sums over parts of the features differ by 1e-7.
            module.forward = functools.partial(_in_its_own_dtype, module)
    return made


def _in_its_own_dtype(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return norm.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)


@pytest.mark.parametrize("case", params(CASES, deep=MORE))
def test_training_gives_the_numbers_of_one_device(case: Case):
    prove(case, model=functools.partial(_model, case), steps=1)


def _gpt() -> nn.Module:
    return perturb(GPT(GPTConfig(vocab_size=13, context=8, n_layer=1, n_head=4, d_model=16)))


@pytest.mark.parametrize("mode", ["2.5d", "3d"])
def test_a_cube_of_ranks_trains_a_gpt_as_one_device_does(mode: str):
    assert_equivalent(_gpt, Tokens(8, 8, 13), mesh=CUBE, rules=sl.layouts.load("example_gpt", mode), steps=2)


TOKENS, FEATURES = 16, 32


def _of_a_product(mode: str, mesh: str) -> tuple[Counter[tuple[str, str]], int, list[int]]:
    """Of one linear layer, rows of activations and a square matrix: collectives, bytes that this rank sends, and sizes
    of what it keeps for backward."""
    rules = sl.Rules(
        {"up": "ff"},
        unmatched="replicate",
        axes={"ff": "tp"},
        activations={"up.output": "batch ff"},
        modes={
            "grid": {
                "rules": {"up.weight": "ff embed_in"},
                "activations": {"whole.output": "batch embed", "up.output": "hidden_batch ff"},
            }
        },
    )
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(whole=nn.Identity(), up=nn.Linear(FEATURES, FEATURES, bias=False))).double()
    model = sl.shard_model(model, mesh, rules if mode == "1d" else rules.mode(mode), compile=None)
    x = torch.randn(TOKENS, FEATURES, dtype=torch.float64, requires_grad=True)
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.to_local().numel() if isinstance(tensor, DTensor) else tensor.numel())
        return tensor

    with record_collectives(model) as log:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = model(x)
        y.square().mean().backward()
    # In 1D it is where the region begins that gradients of the input are summed.
    own = [each for each in log.collectives if each.module == "up" or (mode == "1d" and each.kind == "all_reduce")]
    return Counter((each.phase, each.kind) for each in own), sum(each.sent for each in own), kept


_BOTH = {("forward", "all_gather"): 2, ("backward", "all_gather"): 2, ("backward", "reduce_scatter"): 2}
X, W = TOKENS * FEATURES, FEATURES**2  # as many elements as there are of activations, and of the matrix
Q, D = 2, 2


@pytest.mark.parametrize(
    ("mode", "mesh", "counts", "sent", "kept"),
    [
        ("1d", "tp=4", {("backward", "all_reduce"): 1}, 2 * 3 / 4 * X, {X, W / 4}),
        ("2d", SQUARE, _BOTH, 3 * (Q - 1) / Q**2 * (X + W), {X / Q**2, W / Q**2}),
        ("2.5d", CUBE, _BOTH, 3 * (Q - 1) / Q**2 * (X / D + W), {X / (D * Q**2), W / Q**2}),
        (
            "3d",
            CUBE,
            {("forward", "all_gather"): 2, ("forward", "reduce_scatter"): 1}
            | {("backward", "all_gather"): 3, ("backward", "reduce_scatter"): 2},
            (Q - 1) / Q**3 * (3 * X + 3 * W + 2 * X),
            {X / Q**3, W / Q**3},
        ),
    ],
    ids=["1d", "2d", "2.5d", "3d"],
)
def test_a_product_costs_what_is_published(ranks, mode: str, mesh: str, counts: Any, sent: float, kept: set[float]):
    """ColossalAI's table, for X = W = 1 and forward and backward together: bandwidth 2(P-1)/P in 1D, 6(q-1)/q in 2D,
    3(q-1)(d+1)/(dq) in 2.5D, 6(q-1)/q^3 in 3D; in 2D and 2.5D it counts all that a row of q ranks sends, a rank sends
    one q-th. Latency 2(P-1), and q-1 for each of six collectives. Memory 1/q^2, 1/(dq^2), 1/q^3 of activations. In
    3D the table keeps what was gathered, which is q times more; to gather it anew in backward makes eight of six.
    """
    for found, of_rank, saved in ranks(sl.MeshShape(mesh).world_size).run(_of_a_product, mode, mesh):
        assert found == counts
        assert of_rank == sent * 8  # bytes
        assert kept <= set(saved) and max(saved) == max(kept)

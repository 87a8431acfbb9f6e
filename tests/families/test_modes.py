"""Modes of layout files split the sequence: over tp between blocks, or over sp throughout."""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

import shardlib as sl
from examples.gpt import GPT, GPTConfig
from shardlib.errors import RuleError
from tests.families.cases import BERT, GPT2, LAYOUTS, LLAMA, MISTRAL, VIT, Case, prove
from tests.families.params import params
from tests.families.transformer_models import build, text

TOLERANCE = 1e-10  # of float64; sums in another order differ by some 1e-15
TP2, SP2, CP2, SP4, BOTH = "tp=2", "sp=2", "cp=2", "sp=4", "tp=2,sp=2"

# Each model in each mode that its layout has; each mode with padding on either side, beside tp, on four ranks, and once
# with two layers.
CASES = [
    Case(GPT2, "sdpa", "tp=4", "sequence", padding="left", layers=2),
    Case(LLAMA, "sdpa", "dp=2,tp=2", "sequence", padding="right"),
    Case(BERT, "sdpa", TP2, "sequence", padding="right"),
    Case(VIT, "sdpa", TP2, "sequence"),
    Case(GPT2, "sdpa", SP2, "ulysses", padding="right", dropout=True),
    Case(LLAMA, "sdpa", SP4, "ulysses", padding="left"),  # fewer key heads than ranks
    Case(LLAMA, "eager", "dp=2,sp=2", "ulysses", padding="right", layers=2),
    Case(BERT, "sdpa", BOTH, "ulysses", padding="left"),
    Case(VIT, "sdpa", SP2, "ulysses"),
    Case(LLAMA, "sdpa", BOTH, "gather", layers=2),  # a causal mask for each rank's own queries
    Case(MISTRAL, "sdpa", SP2, "gather"),  # and one with a window
    Case(BERT, "eager", SP2, "gather", padding="right"),
    Case(VIT, "sdpa", SP2, "gather"),
    Case(LLAMA, "sdpa", "cp=4", "ring", padding="left"),
    Case(GPT2, "sdpa", CP2, "ring", dropout=True),
    Case(BERT, "sdpa", CP2, "ring", padding="right", layers=2),
    Case(LLAMA, "sdpa", "tp=2,cp=2", "ring", settings={"num_key_value_heads": 1}),
]
MORE = [
    Case(GPT2, "eager", TP2, "sequence", compile="auto"),
    Case(GPT2, "sdpa", BOTH, "ulysses", padding="right"),
    Case(LLAMA, "sdpa", BOTH, "ulysses", padding="left"),
    Case(LLAMA, "sdpa", SP2, "ulysses", compile="auto"),
    Case(VIT, "sdpa", BOTH, "gather"),
    Case(LLAMA, "sdpa", "cp=3", "ring"),  # pieces of 4, 4 and 2, whose halves are traded
    Case(LLAMA, "eager", "dp=2,cp=2", "ring"),
    Case(LLAMA, "sdpa", CP2, "ring", compile="auto"),
    Case(MISTRAL, "sdpa", "cp=4", "ring"),
    Case(GPT2, "sdpa", "tp=2,cp=2", "ring"),
    Case(VIT, "sdpa", CP2, "ring", compile="auto"),
]


@pytest.mark.parametrize("case", params(CASES, deep=MORE))
def test_training_gives_the_numbers_of_one_device(case: Case):
    prove(case)


IDS = torch.randint(3, 30, (4, 12), generator=torch.Generator().manual_seed(0))


def _collectives(model: str, mode: str, mesh: str) -> tuple[Counter[str], Counter[str], float]:
    """Of the forward pass; of both, but for sums of parameters' gradients; and how far logits are from one device's."""
    torch.manual_seed(0)
    one = (build(model, "sdpa") if model else GPT(GPTConfig(vocab_size=30, context=12, n_layer=2, d_model=32))).double()
    rules = sl.layouts.load(LAYOUTS.get(model, "example_gpt"), mode)
    sharded = sl.shard_model(copy.deepcopy(one), mesh, rules)
    wanted, _ = _logits(one), _logits(sharded).sum().backward()
    with CommDebugMode() as counting:
        logits = _logits(sharded)
        forward = _counts(counting)
        logits.square().mean().backward()
    return forward, _counts(counting) - forward, (logits - wanted).abs().max().item()


def _logits(model: nn.Module) -> torch.Tensor:
    output = model(IDS)
    return output if isinstance(output, torch.Tensor) else output.logits


def _counts(counting: CommDebugMode) -> Counter[str]:
    return Counter({str(op).rpartition(".")[2]: count for op, count in counting.get_comm_counts().items()})


BLOCKS = 2


@pytest.mark.parametrize(
    "model", [LLAMA, "", pytest.param(GPT2, marks=pytest.mark.deep)], ids=lambda model: model or "example_gpt"
)
def test_the_residual_stream_is_gathered_and_scattered_twice_a_block(ranks, model: str):
    """Korthikanti et al., arXiv 2205.05198, section 4.2.2. Beside the blocks: the embedding is scattered, the last
    norm's output and the logits are gathered."""
    for forward, _, off in ranks(2).run(_collectives, model, "sequence", TP2):
        assert off < TOLERANCE
        assert forward["reduce_scatter_tensor"] == 2 * BLOCKS + 1
        assert forward["all_gather_into_tensor"] == 2 * BLOCKS + 2
        assert forward["all_reduce"] == forward["all_to_all_single"] == 0


@pytest.mark.parametrize(
    ("model", "fused"), [(LLAMA, False), ("", True), pytest.param(GPT2, True, marks=pytest.mark.deep)]
)
def test_ulysses_exchanges_four_times_a_block(ranks, model: str, fused: bool):
    """Queries, keys, values and what comes of them (Jacobs et al., arXiv 2309.14509, section 3.1); the logits are
    gathered. Where q, k and v are fused it is attention that moves them, and its backward in ways of its own."""
    for forward, backward, off in ranks(2).run(_collectives, model, "ulysses", SP2):
        assert off < TOLERANCE
        assert forward["all_to_all_single"] == 4 * BLOCKS
        assert fused or backward["all_to_all_single"] == 4 * BLOCKS
        assert forward["all_gather_into_tensor"] == 1 and forward["all_reduce"] == 0


@pytest.mark.parametrize(("model", "traded"), [(LLAMA, 1), (BERT, 0)])
def test_keys_and_values_go_round(ranks, model: str, traded: int):
    """To the next of n ranks n - 1 times; in the backward their gradients follow, n times. Under a causal mask half of
    the queries is traded for those of another rank, and back, each way."""
    n = 2
    for forward, backward, off in ranks(n).run(_collectives, model, "ring", CP2):
        assert off < TOLERANCE
        assert forward["all_to_all_single"] == (n - 1 + 2 * traded) * BLOCKS
        assert backward["all_to_all_single"] == (n - 1 + n + 2 * traded) * BLOCKS
        assert forward["all_gather_into_tensor"] == 1 and forward["all_reduce"] == 0


def _packed(by: str, step: int) -> Any:
    """Three documents in a row of ten tokens: each sees itself alone. Said by a mask, or by positions that restart."""
    document = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 2])
    positions = torch.tensor([0, 1, 2, 3, 0, 1, 2, 0, 1, 2])
    more = {"position_ids": positions.expand(4, -1).clone(), "use_cache": False}
    if by == "mask":
        seen = (document == document.unsqueeze(1)) & torch.ones(10, 10, dtype=torch.bool).tril()
        more["attention_mask"] = seen.expand(4, 1, -1, -1).clone()
    return text(step, **more)


@pytest.mark.parametrize(
    ("mode", "mesh", "by"),
    [("gather", SP2, "mask"), ("ulysses", SP2, "mask"), ("ring", CP2, "mask"), ("ring", CP2, "positions")],
)
def test_packed_documents_see_themselves_alone(mode: str, mesh: str, by: str):
    prove(Case(LLAMA, "sdpa", mesh, mode), batch=partial(_packed, by), steps=1)


def test_a_mode_is_a_layout():
    known = sl.layouts.load("llama")
    assert set(known.modes) == {"sequence", "ulysses", "gather", "ring", "grid"}
    chosen = known.mode("ulysses")
    assert chosen == sl.layouts.load("llama", mode="ulysses") == sl.layouts.for_model(build(LLAMA), "ulysses")
    border = chosen.resolve(build(LLAMA), "tp=2,sp=2").borders["model.layers.0.self_attn.q_proj", "output"]
    assert str(border.layout) == "batch full_seq (all_heads@(tp,sp) head)"
    with pytest.raises(RuleError, match=r'"ulyses" was asked for .* Did you mean "ulysses"\?'):
        known.mode("ulyses")

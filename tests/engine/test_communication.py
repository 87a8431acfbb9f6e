"""A transformer block costs Megatron's collectives and no more: counted by PyTorch, equal to what the plan foretold.

Shoeybi et al., arXiv 1909.08053, section 3: two all-reduces forward, two backward. Korthikanti et al., arXiv
2205.05198, section 4.2: with the residual stream split on the sequence each becomes a reduce-scatter and an all-gather.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

import shardlib as sl
from examples.gpt import GPT, GPTConfig
from tests.families.transformer_models import build

BLOCKS = 2


@dataclass(frozen=True)
class Family:
    """A model's name in transformers ("" for the example GPT), its layout file, and what its blocks call things."""

    name: str
    layout: str
    blocks: str
    norms: tuple[str, str]
    rows: tuple[str, str]

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        example = GPTConfig(vocab_size=30, context=10, n_layer=BLOCKS, d_model=32)
        return (build(self.name, "sdpa") if self.name else GPT(example)).double()

    def rules(self, *, split_sequence: bool) -> sl.Rules:
        known = sl.layouts.load(self.layout)
        if not split_sequence:
            return known
        borders = {f"{self.blocks}.*.{norm}.output": "batch seq embed" for norm in self.norms}
        borders |= {f"{self.blocks}.*.{row}.output": "batch seq@tp embed" for row in self.rows}
        borders |= {f"{self.blocks}.*.output": "batch seq@tp embed"}
        optional = [key for key in known.optional if key in known.rules]
        return sl.Rules({**known.rules, **borders}, axes=known.axes, sizes=known.sizes, optional=optional)


FAMILIES = [
    Family("", "example_gpt", "blocks", ("norm1", "norm2"), ("attn.proj", "mlp.down")),
    Family("GPT2LMHeadModel", "gpt2", "transformer.h", ("ln_1", "ln_2"), ("attn.c_proj", "mlp.c_proj")),
    Family(
        "LlamaForCausalLM",
        "llama",
        "model.layers",
        ("input_layernorm", "post_attention_layernorm"),
        ("self_attn.o_proj", "mlp.down_proj"),
    ),
]

IDS = torch.randint(3, 30, (4, 10), generator=torch.Generator().manual_seed(0))
WHOLE = IDS.numel() * 32 * 8  # bytes of a residual stream in float64
NAMES = {"all_reduce": "all_reduce", "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}


def _loss(model: nn.Module) -> torch.Tensor:
    output = model(IDS)
    return (output if isinstance(output, torch.Tensor) else output.logits).square().mean()


def _measure(family: Family, split_sequence: bool) -> tuple[Counter[str], float]:
    """PyTorch's own count in one training step, and how far the loss is from one device's."""
    model, rules = family.make(), family.rules(split_sequence=split_sequence)
    wanted = _loss(copy.deepcopy(model)).item()
    sharded = sl.shard_model(model, "tp=2", rules, compile=None)
    _loss(sharded).backward()
    sharded.zero_grad()
    with CommDebugMode() as mode:
        loss = _loss(sharded)
        loss.backward()
    counts: Counter[str] = Counter()
    for op, count in mode.get_comm_counts().items():
        name = str(op).rpartition(".")[2]
        counts[NAMES.get(name, name.removesuffix("_").replace("allreduce", "all_reduce"))] += count
    return counts, abs(loss.item() / wanted - 1)


def _predict(family: Family, split_sequence: bool) -> tuple[sl.Collective, ...]:
    ids = "input_ids" if family.name else "ids"
    made = sl.plan(family.make(), "tp=2", family.rules(split_sequence=split_sequence), example={ids: IDS})
    assert made.report is not None
    return made.report.collectives


def _of_block(predicted: Any, family: Family, index: int) -> list[Any]:
    inside = re.compile(rf"{re.escape(family.blocks)}\.{index}(\.|$)")
    return [c for c in predicted if inside.match(c.module)]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.layout)
def test_a_block_costs_four_all_reduces(ranks, family: Family):
    predicted = _predict(family, False)
    for index in range(BLOCKS):
        mine = _of_block(predicted, family, index)
        assert [(c.kind, c.phase, c.bytes) for c in mine] == [
            ("all_reduce", phase, WHOLE) for phase in ("forward", "forward", "backward", "backward")
        ]
    for counts, off in ranks(2).run(_measure, family, False):
        assert counts == Counter(c.kind for c in predicted)
        assert off < 1e-12


@pytest.mark.parametrize(
    "family",
    [FAMILIES[0], pytest.param(FAMILIES[1], marks=pytest.mark.deep), FAMILIES[2]],
    ids=lambda family: family.layout,
)
def test_with_the_sequence_split_each_is_a_reduce_scatter_and_an_all_gather(ranks, family: Family):
    """A reduce-scatter is given the whole, an all-gather a rank's half: together they send what an all-reduce sends."""
    predicted = _predict(family, True)
    last = _of_block(predicted, family, BLOCKS - 1)
    sent = Counter((c.phase, c.kind, c.bytes) for c in last)
    assert sent == {
        ("forward", "all_gather", WHOLE // 2): 2,
        ("forward", "reduce_scatter", WHOLE): 2,
        ("backward", "all_gather", WHOLE // 2): 2,
        ("backward", "reduce_scatter", WHOLE): 2,
    }
    for counts, off in ranks(2).run(_measure, family, True):
        assert counts == Counter(c.kind for c in predicted)
        assert off < 1e-12

"""Modes of layout files split the sequence: over tp between blocks, or over sp throughout."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

import shardlib as sl
from shardlib.errors import RuleError
from tests.engine import models
from tests.engine.same_numbers import differences
from tests.families.test_transformers import _ADAMW, Case
from tests.families.transformer_models import build, text

TOLERANCE = 1e-10  # of float64; sums in another order differ by some 1e-15
LAYOUTS = {
    "GPT2LMHeadModel": "gpt2",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "BertForMaskedLM": "bert",
    "ViTForImageClassification": "vit",
}
GPT2, LLAMA, MISTRAL, BERT, VIT = LAYOUTS


@dataclass(frozen=True)
class Mode:
    """One run: a model in a mode of its layout on a mesh. Texts are 10 tokens long, images 5 patches: uneven over 4."""

    model: str
    mode: str
    mesh: str
    attention: str = "sdpa"
    padding: str | None = None
    compile: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = (self.model, self.mode, self.mesh, self.attention, self.padding, self.compile)
        return " ".join(str(part) for part in (*parts, *self.settings) if part)

    @property
    def case(self) -> Case:
        return Case(
            self.model, self.attention, self.mesh, padding=self.padding, compile=self.compile, settings=self.settings
        )


TP2, SP2, CP2, SP4, BOTH = "tp=2", "sp=2", "cp=2", "sp=4", "tp=2,sp=2"
DROPOUT = {"attn_pdrop": 0.2, "embd_pdrop": 0.2, "resid_pdrop": 0.2}

CASES = [
    Mode(GPT2, "sequence", "tp=4", padding="left"),
    Mode(GPT2, "sequence", TP2, attention="eager", compile="auto"),
    Mode(LLAMA, "sequence", "dp=2,tp=2", padding="right"),
    Mode(BERT, "sequence", TP2, padding="right"),
    Mode(VIT, "sequence", TP2),
    Mode(GPT2, "ulysses", BOTH, padding="right"),
    Mode(GPT2, "ulysses", SP2, settings=DROPOUT),
    Mode(LLAMA, "ulysses", BOTH, padding="left"),
    Mode(LLAMA, "ulysses", SP4),  # fewer key heads than ranks
    Mode(LLAMA, "ulysses", "dp=2,sp=2", attention="eager", padding="right"),
    Mode(LLAMA, "ulysses", SP2, compile="auto"),
    Mode(BERT, "ulysses", BOTH, padding="left"),
    Mode(VIT, "ulysses", SP2),
    Mode(LLAMA, "gather", BOTH),  # a causal mask for each rank's own queries
    Mode(MISTRAL, "gather", SP2),  # and one with a window
    Mode(BERT, "gather", SP2, attention="eager", padding="right"),
    Mode(VIT, "gather", BOTH),
    Mode(LLAMA, "ring", "cp=4", padding="left"),
    Mode(GPT2, "ring", CP2, settings=DROPOUT),
    Mode(BERT, "ring", CP2, padding="right"),
    Mode(LLAMA, "ring", "tp=2,cp=2", settings={"num_key_value_heads": 1}),
]
MORE = [
    Mode(LLAMA, "ring", "cp=3"),  # pieces of 4, 4 and 2, whose halves are traded
    Mode(LLAMA, "ring", "dp=2,cp=2", attention="eager"),
    Mode(LLAMA, "ring", CP2, compile="auto"),
    Mode(MISTRAL, "ring", "cp=4"),
    Mode(GPT2, "ring", "tp=2,cp=2"),
    Mode(VIT, "ring", CP2, compile="auto"),
]


def _train(run: Mode) -> dict[str, float]:
    rules = sl.layouts.load(LAYOUTS[run.model], run.mode)
    case = run.case

    def seeded() -> torch.nn.Module:
        model = case.make_model()
        model.register_forward_pre_hook(lambda *_: torch.manual_seed(7) and None)  # of dropout
        return model

    return differences(seeded, case.make_batch, case.loss, case.mesh, rules, compile=case.compile, optimizer=_ADAMW)


@pytest.mark.parametrize("run", [*CASES, *(pytest.param(run, marks=pytest.mark.deep) for run in MORE)], ids=str)
def test_training_gives_the_numbers_of_one_device(ranks, run: Mode):
    for found in ranks(run.case.world_size).run(_train, run):
        assert max(found.values()) <= TOLERANCE, {name: off for name, off in found.items() if off > TOLERANCE}


IDS = torch.randint(3, 30, (4, 12), generator=torch.Generator().manual_seed(0))


def _collectives(model: str, mode: str, mesh: str) -> tuple[Counter[str], Counter[str], float]:
    """Of the forward pass; of both, but for sums of parameters' gradients; and how far logits are from one device's."""
    torch.manual_seed(0)
    one = build(model, "sdpa").double() if model else models.gpt(n_layer=2, d_model=32, context=12).double()
    sharded = sl.shard_model(copy.deepcopy(one), mesh, sl.layouts.load(LAYOUTS.get(model, "example_gpt"), mode))
    wanted, _ = _logits(one), _logits(sharded).sum().backward()
    with CommDebugMode() as counting:
        logits = _logits(sharded)
        forward = _counts(counting)
        models.spread(logits).backward()
    return forward, _counts(counting) - forward, (logits - wanted).abs().max().item()


def _logits(model: torch.nn.Module) -> torch.Tensor:
    output = model(IDS)
    return output if isinstance(output, torch.Tensor) else output.logits


def _counts(counting: CommDebugMode) -> Counter[str]:
    return Counter({str(op).rpartition(".")[2]: count for op, count in counting.get_comm_counts().items()})


BLOCKS = 2


@pytest.mark.parametrize("model", [GPT2, LLAMA, ""], ids=lambda model: model or "example_gpt")
def test_the_residual_stream_is_gathered_and_scattered_twice_a_block(ranks, model: str):
    """Korthikanti et al., arXiv 2205.05198, section 4.2.2. Beside the blocks: the embedding is scattered, the last
    norm's output and the logits are gathered."""
    for forward, _, off in ranks(2).run(_collectives, model, "sequence", TP2):
        assert off < TOLERANCE
        assert forward["reduce_scatter_tensor"] == 2 * BLOCKS + 1
        assert forward["all_gather_into_tensor"] == 2 * BLOCKS + 2
        assert forward["all_reduce"] == forward["all_to_all_single"] == 0


@pytest.mark.parametrize(("model", "fused"), [(GPT2, True), (LLAMA, False), ("", True)])
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


def _train_packed(mode: str, mesh: str, by: str) -> dict[str, float]:
    case = Case(LLAMA, "sdpa", mesh)
    rules = sl.layouts.load("llama", mode)
    return differences(case.make_model, partial(_packed, by), case.loss, mesh, rules, optimizer=_ADAMW, steps=1)


@pytest.mark.parametrize(
    ("mode", "mesh", "by"),
    [("gather", SP2, "mask"), ("ulysses", SP2, "mask"), ("ring", CP2, "mask"), ("ring", CP2, "positions")],
)
def test_packed_documents_see_themselves_alone(ranks, mode: str, mesh: str, by: str):
    for found in ranks(2).run(_train_packed, mode, mesh, by):
        assert max(found.values()) <= TOLERANCE, {name: off for name, off in found.items() if off > TOLERANCE}


def test_a_mode_is_a_layout():
    known = sl.layouts.load("llama")
    assert set(known.modes) == {"sequence", "ulysses", "gather", "ring", "grid"}
    chosen = known.mode("ulysses")
    assert chosen == sl.layouts.load("llama", mode="ulysses") == sl.layouts.for_model(build(LLAMA), "ulysses")
    border = chosen.resolve(build(LLAMA), "tp=2,sp=2").borders["model.layers.0.self_attn.q_proj", "output"]
    assert str(border.layout) == "batch whole (all_heads@(tp,sp) head)"
    with pytest.raises(RuleError, match=r'"ulyses" was asked for .* Did you mean "ulysses"\?'):
        known.mode("ulyses")

"""Stages train the numbers of one device: every schedule, with every other axis and transform."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.errors import PlanError
from shardlib.testing import assert_equivalent
from shardlib.testing.models import Tokens, Transformer, rules_for
from shardlib.testing.strategies import ModelFactory

SIZES = (("vocab", 7), ("heads", 2), ("head", 4), ("layers", 6), ("bias", False))
GPT = ModelFactory(Transformer, SIZES)
TIED = ModelFactory(Transformer, (*SIZES, ("tied", True)))
ROTARY = ModelFactory(Transformer, (*SIZES, ("position", "rotary"), ("kv_heads", 1)))
FIVE_IN_THREE = 3  # microbatches of two, two and one row


def prove(factory: Any, mesh: str, *transforms: Any, stages: Any = None, rows: int = 5, **given: Any) -> None:
    ranks = sl.MeshShape(mesh)
    rules = rules_for(factory()).with_stages(stages or sl.rules.Balanced())
    rows *= ranks.data_ranks
    assert_equivalent(factory, Tokens(rows, 4, 7), mesh, rules, transforms=transforms, steps=2, **given)


FOUR = "embed, position, blocks.0 | blocks.1-2 | blocks.3-4 | blocks.5, norm, head"
EIGHT = "embed, position | blocks.0 | blocks.1 | blocks.2 | blocks.3 | blocks.4 | blocks.5 | norm, head"


@pytest.mark.covering
@pytest.mark.parametrize(
    ("schedule", "mesh", "stages"),
    [
        ("gpipe", "pp=2", "embed, position, blocks.0-2 | blocks.3-5, norm, head"),
        ("gpipe", "pp=4", FOUR),
        ("1f1b", "pp=2", sl.rules.Balanced([2, 4])),
        ("1f1b", "pp=4", FOUR),
        ("interleaved", "pp=2", FOUR),
        ("interleaved", "pp=4", EIGHT),
        ("interleaved-zb", "pp=2", FOUR),
        ("interleaved-zb", "pp=4", EIGHT),
        ("zbv", "pp=2", FOUR),
        ("zbv", "pp=4", EIGHT),
    ],
)
def test_every_schedule(schedule: str, mesh: str, stages: Any):
    """The embedding is the output layer: on the first stage and on the last one."""
    count = 4 if "interleaved" in schedule and mesh == "pp=2" else 5
    prove(TIED, mesh, sl.pipeline(schedule, count), stages=stages, rows=7, clip=0.5)


@pytest.mark.parametrize(
    ("mesh", "transforms"),
    [
        ("pp=2,tp=2", ()),
        ("pp=2,dp=2", (sl.zero(1),)),
        ("dp=2,pp=2", (sl.zero(2),)),
        pytest.param("dp=2,pp=2", (sl.zero(3),), marks=pytest.mark.deep),
        ("dp=2,pp=2", (sl.zero(3), sl.checkpoint_activations())),
        ("pp=2,dp=2", (sl.zero(1), sl.pipeline("gpipe"))),
    ],
)
def test_with_other_axes(mesh: str, transforms: tuple[Any, ...]):
    prove(TIED, mesh, *transforms, clip=0.5)


@pytest.mark.covering
@pytest.mark.parametrize("schedule", ["interleaved-zb", "zbv"])
@pytest.mark.parametrize(
    ("mesh", "transforms"),
    [
        ("pp=2,tp=2", ()),
        ("dp=2,pp=2", (sl.zero(2),)),
        pytest.param("dp=2,pp=2", (sl.zero(3),), marks=pytest.mark.deep),
        ("dp=2,pp=2", (sl.zero(3), sl.checkpoint_activations())),
        pytest.param("pp=2", (sl.checkpoint_activations(),), marks=pytest.mark.deep),
        ("dp=2,pp=2", (sl.fsdp(), sl.accumulate(2))),
    ],
)
def test_late_gradients_of_weights_with_other_axes(mesh: str, transforms: tuple[Any, ...], schedule: str):
    prove(TIED, mesh, *transforms, sl.pipeline(schedule, 4), stages=FOUR)


@pytest.mark.covering
@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("transforms", [(), (sl.zero(2),)], ids=str)
def test_several_backward_passes_make_a_step(transforms: tuple[Any, ...], no_sync: bool):
    prove(TIED, "dp=2,pp=2", *transforms, accumulate=2, no_sync=no_sync)


def test_buffers_that_every_stage_needs():
    prove(ROTARY, "pp=2", sl.pipeline("1f1b", FIVE_IN_THREE))


def _frozen(model: torch.nn.Module, step: int) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_(step > 0 or not name.startswith(("embed", "head", "blocks.0", "blocks.1")))


def test_frozen_parameters_and_thawed_ones():
    prove(TIED, "pp=2", sl.pipeline("1f1b", 2), before_step=_frozen)
    prove(GPT, "dp=2,pp=2", sl.zero(1), before_step=_frozen)


def sequential() -> torch.nn.Module:
    sizes = [(6, 8), (8, 8), (8, 8), (8, 5)]
    return torch.nn.Sequential(*(layer for a, b in sizes for layer in (torch.nn.Linear(a, b), torch.nn.Tanh())))


def rows(step: int) -> torch.Tensor:
    return torch.randn(7, 6, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("stages", ["0-2 | 3-7", "0-3 | 4-7", sl.rules.Balanced()])
def test_a_sequential(stages: Any):
    """The Tanh between stages is on either side."""
    rules = sl.Rules({"**": None}, stages=stages)
    assert_equivalent(sequential, rows, "pp=2", rules, transforms=(sl.pipeline("1f1b", 3),), steps=2)


def twice() -> torch.nn.Module:
    """One layer stands in two places, with others beside it."""
    layer = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6, affine=False))
    return torch.nn.Sequential(layer, torch.nn.Tanh(), layer, torch.nn.Linear(6, 5))


class Halves(torch.nn.Module):
    """Both halves have the same embedding, and read the batch by it."""

    def __init__(self) -> None:
        super().__init__()
        embed = torch.nn.Embedding(7, 6)
        self.a, self.b = (torch.nn.ModuleDict({"embed": embed, "block": torch.nn.Linear(6, 6)}) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.a["block"](self.a["embed"](ids)).tanh()
        return self.b["block"](self.b["embed"](ids) + x)


@pytest.mark.parametrize("transform", [sl.zero(1), sl.zero(3)], ids=str)
def test_a_module_that_stages_have_in_common(transform: Any):
    rules = sl.Rules({"**": None}, stages="a.embed, a.block | b.block, b.embed")
    assert_equivalent(Halves, Tokens(8, 4, 7), "dp=2,pp=2", rules, transforms=(transform,), steps=2)


@pytest.mark.parametrize("transforms", [(), (sl.zero(3),)], ids=str)
def test_a_module_that_runs_twice_on_a_stage(transforms: Any):
    rules = sl.Rules({"**": None}, stages="0-2 | 3")
    mesh = "dp=2,pp=2" if transforms else "pp=2"
    transforms = (sl.pipeline("1f1b", 1), *transforms)
    assert_equivalent(twice, lambda step: rows(step)[:6], mesh, rules, transforms=transforms, steps=2)


def _on_two_stages() -> str:
    model = sl.shard_model(twice(), "pp=2", sl.Rules({"**": None}, stages="0-1 | 2-3"))
    with pytest.raises(PlanError) as raised:
        sl.pipeline_step(model, rows(0), lambda output, _: output.mean(), microbatches=2)
    return str(raised.value)


def test_a_module_on_two_stages_is_refused(ranks):
    for said in ranks(2).run(_on_two_stages):
        assert said == (
            "Stage 1 (2, 3, ...) is given nothing by the stages before it: no call of its modules in the forward of "
            'Sequential takes what they make. "2" is the same module as "0" on stage 0, and a stage calls the modules '
            "that it has by itself. Put both on one stage; or make two modules with the same parameters, which stages "
            "train as one: other = copy.deepcopy(module); other.weight = module.weight."
        )


class Headless(torch.nn.Module):
    """Its last stage has large tensors only, each of which is a bucket of its own."""

    def __init__(self, width: int = 384) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, width)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x).tanh()
        return x


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_model_without_a_head(stage: int):
    transforms = (sl.pipeline("1f1b", 2), *([sl.zero(stage)] if stage else []))
    rules = sl.Rules({"**": None}, stages="embed | blocks.0-2" if stage == 1 else "embed, blocks.0 | blocks.1-2")
    assert_equivalent(Headless, Tokens(8, 4, 7), "dp=2,pp=2", rules, transforms=transforms, steps=2)


def test_blocks_may_be_compiled_besides():
    prove(TIED, "pp=2,tp=2", sl.pipeline("1f1b", 2), rows=4, compile="auto")

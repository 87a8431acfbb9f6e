"""Experts on ranks of their own: tokens of every rank go to them, and the numbers are those of one device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardlib as sl
from shardlib.testing import assert_equivalent
from shardlib.transforms import parse
from tests.engine.whole import gradients
from tests.families.transformer_models import FAMILIES, MIXTURE, transformers

_ROWS, _SEQ = 8, 6


@dataclass(frozen=True)
class Case:
    """`experts` is transformers' way of computing them: a loop over those that are hit, or one batched product."""

    family: str
    mesh: str
    transforms: str = ""
    experts: str = "eager"
    mode: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join(filter(None, (self.family, self.mesh, self.transforms, self.experts, self.mode)))

    def make_model(self) -> nn.Module:
        config = getattr(transformers, f"{self.family}Config")
        cls = getattr(transformers, f"{self.family}ForCausalLM")
        settings = {**MIXTURE, **FAMILIES[self.family], **self.settings}
        model = cls._from_config(config(**settings), experts_implementation=self.experts).train()
        with torch.no_grad():  # far enough from where weights start that nothing is lost in the noise
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        return model

    def made(self) -> Iterator[Any]:
        return map(parse, filter(None, [self.transforms]))


def batch(step: int, **more: Any) -> Any:
    draw = torch.Generator().manual_seed(step)
    return {"input_ids": torch.randint(3, MIXTURE["vocab_size"], (_ROWS, _SEQ), generator=draw), **more}


def loss(model: nn.Module, given: Any) -> torch.Tensor:
    logits = model(**given).logits
    return logits.sin().mean() + logits.square().mean()


_ONE_LAYER = {"num_hidden_layers": 1}
# Every family, and every transform, with two layers once.
CASES = [
    Case("Mixtral", "dp=2,ep=2", "zero(3)"),
    Case("Mixtral", "ep=2,tp=2", "zero(1)", "batched_mm", settings=_ONE_LAYER),
    Case("Qwen2Moe", "ep=2"),
    Case("Qwen3Moe", "ep=4", settings=_ONE_LAYER),
    Case("DeepseekV3", "ep=2,tp=2", "zero(2)"),
    Case("Mixtral", "ep=2,tp=2", mode="sequence", settings=_ONE_LAYER),
]
SWEEP = [
    Case(family, mesh, transforms, experts)
    for family in FAMILIES
    for mesh, transforms, experts in [
        ("dp=2,ep=2", "", "batched_mm"),
        ("dp=2,ep=2", "zero(2)", "eager"),
        ("ep=2,tp=2", "fsdp()", "eager"),
        ("tp=2", "", "eager"),
        ("ep=2,dp=2", "zero(3)", "eager"),
    ]
]
SWEEP += [
    Case("Mixtral", "dp=2,ep=2", "zero(1)"),
    Case("Mixtral", "ep=2,tp=2", "", "batched_mm"),
    Case("DeepseekV3", "dp=2,tp=2", "zero(1)", mode="sequence"),
    Case("Mixtral", "ep=2"),
    Case("DeepseekV3", "dp=2,tp=2"),
    Case("Qwen3Moe", "tp=2", mode="sequence"),
    *(Case(family, "tp=4", mode="sequence") for family in ("Qwen2Moe", "DeepseekV2")),
]


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.deep) for case in SWEEP)], ids=str)
def test_training_gives_the_numbers_of_one_device(case: Case):
    assert_equivalent(
        case.make_model,
        batch,
        mesh=case.mesh,
        rules=sl.layouts.for_model(case.make_model(), case.mode),
        transforms=[*case.made()],
        loss=loss,
        clip=0.5,
        steps=2,
    )


def _by_the_grouped_kernel() -> tuple[float, float]:
    """How far the mean loss over ranks, and the gradient that is farthest off, are from those of one device."""
    case = Case("Mixtral", "ep=2", experts="grouped_mm", settings={"intermediate_size": 32})
    torch.manual_seed(0)
    alone = case.make_model()
    model = sl.shard_model(copy.deepcopy(alone), case.mesh)
    want = loss(alone, batch(0))
    got = loss(model, {"input_ids": batch(0)["input_ids"].chunk(2)[dist.get_rank()]})
    want.backward()
    got.backward()
    mean = got.detach().clone()
    dist.all_reduce(mean)
    found, wanted = gradients(model), gradients(alone)
    off = max(((found[name] - grad).abs().max() / grad.abs().max()).item() for name, grad in wanted.items())
    return abs(mean / 2 / want.detach() - 1).item(), off


def test_the_kernel_that_transformers_chooses_by_itself_runs_on_what_came(ranks):
    """It refuses float64, and rows that are no multiples of 16 bytes. Rounding is 6e-8 of a result, and some ten layers
    of sums of a hundred terms reorder; a bug is of order one."""
    for of_loss, of_gradients in ranks(2).run(_by_the_grouped_kernel):
        assert of_loss < 1e-4 and of_gradients < 1e-4


# --- the router's balance loss ---------------------------------------------------------------------------------------


def _losses(mesh: str) -> tuple[float, float]:
    """How far the mean over ranks of the balance loss, and the routers' gradients, are from those of one device."""
    torch.manual_seed(0)
    alone = Case("Mixtral", mesh).make_model()
    shape = sl.MeshShape(mesh)
    model = sl.shard_model(copy.deepcopy(alone), mesh)
    given = batch(0)["input_ids"]
    mask = (torch.arange(_SEQ) < (torch.arange(_ROWS) + 1)[:, None]).long()  # ranks have other numbers of tokens
    index, count = shape.data_place(shape.coordinate(dist.get_rank()))
    want = alone(input_ids=given, attention_mask=mask, output_router_logits=True).aux_loss
    mine = {"input_ids": given.chunk(count)[index], "attention_mask": mask.chunk(count)[index]}
    got = model(**mine, output_router_logits=True).aux_loss
    want.backward()
    got.backward()
    mean = got.detach().clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    pairs = zip(alone.model.layers, model.model.layers, strict=True)
    gates = [(a.mlp.gate.weight.grad, b.mlp.gate.weight.grad) for a, b in pairs]
    return abs(mean / want.detach() - 1).item(), max(((b - a).abs().max() / a.abs().max()).item() for a, b in gates)


@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,ep=2"])
def test_the_balance_loss_is_that_of_all_tokens(ranks, mesh: str):
    """transformers computes it in float32, of a few dozen tokens: roundings are below 1e-6 of it, a rank's own loss is
    off by a hundredth and more."""
    for of_loss, of_gradients in ranks(sl.MeshShape(mesh).world_size).run(_losses, mesh):
        assert of_loss < 1e-5 and of_gradients < 1e-4


def _untouched() -> tuple[bool, bool]:
    """A model that nobody sharded has its own tokens' loss, also after another was sharded."""
    torch.manual_seed(0)
    alone = Case("Mixtral", "ep=2").make_model()
    given = {"input_ids": batch(dist.get_rank())["input_ids"], "output_router_logits": True}
    before = alone(**given).aux_loss
    model = sl.shard_model(copy.deepcopy(alone), "ep=2")
    changed = model(**given).aux_loss
    return torch.equal(alone(**given).aux_loss, before), torch.equal(changed, before)


def test_models_that_nobody_sharded_keep_their_own_balance_loss(ranks):
    assert ranks(2).run(_untouched) == [(True, False)] * 2


# --- layout files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["qwen_moe", "deepseek"])
def test_each_class_that_a_file_is_for_finds_it_and_fits_it(file: str):
    rules = sl.layouts.load(file)
    for entry in rules.models:
        model = entry.rpartition(".")[2]
        cls = getattr(transformers, model)
        family = next(family for family in FAMILIES if model.startswith(family))
        with torch.device("meta"):
            made = cls(cls.config_class(**{**MIXTURE, **FAMILIES[family]}))
        assert sl.layouts.for_model(made) == rules, entry
        rows = {
            row.name.removeprefix("model.").removeprefix("transformer."): row
            for row in sl.plan(made, "dp=2,ep=2,tp=2").rows
        }
        assert str(rows["layers.1.mlp.experts.gate_up_proj"].compute) == "expert@ep (gate_up ff@tp) embed", entry
        assert str(rows["layers.1.mlp.experts.down_proj"].compute) == "expert@ep embed ff@tp", entry
        assert rows["layers.1.mlp.gate.weight"].stored.axes == frozenset(), entry


# The smallest product that the kernel takes: its rows are multiples of 16 bytes.
_STAGED = Case("Mixtral", "pp=2,ep=2", experts="grouped_mm", settings={"num_local_experts": 4})


def _staged(dtype: torch.dtype) -> tuple[float, float]:
    """The loss of two stages in a dtype, and that of one device in float32."""
    torch.manual_seed(0)
    alone = _STAGED.make_model()
    rules = sl.layouts.load("mixtral").with_stages(sl.rules.Balanced())
    model = sl.shard_model(copy.deepcopy(alone).to(dtype), _STAGED.mesh, rules, transforms=[sl.pipeline("1f1b", 2)])
    mine = batch(0)["input_ids"].chunk(2)[dist.get_rank() % 2]
    done = sl.pipeline_step(model, {"input_ids": mine}, lambda output, _: output.logits.float().square().mean())
    assert all(param.grad is not None and param.grad.isfinite().all() for param in model.parameters())
    return done.loss.item(), alone(**batch(0)).logits.square().mean().item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_stages_with_grouped_products_in_every_dtype_of_the_kernel(ranks, dtype: torch.dtype):
    """The shape function of PyTorch, by which stages learn what the others send, takes bfloat16 alone."""
    for got, want in ranks(4).run(_staged, dtype):
        assert got == pytest.approx(want, rel=2**-7 if dtype is torch.float16 else 1e-5)
    rules = sl.layouts.load("mixtral").with_stages(sl.rules.Balanced())
    model = _STAGED.make_model().to(dtype)
    found = sl.plan(model, _STAGED.mesh, rules, transforms=[sl.pipeline("1f1b", 2)], example=batch(0))
    assert found.report is not None

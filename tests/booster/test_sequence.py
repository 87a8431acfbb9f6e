"""The ways of plugins to split a sequence: each trains a model of transformers as one device does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardlib as sl
from shardlib.booster import Booster, GeminiPlugin, HybridParallelPlugin
from shardlib.errors import PlanError, RuleError
from tests.families.transformer_models import VOCABULARY, build

STEPS, ROWS, LENGTH = 2, 4, 9  # two ranks cut nine tokens unevenly
TOLERANCE = 1e-10  # of float64; sums in another order differ by some 1e-15


def llama() -> nn.Module:
    torch.manual_seed(0)
    return build("LlamaForCausalLM", "sdpa", use_cache=False).double()


def texts(step: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


def criterion(output: Any, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)  # nothing that is noise is divided by itself


def plainly() -> tuple[list[float], dict[str, torch.Tensor]]:
    model = llama()
    optimizer, losses = adamw(model), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = criterion(model(texts(step)), texts(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


SPLIT = {"enable_sequence_parallelism": True, "precision": "fp32", "max_norm": 0.5}
PLUGINS: dict[str, Any] = {
    "split_gather": lambda: HybridParallelPlugin(tp_size=2, zero_stage=1, **SPLIT),
    "all_to_all": lambda: HybridParallelPlugin(sp_size=2, zero_stage=3, **SPLIT),
    "all_to_all beside tp": lambda: HybridParallelPlugin(
        tp_size=2, sp_size=2, sequence_parallelism_mode="all_to_all", **SPLIT
    ),
    "ring_attn": lambda: HybridParallelPlugin(sp_size=2, sequence_parallelism_mode="ring_attn", **SPLIT),
    "ring in stages": lambda: HybridParallelPlugin(
        tp_size=2, pp_size=2, num_microbatches=2, sequence_parallelism_mode="ring", **SPLIT
    ),
    "gemini": lambda: GeminiPlugin(tp_size=2, **SPLIT),
}


def trained(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    booster, model = Booster(plugin=PLUGINS[name]()), llama()
    model, optimizer, _, _, _ = booster.boost(model, adamw(model), criterion)
    shape = sl.get_plan(model).mesh
    index, count = shape.data_place(shape.coordinate(dist.get_rank()))
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        mine = texts(step).chunk(count)[index]
        if "pp" in shape:
            loss = booster.execute_pipeline(iter([mine]), model, criterion, optimizer)["loss"]
        else:
            loss = criterion(model(mine), mine)
            booster.backward(loss, optimizer)
            dist.all_reduce(loss.detach_())
            loss = loss / dist.get_world_size()
        optimizer.step()
        losses.append(loss.item())
    return losses, sl.full_state_dict(model)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.deep) if name == "gemini" else name for name in PLUGINS]
)
def test_a_split_sequence_trains_the_numbers_of_one_device(ranks, name: str):
    losses, weights = plainly()
    for mine, state in ranks(4).run(trained, name):
        assert mine == pytest.approx(losses, rel=TOLERANCE)
        assert all(torch.allclose(state[key], weights[key], rtol=0, atol=TOLERANCE) for key in weights)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"sp_size": 2}, PlanError, "with enable_sequence_parallelism=True"),
        ({"sequence_parallelism_mode": "ring"}, PlanError, "with enable_sequence_parallelism=True"),
        ({**SPLIT}, PlanError, "'split_gather' shards the sequence over the ranks of tp; give tp_size above 1"),
        ({**SPLIT, "tp_size": 2, "sp_size": 4, "sequence_parallelism_mode": "ring"}, PlanError, "and no sp_size"),
        ({**SPLIT, "tp_size": 2, "sequence_parallelism_mode": "all_to_all"}, PlanError, "give sp_size above 1"),
        ({**SPLIT, "sp_size": 2, "sequence_parallelism_mode": "ring_atn"}, PlanError, 'Did you mean "ring_attn"'),
        ({**SPLIT, "sp_size": 2, "custom_policy": {"**": None}}, RuleError, '\'?"ulysses" was asked for as a mode'),
    ],
)
def test_what_is_refused(options: dict[str, Any], error: type[Exception], said: str):
    with pytest.raises(error, match=said):
        plugin = HybridParallelPlugin(**options)
        plugin.mesh_shape()
        plugin.rules(llama())
    with pytest.raises(PlanError, match="give tp_size above 1"):
        GeminiPlugin(**SPLIT).rules(llama())


def test_a_way_to_split_is_not_used_where_nothing_is_split():
    """Scripts give `sp_size=1` and a way to split by default."""
    plugin = HybridParallelPlugin(2, 1, sp_size=1, sequence_parallelism_mode="all_to_all")
    plain = HybridParallelPlugin(2, 1)
    assert plugin.mesh_shape() == plain.mesh_shape() and repr(plugin.rules(llama())) == repr(plain.rules(llama()))

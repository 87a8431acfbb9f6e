"""Modules of TorchScript inside a model: trained as on one device where their tensors stay, and refused by name
elsewhere."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardlib as sl
from shardlib.errors import ShardingError
from shardlib.transforms import Transform
from tests.engine.whole import whole


class Net(nn.Module):
    """Has a part that was scripted, or traced."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        part = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.part = torch.jit.script(part) if how == "scripted" else torch.jit.trace(part, torch.ones(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(self.down(self.up(x)))


def _gradients(how: str, mesh: str | None, rules: Any = None, transforms: Any = ()) -> Any:
    """The gradients on this rank after a step on its rows, or the message of the error."""
    torch.manual_seed(0)
    model, rows = Net(how).double(), torch.randn(4, 4, dtype=torch.float64)
    if mesh is not None:
        try:
            sl.shard_model(model, mesh, rules, transforms=transforms)
        except ShardingError as error:
            assert not any(isinstance(param, torch.distributed.tensor.DTensor) for param in model.parameters())
            return str(error)
        rows = rows.chunk(2)[dist.get_rank()] if "dp" in mesh else rows
    model(rows).square().mean().backward()
    return {name: whole(param.grad) for name, param in model.named_parameters()}


WHOLE = {"**": None}
SPLIT = {"up": "colwise", "down": "rowwise", "part.**": None}


@pytest.mark.parametrize(
    ("how", "mesh", "rules", "transforms"),
    [
        ("scripted", "dp=2", WHOLE, ()),
        ("traced", "dp=2", WHOLE, sl.zero(2)),
        ("scripted", "dp=2", WHOLE, (sl.zero(3), sl.replicate("part"))),
        ("scripted", "tp=2", {"up": None, "down": "rowwise", "part.**": None}, ()),
    ],
)
def test_a_part_whose_tensors_stay_trains_as_on_one_device(
    ranks, how: str, mesh: str, rules: Any, transforms: Transform
):
    expected = _gradients(how, None)
    for found in ranks(2).run(_gradients, how, mesh, rules, transforms):
        assert found.keys() == expected.keys()
        assert all(torch.allclose(found[name], value, atol=1e-12) for name, value in expected.items())


@pytest.mark.parametrize(
    ("how", "mesh", "rules", "transforms", "would_be"),
    [
        ("scripted", "dp=2", WHOLE, sl.zero(3), 'stored as "_@dp _"'),
        ("traced", "dp=2", WHOLE, sl.fsdp(), 'stored as "_@dp _"'),
        ("scripted", "tp=2", SPLIT, (), "a DTensor"),
    ],
)
def test_a_part_whose_tensors_would_be_replaced_is_refused(
    ranks, how: str, mesh: str, rules: Any, transforms: Any, would_be: str
):
    kind = {"scripted": "RecursiveScriptModule", "traced": "TopLevelTracedModule"}[how]
    assert set(ranks(2).run(_gradients, how, mesh, rules, transforms)) == {
        f'"part" is a module of TorchScript ({kind}), which computes with tensors of its own, and "part.0.weight" '
        f"would be {would_be}. Shard the model before torch.jit.script or torch.jit.trace, or without it; or keep "
        "these tensors replicated: data axes with zero(2) or a lower stage, or "
        'sl.zero(3) | sl.replicate("part").'
    }

"""What stands around the calls of a sharded model's modules, in which order, and that most have nothing."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardlib as sl
from shardlib.engine import _torch
from shardlib.errors import InputError
from shardlib.testing.models import Transformer, rules_for


def _around(module: nn.Module) -> list[str]:
    """The wrappers of a module's calls, the outermost first."""
    call, found = _torch.compiled_call(module), []
    while isinstance(call, functools.partial):
        found.append(f"{call.func.__module__.rpartition('.')[2]}.{call.func.__qualname__}")
        call = call.args[-1]
    return found


def _all_around(mesh: str, transforms: tuple[Any, ...], **given: Any) -> dict[str, list[str]]:
    torch.manual_seed(0)
    model = Transformer(vocab=7, heads=2, head=4, layers=2)
    rules = rules_for(model)
    rules = rules.with_stages("embed, position, blocks.0 | blocks.1, norm, head") if "pp" in mesh else rules
    sl.shard_model(model, mesh, rules, transforms=transforms, **given)
    return {name: around for name, module in model.named_modules() if (around := _around(module))}


OWN = "modules._call_if_there"
RECOMPUTE, UNIT, LATE, WATCH = (
    "recompute._recompute",
    "units.Units.call",
    "schedule.Updates.call",
    "lost.watch_forward.<locals>.watched",
)
STAGE, EAGER = "route.Route._call", "compile.run_eagerly"
BLOCKS = ("blocks.0", "blocks.1")
OTHERS = ("embed", "position", "norm", "head")


def _each(names: tuple[str, ...], *around: str) -> dict[str, list[str]]:
    return {name: list(around) for name in names}


@pytest.mark.parametrize(
    ("mesh", "transforms", "given", "expected"),
    [
        ("dp=2", (), {}, {"": [WATCH, OWN]}),
        ("dp=2", (), {"check": False}, {}),
        ("tp=2", (), {"check": False, "compile": None}, {"": [EAGER, OWN]}),
        (
            "dp=2",
            (sl.zero(1, overlap=True), sl.checkpoint_activations("blocks.*")),
            {},
            {"": [WATCH, OWN], **_each(BLOCKS, RECOMPUTE, LATE, OWN)},
        ),
        (
            "dp=2",
            (sl.zero(3), sl.checkpoint_activations("blocks.*")),
            {},
            {
                "": [EAGER, WATCH, OWN],
                **_each(OTHERS, EAGER, UNIT, OWN),
                **_each(BLOCKS, EAGER, RECOMPUTE, UNIT, OWN),
            },
        ),
        pytest.param(
            "dp=2,tp=2",
            (sl.zero(3),),
            {"compile": "aot_eager", "check": False},
            # What `compile` gives a block is innermost.
            {"": [EAGER, OWN], **_each(OTHERS, EAGER, UNIT, OWN), **_each(BLOCKS, EAGER, UNIT)},
            marks=pytest.mark.compiled,
        ),
        (
            "dp=2,pp=2",
            (sl.zero(1),),
            {},
            {"": [EAGER, WATCH, OWN], **_each(OTHERS + BLOCKS, STAGE, OWN)},
        ),
    ],
)
def test_a_module_has_one_wrapper_or_none(
    ranks, mesh: str, transforms: tuple[Any, ...], given: dict[str, Any], expected: dict[str, list[str]]
):
    for found in ranks(sl.MeshShape(mesh).world_size).run(_all_around, mesh, transforms, **given):
        assert found == expected


class Pair(nn.Module):
    """Two parts that a loop may call by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def _outputs(transform: Any) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = sl.shard_model(Pair(), "dp=2", {"**": None}, transforms=(transform,))
    x = torch.randn(2, 6)
    return model(x).detach(), model.second(model.first(x)).detach()


def _another_batch() -> None:
    model = sl.shard_model(Pair(), "tp=2", {"first": "colwise", "second": "rowwise"}, compile=None)
    with pytest.raises(InputError):
        model.second(model.first(torch.full((2, 6), float(dist.get_rank()))))


@pytest.mark.parametrize("transform", [sl.precision("bf16"), sl.precision("bf16", autocast=True)], ids=repr)
def test_parts_that_are_called_by_themselves_compute_as_the_model_does(ranks, transform: Any):
    """In bfloat16, and outputs are in float32."""
    for whole, parts in ranks(2).run(_outputs, transform):
        assert torch.equal(whole, parts) and parts.dtype is torch.float32
        assert torch.equal(parts, parts.bfloat16().float())


def test_parts_that_are_called_by_themselves_compare_their_first_batch(ranks):
    ranks(2).run(_another_batch)

"""What stands around the calls of a sharded model's modules, in which order, and that most have nothing."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib.engine import _torch
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

"""Blocks store tensors in containers that they are given, and write into tensors, as on one device."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib.testing.models import Numbers
from tests.engine.whole import gradients

Make, Act, Read = Callable[[torch.Tensor], Any], Callable[..., Any], Callable[[Any], torch.Tensor]


class Block(nn.Module):
    def __init__(self, act: Act) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(6, 8), nn.Linear(8, 6), act

    def forward(self, x: torch.Tensor, given: Any) -> Any:
        inner = torch.tanh(self.up(x))
        x = x + self.down(inner)
        returned = self.act(given, x, inner)
        return x if returned is None else (x, returned)


class Giving(nn.Module):
    """Gives its blocks a container, and adds what they have left there to its loss."""

    def __init__(self, make: Make, act: Act, read: Read) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(act) for _ in range(3))
        self.make, self.read = make, read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.make(x)
        for block in self.blocks:
            x = block(x, given)
            if isinstance(x, tuple):
                x, given = x
        return x.square().mean() + self.read(given)


def _append(given: Any, x: torch.Tensor, inner: torch.Tensor) -> None:
    given.append(x)
    given.append(inner)


def _count(given: Any, x: torch.Tensor, inner: torch.Tensor) -> None:
    given["found"].append({"x": x, "inner": (inner,)})
    given["n"] += 1


def _set(given: Any, x: torch.Tensor, inner: torch.Tensor) -> None:
    given[len(given)] = inner


def _set_and_return(given: Any, x: torch.Tensor, inner: torch.Tensor) -> Any:
    given[len(given)] = x
    return given


def _sum_up(given: Any, x: torch.Tensor, inner: torch.Tensor) -> None:
    given["loss"] = given["loss"] + inner.abs().mean()


def _turn(given: Any, x: torch.Tensor, inner: torch.Tensor) -> None:
    given.append(given.popleft() * x.mean())


def _append_to_first(given: Any, x: torch.Tensor, inner: torch.Tensor) -> None:
    given[0].append(x)


def _append_by_name(given: Any, x: torch.Tensor, inner: torch.Tensor) -> None:
    given["x"].append(x)


def _add_in_place(given: Any, x: torch.Tensor, inner: torch.Tensor) -> None:
    given.add_(x)


def _write_a_column(given: Any, x: torch.Tensor, inner: torch.Tensor) -> None:
    given[:, 1] = x[:, 1]


def _sizes(values: Any) -> torch.Tensor:
    return sum((value.abs().mean() for value in values), torch.zeros(())) + len(values)


CASES: dict[str, tuple[Make, Act, Read]] = {
    "an empty list": (lambda x: [], _append, _sizes),
    "a list of tensors": (lambda x: [2 * x], _append, _sizes),
    "a dict": (lambda x: {}, _set, lambda given: _sizes(given.values())),
    "a dict that comes back": (lambda x: {}, _set_and_return, lambda given: _sizes(given.values())),
    "an OrderedDict": (lambda x: OrderedDict(), _set, lambda given: _sizes(given.values())),
    "a sum in a dict": (lambda x: {"loss": torch.zeros(())}, _sum_up, lambda given: given["loss"]),
    "a list in a tuple": (lambda x: ([],), _append_to_first, lambda given: _sizes(given[0])),
    "a defaultdict": (lambda x: defaultdict(list), _append_by_name, lambda given: _sizes(given["x"])),
    "a deque": (lambda x: deque([x, 2 * x]), _turn, _sizes),
    "a tensor": (torch.zeros_like, _add_in_place, lambda given: given.abs().mean()),
    "a column": (torch.zeros_like, _write_a_column, lambda given: given.square().mean()),
    "dicts in a list in a dict": (
        lambda x: {"found": [], "n": 0},
        _count,
        lambda given: _sizes([one["x"] * one["inner"][0].mean() for one in given["found"]]) + given["n"],
    ),
}
SPLIT = {"up": "colwise", "down": "rowwise"}


def _both(names: list[str], mesh: str, compile: str | None, *transforms: Any) -> dict[str, tuple[Any, Any]]:
    """Losses and gradients of a sharded model and of one device, by case."""
    found = {}
    for name in names:
        torch.manual_seed(0)
        plain = Giving(*CASES[name]).double()
        rules = SPLIT if "tp" in mesh else {"**": None}
        model = sl.shard_model(copy.deepcopy(plain), mesh, rules, transforms=transforms, compile=compile)
        of_each = []
        for each in (model, plain):
            losses = []
            for step in range(2):  # the second call of a block has its graph
                losses.append(each(Numbers((8, 6))(step)))
                losses[-1].backward()
            of_each.append(([loss.detach() for loss in losses], gradients(each)))
        found[name] = tuple(of_each)
        if compile is not None and "tensor" not in name and "column" not in name:
            assert any("runs eagerly" in note for note in sl.get_plan(model).notes)
    return found


@pytest.mark.parametrize(("mesh", "transforms"), [("tp=2", ()), ("dp=2", (sl.zero(3),))], ids=["tp", "zero(3)"])
def test_what_blocks_store_is_there(ranks, mesh: str, transforms: tuple[Any, ...]):
    for by_case in ranks(2).run(_both, list(CASES), mesh, None, *transforms):
        for name, (found, expected) in by_case.items():
            torch.testing.assert_close(found, expected, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.compiled
def test_blocks_that_could_store_something_run_eagerly(ranks):
    names = ["an empty list", "dicts in a list in a dict", "a tensor", "a column"]
    for by_case in ranks(2).run(_both, names, "tp=2", "auto"):
        for name, (found, expected) in by_case.items():
            torch.testing.assert_close(found, expected, msg=lambda text, name=name: f"{name}: {text}")


def _after_an_exception() -> tuple[int, list[type]]:
    """The number and the types of what a block has left in a list before it raised."""

    def stop(given: Any, x: torch.Tensor, inner: torch.Tensor) -> None:
        given.append(inner)
        raise StopIteration

    model = sl.shard_model(Block(stop).double(), "tp=2", SPLIT)
    given: list[Any] = [torch.ones(8, 6).double()]
    with pytest.raises(StopIteration):
        model(Numbers((8, 6))(0), given)
    return len(given), [type(one) for one in given]


def test_what_a_block_has_stored_before_it_raised_is_there_too(ranks):
    assert ranks(2).run(_after_an_exception) == [(2, [torch.Tensor, torch.Tensor])] * 2

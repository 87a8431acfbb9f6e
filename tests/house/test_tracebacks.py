"""Errors and warnings as a user sees them: the line of the call, and the message."""

from __future__ import annotations

import ast
import inspect
import logging
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib.errors import ShardlibError
from tests.house import source


def _shrink(plan: sl.Plan) -> sl.Plan:
    return plan | sl.fsdp(axis="rows")


def _forward() -> None:
    sl.shard_model(nn.Linear(8, 8), "dp=1,tp=1", {"**": "colwise"})(torch.zeros(2, 8, device="meta"))


_BAD_CALLS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "shard_model": (lambda: sl.shard_model(nn.Linear(8, 8), "tp=1", {"**": "colwize"}), ["<lambda>", "call"]),
    "plan": (
        lambda: sl.plan(nn.Linear(8, 8), "dp=2", {"**": None}, transforms=[_shrink]),
        ["<lambda>", "call", "_shrink"],
    ),
    "mesh": (lambda: sl.mesh("dp=64"), ["<lambda>", "call"]),
    "save": (lambda: sl.save("here", nn.Linear(8, 8), weights="all"), ["<lambda>", "call"]),
    "load": (lambda: sl.load("nowhere", nn.Linear(8, 8)), ["<lambda>", "call"]),
    "forward": (_forward, ["_forward", "_wrapped_call_impl", "named"]),
}


@pytest.mark.parametrize("name", _BAD_CALLS)
def test_a_traceback_goes_from_the_users_lines_to_the_message(name: str, caplog: pytest.LogCaptureFixture):
    """At level debug all frames are there. A second traceback does not repeat the message."""
    call, frames = _BAD_CALLS[name]
    with pytest.raises(ShardlibError) as short:
        call()
    assert [each.name for each in traceback.extract_tb(short.value.__traceback__)][1:] == frames
    with caplog.at_level(logging.DEBUG, logger="shardlib"), pytest.raises(ShardlibError) as full:
        call()
    assert len(traceback.extract_tb(full.value.__traceback__)) > len(frames) + 1
    assert "".join(traceback.format_exception(short.value)).count("Traceback") == 1


def test_a_warning_names_the_users_line():
    with pytest.warns(sl.layouts.SuggestedLayoutWarning) as caught:
        sl.plan(nn.Sequential(nn.Linear(8, 8)), "tp=2")
    (warning,) = caught
    lines, first = inspect.getsourcelines(test_a_warning_names_the_users_line)
    assert warning.filename == __file__
    assert "sl.plan(" in lines[warning.lineno - first]


def test_every_warning_goes_through_one_function():
    uses = [
        module
        for module, tree in source.modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("warnings.warn", "warnings.warn_explicit")
    ]
    assert uses == ["shardlib.errors"]
    assert not [module for module in source.modules() for _, name in source.imports(module) if "warnings.warn" in name]

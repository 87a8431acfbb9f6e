"""Resolved tables of whole models are kept as files, so that a change of a layout is a readable change.

After an intended change write them anew with SHARDLIB_WRITE_GOLDEN=1 and read what changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from shardlib import layouts
from shardlib._plan import Plan, plan
from tests.plan.cases import gpt

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


CASES: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "example_gpt": (gpt, "example_gpt", "dp=2,tp=2"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_resolved_table_is_the_one_that_is_kept(name: str):
    build, layout, mesh = CASES[name]
    with torch.device("meta"):
        made = plan(build(), mesh, layouts.load(layout))
    file = GOLDEN / f"{name}.json"
    if os.environ.get("SHARDLIB_WRITE_GOLDEN"):
        file.write_text(made.to_json(), encoding="utf-8")
    kept = file.read_text(encoding="utf-8")
    assert Plan.from_json(kept).diff(made) == ""
    assert kept == made.to_json()

"""The page about optimizers has every name, and every name has an example."""

from __future__ import annotations

import inspect
import re

import pytest

from shardlib import optim
from shardlib.optim import lr_scheduler
from tests.house.source import ROOT

PAGE = (ROOT / "docs" / "optimizers.md").read_text()
NAMES = {name: getattr(module, name) for module in (optim, lr_scheduler) for name in module.__all__}


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_stands_on_the_page_and_has_an_example(name):
    assert re.search(rf"`[^`]*\b{name}\b", PAGE)
    if not inspect.ismodule(NAMES[name]) and NAMES[name].__module__.startswith("shardlib"):
        assert ">>> " in (inspect.getdoc(NAMES[name]) or "")

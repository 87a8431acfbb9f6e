"""The page about boosters says what the code says."""

from __future__ import annotations

import inspect
import re

import pytest

from shardlib import booster
from shardlib.booster._moe import known_plugins
from shardlib.booster._options import refused_keywords
from tests.house.source import ROOT

PAGE = (ROOT / "docs" / "boosters.md").read_text()


@pytest.mark.parametrize("plugin", known_plugins())
def test_the_refused_keywords_of_a_plugin_stand_on_its_line(plugin):
    line = re.search(rf"^\| `{plugin.__name__}` \| (.*) \|$", PAGE, re.MULTILINE)
    assert line is not None
    assert line[1].replace("`", "").split(", ") == sorted(refused_keywords(plugin))


@pytest.mark.parametrize("name", booster.__all__)
def test_a_public_name_has_a_docstring_and_stands_in_the_documents(name):
    assert inspect.getdoc(getattr(booster, name))
    texts = [PAGE, *((ROOT / "docs" / page).read_text() for page in ("api.md", "launching.md"))]
    assert any(re.search(rf"`[^`]*\b{name}\b", text) for text in texts)

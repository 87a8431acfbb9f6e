"""Pages on libraries that only the environment of `make test-hosts` has do what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house.source import ROOT
from tests.pages import OF_HOSTS, follow, read_page


@pytest.mark.parametrize("page", OF_HOSTS)
def test_a_page_does_what_it_says(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    follow(read_page(ROOT / "docs" / page), tmp_path)

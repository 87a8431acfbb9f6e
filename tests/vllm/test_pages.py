"""Pages on vLLM do what they say."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from tests.house.source import ROOT
from tests.pages import OF_VLLM, follow, read_page


@pytest.mark.parametrize("page", OF_VLLM)
def test_a_page_does_what_it_says(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name, value in {"KVCACHE_SPACE": "1", "OMP_THREADS_BIND": "nobind"}.items():
        monkeypatch.setenv(f"VLLM_CPU_{name}", value)
    try:
        follow(read_page(ROOT / "docs" / page), tmp_path, anew=True)
    finally:
        if (started := tmp_path / "server.pid").exists():  # where a line before the one that ends it failed
            with suppress(ProcessLookupError):
                os.kill(int(started.read_text()), signal.SIGTERM)

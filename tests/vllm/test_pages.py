"""Pages on vLLM do what they say."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from tests.house.source import ROOT
from tests.pages import OF_VLLM, Lines, Page, follow, read_page

_PORT = "8123"  # of servers on the pages; in a test another one may have it


@pytest.mark.parametrize("page", OF_VLLM)
def test_a_page_does_what_it_says(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name, value in {"KVCACHE_SPACE": "1", "OMP_THREADS_BIND": "nobind"}.items():
        monkeypatch.setenv(f"VLLM_CPU_{name}", value)
    try:
        follow(_at_a_free_port(read_page(ROOT / "docs" / page)), tmp_path, anew=True)
    finally:
        if (started := tmp_path / "server.pid").exists():  # where a line before the one that ends it failed
            with suppress(ProcessLookupError):
                os.kill(int(started.read_text()), signal.SIGTERM)


def _at_a_free_port(page: Page) -> Page:
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        port = str(listening.getsockname()[1])
    files = {name: text.replace(_PORT, port) for name, text in page.files.items()}
    lines = [Lines(tuple(line.replace(_PORT, port) for line in block.lines), block.printed) for block in page.shell]
    return Page(files, lines)

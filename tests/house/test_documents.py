"""Run what the documents show, and find every public name in them."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardlib
from shardlib import testing
from tests.house.source import ROOT
from tests.pages import OF_HOSTS, OF_VLLM, follow, read_page

DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
_LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")
_NAMES = {name: getattr(shardlib, name) for name in shardlib.__all__}
_OURS = {n: v for n, v in _NAMES.items() if getattr(v, "__module__", v.__name__).startswith("shardlib")}


def _title(document: Path) -> str:
    return str(document.relative_to(ROOT))


# Pages that start several jobs of their own take a quarter of a minute each.
_SLOW = "debug-hangs", "debug-numbers", "slurm", "survive", "ci"


def _pages() -> Iterator[Any]:
    elsewhere = {ROOT / "docs" / page for page in (*OF_HOSTS, *OF_VLLM)}
    for page in DOCUMENTS:
        if page not in elsewhere and read_page(page).shell:
            yield pytest.param(page, id=_title(page), marks=[pytest.mark.deep] if page.stem in _SLOW else [])


@pytest.mark.parametrize("document", list(_pages()))
def test_a_page_does_what_it_says(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Follow a page as a reader with an empty folder: no seed is set, and there is no process group yet."""
    monkeypatch.chdir(tmp_path)
    follow(read_page(document), tmp_path)


@pytest.mark.parametrize("document", DOCUMENTS, ids=_title)
def test_links_inside_the_repository_lead_somewhere(document: Path):
    links = _LINK.findall(document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("name", _OURS)
def test_a_public_name_has_a_docstring_with_an_example(name: str):
    value = _OURS[name]
    text = inspect.getdoc(value) or ""
    assert text
    if not isinstance(value, types.ModuleType):
        assert ">>> " in text, f"the docstring of shardlib.{name} shows no example"


@pytest.mark.parametrize("name", [n for n, value in _OURS.items() if isinstance(value, type)])
def test_public_methods_have_docstrings(name: str):
    methods = {n: m for n, m in inspect.getmembers(_OURS[name], inspect.isroutine) if n in vars(_OURS[name])}
    assert [n for n, method in methods.items() if not n.startswith("_") and not inspect.getdoc(method)] == []


@pytest.mark.parametrize("name", _NAMES)
def test_a_public_name_stands_in_the_documents(name: str):
    text = "\n".join(document.read_text() for document in DOCUMENTS)
    assert re.search(rf"\b(sl|shardlib)\.{name}\b", text), f"neither README.md nor docs/ mentions shardlib.{name}"


@pytest.mark.parametrize("name", testing.__all__)
def test_a_name_of_testing_has_a_docstring_and_stands_in_its_document(name: str):
    assert inspect.getdoc(getattr(testing, name))
    assert f"`{name}`" in (ROOT / "docs" / "testing.md").read_text()


@pytest.mark.deep
@pytest.mark.parametrize("processes", [1, 4])
def test_the_script_of_the_readme_is_one_that_python_and_torchrun_start(processes: int, tmp_path: Path):
    for name, body in read_page(ROOT / "README.md").files.items():
        (tmp_path / name).write_text(body)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4"] if processes == 4 else []
    command = [sys.executable, *launcher, tmp_path / "train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("Plan on ") == 1 and run.stdout.count("step 2: loss 0.085074") == 1

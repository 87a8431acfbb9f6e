"""Notebooks run from their first cell to their last."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.house.source import ROOT

_FOLDER = ROOT / "examples" / "notebooks"
_SHOWS = {
    "plan_a_model": ("<svg", "tp=0", "zero(3)"),
    "prove_and_train": ("equivalent to a single device: mesh dp=2,tp=2", "NOT equivalent", " -> "),
}


def test_each_notebook_is_tried():
    assert {path.stem for path in _FOLDER.glob("*.ipynb")} == _SHOWS.keys()


@pytest.mark.parametrize("name", _SHOWS)
def test_a_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}/tests/at_start:{ROOT}")
    notebook = nbformat.read(_FOLDER / f"{name}.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells)  # kept without what they print
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = str([cell.get("outputs") for cell in notebook.cells])
    assert [text for text in _SHOWS[name] if text not in printed] == []

"""The proof finds mistakes: each planted one is caught, its module named, and its case passes without it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from shardlib.errors import InputError
from shardlib.testing import mutants
from shardlib.testing.mutants._scale import SCALE
from tests.house.source import ROOT

DOCS = ROOT / "docs" / "mutants.md"
_COUNT = re.compile(r"\[\S+ real mistakes\]")

NAMES = [mutant.name for mutant in mutants.MUTANTS]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.deep] * (i % 3 > 0)) for i, name in enumerate(NAMES)]
)
def test_a_mistake_is_caught_and_its_module_named(name: str):
    verdict = mutants.verdict(name)
    assert verdict.clean
    assert verdict.caught
    assert verdict.named, f"{verdict.module!r} was named"


@pytest.mark.parametrize(
    "name", [pytest.param(mutant.name, marks=[pytest.mark.deep] * (i > 2)) for i, mutant in enumerate(SCALE)]
)
def test_a_proof_of_one_unit_and_one_bucket_misses_it(name: str):
    assert mutants.prove(name, planted=True, at_scale=False)


def test_there_are_many_and_each_was_made_by_somebody():
    assert len(mutants.MUTANTS) >= 25
    assert len({mutant.name for mutant in mutants.MUTANTS}) == len(mutants.MUTANTS)
    assert all("#" in mutant.evidence or "arxiv" in mutant.evidence for mutant in mutants.MUTANTS)


def test_the_table_in_the_documentation_is_of_these_mutants():
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("| ") and "| seen in |" not in line]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == [m.mistake for m in mutants.MUTANTS]
    assert all(" | yes | " in row and "(wrong)" not in row for row in rows)


def test_the_documents_say_how_many_there_are():
    said = {text for page in ("README.md", "docs/testing.md") for text in _COUNT.findall((ROOT / page).read_text())}
    assert said == {f"[{len(mutants.MUTANTS)} real mistakes]"}


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "verdicts.json"
    assert mutants.main(["mutants", "--only", "row sum", "--json", str(out)]) == 0
    assert "| `blocks.0.attn.proj` |" in capsys.readouterr().out
    assert [v["name"] for v in json.loads(out.read_text())] == ["row sum"]


def test_an_unknown_mutant_is_refused():
    with pytest.raises(InputError, match=r'There is no mutant "row some"\. Did you mean "row sum"\?'):
        mutants.verdict("row some")

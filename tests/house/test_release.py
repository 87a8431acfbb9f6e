"""Files around the package agree with each other, and hosted CI calls targets that exist."""

from __future__ import annotations

import re
import tomllib

from tests.house.source import ROOT

_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_WORKFLOW = (ROOT / ".github/workflows/test.yml").read_text()


def test_hosted_ci_calls_targets_of_the_makefile():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    listed = re.search(r"target: \[(.*)\]", _WORKFLOW)
    assert listed is not None
    called = {name.strip(' "') for name in listed[1].split(",")} | set(re.findall(r"make ([a-z-]+)", _WORKFLOW))
    assert {"test", "demo", "dist-test", "test-deep"} <= called <= targets


def test_the_parts_of_the_deep_tests_are_all_of_them():
    parts = re.findall(r"(\d)/(\d)", _WORKFLOW)
    assert [int(part) for part, _ in parts] == [*range(1, len(parts) + 1)] and {of for _, of in parts} == {
        str(len(parts))
    }


def test_the_versions_of_python_that_are_named_are_those_that_run():
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(_PROJECT["classifiers"]))
    assert named == sorted(set(re.findall(r'python-version: "(.*)"', _WORKFLOW)))
    assert _PROJECT["requires-python"] == f">={named[0]}"


def test_the_citation_names_the_package_and_its_license():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"title: {_PROJECT['name']}\n" in citation and f"license: {_PROJECT['license']}\n" in citation
    assert f"repository-code: {_PROJECT['urls']['Repository']}\n" in citation

"""Models in the tables of `rightly` train as one device does: what an audit says of them is measured against that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from tests.audit.rightly import Case, accelerate_models, prove, torch_models, transformers_models

TABLES = {
    "torch": torch_models.CASES,
    "transformers": transformers_models.CASES,
    "accelerate": accelerate_models.CASES,
}


def _one_of_each_kind(cases: Sequence[Case]) -> Iterator[object]:
    """Iterate over the first case of each way to shard; the others are deep."""
    seen: set[tuple[str, str]] = set()
    for case in cases:
        kind = (case.how, case.mesh)
        yield pytest.param(case, marks=[pytest.mark.deep] if kind in seen else [], id=str(case))
        seen.add(kind)


@pytest.mark.parametrize("case", [each for table in TABLES.values() for each in _one_of_each_kind(table)])
def test_the_numbers_are_those_of_one_device(case: Case):
    report = prove(case)
    assert report, str(report)


@pytest.mark.parametrize("host", TABLES)
def test_no_two_cases_have_the_same_name(host: str):
    names = [str(case) for case in TABLES[host]]
    assert len(set(names)) == len(names)

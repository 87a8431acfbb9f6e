"""Models that libraries shard rightly: an audit has nothing to say of them. The runner has all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks import audit as runner
from tests.audit.rightly import Case, accelerate_models, torch_models, transformers_models

TABLES = {
    "torch": torch_models.CASES,
    "transformers": transformers_models.CASES,
    "accelerate": accelerate_models.CASES,
}


def _one_of_each_kind() -> Iterator[Any]:
    """Iterate over the first case of each way to shard; all but the first of each library are deep."""
    for host, cases in TABLES.items():
        seen: set[tuple[str, str]] = set()
        for case in cases:
            if (kind := (case.how, case.mesh)) not in seen:
                yield pytest.param(host, case, marks=[pytest.mark.deep] if seen else [], id=f"{host}: {case}")
                seen.add(kind)


@pytest.mark.parametrize(("host", "case"), list(_one_of_each_kind()))
def test_an_audit_says_of_a_model_what_the_results_say(host: str, case: Case):
    now = runner.verdict(host, case)
    assert now.ok == runner.known_verdicts()[host, str(case)].ok, now.said


@pytest.mark.parametrize("host", TABLES)
def test_most_models_have_nothing_reported(host: str):
    known = [each for (of_host, _), each in runner.known_verdicts().items() if of_host == host]
    assert sum(each.ok for each in known) >= 40
    names = [str(case) for case in TABLES[host]]
    assert sorted(names) == sorted(set(names)) == sorted(each.case for each in known)

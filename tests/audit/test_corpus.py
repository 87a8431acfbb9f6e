"""The faults on which the audit is tried are complete: each has a report, a sentence and a mended twin."""

from __future__ import annotations

import inspect
import re

import pytest

from tests.audit.faults import KINDS, Fault, case, cases

MENDED = ("right", "clip_right", "accumulate_right", "save_right", "resume_right")
# What is not ours to mend: the library's own, in the installed version.
UNMENDED = {"batch_norm_of_own_rows", "hf_chunked_weights", "hf_few_key_heads", "hf_head_norm_accumulated"}
UNMENDED |= {"lightning_clip_mixed"}


@pytest.mark.parametrize("name", cases())
def test_a_case_has_what_an_audit_is_given(name):
    module = case(name)
    assert all(callable(getattr(module, function)) for function in ("build", "batch", "shard"))
    assert re.fullmatch(r"\w+=\d(,\w+=\d)?", module.MESH)
    assert any(hasattr(module, mended) for mended in MENDED) == (name not in UNMENDED)


@pytest.mark.parametrize("name", cases())
def test_a_case_says_what_is_wrong_and_who_reported_it(name):
    module = case(name)
    fault: Fault = module.FAULT
    said = " ".join((module.__doc__ or "").split())
    assert re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", fault.report)
    assert fault.report in said
    assert fault.kind in KINDS
    assert fault.host and fault.versions and fault.line
    assert ("A plant" in said) != fault.own


def test_there_are_enough_of_each_library():
    hosts = [case(name).FAULT.host for name in cases()]
    assert len(hosts) >= 34
    for host, least in (("torch", 16), ("transformers", 8), ("accelerate", 4), ("lightning", 2)):
        assert hosts.count(host) >= least, host


@pytest.mark.parametrize("name", cases())
def test_importing_a_case_imports_no_library(name):
    assert not re.search(
        r"^(import|from) (transformers|accelerate|lightning|peft)\b", inspect.getsource(case(name)), re.M
    )

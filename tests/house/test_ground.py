"""The ground that the other tests stand on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from tests import torchvision_on_cpu
from tests.conftest import slowest_files


def _sum_of_ranks(scale: float) -> float:
    total = torch.tensor(scale * dist.get_rank())
    dist.all_reduce(total)
    return total.item()


def test_functions_of_a_test_module_run_on_ranks(ranks):
    assert ranks(3).run(_sum_of_ranks, 2.0) == [6.0, 6.0, 6.0]


def test_torchvision_models_run_beside_the_cpu_build_of_torch(torchvision: ModuleType):
    assert torchvision.models.resnet18(num_classes=10)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_an_environment_in_which_torchvision_was_let_in_imports_it(tmp_path: Path):
    torchvision_on_cpu.install(tmp_path)
    script = f"import site; site.addsitedir({str(tmp_path)!r}); import torchvision.models"
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_theslowest_files_come_first():
    spent = [
        ("a.py::one", 1.0),
        ("b.py::one", 2.0),
        ("a.py::two[x::y]", 3.0),
        *((f"{n}.py::test", 0.1) for n in range(10)),
    ]
    lines = slowest_files(spent)
    assert lines[:2] == ["     4.0 s  a.py", "     2.0 s  b.py"] and len(lines) == 11
    assert lines[-1] == "     7.0 s  in all 12 files, added up over processes"


def test_a_run_in_several_processes_lists_them_before_its_last_line(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    pytester.makeconftest("from tests.conftest import pytest_terminal_summary")
    pytester.makepyfile(test_one="def test(): pass", test_two="def test(): pass")
    result = pytester.runpytest_inprocess("-n", "1", "-p", "no:cacheprovider")
    result.stdout.fnmatch_lines(["*slowest files*", "* s  test_*.py", "* s  test_*.py", "* s  in all 2 files*"])
    assert "2 passed in " in result.outlines[-1]

"""The examples that prove a model: sharded by hand, and in the CI of a repository of its own."""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import fully_sharded
import parallelized
import pytest
from hypothesis import settings

from shardlib.cli import main
from shardlib.testing import Ranks
from tests.house.source import ROOT


def test_fully_shard_by_hand_is_proved():
    assert str(fully_sharded.prove()).startswith("equivalent to a single device")


def test_the_line_forgotten_by_hand_is_found_and_mending_it_is_proved(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    script = str(ROOT / "examples" / "by_hand" / "parallelized.py")
    monkeypatch.setattr(sys, "argv", [script])
    runpy.run_path(script, run_name="__main__")
    forgotten = capsys.readouterr().out
    assert forgotten.startswith("NOT equivalent to a single device")
    assert (
        "First difference, step 0: the gradient of blocks.0.norm2.weight (4 of 37 parameters' gradients differ"
        in forgotten
    )
    assert "the sum of what the ranks of tp hold is right: a reduction over tp is missing" in forgotten
    assert str(parallelized.prove(mended=True)).startswith("equivalent to a single device")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy elsewhere, as a user has it."""
    return Path(shutil.copytree(ROOT / "examples" / "ci", tmp_path_factory.mktemp("user") / "forecast"))


@pytest.fixture
def at_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Goes into a repository's folder in this process, where its package is imported from; forgets it at the end."""

    def go(folder: Path) -> None:
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(folder)

    _forget()
    yield go
    _forget()


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "forecast"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("tests", "count"), [("our_layout or bfloat16", 2), pytest.param("any_layout", 1, marks=pytest.mark.deep)]
)
def test_the_ci_of_a_users_repository_passes(
    tests: str, count: int, repository: Path, at_home: Callable[[Path], None], pytester: pytest.Pytester, ranks: Ranks
):
    at_home(repository)
    ranks(4).run(_forget)
    run = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-k", tests, f"--rootdir={repository}", repository)
    ranks(4).run(_forget)
    run.assert_outcomes(passed=count, deselected=3 - count)


def test_its_layout_is_checked(repository: Path, at_home: Callable[[Path], None], capsys: pytest.CaptureFixture[str]):
    at_home(repository)
    assert main(["check", "forecast.model:Forecaster", "--layout", "forecast/layout.toml"]) == 0
    assert "The layout fits" in capsys.readouterr().out


def test_its_ci_fails_for_a_model_whose_rows_depend_on_each_other(
    repository: Path, tmp_path: Path, at_home: Callable[[Path], None], pytester: pytest.Pytester, ranks: Ranks
):
    """A mean over the rows of the batch: a data rank takes it over its own rows."""
    broken = Path(shutil.copytree(repository, tmp_path / "broken"))
    model = broken / "forecast" / "model.py"
    text = model.read_text()
    assert "self.entry(x)" in text
    model.write_text(text.replace("self.entry(x)", "self.entry(x - x.mean(0))"))
    at_home(broken)
    ranks(4).run(_forget)
    settings.load_profile("mutate")  # one mesh that fails is enough: it need not be the smallest
    try:
        run = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-k", "our_layout", f"--rootdir={broken}", broken)
    finally:
        settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
        ranks(4).run(_forget)
    assert run.ret == 1
    printed = run.stdout.str()
    assert "NotEquivalentError" in printed
    assert "First difference, step 0: what (the model's own forward) computes for entry" in printed

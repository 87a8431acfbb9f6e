"""The pytest plugin, as suites of other people use it: pytest runs pytest, in a folder that is on no path."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from xml.etree import ElementTree

import pytest

import shardlib.testing.plugin  # noqa: F401  so that a run in this process does not import it anew

HEAD = """
import os, time
import pytest, torch
import torch.distributed as dist
"""
Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run_here(pytester: pytest.Pytester) -> Run:
    """Run pytest in this process: for what is refused before a test runs."""

    def run(source: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(test_theirs=HEAD + source)
        return pytester.runpytest_inprocess("--import-mode=importlib", "-p", "no:cacheprovider", *options)

    return run


USUAL = """
class Answer:
    def __init__(self, number):
        self.number = number

def total():
    x = torch.ones(())
    dist.all_reduce(x)
    return x.item()

def test_the_command_line_says_how_many(ranks):
    assert ranks.run(total) == [3.0] * 3
    assert ranks(2).run(total) == [2.0] * 2

@pytest.mark.shardlib(world_size=2)
class TestMarked:
    def test_the_mark_of_the_class(self, ranks):
        assert ranks.run(lambda: Answer(dist.get_rank()))[1].number == 1

    @pytest.mark.shardlib(timeout=50)
    def test_the_nearest_mark_adds_to_it(self, ranks):
        assert (ranks.world_size, ranks.timeout) == (2, 50)

@pytest.fixture
def answer():
    return Answer(2)

@pytest.mark.shardlib(world_size=2, on_ranks=True)
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_inside(answer, scale, tmp_path):
    assert isinstance(answer, Answer)
    assert dist.get_world_size() == answer.number == total()
    (tmp_path / str(dist.get_rank())).touch()

@pytest.mark.shardlib(world_size=2, on_ranks=True)
def test_all_skip():
    pytest.skip("not here")

def test_plain():
    pass

@pytest.mark.shardlib(world_size=2, on_ranks=True)
def test_modules_are_preloaded():
    import sys
    assert "wave" in sys.modules
"""


FAILING = """
@pytest.mark.shardlib(world_size=3, on_ranks=True)
def test_fails_on_one():
    x = torch.ones(2) * dist.get_rank()
    assert x.tolist() != [2.0, 2.0]
    dist.barrier()

@pytest.mark.shardlib(world_size=2, timeout=4, on_ranks=True)
def test_hangs():
    if dist.get_rank() == 1:
        time.sleep(60)
    dist.all_reduce(torch.ones(5))

@pytest.mark.shardlib(world_size=2, on_ranks=True)
def test_dies():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), 9)
    dist.barrier()

@pytest.mark.shardlib(world_size=2, on_ranks=True)
def test_some_skip():
    if dist.get_rank() == 1:
        pytest.skip("only here")

@pytest.mark.shardlib(world_size=2, on_ranks=True)
def test_cannot_be_sent(request):
    pass

@pytest.mark.shardlib(world_size=2, on_ranks=True)
def test_still_works():
    dist.barrier()
"""

GIVEN = """
from hypothesis import given, settings, strategies as st

@pytest.mark.shardlib(world_size=2, on_ranks=True)
@settings(max_examples=7, deadline=None, database=None)
@given(n=st.integers(0, 3))
def test_examples(n):
    x = torch.tensor(n)
    dist.all_reduce(x)
    assert x == 2 * n

@pytest.mark.shardlib(world_size=2, on_ranks=True)
@settings(deadline=None, database=None)
@given(n=st.integers(0, 1000))
def test_shrinks(n):
    assert n < 17 or dist.get_rank() == 0
"""


@dataclass(frozen=True)
class Suite:
    """Return what a run of all of their tests printed, and what its junit file has of each test."""

    printed: str
    tests: list[ElementTree.Element]

    def outcomes(self, file: str) -> dict[str, int]:
        ends = [{part.tag for part in test} & {"failure", "error", "skipped"} for test in self._of(file)]
        words = [end.pop() if end else "passed" for end in ends]
        return {word: words.count(word) for word in words}

    def spent(self, what: str, file: str = "") -> list[int]:
        """Return what the tests of a file spent, for each that ran on ranks."""
        path = f"./properties/property[@name='shardlib_{what}']"
        return [int(found.attrib["value"]) for test in self._of(file) for found in test.findall(path)]

    def _of(self, file: str) -> list[ElementTree.Element]:
        return [test for test in self.tests if test.attrib["classname"].startswith(file)]


_IN_TURN = [("-p", "no:xdist"), pytest.param(("-n", "1"), marks=pytest.mark.deep)]
_AT_ONCE = pytest.param(("-n", "2"), marks=pytest.mark.deep)


@pytest.fixture(scope="module", params=[*_IN_TURN, _AT_ONCE], ids=" ".join)
def suite(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Suite:
    folder = tmp_path_factory.mktemp("theirs")
    sources = {"test_usual.py": USUAL, "test_given.py": GIVEN, "test_failing.py": FAILING}
    for name, source in sources.items():
        (folder / name).write_text(HEAD + source)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "--import-mode=importlib", "-p", "no:cacheprovider", *sources]
    options = ("--override-ini", "shardlib_preload=wave", "--shardlib-world-size", "3", "--strict-markers")
    run = subprocess.run(
        [*command, *request.param, *options, "--junitxml", "out.xml"],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout
    return Suite(run.stdout, list(ElementTree.parse(folder / "out.xml").iter("testcase")))


def test_marks_fixtures_parameters_and_the_summary(suite: Suite):
    assert suite.outcomes("test_usual") == {"passed": 7, "skipped": 1}, suite.printed
    assert sorted(suite.spent("world_size", "test_usual")) == [2, 2, 2, 2, 2, 3]
    assert (len(suite.spent("calls", "test_usual")), sum(suite.spent("calls", "test_usual"))) == (6, 7)
    assert suite.printed.count("shardlib: ") == 1
    told = re.search(
        r"^shardlib: 13 tests on ranks \(11 on 2, 2 on 3\), "
        r"(\d+) calls in [\d.]+ s, (\d+) processes started in [\d.]+ s$",
        suite.printed,
        re.MULTILINE,
    )
    assert told is not None, suite.printed
    assert [int(number) for number in told.groups()] == [sum(suite.spent("calls")), sum(suite.spent("starts"))]


@pytest.mark.parametrize("suite", _IN_TURN, indirect=True, ids=" ".join)
def test_processes_start_once_and_again_after_ranks_that_are_lost(suite: Suite):
    assert sorted(suite.spent("starts", "test_usual")) == [0] * 5 + [3]
    assert suite.spent("starts", "test_given") == [0, 0]
    assert suite.spent("starts", "test_failing") == [0, 0, 2, 2, 0]  # after the hang, and after the death


def test_failures_name_the_rank_and_the_next_test_runs(suite: Suite):
    assert suite.outcomes("test_failing") == {"failure": 5, "passed": 1}
    for words in (
        r"rank 2 raised in test_fails_on_one:",
        r"AssertionError: assert \[2\.0, 2\.0\] != \[2\.0, 2\.0\]",
        r"where \[2\.0, 2\.0\] = .*tolist",  # pytest's own introspection, from the rank
        r"HangError: ranks 0 and 1 did not answer within 4 s in test_hangs",
        r"rank 0  +all_reduce over world  float32 \[5\]  test_failing\.py:\d+ in test_hangs",
        r"rank 0 waits in all_reduce over world: rank 1 has not entered it",
        r"RankDied: rank 1 died in test_dies: its process was ended by SIGKILL",
        r"Ranks must skip or run a test together: rank 0 ran on, rank 1 skip\.",
        r'test_cannot_be_sent cannot be sent to the ranks: argument "request"',
    ):
        assert re.search(words, suite.printed), f"{words} is not in\n{suite.printed}"


def test_each_example_of_hypothesis_runs_on_the_ranks(suite: Suite):
    assert suite.outcomes("test_given") == {"passed": 1, "failure": 1}
    assert re.search(r"test_shrinks\($", suite.printed, re.MULTILINE), suite.printed
    assert "n=17," in suite.printed
    assert suite.spent("world_size", "test_given") == [2, 2]
    assert sum(suite.spent("calls", "test_given")) > 4 + 1


@pytest.mark.parametrize(
    ("mark", "says"),
    [
        ("world_size=0", "world_size=0 is not a positive integer"),
        ('world_size="4"', "world_size='4' is not a positive integer"),
        ("world_size=True", "world_size=True is not a positive integer"),
        ("timeout=-1", "timeout=-1 is not a positive number of seconds"),
        ("on_ranks=1", "on_ranks=1 is not True or False"),
        ("ranks=2", "got an unexpected keyword argument 'ranks'; it takes world_size, timeout and on_ranks"),
    ],
)
def test_a_wrong_mark_is_refused_at_collection(run_here: Run, mark: str, says: str):
    result = run_here(f"@pytest.mark.shardlib({mark})\ndef test_marked():\n    raise SystemExit\n")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: test_theirs.py::test_marked: @pytest.mark.shardlib: {says}"])


def test_an_async_test_is_refused(run_here: Run):
    result = run_here("@pytest.mark.shardlib(on_ranks=True)\nasync def test_async():\n    pass\n")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*on_ranks=True takes a plain test function, not an async one*"])


@pytest.mark.parametrize("option", ["--shardlib-world-size=0", "--shardlib-timeout=0"])
def test_a_wrong_option_is_refused(run_here: Run, option: str):
    assert run_here("def test_plain(): pass", option).ret == pytest.ExitCode.USAGE_ERROR


def test_a_suite_that_does_not_use_it_never_imports_it(pytester: pytest.Pytester):
    pytester.makepyfile(
        """
        import sys
        def test_nothing_was_imported():
            assert not {"torch", "shardlib"} & set(sys.modules)
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
    assert "shardlib: " not in result.stdout.str()


def test_the_mark_is_described(run_here: Run):
    run_here("", "--markers").stdout.fnmatch_lines(
        ["@pytest.mark.shardlib(world_size=4, timeout=60, on_ranks=False): *"]
    )


@pytest.mark.shardlib(world_size=2, on_ranks=True)
def test_our_own_tests_may_run_on_ranks():
    import torch.distributed as dist

    assert dist.get_world_size() == 2

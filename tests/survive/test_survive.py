"""The script of docs/how-to/survive.md goes on when ranks and nodes are lost, with the numbers of one device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.survive.job import LIMIT, STEPS, TOLERANCE, Job, check_trained_as, nodes, store, wait_for
from tests.survive.wires import two_machines


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The script on one device."""
    job = Job.new(tmp_path_factory.mktemp("one"))
    assert job.start(sys.executable, "train.py").wait() == 0, job.log
    return job


def _torchrun(job: Job, ranks: int, **variables: str) -> None:
    again = f"--standalone --nproc_per_node {ranks} --max-restarts 3".split()
    assert job.start("torchrun", *again, "train.py", **variables).wait() == 0, job.log
    assert job.fates == []


@pytest.mark.parametrize(("ranks", "mesh"), [(2, "dp=-1"), pytest.param(4, "dp=-1,tp=2", marks=pytest.mark.deep)])
def test_ranks_that_are_killed_before_the_first_checkpoint_and_in_a_save(
    one: Job, tmp_path: Path, ranks: int, mesh: str
):
    job = Job.new(tmp_path, "2-0-kill", f"10-{ranks - 1}-save")
    _torchrun(job, ranks, MESH=mesh)
    check_trained_as(one, job, (2, range(1, 2)), (2, range(1, 11)), (2, range(6, STEPS + 1)))
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step-000015", "step-000020"]


@pytest.mark.deep
def test_several_ranks_in_a_row(one: Job, tmp_path: Path):
    job = Job.new(tmp_path, "7-1-kill", "6-0-kill", "15-2-save")
    _torchrun(job, 3)
    check_trained_as(one, job, (3, range(1, 7)), (3, range(6, 6)), (3, range(6, 16)), (3, range(11, STEPS + 1)))


def _dead(agents: dict[str, subprocess.Popen[bytes]]) -> list[str]:
    return [name for name, agent in agents.items() if agent.poll() is not None]


def _lose_one_and_get_it_back(job: Job, names: str, **variables: str) -> None:
    """Start nodes; one is lost, and is started again when the others hold."""
    ranks = len(names) * int(variables.get("RANKS", 1))
    with store(job) as port, nodes(job, port, {0: ranks, 13: ranks}, **variables) as start:
        agents = {name: start(name) for name in names}
        wait_for(lambda: _dead(agents), "the loss of a node", job)
        (lost,) = _dead(agents)
        wait_for(lambda: any("holds" in line for line in job.lines()), "the next attempt", job)
        agents[lost] = start(lost)
        assert [agent.wait(timeout=LIMIT) for agent in agents.values()] == [0] * len(names), job.log
    assert job.fates == []


@pytest.mark.parametrize("names", ["ab", pytest.param("abc", marks=pytest.mark.deep)])
def test_a_node_is_lost_and_comes_back(one: Job, tmp_path: Path, names: str):
    job, all_ = Job.new(tmp_path, "8-1-lose", "13-0-hold"), len(names)
    _lose_one_and_get_it_back(job, names)
    check_trained_as(one, job, (all_, range(1, 8)), (all_ - 1, range(6, 14)), (all_, range(14, STEPS + 1)))


@pytest.mark.deep
def test_a_node_of_two_ranks_is_lost_and_comes_back(one: Job, tmp_path: Path):
    job = Job.new(tmp_path, "8-2-lose", "13-0-hold")
    _lose_one_and_get_it_back(job, "ab", RANKS="2", MESH="dp=-1,tp=2")
    check_trained_as(one, job, (2, range(1, 8)), (1, range(6, 14)), (2, range(14, STEPS + 1)))


@pytest.mark.deep
def test_ranks_that_lose_their_agent_train_on_until_it_is_back(one: Job, tmp_path: Path):
    job = Job.new(tmp_path, "8-1-orphan", "13-0-hold")
    _lose_one_and_get_it_back(job, "ab")
    check_trained_as(one, job, (2, range(1, 14)), (2, range(14, STEPS + 1)))


@pytest.mark.deep
def test_a_node_that_has_to_go_saves_and_the_other_goes_on(one: Job, tmp_path: Path):
    job = Job.new(tmp_path, "8-1-preempt", workers=1)
    with store(job) as port, nodes(job, port, {0: 2}) as start:
        codes = sorted(agent.wait(timeout=LIMIT) for agent in [start("a"), start("b")])
    assert codes[0] == 0 < codes[1], job.log
    check_trained_as(one, job, (2, range(1, 9)), (1, range(9, STEPS + 1)))


@pytest.mark.deep
def test_a_job_that_has_to_end_saves(one: Job, tmp_path: Path):
    job = Job.new(tmp_path, "8-1-preempt", workers=1)
    start = "torchrun", "--standalone", "--nproc_per_node", "2", "--max-restarts", "3", "train.py"
    assert job.start(*start).wait() != 0
    assert job.start(*start).wait() == 0, job.log
    assert [step.step for step in job.printed] == list(range(1, STEPS + 1))
    assert [step.loss for step in job.printed] == pytest.approx([step.loss for step in one.printed], rel=TOLERANCE)


@pytest.mark.deep
def test_a_machine_is_cut_off_and_the_other_goes_on_until_it_is_back(one: Job, tmp_path: Path):
    job = Job.new(tmp_path, "8-far-cut", "13-0-hold", timeout=10)
    with (
        two_machines() as (here, there),
        store(job, *here.prefix) as port,
        nodes(job, f"{here.address}:{port}", {0: 2, 13: 2}) as start,
    ):
        agents = [start("near", *here.prefix, **here.variables), start("far", *there.prefix, **there.variables)]
        wait_for(lambda: any("holds" in line for line in job.lines()), "the next attempt", job)
        there.connect()
        assert [agent.wait(timeout=LIMIT) for agent in agents] == [0, 0], job.log
    check_trained_as(one, job, (2, range(1, 8)), (1, range(6, 14)), (2, range(14, STEPS + 1)))

"""Jobs of the script of docs/how-to/survive.md: torchrun starts them, ranks and nodes are lost, and what was trained is
compared with one device."""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import subprocess
import sys
import sysconfig
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tests.house.source import ROOT
from tests.pages import read_page
from tests.survive import survivor

STEPS, BATCH, TOLERANCE = 20, 24, 1e-10
_PAGE = read_page(ROOT / "docs" / "how-to" / "survive.md")
_OF_WORKERS = "worker_init_fn=lambda _: os.setpgrp()"
_PRINTED = re.compile(r"^step (\d+), (\d+) replicas: loss (\S+)$", re.MULTILINE)
# Agents that wait for more nodes, or for a lost one, do so for seconds.
_CONF = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=8,read_timeout=20,is_host=0"
LIMIT = 300.0  # seconds, after which a job hangs
_ENVIRONMENT = {
    "PATH": os.pathsep.join((sysconfig.get_path("scripts"), os.environ["PATH"])),
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "PET_MONITOR_INTERVAL": "0.1",
    "PET_LOG_DIR": "logs",
    "RANKS": "1",
}


class Step(NamedTuple):
    """A step that rank 0 has printed."""

    step: int
    replicas: int
    loss: float


@dataclass(frozen=True)
class Job:
    """A folder in which a reader of the page has its files."""

    folder: Path

    @classmethod
    def new(cls, folder: Path, *fates: str, timeout: int = 300, workers: int = 0) -> Job:
        """Write the files, and what is to happen to ranks: see `survivor`.

        Args:
            folder: an empty folder.
            *fates: what is to happen to ranks.
            timeout: seconds after which a rank is lost that does not answer.
            workers: processes of each `DataLoader`, as the page says.
        """
        for name, body in _PAGE.files.items():
            (folder / name).write_text(body)
        script = (folder / "train.py").read_text().replace(":.6f}", "}").replace("timeout=300", f"timeout={timeout}")
        if workers:
            loader = "batch_sampler=batches(), "
            script = script.replace(loader, f"{loader}num_workers={workers}, {_OF_WORKERS}, ")
        (folder / survivor.SCRIPT).write_text(script)
        (folder / "train.py").write_text("from tests.survive.survivor import main\n\nmain()\n")
        for made in (survivor.FATES, survivor.SEEN):
            (folder / made).mkdir()
        for fate in fates:
            (folder / survivor.FATES / fate).touch()
        return cls(folder)

    @property
    def fates(self) -> list[str]:
        """Return what has not happened yet."""
        return [path.name for path in (self.folder / survivor.FATES).iterdir()]

    @property
    def printed(self) -> list[Step]:
        """The steps in the order in which ranks 0 have printed them."""
        text = (self.folder / "out").read_text()
        return [Step(int(step), int(replicas), float(loss)) for step, replicas, loss in _PRINTED.findall(text)]

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def start(self, *command: str, **variables: str) -> subprocess.Popen[bytes]:
        """Start a command in the folder; its output is added to that of the others."""
        environment = {**os.environ, **_ENVIRONMENT, **variables}
        with open(self.folder / "out", "ab") as out, open(self.folder / "log", "ab") as log:
            return subprocess.Popen(command, cwd=self.folder, env=environment, stdout=out, stderr=log)

    def seen(self) -> dict[tuple[str, int], list[list[float]]]:
        """The rows that the ranks of each attempt have taken in each step, where all of them have."""
        rows: defaultdict[tuple[str, int], list[list[float]]] = defaultdict(list)
        worlds = {}
        for line in self.lines():
            if "rows" in line:
                rows[line["attempt"], line["step"]].append(line["rows"])
                worlds[line["attempt"]] = line["world"]
        return {key: taken for key, taken in rows.items() if len(taken) == worlds[key[0]]}

    def lines(self) -> Iterator[dict[str, Any]]:
        """Return what ranks have written; the last line of one that was killed may be half there."""
        for path in (self.folder / survivor.SEEN).iterdir():
            for line in path.read_text().splitlines():
                with suppress(json.JSONDecodeError):
                    yield json.loads(line)


@contextmanager
def nodes(
    job: Job, store: int | str, needs: Mapping[int, int], **variables: str
) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start nodes by name, as the page says; at the end, kill those that are left.

    Args:
        job: their folder.
        store: the port of the store, or its address.
        needs: the number of ranks of attempts that begin after a step.
        **variables: of their environment.
    """
    variables |= {"PET_RDZV_CONF": _CONF, "NEEDS": json.dumps(needs)}
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *prefix: str, **more: str) -> subprocess.Popen[bytes]:
        where = store if isinstance(store, str) else f"127.0.0.1:{store}"
        started.append(job.start(*prefix, "bash", "node.sh", NODE=name, STORE=where, **variables, **more))
        return started[-1]

    try:
        yield start
    finally:
        for agent in started:
            if agent.poll() is None:
                survivor.kill_node(agent.pid)
            agent.wait()


@contextmanager
def store(job: Job, *prefix: str) -> Iterator[int]:
    """Keep the store of the page, at a free port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    kept = job.start(*prefix, sys.executable, "store.py", str(port))
    try:
        wait_for(lambda: _listens(port, *prefix), "the store", job)
        yield port
    finally:
        kept.kill()
        kept.wait()


def _listens(port: int, *prefix: str) -> bool:
    connect = f"import socket; socket.create_connection(('127.0.0.1', {port}))"
    return subprocess.run([*prefix, sys.executable, "-c", connect], capture_output=True).returncode == 0


def wait_for(happened: Callable[[], Any], what: str, job: Job) -> None:
    """Wait until something has happened; a test that waits in vain fails, and shows the log."""
    until = time.monotonic() + LIMIT
    while not happened():
        assert time.monotonic() < until, f"{what} did not happen; {job.fates} are to come\n{job.printed}\n{job.log}"
        time.sleep(0.05)


def check_trained_as(one: Job, job: Job, *attempts: tuple[int, range]) -> None:
    """Compare losses and rows with those of one device.

    Args:
        one: the job of one device.
        job: the job that has lost ranks.
        attempts: the number of replicas, and the steps that rank 0 has printed, of each attempt.
    """
    printed = job.printed
    want = [(replicas, step) for replicas, steps in attempts for step in steps]
    assert [(step.replicas, step.step) for step in printed] == want, job.log
    losses = {step.step: step.loss for step in one.printed}
    assert list(losses) == list(range(1, STEPS + 1))
    off = {step.step: step.loss / losses[step.step] - 1 for step in printed}
    assert max(map(abs, off.values())) < TOLERANCE, off
    _check_rows(one.seen(), job.seen())


def _check_rows(
    one: Mapping[tuple[str, int], Sequence[list[float]]], seen: Mapping[Any, Sequence[list[float]]]
) -> None:
    """Each step of each attempt takes each row of its global batch once; ranks of a model axis take the same ones."""
    assert {step for _, step in seen} == set(range(1, STEPS + 1))
    for (attempt, step), taken in seen.items():
        together = sorted(itertools.chain.from_iterable(taken))
        copies, rest = divmod(len(together), BATCH)
        (batch,) = one["0", step]
        assert not rest and together == sorted(batch * copies), (attempt, step)

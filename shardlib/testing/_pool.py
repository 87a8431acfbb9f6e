"""A warm pool of real ranks: processes that keep torch imported and meet over gloo when they are given a function.

Starting a process and importing torch costs seconds; a call on a warm pool costs some ten milliseconds. Every call
gets a fresh process group and starts from clean state, so that nothing of one call reaches the next. A rank that hangs
or dies takes its pool with it, never the caller, and the error says where each rank stood.

Nothing of a pool has a name that another could take: ranks meet on a port that the system chose, and files have been
unlinked before they are used. No process outlives this one: ranks end with the fork server, and with their pipes.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest import mock

from shardlib.errors import ShardlibError
from shardlib.testing import _carry
from shardlib.testing._standing import Standing, explain, lost_a_peer, table
from shardlib.testing._worker import Call, Failure, serve

__all__ = ["HangError", "RankDied", "RankError", "Ranks", "Spent", "preload", "ranks", "shared_pool", "spent"]

_GRACE_SECONDS = 5.0  # after one rank failed, the others get so long to notice
_ASKED_SECONDS = 1.0  # to report a standing
_START_SECONDS = 300.0  # to import torch, on a machine however busy
_LONGEST_TEMPORARY_FOLDER = 103 - 32  # bytes: a socket's path ends at 103 (macOS) or 107, multiprocessing adds 32
_PRELOAD = [
    "torch",
    "torch._dynamo",  # that is imported by the first backward of DTensors, compiled or not
    "torch.distributed.tensor",
    "torch.distributed.device_mesh",
    "shardlib.engine._torch",
    "shardlib.testing._worker",
]
_LAST = "shardlib.testing._settled"
# Semaphores that libraries make (tqdm's lock) end with their rank; the tracker frees them, and need not say so.
_OF_TRACKER = "ignore:resource_tracker:UserWarning"


class RankError(ShardlibError):
    """Ranks that did not do what they were given: see `HangError` and `RankDied`; or something that cannot be sent.

    Attributes:
        standing: each rank's standing, rank 0 first, if it is known.
    """

    def __init__(self, message: str, standing: Sequence[Standing] = ()) -> None:
        super().__init__(message)
        self.standing = list(standing)

    def __reduce__(self) -> Any:
        return type(self), (self.args[0], self.standing)


class HangError(RankError):
    """Ranks that did not answer in time. `standing` has the rank, module, collective, axis and shape of each.

    Example:
        >>> from torch import distributed as dist
        >>> def skipped_by_one_rank():
        ...     if dist.get_rank() != 1:
        ...         dist.barrier()
        >>> try:
        ...     shared_pool(2).run(skipped_by_one_rank)
        ... except HangError as error:
        ...     print(error.standing[1].state)
        done
    """


class RankDied(RankError):
    """A rank whose process ended: the message names the signal or exit code."""


@dataclass
class Ranks:
    """`world_size` processes that run functions together; made by `ranks` or `shared_pool`.

    Called with another size it gives ranks of that size on the same processes: `pool(2).run(...)`.

    Example:
        >>> from torch import distributed as dist
        >>> def hello(greeting):
        ...     return greeting, dist.get_rank()
        >>> pool = shared_pool(3)
        >>> pool.run(hello, "hi")
        [('hi', 0), ('hi', 1), ('hi', 2)]
        >>> pool(2).run(lambda: dist.get_world_size())
        [2, 2]
    """

    world_size: int
    timeout: float
    workers: _Workers = field(repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.world_size, bool) or not isinstance(self.world_size, int) or self.world_size < 1:
            raise RankError(f"A pool of {self.world_size!r} ranks was asked for; give a positive integer.")

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank and return the results, rank 0 first.

        On each rank the default process group is gloo, of this pool's world size; random numbers begin at the same
        seed; `sys.path`, the working folder and `os.environ` are those of the caller. What ranks can import travels by
        name; lambdas, closures and functions of test files by value; arguments and results must be picklable, tensors
        travel by value.

        Args:
            fn: the function.
            *args: its arguments.
            timeout: seconds to wait, instead of the pool's.
            **kwargs: its keyword arguments.

        Raises:
            HangError: a rank did not answer within `timeout` seconds.
            RankDied: the process of a rank ended.
            RankError: the function, an argument or a result cannot be sent.
            Exception: the error of a rank, with the rank, its traceback and the others' standings as a note.
        """
        limit = self.timeout if timeout is None else timeout
        return self.workers.call(fn, args, kwargs, self.world_size, limit)

    def close(self) -> None:
        """Close the pool and end its processes; a later `run` starts new ones."""
        self.workers.close()

    def __call__(self, world_size: int) -> Ranks:
        return Ranks(world_size, self.timeout, self.workers)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def ranks(world_size: int, *, timeout: float = 120.0) -> Ranks:
    """Return a new pool. Prefer `shared_pool` in tests: starting processes takes seconds."""
    return Ranks(world_size, timeout, _Workers())


def shared_pool(world_size: int, *, timeout: float = 120.0) -> Ranks:
    """Return the pool that this process shares; it grows when a larger world is asked for."""
    return Ranks(world_size, timeout, _SHARED)


@dataclass
class Spent:
    """Statistics of calls on ranks: calls by world size, their seconds, processes started, seconds of starting."""

    calls: Counter[int] = field(default_factory=Counter)
    seconds: float = 0.0
    starts: int = 0
    seconds_starting: float = 0.0


_SPENT = Spent()


def spent() -> Spent:
    """Return the statistics of all pools of this process, as a copy."""
    return Spent(Counter(_SPENT.calls), _SPENT.seconds, _SPENT.starts, _SPENT.seconds_starting)


# --- the processes ------------------------------------------------------------------------------------------------


@dataclass
class _Worker:
    process: Any
    calls: Connection
    questions: Connection
    stacks: Any  # a file without a name, to which the process writes its stack on SIGUSR1

    def send(self, *messages: bytes) -> None:
        """Send to a process that may be gone: the receiver of its answer notices."""
        with contextlib.suppress(OSError):
            for message in messages:
                self.calls.send_bytes(message)

    def ask(self, number: int) -> None:
        with contextlib.suppress(OSError):
            self.questions.send_bytes(_carry.dump(number))

    def hang_up(self) -> None:
        """Close the pipes, at which an idle process ends."""
        self.calls.close()
        self.questions.close()

    def end(self) -> str:
        """Describe how the rank's process ended."""
        self.process.join(1.0)
        code = self.process.exitcode
        if code is not None and code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process ended with exit code {code}"

    def stack(self) -> str:
        """Return what faulthandler wrote of its threads: when it was asked to, or when the process crashed."""
        self.stacks.seek(0)
        return str(self.stacks.read().decode(errors="replace"))


@dataclass
class _Workers:
    """The processes themselves. Worker i is rank i of any world larger than i; worker 0 has the store they meet at."""

    alive: list[_Worker] = field(default_factory=list)
    calls: int = 0
    port: int = 0
    owner: int = 0
    lock: Any = field(default_factory=threading.Lock)

    def call(self, fn: Callable[..., Any], args: Any, kwargs: Any, world_size: int, timeout: float) -> list[Any]:
        work = _packed_call(fn, args, kwargs)
        with self.lock:
            try:
                self._grow(world_size)
                begin = time.perf_counter()
                outcome = self._carry_out(work, world_size, timeout)
                _SPENT.calls[world_size] += 1
                _SPENT.seconds += time.perf_counter() - begin
            except BaseException:
                self.stop()
                raise
            if outcome.broken:
                self.stop()
        outcome.throw(_carry.name_of(fn), timeout)
        return [_carry.load(outcome.answers[rank]) for rank in range(world_size)]

    def _carry_out(self, work: bytes, world_size: int, timeout: float) -> _Round:
        self.calls += 1
        workers = self.alive[:world_size]
        path, folder, environment = tuple(sys.path), os.getcwd(), dict(os.environ)
        for rank, worker in enumerate(workers):
            call = Call(rank, world_size, self.calls, self.port, path, folder, environment)
            worker.send(pickle.dumps(call), work)
        outcome = _Round(workers, self.calls, time.monotonic() + timeout)
        outcome.collect()
        return outcome

    def _grow(self, world_size: int) -> None:
        """Start what is missing of `world_size` processes, and wait until they are ready."""
        if self.owner != os.getpid():  # a fork of the process that has the pool: its ranks are not ours
            self.alive, self.owner = [], os.getpid()
        if multiprocessing.current_process().daemon:
            raise RankError("A rank asked for ranks of its own; run this where the pool was made.")
        if any(worker.calls.poll() for worker in self.alive):  # between calls they say nothing: one ended
            self.stop()
        begin, missing = time.perf_counter(), range(len(self.alive), world_size)
        for rank in missing:
            self.alive.append(_start(rank))
        for rank in missing:
            self._await(rank)
        if missing:
            _SPENT.starts += len(missing)
            _SPENT.seconds_starting += time.perf_counter() - begin

    def _await(self, rank: int) -> None:
        worker = self.alive[rank]
        try:
            if not worker.calls.poll(_START_SECONDS):
                raise RankError(f"Rank {rank} did not start within {_START_SECONDS:g} s.")
            port = _carry.load(worker.calls.recv_bytes())
        except (EOFError, OSError):
            raise RankDied(f"Rank {rank} died while it started: {worker.end()}.") from None
        self.port = port or self.port

    def close(self) -> None:
        """Let idle ranks end by themselves, so that a measuring tool (coverage) can write its results."""
        if self.owner == os.getpid():
            for worker in self.alive:
                worker.hang_up()
            for worker in self.alive:
                worker.process.join(_GRACE_SECONDS)
        self.stop()

    def stop(self) -> None:
        alive, self.alive = self.alive, []
        if self.owner != os.getpid():
            return
        for worker in alive:
            worker.process.kill()
        for worker in alive:
            worker.process.join()
            worker.hang_up()
            worker.stacks.close()


_SHARED = _Workers()
atexit.register(_SHARED.close)


def preload(modules: Iterable[str]) -> None:
    """Import these modules before ranks start, so that ranks share them; has no effect once a rank has started.

    The processes are forked from one that has imported them: so none may start a thread when it is imported.
    """
    _PRELOAD.extend(modules)


def _packed_call(fn: Callable[..., Any], args: Any, kwargs: Any) -> bytes:
    try:
        return _carry.dump_call(fn, args, kwargs)
    except TypeError as error:
        raise RankError(str(error)) from error


def _start(rank: int) -> _Worker:
    context = multiprocessing.get_context("forkserver")
    with mock.patch.dict(os.environ, PYTHONWARNINGS=_OF_TRACKER):
        resource_tracker.ensure_running()
    context.set_forkserver_preload([*_PRELOAD, _LAST])
    calls, their_calls = context.Pipe()
    questions, their_questions = context.Pipe()
    stacks = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the worker
    their_stacks = Connection(os.dup(stacks.fileno()), readable=False)  # a Connection's descriptor can be sent
    arguments = (their_calls, their_questions, their_stacks, rank == 0)
    process = context.Process(target=serve, args=arguments, name=f"shardlib-rank-{rank}", daemon=True)  # type: ignore[attr-defined]
    with _room_for_a_socket_name(), _carry.without_main():
        process.start()
    for end in (their_calls, their_questions, their_stacks):
        end.close()
    return _Worker(process, calls, questions, stacks)


@contextlib.contextmanager
def _room_for_a_socket_name() -> Iterator[None]:
    """Let the fork server bind its socket where the temporary folder's name leaves no room for a socket's."""
    chosen = tempfile.tempdir
    if os.name == "posix" and len(os.fsencode(tempfile.gettempdir())) > _LONGEST_TEMPORARY_FOLDER:
        tempfile.tempdir = "/tmp"
    try:
        yield
    finally:
        tempfile.tempdir = chosen


# --- one call -----------------------------------------------------------------------------------------------------


@dataclass
class _Round:
    """One call while it runs: what ranks answered, and where those stand that have not."""

    workers: list[_Worker]
    number: int
    deadline: float
    answers: dict[int, bytes] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    standing: dict[int, Standing] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)
    late: tuple[int, ...] = ()
    holding: bool = True  # ranks that failed hold their connections until the others were asked

    def collect(self) -> None:
        """Wait for every rank; after a failure only so long as the others may need to notice it."""
        self.waiting = set(range(len(self.workers)))
        while self.waiting and not self.failures and self._listen(self.deadline):
            pass
        self.late = () if self.failures else tuple(sorted(self.waiting))
        if self.waiting:
            self._ask_those_waiting()  # at once: those who lose a peer raise soon after
        self._let_go()
        patience = 0.0 if self.late or any(f.died for f in self.failures) else _GRACE_SECONDS
        self.deadline = min(self.deadline, time.monotonic() + patience)
        while self.waiting and self._listen(self.deadline):
            pass

    def _ask_those_waiting(self) -> None:
        until = time.monotonic() + _ASKED_SECONDS
        self.asked = set(self.waiting)
        for rank in self.waiting:
            self.workers[rank].ask(self.number)
        while self.asked & self.waiting and self._listen(until):
            pass
        for rank in self.asked & self.waiting:
            self.standing[rank] = Standing(rank, "silent")
        if self.late:
            self._dump_stacks()

    def _dump_stacks(self) -> None:
        """Request the stacks of processes that do not answer; faulthandler writes them without Python's lock."""
        silent = sorted(self.asked & self.waiting)
        for rank in silent:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.workers[rank].process.pid, signal.SIGUSR1)
        if silent:
            time.sleep(0.5)
        for rank in silent:
            self.standing[rank] = Standing(rank, "silent", stack=self.workers[rank].stack())

    def _let_go(self) -> None:
        """Tell ranks that failed, and those that fail from now on, to close their connections."""
        self.holding = False
        for failure in self.failures:
            self.workers[failure.rank].send(b"")

    def _listen(self, until: float) -> bool:
        """Receive the next message; return False when none came until then."""
        pipes = {self.workers[rank].calls: rank for rank in self.waiting}
        questions = {self.workers[rank].questions: rank for rank in self.asked & self.waiting}
        ready = wait([*pipes, *questions], max(0.0, until - time.monotonic()))
        for pipe in ready:
            if pipe in pipes:
                self._take(pipes[pipe])  # type: ignore[index]
            elif questions[pipe] in self.waiting:  # type: ignore[index]
                self._take_standing(questions[pipe])  # type: ignore[index]
        return bool(ready)

    def _take(self, rank: int) -> None:
        worker = self.workers[rank]
        self.waiting.discard(rank)
        try:
            answer = _carry.load(worker.calls.recv_bytes())
        except (EOFError, OSError):
            ending = worker.end()
            answer = Failure(
                rank, 0.0, ending, None, Standing(rank, "died", said=ending, stack=worker.stack()), died=True
            )
        if isinstance(answer, bytes):
            self.answers[rank] = answer
            return
        self.failures.append(answer)
        if not self.holding:
            worker.send(b"")

    def _take_standing(self, rank: int) -> None:
        try:
            number, standing = _carry.load(self.workers[rank].questions.recv_bytes())
        except (EOFError, OSError):  # it died; its other pipe says so
            self.asked.discard(rank)
            return
        if number == self.number:
            self.asked.discard(rank)
            self.standing[rank] = standing or Standing(rank, "idle")

    def standings(self) -> list[Standing]:
        """Return the state of each rank: how it ended, or its standing when it was asked, before it lost a peer."""
        lost = {f.rank: f.standing for f in self.failures if lost_a_peer(f.text)}
        own = {f.rank: f.standing for f in self.failures if f.rank not in lost and f.rank not in self.late}
        done = {rank: Standing(rank, "done") for rank in self.answers if rank not in self.late}
        known = {**lost, **self.standing, **done, **own}
        return [known.get(rank, Standing(rank, "running")) for rank in range(len(self.workers))]

    @property
    def broken(self) -> bool:
        """Whether the processes cannot be used again."""
        return bool(self.waiting or self.late or any(failure.died for failure in self.failures))

    def throw(self, name: str, timeout: float) -> None:
        """Raise the error of the call, if there is one."""
        if self.late:
            message = f"{_ranks(self.late)} did not answer within {timeout:g} s in {name}; new processes are started."
            raise HangError("\n".join([message, *self._told(stacks=True)]), self.standings())
        if self.answers and self.failures and all(lost_a_peer(failure.text) for failure in self.failures):
            message = f"{_ranks(self.answers)} finished {name} while others waited for them in a collective."
            raise HangError("\n".join([message, *self._told()]), self.standings())
        if self.failures:
            self._throw(_first_cause(self.failures), name)
        elif self.waiting:
            message = (
                f"{_ranks(self.waiting)} did not answer within {timeout:g} s in {name}; new processes are started."
            )
            raise HangError("\n".join([message, *self._told(stacks=True)]), self.standings())

    def _throw(self, cause: Failure, name: str) -> None:
        error = None
        if cause.error is not None:
            with contextlib.suppress(Exception):
                error = _carry.load(cause.error)
        if isinstance(error, Exception):
            error.add_note("\n".join([f"rank {cause.rank} raised in {name}:", cause.text.rstrip(), *self._told()]))
            raise error
        if cause.died:
            head = f"rank {cause.rank} died in {name}: {cause.text}; new processes are started."
            crashed = [f"\nrank {cause.rank} when it died:\n{cause.standing.stack}"] if cause.standing.stack else []
            raise RankDied("\n".join([head, *self._told(), *crashed]), self.standings())
        raise RankError(
            "\n".join([f"rank {cause.rank} raised in {name}:", cause.text, *self._told()]), self.standings()
        )

    def _told(self, *, stacks: bool = False) -> list[str]:
        """Describe the standings of ranks, unless all of them raised the same error."""
        standings = self.standings()
        if len({(s.state, s.said) for s in standings}) == 1 and standings[0].state == "raised":
            return [f"All {len(standings)} ranks raised this."] if len(standings) > 1 else []
        lines = ["Where the ranks stood:", table(standings), explain(standings)]
        if stacks:
            lines += [f"\nrank {s.rank}:\n{s.stack.rstrip()}" for s in standings if s.stack]
        return [line for line in lines if line]


def _first_cause(failures: list[Failure]) -> Failure:
    """Return the failure that came first, except those that only report a lost peer."""
    own = [failure for failure in failures if not lost_a_peer(failure.text)]
    return min(own or failures, key=lambda failure: failure.when)


def _ranks(ranks: Iterable[int]) -> str:
    *first, last = map(str, sorted(ranks))
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"

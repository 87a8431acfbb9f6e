"""A warm pool of real ranks: processes that keep torch imported and meet over gloo when they are given a function.

Starting a process and importing torch costs seconds; a call on a warm pool costs some ten milliseconds. Every call
gets a fresh process group, so that nothing of one call reaches the next. A rank that hangs or dies takes its pool
with it, never the caller, and the error says where each rank stood.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from shardlib.errors import ShardlibError

__all__ = ["RankError", "Ranks", "ranks", "shared_pool"]

_GRACE_SECONDS = 5.0  # after one rank failed, the others get so long to notice
_PRELOAD = ["torch", "torch.distributed.tensor", "torch.distributed.device_mesh", "shardlib.testing._pool"]


class RankError(ShardlibError):
    """Ranks that did not answer: a hang, a process that died, or an exception that cannot be carried over."""


@dataclass
class Ranks:
    """`world_size` processes that run functions together; made by `ranks` or `shared_pool`.

    Example:
        >>> def hello(greeting):
        ...     return greeting, torch.distributed.get_rank()
        >>> with ranks(2) as pool:  # doctest: +SKIP
        ...     pool.run(hello, "hi")
        [('hi', 0), ('hi', 1)]
    """

    world_size: int
    timeout: float
    workers: _Workers

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank and return the results, rank 0 first.

        On each rank the default process group is gloo, of this pool's world size. Function, arguments and results
        must be picklable, the function by import; tensors travel by value.

        Raises:
            RankError: a rank did not answer within `timeout` seconds, or died; the message gives each rank's stack.
            Exception: what a rank raised, with the rank and its traceback as a note.
        """
        self.workers.grow(self.world_size)
        return self.workers.call(fn, args, kwargs, self.world_size, self.timeout if timeout is None else timeout)

    def close(self) -> None:
        """End the processes; a later `run` starts new ones."""
        self.workers.stop()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def ranks(world_size: int, *, timeout: float = 120.0) -> Ranks:
    """A pool of its own. Prefer `shared_pool` in tests: starting processes takes seconds."""
    return Ranks(world_size, timeout, _Workers())


def shared_pool(world_size: int, *, timeout: float = 120.0) -> Ranks:
    """The pool that this whole process shares, grown when a larger world is asked for."""
    return Ranks(world_size, timeout, _SHARED)


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    stack_file: Path


@dataclass
class _Workers:
    """The processes themselves. Worker i is rank i of any world larger than i."""

    alive: list[_Worker] = field(default_factory=list)
    folder: tempfile.TemporaryDirectory[str] | None = None
    calls: int = 0

    def grow(self, world_size: int) -> None:
        if self.folder is None:
            self.folder = tempfile.TemporaryDirectory(prefix="shardlib-ranks-")
        for rank in range(len(self.alive), world_size):
            self.alive.append(_start(rank, Path(self.folder.name)))

    def stop(self) -> None:
        alive, self.alive = self.alive, []
        for worker in alive:
            worker.process.kill()
        for worker in alive:
            worker.process.join()
            worker.pipe.close()
        if self.folder is not None:
            self.folder.cleanup()
            self.folder = None

    def call(self, fn: Callable[..., Any], args: Any, kwargs: Any, world_size: int, timeout: float) -> list[Any]:
        assert self.folder is not None
        self.calls += 1
        store = Path(self.folder.name) / f"store-{self.calls}"
        work = pickle.dumps((fn, args, kwargs))
        workers = self.alive[:world_size]
        try:
            for rank, worker in enumerate(workers):
                worker.pipe.send_bytes(pickle.dumps((sys.path, os.getcwd(), str(store), rank, world_size)))
                worker.pipe.send_bytes(work)
            answers, failures, waiting = _collect(workers, timeout)
            hang = _hang_message(workers, waiting, timeout) if waiting and not failures else None
        except BaseException:
            self.stop()
            raise
        if waiting or any(failure.died for failure in failures):
            self.stop()
        store.unlink(missing_ok=True)
        if failures:
            _first_cause(failures).throw()
        if hang is not None:
            raise RankError(hang)
        return [pickle.loads(answers[rank]) for rank in range(world_size)]


def _collect(workers: list[_Worker], timeout: float) -> tuple[dict[int, bytes], list[_Failure], list[int]]:
    """Answers by rank, failures, and the ranks that are still silent when there is nothing left to wait for."""
    answers: dict[int, bytes] = {}
    failures: list[_Failure] = []
    deadline = time.monotonic() + timeout
    waiting = {worker.pipe: rank for rank, worker in enumerate(workers)}
    while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
        for pipe in ready:
            rank = waiting.pop(pipe)  # type: ignore[call-overload]
            answer = _receive(pipe, rank, workers[rank])  # type: ignore[arg-type]
            if isinstance(answer, bytes):
                answers[rank] = answer
                continue
            failures.append(answer)
            deadline = min(deadline, time.monotonic() + (0.0 if answer.died else _GRACE_SECONDS))
    return answers, failures, sorted(waiting.values())


_SHARED = _Workers()
atexit.register(_SHARED.stop)


@dataclass
class _Failure:
    rank: int
    when: float
    text: str
    pickled: bytes | None
    died: bool = False

    def throw(self) -> None:
        note = f"rank {self.rank} raised:\n{self.text}"
        error: BaseException | None = None
        if self.pickled is not None:
            with contextlib.suppress(Exception):
                error = pickle.loads(self.pickled)
        if isinstance(error, Exception):
            error.add_note(note)
            raise error
        raise RankError(f"rank {self.rank} died\n{self.text}" if self.died else note)


def _first_cause(failures: list[_Failure]) -> _Failure:
    """The failure that came first, leaving aside those that only report that a peer went away."""
    peers_left = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    own = [f for f in failures if not any(words in f.text for words in peers_left)]
    return min(own or failures, key=lambda failure: failure.when)


def _receive(pipe: Connection, rank: int, worker: _Worker) -> bytes | _Failure:
    try:
        ok, when, *payload = pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        worker.process.join(1.0)
        return _Failure(rank, 0.0, f"its process ended with exit code {worker.process.exitcode}", None, died=True)
    return payload[0] if ok else _Failure(rank, when, *payload)


def _hang_message(workers: list[_Worker], waiting: list[int], timeout: float) -> str:
    for rank in waiting:
        with contextlib.suppress(ProcessLookupError):
            os.kill(workers[rank].process.pid, signal.SIGUSR1)
    time.sleep(0.5)
    stacks = [f"rank {rank} stood at:\n{workers[rank].stack_file.read_text()}" for rank in waiting]
    done = [rank for rank in range(len(workers)) if rank not in waiting]
    head = f"ranks {waiting} did not answer within {timeout:g} s (ranks {done} did); their processes were ended."
    return "\n".join([head, *stacks])


def _start(rank: int, folder: Path) -> _Worker:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    ours, theirs = context.Pipe()
    stack_file = folder / f"stack-{rank}"
    stack_file.touch()
    process = context.Process(target=_serve, args=(theirs, str(stack_file)), name=f"shardlib-rank-{rank}", daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours, stack_file)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; the parent is the fork server


def _serve(pipe: Connection, stack_file: str) -> None:
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Kept open for the life of the process: the signal handler writes to it.
    stacks = open(stack_file, "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # what is imported stays: collecting after each call need not look at it
    while True:
        try:
            head, work = pipe.recv_bytes(), pipe.recv_bytes()
        except (EOFError, OSError):
            return
        with contextlib.suppress(BrokenPipeError):  # the parent gave this call up; what ends us comes by another way
            pipe.send_bytes(_answer(head, work))


def _answer(head: bytes, work: bytes) -> bytes:
    try:
        path, folder, store, rank, world_size = pickle.loads(head)
        sys.path[:] = path
        os.chdir(folder)
        with _process_group(store, rank, world_size):
            fn, args, kwargs = pickle.loads(work)
            result = pickle.dumps(fn(*args, **kwargs))
        return pickle.dumps((True, time.monotonic(), result))
    except BaseException as error:
        return pickle.dumps((False, time.monotonic(), traceback.format_exc(), _pickled(error)))


def _pickled(error: BaseException) -> bytes | None:
    try:
        data = pickle.dumps(error)
        return data if isinstance(pickle.loads(data), Exception) else None
    except Exception:
        return None


@contextlib.contextmanager
def _process_group(store: str, rank: int, world_size: int) -> Any:
    import torch
    import torch.distributed as dist

    from shardlib.engine._torch import forget_meshes

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    dist.barrier()  # whoever is done before another has connected would close the door on it
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_meshes()
        gc.collect()  # a process group that a cycle keeps has threads, which go on asking for work
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)

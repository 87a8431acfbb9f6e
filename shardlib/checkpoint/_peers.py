"""The ranks of a job while they save or load: what one learns all learn, and one that is gone is named.

Every phase ends with all ranks telling rank 0 how it went, and rank 0 telling all. Each goes over a gloo group of its
own, because gloo drops every connection of a group on a rank that waited in vain there: rank 0 gives up on a rank that
is silent and can still say so to the others. Tensors have a third group, for the same reason. Messages are JSON.
"""

from __future__ import annotations

import contextlib
import json
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardlib._log import timed
from shardlib.errors import CheckpointError, by_rank

__all__ = ["Lost", "Peers", "peers"]

T = TypeVar("T")


class Lost(CheckpointError):
    """A rank that ended, or did not answer in time."""


class Peers:
    """Agreement between ranks; a job of one process agrees with itself.

    Attributes:
        rank, size: the number of this process, and of all.
        timeout: seconds that the ranks wait for each other in a phase.
        doing: the collective task, for messages: 'saving "run/step-000120"'.
    """

    def __init__(self, doing: str = "", timeout: float = 1800.0) -> None:
        self.rank, self.size, self.doing, self.timeout = 0, 1, doing, timeout

    def run(self, phase: str, work: Callable[[], T]) -> T:
        """Run a phase of the work; if it raises on any rank, all ranks raise.

        Raises:
            CheckpointError: the error of a rank, with its number and the phase; `Lost` if a rank is gone.
        """
        result, mine, failure = self._attempt(phase, work)
        self._raise_first(self.exchange(phase, failure), mine)
        return result  # type: ignore[return-value]

    def gather(self, phase: str, work: Callable[[], T]) -> list[T]:
        """Run `work` and return every rank's result, serialized as JSON, in the order of ranks."""
        result, mine, failure = self._attempt(phase, work)
        every = self.exchange(phase, {"failed": failure, "result": None if failure else result})
        self._raise_first([answer["failed"] for answer in every], mine)
        return [answer["result"] for answer in every]

    def first(self, phase: str, work: Callable[[], T]) -> T:
        """Return rank 0's result, serialized as JSON, on all ranks."""
        return self.gather(phase, work if self.rank == 0 else lambda: None)[0]  # type: ignore[return-value]

    def exchange(self, phase: str, mine: Any) -> list[Any]:
        """Return every rank's value, serialized as JSON, in the order of ranks."""
        return [json.loads(json.dumps(mine))]

    def compare(self, **given: Any) -> None:
        """Compare the arguments that every rank gives the same.

        Raises:
            CheckpointError: ranks gave different ones, which are shown; on every rank.
        """
        every = self.exchange("compare arguments", {name: repr(value) for name, value in given.items()})
        for name in given:
            values = [theirs[name] for theirs in every]
            if len(set(values)) > 1:
                raise CheckpointError(
                    f"{_capital(self.doing)} failed: ranks gave different values of {name}.\n"
                    f"{by_rank(enumerate(values))}\nGive the same on every rank. Nothing was written or changed."
                )

    def send(self, tensor: torch.Tensor, to: int) -> Callable[[], None]:
        """Start to send a contiguous CPU tensor to a rank that receives one of the same shape; a call waits for it."""
        raise AssertionError("a job of one process sends nothing")

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Fill a contiguous CPU tensor with what a rank sends."""
        raise AssertionError("a job of one process receives nothing")

    def _attempt(self, phase: str, work: Callable[[], T]) -> tuple[T | None, Exception | None, str | None]:
        try:
            with timed(f"{self.doing}: {phase}"):
                return work(), None, None
        except Exception as error:
            return None, error, str(error) if isinstance(error, CheckpointError) else described(error)

    def _raise_first(self, failures: list[str | None], mine: Exception | None) -> None:
        for rank, failure in enumerate(failures):
            if failure is not None:
                where = f" (on rank {rank})" if self.size > 1 else ""
                said = isinstance(mine, CheckpointError) and str(mine) == failure  # its traceback says no more
                raise CheckpointError(f"{_capital(self.doing)} failed{where}: {failure}") from None if said else mine


def described(error: Exception) -> str:
    """Describe an error of Python or of the system."""
    return str(error) if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"


class _Job(Peers):
    def __init__(self, doing: str, timeout: float, groups: _Groups) -> None:
        super().__init__(doing, timeout)
        self.rank, self.size, self._groups = dist.get_rank(), dist.get_world_size(), groups

    def exchange(self, phase: str, mine: Any) -> list[Any]:
        if self._groups.broken:
            raise Lost(f"{_capital(self.doing)} failed: ranks were lost before. Restart the job.")
        verdict = self._collect(phase, mine) if self.rank == 0 else self._report(phase, mine)
        if isinstance(verdict, str):
            self._groups.broken = True
            raise Lost(verdict)
        return verdict

    def _collect(self, phase: str, mine: Any) -> list[Any] | str:
        """Receive every rank's message, and send all of them, or the ranks without an answer, to every rank. Runs on
        rank 0."""
        until = time.monotonic() + self.timeout
        every, verdict = [json.loads(json.dumps(mine))], None
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        hearing = {rank: self._irecv(sizes[rank], rank, self._groups.up) for rank in range(1, self.size)}
        for rank in range(1, self.size):
            try:
                _wait(hearing[rank], until)
                every.append(self._receive_json(int(sizes[rank]), rank, self._groups.up, until))
            except RuntimeError as error:
                verdict = self._lost(rank, phase, error)
                break
        answer: Any = every if verdict is None else verdict
        works = [self._send_json(answer, rank, self._groups.down) for rank in range(1, self.size)]
        for work in works:
            for part in work:
                with contextlib.suppress(RuntimeError):
                    _wait(part, until + _GRACE)
        return answer

    def _report(self, phase: str, mine: Any) -> list[Any] | str:
        """Send this rank's message to rank 0, and receive all messages. Runs on other ranks.

        What is sent is not waited for: where rank 0 gives up on another rank, it no longer listens, but speaks.
        """
        until = time.monotonic() + self.timeout
        self._send_json(mine, 0, self._groups.up)
        try:
            size = torch.zeros(1, dtype=torch.int64)
            _wait(self._irecv(size, 0, self._groups.down), until + 2 * _GRACE)
            return self._receive_json(int(size), 0, self._groups.down, until + 2 * _GRACE)
        except RuntimeError as error:
            return self._lost(0, phase, error)

    def _lost(self, rank: int, phase: str, error: Exception) -> str:
        why = f"did not answer within {self.timeout:g} s" if "Timed out" in str(error) else "has ended"
        return (
            f'{_capital(self.doing)} failed: rank {rank} {why}, while the ranks were in phase "{phase}". Nothing that '
            "was saved before is touched; restart the job from the last checkpoint."
        )

    def _irecv(self, tensor: torch.Tensor, rank: int, group: dist.ProcessGroup) -> Any:
        try:
            return self._groups.keep(dist.irecv(tensor, rank, group=group), tensor)
        except RuntimeError as error:
            return error

    def _isend(self, tensor: torch.Tensor, rank: int, group: dist.ProcessGroup) -> Any:
        try:
            return self._groups.keep(dist.isend(tensor, rank, group=group), tensor)
        except RuntimeError as error:
            return error

    def _send_json(self, value: Any, rank: int, group: dist.ProcessGroup) -> list[Any]:
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        return [self._isend(torch.tensor([data.numel()]), rank, group), self._isend(data, rank, group)]

    def _receive_json(self, size: int, rank: int, group: dist.ProcessGroup, until: float) -> Any:
        data = torch.empty(size, dtype=torch.uint8)
        _wait(self._irecv(data, rank, group), until)
        return json.loads(data.numpy().tobytes())

    def send(self, tensor: torch.Tensor, to: int) -> Callable[[], None]:
        return partial(self._wait_for_data, self._isend(_bytes(tensor), to, self._groups.data), to)

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        self._wait_for_data(self._irecv(_bytes(tensor), source, self._groups.data), source)

    def _wait_for_data(self, work: Any, rank: int) -> None:
        try:
            _wait(work, time.monotonic() + self.timeout)
        except RuntimeError as error:
            raise Lost(self._lost(rank, "write", error)) from None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


_GRACE = 5.0  # seconds by which ranks hear later that another one was waited for in vain


def _wait(work: Any, until: float) -> None:
    if isinstance(work, RuntimeError):
        raise work
    work.wait(timedelta(seconds=max(until - time.monotonic(), 0.001)))


class _Groups:
    """Three groups of all ranks. What was sent and not awaited is kept: the system may still read its memory."""

    def __init__(self, timeout: float) -> None:
        limit = timedelta(seconds=timeout)
        self.up, self.down, self.data = (dist.new_group(backend="gloo", timeout=limit) for _ in range(3))
        self.broken = False
        self._kept: list[Any] = []

    def keep(self, work: Any, tensor: torch.Tensor) -> Any:
        if len(self._kept) > 4096:
            self._kept[:2048] = []
        self._kept.append((work, tensor))
        return work


_made: list[tuple[weakref.ref[Any], _Groups]] = []


def peers(doing: str, timeout: float) -> Peers:
    """Return the ranks of this job, or this process alone without a process group. Collective.

    Raises:
        CheckpointError: not all of them called this within `timeout` seconds.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Peers(doing, timeout)
    world = dist.group.WORLD
    if not _made or _made[0][0]() is not world or _made[0][1].broken:
        try:
            _made[:] = [(weakref.ref(world), _Groups(timeout))]
        except RuntimeError as error:  # of gloo: it waited in vain
            raise CheckpointError(
                f"{_capital(doing)} failed: not all {dist.get_world_size()} ranks came to it within {timeout:g} s "
                f"({error}). A rank is lost, or does something else: look at its log; a timeout= may be longer."
            ) from error
    return _Job(doing, timeout, _made[0][1])


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]

"""Agreement of a job's ranks while they save or load: an error of one rank raises on all, and a lost rank is named.

Every phase ends with all ranks telling rank 0 how it went, and rank 0 telling all. Each goes over a gloo group of its
own, because gloo drops every connection of a group on a rank that waited in vain there: rank 0 gives up on a rank that
is silent and can still say so to the others. Tensors have a third group, for the same reason. Messages are JSON.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardlib import errors
from shardlib._log import timed
from shardlib.engine import _torch
from shardlib.engine.ranks import lost
from shardlib.errors import CheckpointError, ShardlibError, by_rank

__all__ = ["Lost", "Peers", "joined_peers", "peers"]

T = TypeVar("T")


class Lost(CheckpointError):
    """A rank that ended, or did not answer in time."""


class Peers:
    """Agreement between ranks; a job of one process agrees with itself.

    Attributes:
        rank, size: the number of this process, and of all.
        timeout: seconds that the ranks wait for each other in a phase.
        doing: the collective task, for messages: 'saving "run/step-000120"'.
        keeps_kinds: whether an error of shardlib's own keeps its class on all ranks, or becomes a `CheckpointError`.
    """

    def __init__(self, doing: str = "", timeout: float = 1800.0, *, keeps_kinds: bool = False) -> None:
        self.rank, self.size, self.doing, self.timeout, self.keeps_kinds = 0, 1, doing, timeout, keeps_kinds

    def run(self, phase: str, work: Callable[[], T]) -> T:
        """Run a phase of the work; if it raises on any rank, all ranks raise.

        Raises:
            CheckpointError: the error of a rank, with its number and the phase; `Lost` if a rank is gone.
            ShardlibError: that of a rank, under `keeps_kinds`.
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

    def raise_together(self, failure: BaseException | None) -> None:
        """Raise this rank's failure if it has one, else that of the first rank that has one."""
        said = self.exchange("look back", None if failure is None else str(failure))
        if failure is not None:
            raise failure
        for rank, text in enumerate(said):
            if text is not None:
                raise CheckpointError(f"{text} (Rank {rank} has not raised this before.)")

    def group_for(self, device: torch.device) -> dist.ProcessGroup | None:
        """Return the group over which tensors of a device are sent between all ranks."""
        return None

    def stop_sending(self) -> None:
        """Let ranks that wait for tensors of this one fail at once: it has failed, and says why at the phase's end."""

    def renew(self) -> None:
        """Let the next task send tensors over new connections. All ranks call it, after one has stopped sending."""

    def complete(self) -> None:
        """Make connections for tensors, where `renew` has left none. All ranks call it before they send again."""

    def close(self) -> None:
        """Close connections that are these ranks' alone. Those of a job stay."""

    def _attempt(self, phase: str, work: Callable[[], T]) -> tuple[T | None, BaseException | None, _Failure | None]:
        try:
            with timed(f"{self.doing}: {phase}"):
                return work(), None, None
        except BaseException as error:  # an interrupt, too: other ranks wait for this one
            own = isinstance(error, CheckpointError) or (self.keeps_kinds and isinstance(error, ShardlibError))
            kind = type(error).__name__ if own and hasattr(errors, type(error).__name__) else CheckpointError.__name__
            return None, error, (isinstance(error, Lost), kind, str(error) if own else described(error))

    def _raise_first(self, failures: list[_Failure | None], mine: BaseException | None) -> None:
        if mine is not None and not isinstance(mine, Exception):
            raise mine
        # A rank that missed the tensors of another one comes after that one, which has failed by itself.
        found = [(failure[0], rank, *failure[1:]) for rank, failure in enumerate(failures) if failure is not None]
        if found:
            _, rank, kind, text = min(found)
            if mine is not None and kind != CheckpointError.__name__ and len({each[2:] for each in found}) == 1:
                raise mine  # in its own words, which say all
            where = f" (on rank {rank})" if self.size > 1 else ""
            said = isinstance(mine, ShardlibError) and str(mine) == text  # its traceback says no more
            error = getattr(errors, kind)(f"{_capital(self.doing)} failed{where}: {text}")
            raise error from None if said else mine


_Failure = tuple[bool, str, str]  # whether it is that another rank's tensors did not come; its class; its text


def described(error: BaseException) -> str:
    """Describe an error of Python or of the system."""
    if isinstance(error, OSError) and error.strerror:
        return str(error)
    return f"{type(error).__name__}: {error}".removesuffix(": ")


class _Job(Peers):
    def __init__(
        self, doing: str, timeout: float, rank: int, size: int, groups: _Groups, *, keeps_kinds: bool = False
    ) -> None:
        super().__init__(doing, timeout, keeps_kinds=keeps_kinds)
        self.rank, self.size, self._groups = rank, size, groups

    def exchange(self, phase: str, mine: Any) -> list[Any]:
        if self._groups.broken:
            raise Lost(f"{_capital(self.doing)} failed: ranks were lost before. {self._advice}")
        try:
            verdict = self._collect(phase, mine) if self.rank == 0 else self._report(phase, mine)
        except BaseException as error:  # an interrupt between two messages: the others need not wait for the rest
            self._note(error)
            self._groups.hang_up()
            raise
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
                self._wait(hearing[rank], until)
                every.append(self._receive_json(int(sizes[rank]), rank, self._groups.up, until))
            except RuntimeError as error:
                verdict = self._lost(rank, phase, error)
                break
        answer: Any = every if verdict is None else verdict
        works = [self._send_json(answer, rank, self._groups.down) for rank in range(1, self.size)]
        for work in works:
            for part in work:
                with contextlib.suppress(RuntimeError):
                    self._wait(part, until + _GRACE)
        return answer

    def _report(self, phase: str, mine: Any) -> list[Any] | str:
        """Send this rank's message to rank 0, and receive all messages. Runs on other ranks.

        What is sent is not waited for: where rank 0 gives up on another rank, it no longer listens, but speaks.
        """
        until = time.monotonic() + self.timeout
        sent = self._send_json(mine, 0, self._groups.up)
        try:
            size = torch.zeros(1, dtype=torch.int64)
            self._wait(self._irecv(size, 0, self._groups.down), until + 2 * _GRACE)
            answer = self._receive_json(int(size), 0, self._groups.down, until + 2 * _GRACE)
            for work in sent if isinstance(answer, list) else ():  # rank 0 has answered, so it has received them
                self._wait(work, until + 2 * _GRACE)
            return answer
        except RuntimeError as error:
            return self._lost(0, phase, error)

    def _lost(self, rank: int, phase: str, error: Exception) -> str:
        if "Timed out" in str(error):
            why = f"did not answer within {self.timeout:g} s"
        else:
            raised = self._noted(rank)
            why = f"has left, after it raised {raised}" if raised else "has ended"
        return (
            f'{_capital(self.doing)} failed: rank {rank} {why}, while the ranks were in phase "{phase}". {self._advice}'
        )

    _advice = "Nothing that was saved before is touched; restart the job from the last checkpoint."

    def _note(self, error: BaseException) -> None:
        lost.note(error)

    def _noted(self, rank: int) -> str:
        return lost.noted(rank)

    def _irecv(self, tensor: torch.Tensor, rank: int, group: dist.ProcessGroup | None) -> Any:
        try:
            return self._groups.keep(dist.irecv(tensor, rank, group=group), tensor)
        except RuntimeError as error:
            return error

    def _isend(self, tensor: torch.Tensor, rank: int, group: dist.ProcessGroup | None) -> Any:
        try:
            return self._groups.keep(dist.isend(tensor, rank, group=group), tensor)
        except RuntimeError as error:
            return error

    def _send_json(self, value: Any, rank: int, group: dist.ProcessGroup) -> list[Any]:
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        return [self._isend(torch.tensor([data.numel()]), rank, group), self._isend(data, rank, group)]

    def _receive_json(self, size: int, rank: int, group: dist.ProcessGroup, until: float) -> Any:
        data = torch.empty(size, dtype=torch.uint8)
        self._wait(self._irecv(data, rank, group), until)
        return json.loads(data.numpy().tobytes())

    def send(self, tensor: torch.Tensor, to: int) -> Callable[[], None]:
        return partial(self._wait_for_data, self._isend(_bytes(tensor), to, self._groups.data), to)

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        self._wait_for_data(self._irecv(_bytes(tensor), source, self._groups.data), source)

    def _wait_for_data(self, work: Any, rank: int) -> None:
        try:
            self._wait(work, time.monotonic() + self.timeout)
        except RuntimeError as error:
            raise Lost(self._lost(rank, "write", error)) from None

    def _wait(self, work: Any, until: float) -> None:
        if isinstance(work, RuntimeError):
            raise work
        work.wait(timedelta(seconds=max(until - time.monotonic(), 0.001)))
        self._groups.release(work)

    def group_for(self, device: torch.device) -> dist.ProcessGroup | None:
        return self._groups.data if device.type == "cpu" else None

    def complete(self) -> None:
        self._groups.complete(self.timeout)

    def stop_sending(self) -> None:
        if self._groups.data is not None:
            lost.hang_up(self._groups.data)

    def renew(self) -> None:
        self._groups.spent, self._groups.data = self._groups.data, None


class _Joined(_Job):
    """Ranks of several jobs, whose stores know nothing of each other."""

    _advice = "Connect again; a model that has got a part of the weights refuses to serve until it has all of them."

    def __init__(self, doing: str, timeout: float, rank: int, size: int, groups: _Groups) -> None:
        super().__init__(doing, timeout, rank, size, groups, keeps_kinds=True)
        self._of_device: dict[str, dist.ProcessGroup] = {}

    def _note(self, error: BaseException) -> None:
        pass

    def _noted(self, rank: int) -> str:
        return ""

    def group_for(self, device: torch.device) -> dist.ProcessGroup | None:
        if device.type == "cpu":
            return self._groups.data
        if device.type not in self._of_device:
            self._of_device[device.type] = self._groups.new(
                self.timeout, dist.get_default_backend_for_device(device.type)
            )
        return self._of_device[device.type]

    def close(self) -> None:
        for group in (self._groups.up, self._groups.down, self._groups.data, *self._of_device.values()):
            if group is not None:
                _torch.forget_joined_group(group)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


_GRACE = 5.0  # seconds by which ranks hear later that another one was waited for in vain


class _Groups:
    """Three groups of all ranks. A tensor is kept until its message is awaited: the system may still use its memory."""

    def __init__(
        self,
        timeout: float,
        new: Callable[[float, str], dist.ProcessGroup],
        forget: Callable[[dist.ProcessGroup], None] = dist.destroy_process_group,
    ) -> None:
        self.new, self.forget = new, forget
        self.up, self.down = (new(timeout, "gloo") for _ in range(2))
        self.data: dist.ProcessGroup | None = None
        self.spent: dist.ProcessGroup | None = None
        self.broken = False
        self._kept: dict[int, Any] = {}
        self.complete(timeout)

    def complete(self, timeout: float) -> None:
        """Make a group for tensors, where there is none yet or a rank has hung up the last one."""
        if self.data is None:
            if self.spent is not None:
                self.forget(self.spent)
                self.spent = None
                self._kept.clear()
            self.data = self.new(timeout, "gloo")

    def keep(self, work: Any, tensor: torch.Tensor) -> Any:
        self._kept[id(work)] = work, tensor
        return work

    def release(self, work: Any) -> None:
        self._kept.pop(id(work), None)

    def hang_up(self) -> None:
        self.broken = True
        for group in (self.up, self.down, self.data):
            if group is not None:
                lost.hang_up(group)


_made: list[tuple[weakref.ref[Any], _Groups]] = []


def peers(call: str, doing: str, timeout: float | None, *, keeps_kinds: bool = False) -> Peers:
    """Return the ranks of this job, or this process alone without a process group. Collective.

    Args:
        call: the public function that every rank calls, "sl.save".
        doing: the task.
        timeout: seconds that the ranks wait for each other; None for those of the job's process group.
        keeps_kinds: whether errors of shardlib's own keep their classes.

    Raises:
        CheckpointError: not all of them called this within `timeout` seconds, or some have ended or call another one.
    """
    if timeout is None:
        limit = _torch.timeout_of(dist.group.WORLD) if dist.is_initialized() else None
        timeout = limit.total_seconds() if limit is not None else 1800.0
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Peers(doing, timeout, keeps_kinds=keeps_kinds)
    if why := lost.come(call, timeout=timeout):
        raise CheckpointError(f"{_capital(doing)} failed: {why}")
    world = dist.group.WORLD
    if not _made or _made[0][0]() is not world or _made[0][1].broken:
        try:
            _made[:] = [(weakref.ref(world), _Groups(timeout, _of_all))]
        except RuntimeError as error:  # of gloo: it waited in vain
            raise CheckpointError(
                f"{_capital(doing)} failed: not all {dist.get_world_size()} ranks came to it within {timeout:g} s "
                f"({error}). A rank is lost, or does something else: look at its log; a timeout= may be longer."
            ) from error
    job = _Job(doing, timeout, dist.get_rank(), dist.get_world_size(), _made[0][1], keeps_kinds=keeps_kinds)
    job.complete()
    return job


def _of_all(timeout: float, backend: str) -> dist.ProcessGroup:
    return dist.new_group(backend=backend, timeout=timedelta(seconds=timeout))


def joined_peers(doing: str, store: dist.Store, rank: int, size: int, timeout: float) -> Peers:
    """Return the ranks of several jobs that meet in a store. Collective over all of them.

    Args:
        doing: the task.
        store: a store of their own.
        rank: the number of this process among them. A process may be two of them, in two threads.
        size: the number of all.
        timeout: seconds that the ranks wait for each other.

    Raises:
        CheckpointError: not all of them have come within `timeout` seconds.
    """
    made = itertools.count()

    def new(timeout: float, backend: str) -> dist.ProcessGroup:
        return _torch.joined_group(store, f"{next(made)}", (rank, size), backend, timedelta(seconds=timeout))

    try:
        return _Joined(doing, timeout, rank, size, _Groups(timeout, new, _torch.forget_joined_group))
    except RuntimeError as error:
        raise CheckpointError(
            f"{_capital(doing)} failed: not all {size} ranks came to it within {timeout:g} s ({error})."
        ) from error


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]

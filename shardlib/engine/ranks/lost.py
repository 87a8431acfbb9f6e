"""Detection of ranks that are lost in training: which ranks, and in which phase.

A rank that is killed closes its connections. The ranks that wait for it get an error from the back end that names only
an address. This module turns it into a `LostRankError`, which names ranks and a phase. On one machine, process ids tell
which rank has ended. Ranks may end because an earlier one did, and must not be reported: the first rank that finds a
lost rank writes its finding to the job's store, and all others report the same. If no process can be looked up, the
lost ranks are those that write no answer within a few seconds.

A rank that has found a lost rank closes its own connections, so that the ranks that wait for it get an error at once,
and not only when its process ends or the process group times out. A rank that raises in the middle of a module and
keeps its process does the same, if other ranks wait for it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import secrets
import socket
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shardlib.engine import _torch
from shardlib.engine.ranks import agree
from shardlib.engine.ranks.transport import Transport
from shardlib.errors import LostRankError, ShardlibError, by_rank, hide_frames, warn

__all__ = [
    "all_say",
    "come",
    "hang_up",
    "leave",
    "meet",
    "naming_lost_ranks",
    "naming_lost_ranks_in_operations",
    "note",
    "noted",
    "number",
    "watch_forward",
]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

# Times are in seconds.
_ANSWER_TIMEOUT = 5.0  # for the other ranks to answer after the first one has found an error
_AGREEMENT_TIMEOUT = 10.0  # for ranks that compute the same to raise the same error
_STORE_TIMEOUT = 1.0  # for the store to answer: the rank that hosts it may be the lost one
_POLL_INTERVAL = 0.02
_LOOK_AFTER = 0.5  # of waiting in a call, for ranks that have ended
_WARN_AFTER = 60.0  # of waiting in a call, of which nothing would be seen otherwise
_ERROR_IS_RECENT = 60.0  # after an error in which it explains the end of the rank
_NEVER_SENT = 0x1057  # a tag
_OPERATION = "operation on a sharded tensor"

# Messages of gloo, and of the sockets of NCCL and of the store, if the peer is gone or silent. Their other messages,
# such as those about sizes that do not match, are errors of the program.
_PEER_IS_GONE = re.compile(
    r"closed by peer|reset by peer|broken pipe|pair closure|connection refused|timed out|timeout|remote process exited",
    re.IGNORECASE,
)
_GLOO_MESSAGE_WITHOUT_NAME = "Application timeout caused pair closure"  # after another receive in the group timed out


def naming_lost_ranks(phase: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that raises `LostRankError` if a lost rank has made a collective in the function fail.

    All other exceptions pass, those of shardlib without its inner frames. They are written to the store, for the case
    that this rank ends.

    Args:
        phase: the phase that the function belongs to.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def named(*args: P.args, **kwargs: P.kwargs) -> R:
            if phase != _OPERATION and _interrupted:
                _interrupted.pop()(phase)
            try:
                return function(*args, **kwargs)  # inner frames are left out: SHARDLIB_LOG=debug shows them
            except Exception as error:
                _raise_if_lost(error, phase)
                if isinstance(error, ShardlibError):
                    hide_frames(error)
                raise

        return named

    return decorate


def naming_lost_ranks_in_operations(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that user code or autograd may call, where no function of shardlib is around it.

    In phases the outer function is decorated, and names the phase.
    """
    return naming_lost_ranks(_OPERATION)(function)


def watch_forward(ranks: Collection[int]) -> Callable[..., Any]:
    """Return a wrapper of a model's forward that raises `LostRankError` for ranks that are lost meanwhile.

    If the forward raises and the user goes on, the next phase of this rank finds out whether all ranks have raised at
    the same place. Otherwise the collectives of this rank would meet those of an earlier forward on the other ranks.

    Args:
        ranks: the global ranks that take part in collectives of the forward.
    """

    @naming_lost_ranks("forward")
    def watched(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = Transport.calls
        try:
            return forward(*args, **kwargs)
        except Exception as error:
            if (members := _members()) and len(ranks) > 1 and not _is_about_a_peer(error):
                raised = f"{type(error).__name__}: {error}"
                _interrupted[:] = [functools.partial(_go_on, members, ranks, raised, Transport.calls - before)]
            raise

    return watched


def _go_on(members: _Members, ranks: Collection[int], raised: str, calls: int, phase: str) -> None:
    """Begin a phase after a forward that raised on this rank, which had begun so many collectives of parameters.

    Raises:
        LostRankError: within ten seconds, some of its ranks did not come to a next phase, or had begun another number.
    """
    if members is not _members() or all_say("interrupted", str(calls), ranks):
        return
    leave()
    rank = dist.get_rank()
    message = (
        f"Rank {rank} raised {raised} in a forward, and its script went on. Ranks "
        f"{', '.join(str(other) for other in ranks if other != rank)} take part in collectives of that forward, and "
        "did not raise at the same place: they have been told. End the ranks, start the job again, and load the last "
        "checkpoint. Then let all ranks raise, or none: exchange before the forward whether a batch can be used."
    )
    raise LostRankError(message, (rank,), phase)


_interrupted: list[Callable[[str], None]] = []  # what the next phase does first, after a forward that raised


def _raise_if_lost(error: Exception, phase: str) -> None:
    """Raise `LostRankError` if an error means that a rank is lost; otherwise write it to the store."""
    if not (members := _members()) or isinstance(error, LostRankError):
        return
    if phase == _OPERATION and _torch.backward_id() != -1:
        phase = "backward"
    elif phase == _OPERATION and _is_in_another():
        return
    if _is_about_a_peer(error):
        raise _Search(error, phase, members, _store_client()).result() from error
    note(error)


def _is_in_another() -> bool:
    """Return whether a decorated function that raises has been called inside of another one."""
    decorated = naming_lost_ranks("")(_is_in_another).__code__
    return sum(frame.f_code is decorated for frame, _ in traceback.walk_stack(None)) > 1


def _is_about_a_peer(error: Exception) -> bool:
    text = str(error)
    of_gloo = isinstance(error, RuntimeError) and ("gloo" in text or text.startswith(_GLOO_MESSAGE_WITHOUT_NAME))
    return (of_gloo or isinstance(error, dist.DistError)) and _PEER_IS_GONE.search(text) is not None


# --- processes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Member:
    """The process of a rank, with all that ranks on the same machine need to find it.

    Attributes:
        machine: equal for processes that see each other's ids: one boot of one kernel, one pid namespace. "" without
            /proc: the process is not looked up then.
        started: the start time of the process, since the system reuses ids.
    """

    machine: str
    host: str
    pid: int
    started: str

    def condition(self) -> str:
        """Return "there", "stopped" or "ended"; also "there" for a process of another machine."""
        if not self.machine or self.machine != _machine():
            return "there"
        state, started = _status(self.pid)
        if state in _GONE or started != self.started:
            return "ended"
        return "stopped" if state in _STOPPED else "there"


_GONE, _STOPPED = ("", "Z", "X", "x"), ("T", "t")  # a zombie has ended, but its parent has not waited for it


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _status(pid: int) -> tuple[str, str]:
    """Return the state of a process (one letter, or "" if there is none) and its start time; see proc(5)."""
    try:
        # The second field is the program's name in parentheses, which may contain any character.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


_Members = Mapping[int, _Member]  # by rank
_jobs: WeakKeyDictionary[Any, _Members] = WeakKeyDictionary()  # by the group of all ranks
_tokens: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # the same: another job may follow in the same store


def _members() -> _Members:
    """Return the processes of the ranks that have met in the job that this process belongs to now."""
    return _jobs.get(dist.group.WORLD, {}) if dist.is_initialized() else {}


def meet(group: dist.ProcessGroup | None) -> None:
    """Exchange the processes of a group's ranks, so that a lost one can be found. Collective over the group."""
    if group is None or dist.get_world_size(group) == 1:
        return
    store, ranks = _StoreClient(), dist.get_process_group_ranks(group)
    own = store.join()
    try:
        answers = agree.exchange([astuple(own), secrets.token_hex(8)], group)
    except Exception as error:
        if not _is_about_a_peer(error):
            raise
        raise _Search(error, "sharding", store.members(ranks), store, ranks).result() from error
    met = {rank: _Member(*fields) for rank, (fields, _) in zip(ranks, answers, strict=True)}
    _jobs[dist.group.WORLD] = {**_members(), **met}
    _tokens[dist.group.WORLD] = answers[0][1]


# --- the store --------------------------------------------------------------------------------------------------------


def _within(seconds: float, work: Callable[[], T]) -> list[T]:
    """Return the result of a call in a list, which is empty if the call raises or takes longer than this."""
    answers = list[T]()

    def run() -> None:
        with contextlib.suppress(Exception):
            answers.append(work())

    thread = threading.Thread(target=run, daemon=True, name="shardlib-lost")
    thread.start()
    thread.join(seconds)
    return answers


class _StoreClient:
    """The texts that ranks leave in the job's store. The host of the store may be lost or stopped.

    A client serves one call: a reference that is kept would keep the store's port open.

    Attributes:
        answers: whether the store has answered every question so far. If not, no further one is asked.
    """

    def __init__(self, token: str = "", timeout: float = _STORE_TIMEOUT) -> None:
        self._store = dist.PrefixStore(f"shardlib/lost/{token}", _torch.default_store())
        self._timeout, self.answers = timeout, True

    def ask(self, question: Callable[[dist.Store], T]) -> T | None:
        """Return the store's answer; None if it does not answer."""
        found = _within(self._timeout, functools.partial(question, self._store)) if self.answers else []
        self.answers = bool(found)
        return found[0] if found else None

    def get(self, key: str) -> Any:
        """Return a value; None if no rank has written it."""
        found = self.ask(lambda store: store.get(key) if store.check([key]) else b"")
        return json.loads(found) if found else None

    def say(self, what: str, value: Any) -> None:
        """Write this rank's value on a subject: "there", with its phase, once it knows that a rank is lost."""
        self.ask(lambda store: store.set(f"{what}/{dist.get_rank()}", json.dumps(value)))

    def said(self, what: str, ranks: Iterable[int], *, within: float = 0.0) -> dict[int, Any]:
        """Return what these ranks have said on a subject, as soon as all have, or so many seconds have passed."""
        keys, until = {rank: f"{what}/{rank}" for rank in ranks}, time.monotonic() + within
        while time.monotonic() < until and self.ask(lambda store: store.check([*keys.values()])) is False:
            time.sleep(_POLL_INTERVAL)
        found = {rank: self.get(key) for rank, key in keys.items()}
        return {rank: value for rank, value in found.items() if value is not None}

    def claim(self, key: str, value: Any) -> Any:
        """Write a value if no rank has; return the one that was first."""
        first = self.ask(lambda store: store.compare_set(key, "", json.dumps(value)))
        return json.loads(first) if first else value

    def conclude(self, key: str, look: Callable[[float], Any]) -> Any:
        """Return the conclusion of the rank that was first to draw one.

        Args:
            key: of the conclusion.
            look: called with the seconds of waiting, again and again, until it returns a conclusion or another rank has
                drawn one.
        """
        begin = time.monotonic()
        while True:
            if (first := self.get(key)) is not None:
                return first
            waited = time.monotonic() - begin
            if (found := look(waited)) is not None:
                return self.claim(key, found)
            time.sleep(min(max(waited / 10, 0.001), 0.5))

    def join(self) -> _Member:
        """Say which process this rank has, so that others find it even if it is lost before they meet; return it."""
        own = _Member(_machine(), socket.gethostname(), os.getpid(), _status(os.getpid())[1])
        self.say("member", astuple(own))
        return own

    def members(self, ranks: Iterable[int]) -> _Members:
        """Return the processes of those of these ranks that have said theirs."""
        return {rank: _Member(*fields) for rank, fields in self.said("member", ranks).items()}


def _store_client() -> _StoreClient:
    """Return a client for what the ranks say that have met in this job."""
    return _StoreClient(_tokens.get(dist.group.WORLD, ""))


# --- the search -------------------------------------------------------------------------------------------------------


# The ranks that were lost first, and how: a result of `_Member.condition`, "raised", "silent", or "unknown".
_Finding = tuple[list[int], str]


class _Search:
    """The search for lost ranks after an error in a phase of this rank, among ranks whose processes may be known."""

    def __init__(
        self, error: Exception, phase: str, members: _Members, store: _StoreClient, ranks: Iterable[int] = ()
    ) -> None:
        self.error, self.phase, self.members, self.store = error, phase, members, store
        self.rank, self.ranks = dist.get_rank(), sorted({*members, *ranks})

    def result(self) -> LostRankError:
        """Return the error that names the lost ranks. Waits a few seconds."""
        self.store.say("there", self.phase)
        _close_connections()
        lost, how = self.store.conclude("first", self._look)
        message = self._message(lost, how)
        _stay_for([rank for rank in self.ranks if rank not in lost], self.store)
        return LostRankError(message, lost, self.phase)

    def _look(self, waited: float) -> _Finding | None:
        """Return which ranks were lost first, and how; None if that cannot be said yet.

        Rank 0 ends when it has found another lost, and the job's store with it. Where other ranks have ended too, and
        no store can say which was first, rank 0 is not taken for the cause.
        """
        for condition in ("ended", "stopped"):
            if ranks := self._in_condition(condition):
                others = [rank for rank in ranks if rank != 0]
                return ranks if self.store.answers or not others else others, condition
        if waited < _ANSWER_TIMEOUT:
            return None
        answering = {self.rank, *self.store.said("there", self.ranks)}
        silent = [rank for rank in self.ranks if rank not in answering]
        return (silent, "silent") if self.store.answers else ([], "unknown")

    def _in_condition(self, condition: str) -> list[int]:
        return [rank for rank in self.ranks if rank in self.members and self.members[rank].condition() == condition]

    def _message(self, lost: Collection[int], how: str) -> str:
        happened = " and ".join(self._happened(rank, how) for rank in lost)
        if how == "unknown":
            happened = f"A rank was lost, and the job's store with it, which could have said which one ({self.error})"
        elif not lost:
            happened = self._waiting()
        elif not self.store.answers and 0 not in lost and 0 in self._in_condition(how):
            happened += ". Rank 0 has ended too, and the job's store with it"
        if self.phase == _OPERATION:
            happened += (
                ". A tensor that the ranks hold in shards was read or copied here, for which all ranks have to be "
                "there. For full tensors, as for torch.save or a model that is not sharded, take "
                'sl.full_state_dict(model) on every rank, or sl.save(path, model, weights="file")'
            )
        return (
            f'{happened[:1].upper()}{happened[1:]}. Rank {self.rank} was in phase "{self.phase}" and cannot go on: end '
            "it, start the job again, and load the last checkpoint."
        )

    def _waiting(self) -> str:
        """Say where each rank is that waits for the others, while all of them answer."""
        phases = self.store.said("there", self.ranks)
        places = "; ".join(f'rank {rank} in phase "{phase}"' for rank, phase in phases.items())
        waited = f"The ranks waited for one another, and all of them answer now ({self.error}): {places}"
        if _OPERATION not in phases.values():
            return waited
        return (
            f"{waited}. The result of an operation on a sharded tensor, as p.grad.norm(), depends on the shards of all "
            "ranks: compute it on all ranks, and print it on one"
        )

    def _happened(self, rank: int, how: str) -> str:
        member = self.members.get(rank)
        where = f' (process {member.pid} on "{member.host}")' if member is not None else ""
        if how == "stopped":
            return f"rank {rank}{where} did not answer in time: its process is stopped"
        raised = noted(rank, self.store)
        if how == "raised":
            return f"rank {rank}{where} raised {raised or 'an exception'} while others waited for it"
        gone = "has ended" if how == "ended" else f"did not answer in time, nor within {_ANSWER_TIMEOUT:g} s after that"
        return f"rank {rank}{where} {gone}{f', after it raised {raised}' if raised else ''}"


def _stay_for(others: Collection[int], store: _StoreClient) -> None:
    """Tell that this rank knows which ranks are lost; on rank 0, wait a few seconds until the others do.

    Rank 0 usually keeps the job's store, which ends with its process.
    """
    store.say("knows", True)
    if dist.get_rank() == 0:
        store.said("knows", others, within=_ANSWER_TIMEOUT)


# --- calls that ranks make together -----------------------------------------------------------------------------------

_asked: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()  # by the group of all ranks


def number(subject: str) -> int:
    """Return how often this has been called in this job, which tells what ranks say about a subject apart."""
    asked = _asked.setdefault(dist.group.WORLD, Counter())
    asked[subject] += 1
    return asked[subject]


def all_say(what: str, text: str, ranks: Collection[int]) -> bool:
    """Return whether each of these ranks writes the same text on a subject to the job's store within ten seconds.

    Ranks that have nothing to write do not call it.
    """
    subject = f"{what}/{','.join(map(str, ranks))}"
    store, which = _store_client(), f"{subject}/{number(subject)}"
    store.say(which, text)
    return store.said(which, ranks, within=_AGREEMENT_TIMEOUT) == dict.fromkeys(ranks, text)


def come(call: str, *, task: str = "", ranks: Collection[int] | None = None, timeout: float | None = None) -> str:
    """Wait until all ranks come to a collective that is called now and then, through the job's store.

    Such a call is often made on one rank alone, where its collectives would wait for the others without a word.

    Args:
        call: the public function, "sl.save".
        task: more about the call; an error if ranks come to different ones.
        ranks: the global ranks that have to come; None for all of the job.
        timeout: the seconds to wait for ranks that are not known to have ended; by default those of the job's group.

    Returns:
        "", or why the call cannot go on. Either all ranks get "", or none does.
    """
    if not dist.is_initialized() or _torch.is_fake_group():
        return ""
    ranks = sorted(ranks if ranks is not None else range(dist.get_world_size()))
    if len(ranks) == 1:
        return ""
    if timeout is None:
        limit = _torch.timeout_of(dist.group.WORLD)
        timeout = limit.total_seconds() if limit is not None else 1800.0
    subject = f"come/{','.join(map(str, ranks))}"
    count = number(subject)
    meeting = _Meeting(call, f"{subject}/{count}", ranks, timeout)
    found = meeting.conclusion(f"{call}{task}")
    if found != _ALL_CAME:
        return found
    meeting.forget(f"{subject}/{count - 1}")  # no rank reads it any more
    return ""


_ALL_CAME = "all came"


class _Meeting:
    """A call to which ranks come; the first conclusion, of whichever rank, is that of all."""

    def __init__(self, call: str, key: str, ranks: Sequence[int], timeout: float) -> None:
        self.call, self.key, self.ranks, self.timeout = call, key, ranks, timeout
        self.store = _StoreClient(timeout=timeout + _ANSWER_TIMEOUT)
        self.differs = self.is_last = self.has_warned = False

    def conclusion(self, task: str) -> str:
        self.store.join()
        self.store.say(self.key, task)
        self.differs = self.store.claim(f"{self.key}/task", task) != task
        if not self.differs:
            self.is_last = self.store.ask(lambda store: store.add(f"{self.key}/number", 1)) == len(self.ranks)
        return self.store.conclude(f"{self.key}/conclusion", self._look)

    def forget(self, key: str) -> None:
        """Delete what this rank has written under a key; the first rank deletes what all have written."""
        rank = dist.get_rank()
        names = [str(rank), *(("task", "number", "conclusion") if rank == self.ranks[0] else ())]
        self.store.ask(lambda store: [store.delete_key(f"{key}/{name}") for name in names])

    def _look(self, waited: float) -> str | None:
        if not self.store.answers:
            return (
                f"the job's store does not answer, through which the ranks meet in {self.call}; the process that kept "
                "it ended"
            )
        if self.is_last:
            return _ALL_CAME
        if not self.differs and waited < min(self.timeout, _LOOK_AFTER):
            return None
        came = self.store.said(self.key, self.ranks)
        missing = [rank for rank in self.ranks if rank not in came]
        if self.differs:
            return f"ranks do different things:\n{by_rank(came.items())}"
        if waited >= self.timeout:
            return self._missed(came, missing, f"did not come within {self.timeout:g} s")
        if waited >= _WARN_AFTER and not self.has_warned:
            self._warn(came, missing)
        ended = [rank for rank, one in self.store.members(missing).items() if one.condition() == "ended"]
        ended = sorted({*ended} - {*self.store.said(self.key, ended)})  # without those that have come meanwhile
        return self._missed(came, ended, "ended") if ended else None

    def _warn(self, came: Collection[int], missing: Collection[int]) -> None:
        self.has_warned = True
        with contextlib.suppress(Warning):  # an error by the user's filters, for which the waiting must not end
            warn(
                f"{_ranks(came)} wait in {self.call} for {_ranks(missing)}, for {_WARN_AFTER:g} s now and for "
                f"{self.timeout:g} s at most. Every rank has to call it."
            )

    def _missed(self, came: Collection[int], missing: Collection[int], how: str) -> str:
        notes = [(rank, text) for rank in missing if (text := noted(rank))]
        raised = "".join(f" Rank {rank} raised {text}." for rank, text in notes)
        return (
            f"only {_ranks(came)} called {self.call}, and {_ranks(missing)} {how}: every rank has to call it.{raised} "
            "Write the call outside of `if rank == 0`."
        )


def _ranks(ranks: Collection[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


# --- ranks that leave -------------------------------------------------------------------------------------------------


def note(error: BaseException) -> None:
    """Write the error that this rank has raised to the job's store, for the case that it ends or others wait for it."""
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    _store_client().say("raised", [time.time(), text[:500]])


def noted(rank: int, store: _StoreClient | None = None) -> str:
    """Return the error that a rank has raised recently, or ""."""
    when, text = (store or _store_client()).said("raised", [rank]).get(rank, (0.0, ""))
    return text if time.time() - when < _ERROR_IS_RECENT else ""


def leave() -> None:
    """Tell the ranks that wait for this one in collectives that it has raised the noted error; end their waiting."""
    _store_client().claim("first", ([dist.get_rank()], "raised"))
    _close_connections()


def _close_connections() -> None:
    """Close this process's connections to the ranks that it trains with.

    Groups that users created for other purposes stay open.
    """

    def close() -> None:
        for group in _torch.process_groups():
            if group is dist.group.WORLD or group.group_desc.startswith("mesh"):
                hang_up(group)

    _within(_STORE_TIMEOUT, close)


def hang_up(group: dist.ProcessGroup) -> None:
    """Close this process's connections of a group of gloo: ranks that wait for it get an error at once.

    gloo closes all connections of a group if a receive times out: the receive here is for a message that no rank sends.
    From a rank that has ended it fails before it can time out, and is tried from the next one.
    `ProcessGroup.abort` and `shutdown` (2.13.0) leave connections of gloo open until the process ends.
    """
    for offset in range(1, group.size()):
        try:
            unused = torch.empty(1, dtype=torch.uint8, device="cpu")
            group.recv([unused], (group.rank() + offset) % group.size(), _NEVER_SENT).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if "timed out" in str(error).lower():
                return

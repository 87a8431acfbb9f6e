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
import inspect
import json
import os
import re
import secrets
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import astuple, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

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
    "watch_forward",
]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_ANSWER_TIMEOUT = 5.0  # seconds for the other ranks to answer after the first one has found an error
_AGREEMENT_TIMEOUT = 10.0  # seconds for ranks that compute the same to raise the same error
_POLL_INTERVAL = 0.02  # seconds
_STORE_TIMEOUT = 1.0  # seconds; the rank that hosts the store may be the lost one
_ERROR_IS_RECENT = 60.0  # seconds after an error in which it explains the end of the rank
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
            if _interrupted:
                _interrupted.pop().compare(phase)
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

    In phases the outer function is decorated, and errors pass.
    """

    @functools.wraps(function)
    def named(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if _torch.backward_id() != -1:
                _raise_if_lost(error, "backward")
            elif not _is_in_phase():
                _raise_if_lost(error, _OPERATION)
            raise

    return named


def _is_in_phase() -> bool:
    """Return whether a function that `naming_lost_ranks` has decorated is being called."""
    frame, phase = inspect.currentframe(), naming_lost_ranks("")(_is_in_phase).__code__
    while frame is not None and frame.f_code is not phase:
        frame = frame.f_back
    return frame is not None


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
            job = _job_members()
            if job is not None and len(ranks) > 1 and not _is_about_a_peer(error):
                raised = f"{type(error).__name__}: {error}"
                _interrupted[:] = [_Interrupted(job, ranks, raised, Transport.calls - before)]
            raise

    return watched


@dataclass(frozen=True)
class _Interrupted:
    """A forward that raised on this rank.

    Attributes:
        job: the ranks that train together.
        ranks: those of them that take part in its collectives.
        raised: the exception.
        calls: the number of collectives of parameters that this rank had begun in it.
    """

    job: _JobMembers
    ranks: Collection[int]
    raised: str
    calls: int

    def compare(self, phase: str) -> None:
        """Wait up to ten seconds for the other ranks to come to a next phase after a forward that raised.

        Raises:
            LostRankError: some did not, or had begun another number of collectives.
        """
        if self.job is not _job_members():
            return
        if not all_say("interrupted", str(self.calls), self.ranks):
            leave()
            rank, others = self.job.rank, ", ".join(str(rank) for rank in self.ranks if rank != self.job.rank)
            message = (
                f"Rank {rank} raised {self.raised} in a forward, and its script went on. Ranks {others} take part in "
                "collectives of that forward, and did not raise at the same place: they have been told. End the ranks, "
                "start the job again, and load the last checkpoint. Then let all ranks raise, or none: exchange before "
                "the forward whether a batch can be used."
            )
            raise LostRankError(message, (rank,), phase)


_interrupted: list[_Interrupted] = []  # at most one


def _raise_if_lost(error: Exception, phase: str) -> None:
    """Raise `LostRankError` if an error means that a rank is lost; otherwise write it to the store."""
    job = _job_members()
    if job is None or isinstance(error, LostRankError):
        return
    if _is_about_a_peer(error):
        raise job.find_lost(error, phase) from error
    job.store().note(job.rank, f"{type(error).__name__}: {error}")


def _is_about_a_peer(error: Exception) -> bool:
    text = str(error)
    of_gloo = isinstance(error, RuntimeError) and ("gloo" in text or text.startswith(_GLOO_MESSAGE_WITHOUT_NAME))
    return (of_gloo or isinstance(error, dist.DistError)) and _PEER_IS_GONE.search(text) is not None


# --- processes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Member:
    """The process of a rank, with all that ranks on the same machine need to find it.

    Attributes:
        machine: equal for processes that see each other's ids: one boot of one kernel, one pid namespace.
        started: the start time of the process, since the system reuses ids; "" if it is unknown.
    """

    rank: int
    machine: str
    host: str
    pid: int
    started: str

    @classmethod
    def of_this_process(cls) -> _Member:
        pid = os.getpid()
        return cls(dist.get_rank(), _machine(), socket.gethostname(), pid, _status(pid)[1])

    def condition(self) -> str:
        """Return "there", "stopped" or "ended". Call on the member's machine."""
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
        return socket.gethostname()


def _status(pid: int) -> tuple[str, str]:
    """Return the state of a process (one letter, or "" if there is none) and its start time; see proc(5)."""
    if not Path("/proc/self/stat").exists():
        return _status_by_signal(pid), ""
    try:
        # The second field is the program's name in parentheses, which may contain any character.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def _status_by_signal(pid: int) -> str:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "R"


# --- the store --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Finding:
    """The ranks that were lost first, and how: a result of `_Member.condition`, "raised", "silent", or "unknown"."""

    ranks: tuple[int, ...]
    how: str


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
    """The notes of ranks in the job's store. No call blocks for long: the host of the store may be lost or stopped."""

    def __init__(self, token: str = "") -> None:
        self._store: dist.Store | None = dist.PrefixStore(f"shardlib/lost/{token}", _torch.default_store())

    @property
    def answers(self) -> bool:
        """Whether the store has answered every question so far."""
        return self._store is not None

    def _ask(self, question: Callable[[dist.Store], T]) -> T | None:
        """Return the store's answer; None, also for all later calls, if it does not answer."""
        store = self._store
        answers = _within(_STORE_TIMEOUT, functools.partial(question, store)) if store is not None else []
        if not answers:
            self._store = None
            return None
        return answers[0]

    def first(self) -> _Finding | None:
        """Return the first finding; None if there is none."""
        return self._ask_for_finding(lambda store: store.get("first") if store.check(["first"]) else b"")

    def claim(self, finding: _Finding) -> _Finding:
        """Write a finding, if it is the first; return the first finding."""
        claimed = json.dumps([finding.ranks, finding.how])
        return self._ask_for_finding(lambda store: store.compare_set("first", "", claimed)) or finding

    def _ask_for_finding(self, question: Callable[[dist.Store], bytes]) -> _Finding | None:
        answer = self._ask(question)
        if not answer:
            return None
        ranks, how = json.loads(answer)
        return _Finding(tuple(ranks), how)

    def write(self, what: str, rank: int, text: str) -> None:
        """Write the text of a rank on a subject: "there", with its phase, once it knows that a rank is lost."""
        self._ask(lambda store: store.set(f"{what}/{rank}", text))

    def texts(self, what: str, ranks: Iterable[int], *, within: float = 0.0) -> list[str] | None:
        """Return the text of each of these ranks; None if some have not written one within so many seconds."""
        keys, until = [f"{what}/{rank}" for rank in ranks], time.monotonic() + within
        while True:
            found = self._ask(lambda store: [store.get(key).decode() for key in keys] if store.check(keys) else None)
            if found is not None or not self.answers or time.monotonic() >= until:
                return found
            time.sleep(_POLL_INTERVAL)

    def note(self, rank: int, text: str) -> None:
        """Write the error that this rank raised, for the case that it ends because of it."""
        self.write("raised", rank, json.dumps([time.time(), text[:500]]))

    def noted(self, rank: int) -> str:
        """Return the error that a rank raised recently, or ""."""
        key = f"raised/{rank}"
        answer = self._ask(lambda store: store.get(key) if store.check([key]) else b"")
        when, text = json.loads(answer) if answer else (0.0, "")
        return text if time.time() - when < _ERROR_IS_RECENT else ""


class _JobMembers:
    """The ranks that train together, and their processes as far as they are known."""

    def __init__(self, members: Iterable[_Member], token: str, ranks: Iterable[int] = ()) -> None:
        self.rank = dist.get_rank()
        self.members = {member.rank: member for member in members}
        self.ranks = sorted({*self.members, *ranks})
        self._token = token

    def store(self) -> _StoreClient:
        """Return a new client of the job's store. A reference that is kept would keep the store's port open."""
        return _StoreClient(self._token)

    def find_lost(self, error: Exception, phase: str) -> LostRankError:
        """Return the error that names the lost ranks, after an error in a phase of this rank. Waits a few seconds."""
        store = self.store()
        store.write("there", self.rank, phase)
        _within(_STORE_TIMEOUT, _close_connections)
        finding = self._search(store, time.monotonic() + _ANSWER_TIMEOUT)
        message = self._message(store, finding, phase, error)
        self._stay_for_others(store, finding)
        return LostRankError(message, finding.ranks, phase)

    def _stay_for_others(self, store: _StoreClient, finding: _Finding) -> None:
        """Tell that this rank knows the finding; on rank 0, wait a few seconds until all others do.

        Rank 0 usually keeps the job's store, which ends with its process.
        """
        store.write("knows", self.rank, "1")
        if self.rank == 0:
            store.texts("knows", [rank for rank in self.ranks if rank not in finding.ranks], within=_ANSWER_TIMEOUT)

    def _search(self, store: _StoreClient, until: float) -> _Finding:
        while True:
            if (first := store.first()) is not None:
                return first
            for condition in ("ended", "stopped"):
                if ranks := self._on_this_machine(condition):
                    return store.claim(_Finding(_first_of(ranks, store), condition))
            if time.monotonic() >= until:
                others = [rank for rank in self.ranks if rank != self.rank]
                silent = tuple(rank for rank in others if store.texts("there", [rank]) is None)
                return store.claim(_Finding(silent, "silent")) if store.answers else _Finding((), "unknown")
            time.sleep(_POLL_INTERVAL)

    def _on_this_machine(self, condition: str) -> tuple[int, ...]:
        own = self.members[self.rank]
        near = [member for member in self.members.values() if member.machine == own.machine and member is not own]
        return tuple(sorted(member.rank for member in near if member.condition() == condition))

    def _message(self, store: _StoreClient, finding: _Finding, phase: str, error: Exception) -> str:
        happened = " and ".join(self._happened(store, rank, finding.how) for rank in finding.ranks)
        if finding.how == "unknown":
            happened = f"A rank was lost, and the job's store with it, which could have said which one ({error})"
        elif not finding.ranks:
            happened = self._waiting(store, error)
        elif not store.answers and 0 not in finding.ranks and 0 in self._on_this_machine(finding.how):
            happened += ". Rank 0 has ended too, and the job's store with it"
        if phase == _OPERATION:
            happened += (
                ". A tensor that the ranks hold in shards was read or copied here, for which all ranks have to be "
                "there. For full tensors, as for torch.save or a model that is not sharded, take "
                'sl.full_state_dict(model) on every rank, or sl.save(path, model, weights="file")'
            )
        return (
            f'{happened[:1].upper()}{happened[1:]}. Rank {self.rank} was in phase "{phase}" and cannot go on: end it, '
            "start the job again, and load the last checkpoint."
        )

    def _waiting(self, store: _StoreClient, error: Exception) -> str:
        """Say where each rank is that waits for the others, while all of them answer."""
        phases = store.texts("there", self.ranks) or []
        places = "; ".join(f'rank {rank} in phase "{phase}"' for rank, phase in zip(self.ranks, phases, strict=False))
        waited = f"The ranks waited for one another, and all of them answer now ({error}): {places}"
        if _OPERATION not in phases:
            return waited
        return (
            f"{waited}. The result of an operation on a sharded tensor, as p.grad.norm(), depends on the shards of all "
            "ranks: compute it on all ranks, and print it on one"
        )

    def _happened(self, store: _StoreClient, rank: int, how: str) -> str:
        member = self.members.get(rank)
        where = f' (process {member.pid} on "{member.host}")' if member is not None else ""
        if how == "stopped":
            return f"rank {rank}{where} did not answer in time: its process is stopped"
        raised = store.noted(rank)
        if how == "raised":
            return f"rank {rank}{where} raised {raised or 'an exception'} while others waited for it"
        gone = "has ended" if how == "ended" else f"did not answer in time, nor within {_ANSWER_TIMEOUT:g} s after that"
        return f"rank {rank}{where} {gone}{f', after it raised {raised}' if raised else ''}"


def _first_of(ended: tuple[int, ...], store: _StoreClient) -> tuple[int, ...]:
    """Return the ranks that may have ended first.

    Rank 0 ends when it has found another lost, and the job's store with it. Where other ranks have ended too, and no
    store can say which was first, it is not taken for the cause.
    """
    others = tuple(rank for rank in ended if rank != 0)
    return ended if store.answers or not others else others


_known: list[tuple[weakref.ref[Any], _JobMembers]] = []


def meet(group: dist.ProcessGroup | None) -> None:
    """Exchange the processes of a group's ranks, so that a lost one can be found. Collective over the group.

    Each rank has its process in the job's store before: one that is lost meanwhile can be found there.
    """
    if group is None or dist.get_world_size(group) == 1:
        return
    own = _Member.of_this_process()
    _StoreClient().write("member", own.rank, json.dumps(astuple(own)))
    try:
        answers = agree.exchange([astuple(own), secrets.token_hex(8)], group)
    except Exception as error:
        if not _is_about_a_peer(error):
            raise
        raise _members_in_store(group).find_lost(error, "sharding") from error
    before = _job_members()
    members = [*(before.members.values() if before is not None else ()), *(_Member(*fields) for fields, _ in answers)]
    _known[:] = [(weakref.ref(dist.group.WORLD), _JobMembers(members, answers[0][1]))]


def _members_in_store(group: dist.ProcessGroup) -> _JobMembers:
    """Return the members of a group whose ranks could not exchange them."""
    store, ranks = _StoreClient(), dist.get_process_group_ranks(group)
    found = [text for rank in ranks for text in store.texts("member", [rank]) or []]
    members = [_Member(*json.loads(text)) for text in found] or [_Member.of_this_process()]
    return _JobMembers(members, "", ranks)


def all_say(what: str, text: str, ranks: Collection[int]) -> bool:
    """Return whether each of these ranks writes the same text on a subject to the job's store within ten seconds.

    Ranks that have nothing to write do not call it.
    """
    asked = _asked.setdefault(dist.group.WORLD, Counter())
    subject = f"{what}/{','.join(map(str, ranks))}"
    asked[subject] += 1
    store, which = _store_client(), f"{subject}/{asked[subject]}"
    store.write(which, dist.get_rank(), text)
    return {*(store.texts(which, ranks, within=_AGREEMENT_TIMEOUT) or ())} == {text}


# How often `all_say` was called in a job on a subject among some ranks, which tells its calls apart.
_asked: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()


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
    counts, subject = _asked.setdefault(dist.group.WORLD, Counter()), f"come/{','.join(map(str, ranks))}"
    counts[subject] += 1
    number = counts[subject]
    meeting = _Meeting(f"{subject}/{number}", f"{subject}/{number - 1}", f"{call}{task}", call, ranks, timeout)
    answers = _within(timeout + _STORE_TIMEOUT + _ANSWER_TIMEOUT, meeting.conclusion)
    if not answers:
        return (
            f"the job's store does not answer, through which the ranks meet in {call}; the process that kept it ended"
        )
    return "" if answers[0] == _ALL_CAME else answers[0]


_ALL_CAME = "all came"
_LOOK_INTERVAL = 0.5  # seconds between looks for ranks that have ended
_WARN_AFTER = 60.0  # seconds of waiting, of which nothing would be seen otherwise


@dataclass(frozen=True)
class _Meeting:
    """A call to which ranks come; the first conclusion, of whichever rank, is that of all."""

    key: str
    before: str  # the key of the last one
    task: str
    call: str
    ranks: Sequence[int]
    timeout: float

    def conclusion(self) -> str:
        store, rank = dist.PrefixStore("shardlib/lost/", _torch.default_store()), dist.get_rank()
        store.set(f"member/{rank}", json.dumps(astuple(_Member.of_this_process())))
        store.set(f"{self.key}/{rank}", self.task)
        if store.compare_set(f"{self.key}/task", "", self.task).decode() != self.task:
            self._conclude(store, "ranks do different things:\n" + self._tasks(store))
        elif store.add(f"{self.key}/number", 1) == len(self.ranks):
            self._conclude(store, _ALL_CAME)
        begin, pause, looks = time.monotonic(), 0.001, 1
        while not store.check([f"{self.key}/conclusion"]):
            waited = time.monotonic() - begin
            if waited > self.timeout:
                self._conclude(store, self._missed(store, f"did not come within {self.timeout:g} s"))
            elif waited > looks * _LOOK_INTERVAL:
                looks += 1
                if looks * _LOOK_INTERVAL == _WARN_AFTER:
                    self._warn(store)
                if self._ended(store):  # which may have come before they ended: then the conclusion is there
                    self._conclude(store, self._missed(store, "ended", self._ended(store)))
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        found = store.get(f"{self.key}/conclusion").decode()
        if found == _ALL_CAME:  # so no rank reads the keys of the last one any more
            for name in (str(rank), *(("task", "number", "conclusion") if rank == self.ranks[0] else ())):
                store.delete_key(f"{self.before}/{name}")
        return found

    def _warn(self, store: dist.Store) -> None:
        came = self._came(store)
        with contextlib.suppress(Warning):  # an error by the user's filters, for which the waiting must not end
            warn(
                f"{_ranks(came)} wait in {self.call} for {_ranks(sorted({*self.ranks} - {*came}))}, for "
                f"{_WARN_AFTER:g} s now and for {self.timeout:g} s at most. Every rank has to call it."
            )

    def _conclude(self, store: dist.Store, text: str) -> None:
        store.compare_set(f"{self.key}/conclusion", "", text)

    def _came(self, store: dist.Store) -> list[int]:
        return [rank for rank in self.ranks if store.check([f"{self.key}/{rank}"])]

    def _tasks(self, store: dist.Store) -> str:
        return by_rank((rank, store.get(f"{self.key}/{rank}").decode()) for rank in self._came(store))

    def _ended(self, store: dist.Store) -> list[int]:
        """Return the ranks that have not come and that have ended, among those of this machine."""
        own, missing = _machine(), sorted({*self.ranks} - {*self._came(store)})
        known = [rank for rank in missing if store.check([f"member/{rank}"])]
        members = [_Member(*json.loads(store.get(f"member/{rank}"))) for rank in known]
        return [each.rank for each in members if each.machine == own and each.condition() == "ended"]

    def _missed(self, store: dist.Store, how: str, which: Sequence[int] = ()) -> str:
        came = self._came(store)
        missing = list(which) or [rank for rank in self.ranks if rank not in came]
        notes = [(rank, text) for rank in missing if (text := _store_client().noted(rank))]
        raised = "".join(f" Rank {rank} raised {text}." for rank, text in notes)
        return (
            f"only {_ranks(came)} called {self.call}, and {_ranks(missing)} {how}: every rank has to call it.{raised} "
            "Write the call outside of `if rank == 0`."
        )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def note(error: BaseException) -> None:
    """Write the error that this rank has raised to the job's store, for the case that others wait for it."""
    _store_client().note(dist.get_rank(), f"{type(error).__name__}: {error}".removesuffix(": "))


def noted(rank: int) -> str:
    """Return the error that a rank has raised recently, or ""."""
    return _store_client().noted(rank)


def leave() -> None:
    """Tell the ranks that wait for this one in collectives that it has raised the noted error; end their waiting."""
    _store_client().claim(_Finding((dist.get_rank(),), "raised"))
    _within(_STORE_TIMEOUT, _close_connections)


def _store_client() -> _StoreClient:
    job = _job_members()
    return job.store() if job is not None else _StoreClient()


def _job_members() -> _JobMembers | None:
    """Return the members of the job that this process belongs to now."""
    if not _known or not dist.is_initialized() or _known[0][0]() is not dist.group.WORLD:
        return None
    return _known[0][1]


def _close_connections() -> None:
    """Close this process's connections to the ranks that it trains with.

    gloo closes all connections of a group if a receive times out: the receive here is for a message that no rank sends.
    Groups that users created for other purposes stay open.
    """
    for group in _torch.process_groups():
        if group is not dist.group.WORLD and not group.group_desc.startswith("mesh"):
            continue
        hang_up(group)


def hang_up(group: dist.ProcessGroup) -> None:
    """Close this process's connections of a group of gloo: ranks that wait for it get an error at once."""
    other = next((rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()), None)
    if other is not None:
        with contextlib.suppress(RuntimeError):
            unused = torch.empty(1, dtype=torch.uint8, device="cpu")
            work = dist.irecv(unused, other, group=group, tag=_NEVER_SENT)
            if work is not None:
                work.wait(timedelta(milliseconds=1))

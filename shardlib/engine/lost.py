"""Ranks that are lost while others train: who it was, and when.

A rank that is killed closes its connections, and those that wait for it get an error from the back end, which names an
address. Here it becomes a `LostRankError`, which names ranks and a phase. Who has ended is looked up by process id on
the machine that both ran on. Ranks that ended because an earlier one did must not be taken for it: who finds out first
says so in the job's store, and all others repeat it. Where no process can be looked up, the ranks that have found
nothing within a few seconds are those that did not answer.

A rank that has found one lost hangs up: it closes its own connections, so that those who wait for it learn of it too,
at once, and not only when its process ends or the groups' timeout is over. So does a rank that has raised and keeps its
process, while others wait for it in the middle of a module.
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
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from shardlib.engine import _torch, agree
from shardlib.errors import LostRankError

__all__ = ["all_say", "leave", "meet", "naming_lost_ranks", "naming_lost_ranks_in_backward", "watch_forward"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_PATIENCE = 5.0  # seconds in which ranks that are there find out, after the first one has
_TOGETHER = 10.0  # seconds in which ranks that compute the same have raised the same
_LOOK_AGAIN = 0.02  # seconds
_NO_CALL_WAITS_LONGER = 1.0  # seconds; the rank that keeps the store may be the one that is lost
_RECENT = 60.0  # seconds for which what a rank raised explains that it ended
_NEVER_SENT = 0x1057  # a tag

# What gloo, and NCCL's and the store's sockets, say when the other side is gone or silent. Other complaints of theirs
# (sizes that do not fit) are about the program.
_OTHER_SIDE = re.compile(
    r"closed by peer|reset by peer|broken pipe|pair closure|connection refused|timed out|timeout|remote process exited",
    re.IGNORECASE,
)
_OF_GLOO_WITHOUT_ITS_NAME = "Application timeout caused pair closure"  # after another one in the group was in vain


def naming_lost_ranks(phase: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: errors of collectives in this function that a lost rank has caused become `LostRankError`.

    Every other exception passes, with its type and traceback; it is noted for the other ranks, should this one end.

    Args:
        phase: what the function is part of.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def named(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                _look_into(error, phase)
                raise

        return named

    return decorate


def naming_lost_ranks_in_backward(function: Callable[P, R]) -> Callable[P, R]:
    """The same for a function that autograd may call, where `loss.backward()` is the user's own line and nothing of
    ours is around it. In other phases, something is, and errors pass."""

    @functools.wraps(function)
    def named(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if _torch.backward_id() != -1:
                _look_into(error, "backward")
            raise

    return named


@naming_lost_ranks("forward")
def watch_forward(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a model, and name ranks that are lost meanwhile: hooks see no errors."""
    return forward(*args, **kwargs)


def _look_into(error: Exception, phase: str) -> None:
    """Raise `LostRankError` if that is what an error means."""
    crew = _crew()
    if crew is None or isinstance(error, LostRankError):
        return
    if _is_about_the_other_side(error):
        raise crew.find_lost(error, phase) from error
    crew.board().note(crew.rank, f"{type(error).__name__}: {error}")


def _is_about_the_other_side(error: Exception) -> bool:
    text = str(error)
    of_gloo = isinstance(error, RuntimeError) and ("gloo" in text or text.startswith(_OF_GLOO_WITHOUT_ITS_NAME))
    return (of_gloo or isinstance(error, dist.DistError)) and _OTHER_SIDE.search(text) is not None


# --- who is there -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Member:
    """A rank's process, as ranks on the same machine find it again.

    Attributes:
        machine: equal where processes see each other's ids: one boot of one kernel, one namespace.
        started: when, as the system counts, since ids are used again; "" where it does not say.
    """

    rank: int
    machine: str
    host: str
    pid: int
    started: str

    @classmethod
    def here(cls) -> _Member:
        pid = os.getpid()
        return cls(dist.get_rank(), _machine(), socket.gethostname(), pid, _status(pid)[1])

    def condition(self) -> str:
        """ "there", "stopped" or "ended"; asked on its own machine."""
        state, started = _status(self.pid)
        if state in _GONE or started != self.started:
            return "ended"
        return "stopped" if state in _STOPPED else "there"


_GONE, _STOPPED = ("", "Z", "X", "x"), ("T", "t")  # a zombie has ended, and waits for its parent to notice


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _status(pid: int) -> tuple[str, str]:
    """A process's state, one letter and "" for none, and when it started. See proc(5), /proc/pid/stat."""
    if not Path("/proc/self/stat").exists():
        return _signalled(pid), ""
    try:
        # The second field is the program's name in parentheses, and may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def _signalled(pid: int) -> str:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "R"


# --- what ranks tell each other ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Finding:
    """Which ranks were lost first, and how: a word of `_Member.condition`, "raised", "silent", or "unknown"."""

    ranks: tuple[int, ...]
    how: str


def _within(seconds: float, work: Callable[[], T]) -> list[T]:
    """What a call gives, which may wait for a rank that is gone; nothing if it raises or waits longer."""
    answers = list[T]()

    def run() -> None:
        with contextlib.suppress(Exception):
            answers.append(work())

    thread = threading.Thread(target=run, daemon=True, name="shardlib-lost")
    thread.start()
    thread.join(seconds)
    return answers


class _Board:
    """Notes in the job's store. It may be gone, or stand still, with the rank that keeps it: no call waits long."""

    def __init__(self, store: dist.Store, token: str) -> None:
        self._store: dist.Store | None = dist.PrefixStore(f"shardlib/lost/{token}", store)

    def _ask(self, question: Callable[[dist.Store], T]) -> T | None:
        """The store's answer; None, now and for good, where it gives none."""
        store = self._store
        answers = _within(_NO_CALL_WAITS_LONGER, functools.partial(question, store)) if store is not None else []
        if not answers:
            self._store = None
            return None
        return answers[0]

    def first(self) -> _Finding | None:
        """What was found first."""
        return self._ask_for_finding(lambda store: store.get("first") if store.check(["first"]) else b"")

    def claim(self, finding: _Finding) -> _Finding:
        """Say what was found; returns what was found first."""
        mine = json.dumps([finding.ranks, finding.how])
        return self._ask_for_finding(lambda store: store.compare_set("first", "", mine)) or finding

    def _ask_for_finding(self, question: Callable[[dist.Store], bytes]) -> _Finding | None:
        answer = self._ask(question)
        if not answer:
            return None
        ranks, how = json.loads(answer)
        return _Finding(tuple(ranks), how)

    def answer(self, rank: int) -> None:
        """This rank is there, and knows that one was lost."""
        self.say("there", rank, "1")

    def silent(self, ranks: Iterable[int]) -> list[int] | None:
        """Those of some ranks that have not answered; None where nobody can be asked."""
        return self._ask(lambda store: [rank for rank in ranks if not store.check([f"there/{rank}"])])

    def say(self, what: str, rank: int, text: str) -> None:
        self._ask(lambda store: store.set(f"{what}/{rank}", text))

    def said(self, what: str, ranks: Iterable[int]) -> list[str] | None:
        """What each of these ranks has said; None as long as one has not."""
        keys = [f"{what}/{rank}" for rank in ranks]
        return self._ask(lambda store: [store.get(key).decode() for key in keys] if store.check(keys) else None)

    def note(self, rank: int, text: str) -> None:
        """Say what this rank raised, in case that it ends of it."""
        self.say("raised", rank, json.dumps([time.time(), text[:500]]))

    def noted(self, rank: int) -> str:
        """What a rank raised a short time ago; else an empty text."""
        key = f"raised/{rank}"
        answer = self._ask(lambda store: store.get(key) if store.check([key]) else b"")
        when, text = json.loads(answer) if answer else (0.0, "")
        return text if time.time() - when < _RECENT else ""


class _Crew:
    """The ranks that train together, and how each can be found again."""

    def __init__(self, members: Sequence[_Member], token: str) -> None:
        self.rank = dist.get_rank()
        self.members = {member.rank: member for member in members}
        self._token = token

    def board(self) -> _Board:
        """Not kept: a store that somebody holds outlives its process group, and keeps its port."""
        return _Board(_torch.default_store(), self._token)

    def find_lost(self, error: Exception, phase: str) -> LostRankError:
        """Who was lost, after an error in a phase of this rank. Waits a few seconds at most."""
        board = self.board()
        board.answer(self.rank)
        _within(_NO_CALL_WAITS_LONGER, _hang_up)
        finding = self._search(board, time.monotonic() + _PATIENCE)
        return LostRankError(self._told(board, finding, phase, error), finding.ranks, phase)

    def _search(self, board: _Board, until: float) -> _Finding:
        while True:
            if (first := board.first()) is not None:
                return first
            for condition in ("ended", "stopped"):
                if ranks := self._on_this_machine(condition):
                    return board.claim(_Finding(ranks, condition))
            if time.monotonic() >= until:
                silent = board.silent(rank for rank in sorted(self.members) if rank != self.rank)
                return _Finding((), "unknown") if silent is None else board.claim(_Finding(tuple(silent), "silent"))
            time.sleep(_LOOK_AGAIN)

    def _on_this_machine(self, condition: str) -> tuple[int, ...]:
        here = self.members[self.rank]
        near = [member for member in self.members.values() if member.machine == here.machine and member is not here]
        return tuple(sorted(member.rank for member in near if member.condition() == condition))

    def _told(self, board: _Board, finding: _Finding, phase: str, error: Exception) -> str:
        happened = " and ".join(self._happened(board, rank, finding.how) for rank in finding.ranks)
        if finding.how == "unknown":
            happened = f"A rank was lost, and the job's store with it, which could have said which one ({error})"
        elif not finding.ranks:
            happened = f"The ranks lost each other, and all of them answer now ({error})"
        return (
            f'{happened[:1].upper()}{happened[1:]}. Rank {self.rank} was in phase "{phase}" and cannot go on: end it, '
            "start the job again, and load the last checkpoint."
        )

    def _happened(self, board: _Board, rank: int, how: str) -> str:
        member = self.members.get(rank)
        where = f' (process {member.pid} on "{member.host}")' if member is not None else ""
        if how == "stopped":
            return f"rank {rank}{where} did not answer in time: its process is stopped"
        raised = board.noted(rank)
        if how == "raised":
            return f"rank {rank}{where} raised {raised or 'an exception'} while others waited for it"
        gone = "has ended" if how == "ended" else f"did not answer in time, nor within {_PATIENCE:g} s after that"
        return f"rank {rank}{where} {gone}{f', after it raised {raised}' if raised else ''}"


_known: list[tuple[weakref.ref[Any], _Crew]] = []


def meet(group: dist.ProcessGroup | None) -> None:
    """Learn how the processes of a group can be found again, should one be lost. Collective over the group."""
    if group is None or dist.get_world_size(group) == 1:
        return
    told = agree.exchange((_Member.here(), secrets.token_hex(8)), group)
    before = _crew()
    members = {**(before.members if before is not None else {}), **{member.rank: member for member, _ in told}}
    _known[:] = [(weakref.ref(dist.group.WORLD), _Crew(list(members.values()), told[0][1]))]


def all_say(what: str, said: str, ranks: Collection[int]) -> bool:
    """Whether each of these ranks says the same of something within ten seconds; those that do not never ask."""
    board, until = _board(), time.monotonic() + _TOGETHER
    board.say(what, dist.get_rank(), said)
    while (answers := board.said(what, ranks)) is None and time.monotonic() < until:
        time.sleep(_LOOK_AGAIN)
    return answers is not None and set(answers) == {said}


def leave() -> None:
    """Tell the ranks that wait for this one in collectives that it has raised what was noted; none waits any longer."""
    _board().claim(_Finding((dist.get_rank(),), "raised"))
    _within(_NO_CALL_WAITS_LONGER, _hang_up)


def _board() -> _Board:
    crew = _crew()
    return crew.board() if crew is not None else _Board(_torch.default_store(), "")


def _crew() -> _Crew | None:
    """Of the job that this process is in now."""
    if not _known or not dist.is_initialized() or _known[0][0]() is not dist.group.WORLD:
        return None
    return _known[0][1]


def _hang_up() -> None:
    """Close this process's connections to the ranks that it trains with.

    gloo does so for all of a group's when a receive waits in vain: this one is for what nobody sends. Groups that users
    made for other ends stay.
    """
    for group in _torch.process_groups():
        if group is not dist.group.WORLD and not group.group_desc.startswith("mesh"):
            continue
        other = next((rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()), None)
        if other is not None:
            with contextlib.suppress(RuntimeError):
                nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                work = dist.irecv(nothing, other, group=group, tag=_NEVER_SENT)
                if work is not None:
                    work.wait(timedelta(milliseconds=1))

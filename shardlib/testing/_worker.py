"""The process of one rank: it waits for calls, answers them, and reports its standing when asked."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import logging
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from os import _exit
from sys import _current_frames
from typing import Any

from shardlib.testing import _carry, _standing
from shardlib.testing._standing import Standing

__all__ = ["Call", "Failure", "serve"]

# What a rank sets where its caller did not: the interface that gloo connects over, and how many collectives torch's
# flight recorder keeps (writing one down takes a microsecond).
_OWN_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    "TORCH_FR_BUFFER_SIZE": "64",
}


@dataclass(frozen=True)
class Call:
    """The context of a call on a rank. Ranks of one call meet at `port`, under the prefix `number`."""

    rank: int
    world_size: int
    number: int
    port: int
    path: tuple[str, ...]
    folder: str
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Failure:
    """An exception on a rank; `error` is how `_carry` packs it, or None where it cannot be packed."""

    rank: int
    when: float
    text: str
    error: bytes | None
    standing: Standing
    died: bool = False


def serve(calls: Connection, questions: Connection, stacks: Connection, first: bool) -> None:
    """Answer calls until the parent ends. `stacks` is an open file without a name, for the stack of a process that
    hangs or crashes."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable(file=stacks.fileno(), all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=stacks.fileno(), all_threads=True)
    os.environ.update(_OWN_ENVIRONMENT | os.environ)
    import torch

    torch.set_num_threads(1)
    rank = _Rank(calls)
    threading.Thread(target=rank.say_where_it_stands, args=(questions,), daemon=True).start()
    with contextlib.suppress(EOFError, OSError):  # the parent is gone, or gave this pool up
        _collect()
        calls.send_bytes(_carry.dump(rank.open_store() if first else None))
        while True:
            rank.answer(_carry.load(calls.recv_bytes()), calls.recv_bytes())


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; the parent is the fork server


class _Rank:
    """One rank between its first call and its end."""

    def __init__(self, calls: Connection) -> None:
        self.calls = calls
        self.call: Call | None = None
        self.begun_ns = 0
        self.store: Any = None
        self.clean = _Clean()

    def open_store(self) -> int:
        """Open the store at which the ranks of a pool meet, and return its port, which the system chose."""
        from shardlib._store import listening_store

        self.store = listening_store("127.0.0.1", 0, wait_for_workers=False)
        return self.store.port

    def say_where_it_stands(self, questions: Connection) -> None:
        """Report standings when the parent asks, on a separate thread, which ends the process when the parent ends."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                number = _carry.load(questions.recv_bytes())
                questions.send_bytes(_carry.dump((number, self._standing(number))))
        _exit(1)

    def _standing(self, number: int) -> Standing | None:
        call = self.call
        if call is None or call.number != number:
            return None
        try:
            return _standing.of_main_thread(call.rank, self.begun_ns)
        except Exception:  # frames move while they are read; the stack alone is better than nothing
            stack = traceback.format_exc() + _main_stack()
            return Standing(call.rank, "running", stack=stack)

    def answer(self, call: Call, work: bytes) -> None:
        """Run a call, send its result, and clean up while the parent goes on."""
        sys.path[:] = call.path
        os.chdir(call.folder)
        _set_environment(call.environment)
        with warnings.catch_warnings(), contextlib.ExitStack() as after:
            after.callback(self.clean.restore)
            outcome = self._outcome(call, work, after)
            self.call = None
            self.calls.send_bytes(_carry.dump(outcome))
            if isinstance(outcome, Failure):
                self.calls.recv_bytes()  # the peers are asked where they stand: until then their connections stay
            self._leave(call, wait=not isinstance(outcome, Failure))

    def _outcome(self, call: Call, work: bytes, after: contextlib.ExitStack) -> bytes | Failure:
        self.begun_ns, self.call = time.time_ns(), call
        try:
            after.enter_context(self._process_group(call))
            from shardlib._same_mesh import importing

            with importing():
                fn, args, kwargs = _carry.load(work)
            self.clean.seed()  # now: a module that this rank alone had to import may have drawn
            return _result(fn(*args, **kwargs), fn, call)
        except BaseException as error:
            when = time.monotonic()  # before its message is asked for, which may take as long as it likes
            standing = _standing.of_traceback(call.rank, error, self.begun_ns)
            return Failure(call.rank, when, traceback.format_exc(), _packed(error), standing)

    @contextlib.contextmanager
    def _process_group(self, call: Call) -> Iterator[None]:
        import torch.distributed as dist

        from shardlib.engine._torch import forget_meshes, process_groups

        rank, size = str(call.rank), str(call.world_size)
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
        store = dist.PrefixStore(str(call.number), self._store_at(call))
        dist.init_process_group("gloo", store=store, rank=call.rank, world_size=call.world_size)
        dist.barrier()  # a rank that is done would close connections before another has connected
        try:
            yield
        finally:
            groups = process_groups()
            if dist.is_initialized():
                dist.destroy_process_group()
            forget_meshes()
            # A process group that a cycle keeps has threads, which go on asking for work.
            _collect(spring=call.number % _SPRING == 0)
            # Each of gloo's groups waits some ten milliseconds for its threads: not here.
            threading.Thread(target=groups.clear, daemon=True).start()

    def _leave(self, call: Call, *, wait: bool) -> None:
        """Wait until all ranks are done, unless another rank waits for this one in vain: it only fails when a peer
        closes its connections."""
        if self.store is None:
            return
        with contextlib.suppress(RuntimeError):  # a DistStoreError: a rank that is not done in time, or a parent gone
            if self.store.add(f"{call.number}/done", 1) == call.world_size:
                self.store.set(f"{call.number}/all done", "")
            elif wait:
                self.store.wait([f"{call.number}/all done"], _PATIENCE)

    def _store_at(self, call: Call) -> Any:
        import torch.distributed as dist

        if self.store is None:
            self.store = dist.TCPStore("127.0.0.1", call.port, is_master=False, wait_for_workers=False)
        elif call.rank == 0 and call.number % _SPRING == 0:
            for key in self.store.list_keys():
                if not key.lstrip("/").startswith(f"{call.number}/"):
                    self.store.delete_key(key)
        return self.store


_PATIENCE = timedelta(seconds=2)
_SPRING = 500  # calls from one thorough cleaning to the next: of old addresses in the store, of long-lived garbage


_ROUNDS = 4


def _collect(*, spring: bool = False) -> None:
    """Free the objects of a call. Most survivors are imported modules, which later collections need not visit.

    A model's parameters are freed only once what was computed with them is, so that one collection may not be enough.
    """
    if spring:
        gc.unfreeze()
    for _ in range(_ROUNDS):
        if not gc.collect():
            break
    gc.freeze()


def _result(value: Any, fn: Any, call: Call) -> bytes:
    try:
        return _carry.dump(value)
    except Exception as error:
        raise TypeError(
            f"what {_carry.name_of(fn)} returned on rank {call.rank}, a {type(value).__name__}, cannot be sent back "
            f"({type(error).__name__}: {error}). Return tensors, numbers and containers of these."
        ) from error


def _packed(error: BaseException) -> bytes | None:
    try:
        data = _carry.dump(error)
        return data if isinstance(_carry.load(data), Exception) else None
    except Exception:
        return None


def _main_stack() -> str:
    frame = _current_frames().get(threading.main_thread().ident or 0)
    return "".join(["Stack (most recent call last):\n", *traceback.format_stack(frame)])


def _set_environment(environment: Mapping[str, str]) -> None:
    """Set `os.environ` to the caller's; variables of earlier calls and imports are removed."""
    wanted = _OWN_ENVIRONMENT | dict(environment)
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update(wanted)


class _Clean:
    """The state of the process that a call may change for the next one; `restore` puts it back as it was at first.

    Compiled code on disk and modules that were imported stay: they make the next call faster, not different. Dynamo's
    caches in memory go, since they keep meshes.
    """

    def seed(self) -> None:
        """Seed random numbers, equally for every call and rank."""
        import torch

        torch.manual_seed(0)
        random.seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)

    def restore(self) -> None:
        import torch

        from shardlib.engine._torch import forget_global_hooks

        forget_global_hooks()
        logging.disable(logging.NOTSET)
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision("highest")
        if torch.are_deterministic_algorithms_enabled():  # switching it imports the compiler
            torch.use_deterministic_algorithms(False)
        torch.autograd.set_detect_anomaly(False)
        torch.set_autocast_enabled("cpu", False)
        torch.set_autocast_dtype("cpu", torch.bfloat16)
        if not torch.backends.flags_frozen():  # PyTorch's own test helpers freeze them when they are imported
            torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = False, False

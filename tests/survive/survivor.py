"""The script of docs/how-to/survive.md in float64, as torchrun starts it, with losses on its way.

It writes what it does into the folder `seen`, a file for each process. A file in the folder `fates` says what happens
to a rank, once: `{step}-{rank}-{what}`, such as "7-1-kill", or with the name of a node in place of the rank. NEEDS says
how many ranks an attempt has that begins after a step; one with fewer ends at once.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardlib as sl
from shardlib.checkpoint import _save

WIRE = "wire0"
FATES, SEEN, SCRIPT = Path("fates"), Path("seen"), Path("script.py")


def children(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that they have started."""
    found = []
    with suppress(FileNotFoundError):  # it has ended
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += [int(child), *children(int(child))]
    return found


def kill_node(agent: int) -> None:
    """Kill torchrun's agent and then its ranks, as a machine that loses its power does."""
    for process in [agent, *children(agent)]:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


class Rank:
    """This process: which step it is at, and what happens to it there."""

    def __init__(self) -> None:
        self.number, self.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.step, self.asked, self.log = 0, False, SEEN / f"{os.getpid()}.jsonl"
        shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self.attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT" if shared else "MASTER_PORT", "0")

    def write(self, **facts: Any) -> None:
        with self.log.open("a") as log:
            log.write(json.dumps({"attempt": self.attempt, "world": self.world, "step": self.step, **facts}) + "\n")

    def begins(self, loaded: Any) -> Any:
        self.step = 0 if loaded is None else loaded.extra["step"]
        if self.world < json.loads(os.environ.get("NEEDS", "{}")).get(str(self.step), 0):
            sys.exit("the others come a moment later")  # where they share their cores with other tests
        return loaded

    def takes(self, _model: nn.Module, args: tuple[torch.Tensor]) -> None:
        self.step += 1
        self.write(rows=args[0][:, 0].tolist())
        self.meet("hold", self.hold)

    def meet(self, what: str, then: Callable[[], None]) -> None:
        """Do what a file says of this rank at this step, and of no other attempt."""
        for who in (self.number, os.environ.get("NODE")):
            with suppress(FileNotFoundError):
                (FATES / f"{self.step}-{who}-{what}").unlink()
                then()

    def hold(self) -> None:
        """Stand still until torchrun asks this rank to stop, as it does when a node joins or leaves."""
        self.write(holds=True)
        while not self.asked:
            time.sleep(0.05)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def die_with_node(self) -> None:
        kill_node(os.getppid())

    def lose_agent(self) -> None:
        os.kill(os.getppid(), signal.SIGKILL)

    def cut_node(self) -> None:
        """Cut the wire of this rank's machine."""
        subprocess.run(["ip", "link", "set", WIRE, "down"], check=True)

    def stop_node(self) -> None:
        os.kill(os.getppid(), signal.SIGTERM)
        self.hold()


def follow(rank: Rank) -> None:
    """Let a rank tell what it does, and meet its fate there."""
    shard, load, write, handle = sl.shard_model, sl.Checkpoints.load, _save.write_tensors, signal.signal

    def shard_model(model: nn.Module, *args: Any, **options: Any) -> nn.Module:
        sharded = shard(model, *args, **options)
        sharded.register_forward_pre_hook(rank.takes, prepend=True)
        sharded.register_forward_hook(lambda _model, _args, output: output.register_hook(backward) and None)
        return sharded

    def backward(gradient: torch.Tensor) -> None:
        rank.meet("kill", rank.die)
        rank.meet("lose", rank.die_with_node)
        rank.meet("orphan", rank.lose_agent)
        rank.meet("cut", rank.cut_node)
        rank.meet("preempt", rank.stop_node)

    def write_tensors(*args: Any) -> Any:
        rank.meet("save", rank.die)
        return write(*args)

    def install(number: int, handler: Any) -> Any:
        def asked(*given: Any) -> None:
            rank.asked = True
            handler(*given)

        return handle(number, asked if number == signal.SIGTERM and callable(handler) else handler)

    sl.shard_model = shard_model  # type: ignore[assignment]
    sl.Checkpoints.load = lambda *args, **options: rank.begins(load(*args, **options))  # type: ignore[assignment]
    _save.write_tensors, signal.signal = write_tensors, install


def main() -> None:
    torch.set_default_dtype(torch.float64)
    follow(Rank())
    sys.argv[0] = str(SCRIPT)
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()

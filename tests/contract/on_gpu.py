"""Run the habits of the contract on GPUs over NCCL, and print what is not as declared.

    python -m tests.contract.on_gpu "zero(3)" tp        # some kinds; by default all but compiled blocks

Every habit that is the same as on one device, or refused, runs under `torch.set_default_device("cuda")`, on one device
and on the ranks of each kind. Where a habit hangs or ends its processes, others take over after it. Ranks share a GPU
where there are fewer; NCCL takes that from ranks of different hosts alone, and `NCCL_HOSTID` gives each rank a host of
its own. Without a GPU, all of it runs on CPU over gloo.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.contract.cells import wrong
from tests.contract.declare import Habit, habits_of, modules
from tests.contract.harness import KINDS, ONE, Finding, OfRanks, Part, Shard, compare, kind_of, play

_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_PATIENCE = 40.0  # seconds without a result, after which ranks are taken to hang
_KINDS = [name for name, kind in KINDS.items() if kind.compile is None]

Cell = tuple[str, str]  # a module and one of its habits


def run_on_rank(kind: str, folder: Path, cells: list[Cell]) -> None:
    """Run habits on this rank, and write what came of each into a file of its own."""
    rank = int(os.environ["RANK"])
    if _DEVICE == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("nccl" if _DEVICE == "cuda" else "gloo")
    torch.set_default_device(_DEVICE)
    for module, name in cells:
        try:
            [part] = play(module, [name], kind)
        except Exception as error:  # some ranks raised, and others did not
            part = Part(error=f"{type(error).__name__}: {error}")
        part.values = {path: _on_host(value) for path, value in part.values.items()}
        unfinished = folder / f"{rank} {name}.unfinished"
        unfinished.write_bytes(pickle.dumps(part))
        unfinished.rename(folder / f"{rank} {name}")


def _on_host(value: Any) -> Any:
    if isinstance(value, OfRanks):
        return OfRanks(value.how, _on_host(value.value))
    if isinstance(value, Shard):
        return dataclasses.replace(value, local=value.local.cpu())
    return value.cpu() if isinstance(value, torch.Tensor) else value


def outcomes(kind: str, cells: list[Cell]) -> dict[Cell, list[Part] | Finding]:
    """Run habits on ranks of their own."""
    found: dict[Cell, list[Part] | Finding] = {}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        while left := [cell for cell in cells if cell not in found]:
            ranks = _start(kind, folder, left)
            _wait(ranks, folder)
            for cell in left:
                files = [folder / f"{rank} {cell[1]}" for rank in range(len(ranks))]
                if not all(file.exists() for file in files):
                    found[cell] = Finding("hung", f"ranks ended with {[rank.poll() for rank in ranks]}")
                    break
                found[cell] = [pickle.loads(file.read_bytes()) for file in files]
            for rank in ranks:
                rank.kill()
                rank.wait()
    return found


def _start(kind: str, folder: Path, cells: list[Cell]) -> list[subprocess.Popen[bytes]]:
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    (folder / "cells").write_bytes(pickle.dumps(cells))
    count = kind_of(kind).ranks
    common = os.environ | {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": str(count)}
    command = [sys.executable, "-m", __spec__.name, "--on-rank", kind, str(folder)]
    own = [{"RANK": str(rank), "LOCAL_RANK": "0", "NCCL_HOSTID": str(rank)} for rank in range(count)]
    return [subprocess.Popen(command, env=common | each, stderr=subprocess.DEVNULL) for each in own]


def _wait(ranks: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """Wait until the ranks have ended, or nothing has come of them for long."""
    results, since = 0, time.monotonic()
    while any(rank.poll() is None for rank in ranks) and time.monotonic() - since < _PATIENCE:
        time.sleep(0.2)
        if (now := len(list(folder.iterdir()))) != results:
            results, since = now, time.monotonic()


def unlike_declared(kind: str, habits: dict[Cell, Habit], one: dict[Cell, Any]) -> list[str]:
    """Return a line for each habit that is not as declared, though one device runs it."""
    chosen = {cell: habit for cell, habit in habits.items() if kind in habit.kinds and _is_compared(habit, kind)}
    ran = [cell for cell in chosen if not isinstance(one[cell], Finding) and not one[cell][0].error]
    found = outcomes(kind, ran)
    lines = [wrong(chosen[cell], kind, _finding(found[cell], one[cell], kind)) for cell in ran]
    print(f"{kind}: {len(ran)} habits, {sum(map(bool, lines))} not as declared", flush=True)
    return [line for line in lines if line]


def _is_compared(habit: Habit, kind: str) -> bool:
    verdict = habit.verdict(kind)
    return verdict.what in ("same", "refused") and not verdict.apart and not verdict.alone


def _finding(parts: list[Part] | Finding, expected: list[Part], kind: str) -> Finding:
    return parts if isinstance(parts, Finding) else compare(parts, expected, staged=kind_of(kind).staged)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("kinds", nargs="*", default=_KINDS, help=f"of {', '.join(_KINDS)}")
    p.add_argument("--habits", nargs="*", help="the names of some habits; by default all")
    p.add_argument("--on-rank", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.on_rank:
        kind, folder = args.kinds
        run_on_rank(kind, Path(folder), pickle.loads((Path(folder) / "cells").read_bytes()))
        return
    habits = {(module, h.name): h for module in modules() for h in habits_of(module)}
    habits = {cell: habit for cell, habit in habits.items() if not args.habits or cell[1] in args.habits}
    one = outcomes(ONE, list(habits))
    raised = Counter("hung" if isinstance(parts, Finding) else parts[0].error for parts in one.values())
    print(
        f"{ONE}: {raised.pop('', 0)} of {len(habits)} habits ran on {_DEVICE}; the others: {dict(raised)}", flush=True
    )
    with ThreadPoolExecutor(len(args.kinds)) as threads:
        for lines in threads.map(partial(unlike_declared, habits=habits, one=one), args.kinds):
            for line in lines:
                print(line, flush=True)


if __name__ == "__main__":
    main()

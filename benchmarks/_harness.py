"""Several ways to take the same training step, which alternate in one group of processes.

Alternation is what makes the ratios trustworthy on a machine that does other things too: whatever slows one round
slows every variant of that round. Processor time is shown beside it: it says what a step costs when ranks do not
wait for each other or for a core. A step counts with its slowest rank. Reported are the median of the ratios within
single rounds and their middle half: to the first variant, and to peers that do the same with the same optimizer.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import _report
import torch
import torch.distributed as dist
from _models import SIZES, Batch, Size, batches, loss_of
from _report import alternate, compared, written
from rich.console import Console
from rich.table import Table
from torch import nn

PARTS = "forward", "backward", "optimizer"
WARM_UP = 5
LOSS_TOLERANCE = 1e-3  # float32 after some hundred AdamW steps; a wrong gradient is off by far more

OPTIONS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}  # of AdamW

Trained = nn.Module | tuple[nn.Module, torch.optim.Optimizer]


@dataclass(frozen=True)
class Variant:
    """One way to take the step. `build` gives a module that maps local ids to local logits, or it and an optimizer; a
    module with a method `train_on` takes a batch forward and back by itself, and returns the loss."""

    name: str
    build: Callable[[Size], Trained]
    trains_alike: bool = True  # its losses must be those of the others
    fused: bool | None = None  # what AdamW is told; None leaves the choice to torch
    set_to_none: bool = True  # how gradients are forgotten; some peers need theirs to stay
    peers: tuple[str, ...] = ()  # variants that do the same with the same optimizer, for a ratio to each


def fused_and_default(name: str, build: Callable[..., Trained], **more: Any) -> list[Variant]:
    """A peer with the optimizer that shardlib takes on CPU, torch's fused AdamW, and as it is by default, a loop."""
    return [Variant(fused(name), build, fused=True, **more), Variant(name, build, **more)]


def own_optimizer(name: str, build: Callable[..., Trained], **more: Any) -> list[Variant]:
    """The same for a peer whose `build` makes the optimizer: it is told of AdamW whether it is `fused`."""
    return [
        Variant(fused(name), partial(build, fused=True), **more),
        Variant(name, partial(build, fused=None), **more),
    ]


def fused(name: str) -> str:
    return f"{name}, fused AdamW"


@dataclass
class Record:
    """Keeps the measurements of one variant: for each round the means of a step (milliseconds of each part, processor
    time, bytes that sockets sent), and the loss of every step."""

    ms: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    cpu_ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    first_step_seconds: float = 0.0
    peak_megabytes: float = 0.0  # known of a variant that runs in processes of its own, as is
    live_megabytes: float = 0.0  # what it has of the allocator when a step has ended, gradients included

    @property
    def steps(self) -> list[float]:
        return [sum(parts) for parts in zip(*self.ms.values(), strict=True)]


class Trainee:
    """A variant's model and its optimizer, by default a plain AdamW, and the record of its steps."""

    def __init__(self, variant: Variant, size: Size) -> None:
        self.record = Record()
        self.set_to_none = variant.set_to_none
        built = variant.build(size)
        if isinstance(built, tuple):
            self.model, self.optimizer = built
        else:
            self.model = built
            self.optimizer = torch.optim.AdamW(built.parameters(), fused=variant.fused, **OPTIONS)
        self.backward = getattr(self.optimizer, "backward", torch.Tensor.backward)

    def step(self, batch: Batch) -> tuple[float, list[float]]:
        """The loss, and how many milliseconds each part took."""
        clock = [time.perf_counter()]
        self.optimizer.zero_grad(set_to_none=self.set_to_none)
        train_on: Any = getattr(self.model, "train_on", None)
        if train_on is not None:  # forward and backward in one, which count as backward
            clock.append(clock[0])
            loss = train_on(batch)
        else:
            loss = loss_of(self.model, batch)
            clock.append(time.perf_counter())
            self.backward(loss)
            loss = loss.item()
        clock.append(time.perf_counter())
        self.optimizer.step()
        clock.append(time.perf_counter())
        return loss, [1e3 * (b - a) for a, b in itertools.pairwise(clock)]

    def warm_up(self, data: list[Batch]) -> None:
        start = time.perf_counter()
        for i, batch in enumerate(data):
            self.record.losses.append(self.step(batch)[0])
            if i == 0:
                self.record.first_step_seconds = time.perf_counter() - start

    def measure(self, data: list[Batch]) -> None:
        """Take some steps, one after another."""
        dist.barrier()
        sent, cpu = bytes_sent(), time.process_time()
        losses, parts = zip(*map(self.step, data), strict=True)
        self.record.cpu_ms.append(1e3 * (time.process_time() - cpu) / len(data))
        dist.barrier()
        self.record.sent.append((bytes_sent() - sent) // len(data))
        self.record.losses += losses
        for part, ms in zip(PARTS, zip(*parts, strict=True), strict=True):
            self.record.ms[part].append(statistics.fmean(ms))


Explain = Callable[[list[dict[str, Any]]], list[str]]


def compare(
    args: argparse.Namespace,
    variants: list[Variant],
    *,
    seed: int,
    explain: Explain = lambda rows: [],
    sizes: Mapping[str, Size] = SIZES,
) -> dict[str, list[dict[str, Any]]]:
    """Measure on each rank, check the losses, print a table for each size, and return their rows.

    `explain` says in lines what to make of the rows of a table.
    """
    chosen = choose(variants, args.only)
    results = {}
    for name in sizes if args.size == "all" else [args.size]:
        rounds = args.rounds or (sizes[name].rounds // 10 if args.quick else sizes[name].rounds)
        records = run_variants(chosen, sizes[name], rounds=rounds, seed=seed)
        check_losses(chosen, records)
        rows = results[name] = summary(chosen, records)
        what = f"{rounds} rounds of {sizes[name].burst} steps, {dist.get_world_size()} ranks"
        title = f"{name}: {what}, {chosen[0].name} = 1"
        console().print(table(title, rows), *beside(rows), *explain(rows), sep="\n", soft_wrap=True)
    return results


def choose(variants: list[Variant], only: list[str] | None) -> list[Variant]:
    """The variants of these names, in this order; all of them where none is named."""
    by_name = {variant.name: variant for variant in variants}
    if only is None:
        return variants
    if unknown := sorted({*only} - {*by_name}):
        raise SystemExit(f"no such variants: {unknown}; there are {list(by_name)}")
    return [by_name[name] for name in only]


def run_variants(variants: list[Variant], size: Size, *, rounds: int, seed: int) -> dict[str, Record]:
    """Train all variants on the same batches; records hold the slowest rank's times and the mean loss over ranks."""
    at_rest, live_at_rest = resident("VmRSS"), live()
    data = list(batches(size, WARM_UP + rounds * size.burst, seed=seed))
    trainees = {variant.name: Trainee(variant, size) for variant in variants}
    for trainee in trainees.values():
        trainee.warm_up(data[:WARM_UP])
    reset_peak()
    bursts = (data[start : start + size.burst] for start in range(WARM_UP, len(data), size.burst))
    for burst, order in zip(bursts, alternate(list(trainees), rounds), strict=True):
        for name in order:
            trainees[name].measure(burst)
    records = {name: trainee.record for name, trainee in trainees.items()}
    if len(variants) == 1:
        records[variants[0].name].peak_megabytes = resident("VmHWM") - at_rest
        records[variants[0].name].live_megabytes = live() - live_at_rest
    return {name: _over_ranks(record) for name, record in records.items()}


def check_losses(variants: list[Variant], records: dict[str, Record]) -> None:
    """A variant that trains something else is not a faster way to train this."""
    alike = [variant.name for variant in variants if variant.trains_alike]
    for base, name in zip(alike[:1] * len(alike), alike, strict=True):
        pairs = zip(records[name].losses, records[base].losses, strict=True)
        worst = max(abs(got - want) / want for got, want in pairs)
        if not worst < LOSS_TOLERANCE:
            raise SystemExit(f'"{name}": a loss differs from that of "{base}" by {worst:.1e} (relative)')


def table(title: str, rows: list[dict]) -> Table:
    """What `summary` returned, for the terminal."""
    with_memory = len(rows) == 1
    columns = ["", "ms a step", "ratio", "middle half", "cpu ratio", *PARTS, "sent kB", "first step s"]
    table = Table(*columns, *(["live MB", "resident MB"] if with_memory else []), title=title, title_justify="left")
    for row in rows:
        low, high = row["middle_half"]
        cells = [
            row["variant"],
            f"{row['ms']:.2f}",
            f"{row['ratio']:.3f}",
            f"{low:.3f} - {high:.3f}",
            f"{row['cpu_ratio']:.3f}",
        ]
        cells += [f"{row[part]:.2f}" for part in PARTS]
        cells += [f"{row['sent_bytes'] / 1e3:,.1f}", f"{row['first_step_seconds']:.1f}"]
        table.add_row(*cells, *(f"{row[f'{what}_megabytes']:.0f}" for what in ("live", "peak") if with_memory))
    return table


def console() -> Console:
    """Rank 0 speaks, in lines long enough for a table where no terminal says how long they are."""
    return Console(quiet=dist.get_rank() != 0, width=None if sys.stdout.isatty() else 140)


def summary(variants: list[Variant], records: dict[str, Record]) -> list[dict[str, Any]]:
    """One row a variant: medians, its ratios to the first, and "beside", its ratios to those of its peers that ran."""
    first = records[variants[0].name]
    rows = []
    for variant in variants:
        record = records[variant.name]
        row: dict[str, Any] = {"variant": variant.name, "ms": statistics.median(record.steps)}
        row |= _ratios(record, first)
        row["beside"] = {peer: _ratios(record, records[peer]) for peer in variant.peers if peer in records}
        row |= {part: statistics.median(record.ms[part]) for part in PARTS}
        row |= {"sent_bytes": statistics.median(record.sent), "rounds": len(record.steps)}
        rows.append(row | {k: getattr(record, k) for k in ("first_step_seconds", "peak_megabytes", "live_megabytes")})
    return rows


def _ratios(record: Record, base: Record) -> dict[str, Any]:
    wall, cpu = compared(record.steps, base.steps), compared(record.cpu_ms, base.cpu_ms)
    return wall | {f"cpu_{key}": value for key, value in cpu.items()}


def beside(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each variant and each of its peers."""
    return [
        f"{row['variant']} / {peer}: {written(found)}, processor time {found['cpu_ratio']:.3f}"
        for row in rows
        for peer, found in row["beside"].items()
    ]


def parser(doc: str) -> argparse.ArgumentParser:
    p = _report.parser(doc)
    p.add_argument("--size", choices=[*SIZES, "all"], default="all")
    p.add_argument("--only", nargs="+", metavar="VARIANT", help="run these; the first is the base")
    p.add_argument("--rounds", type=int, help="rounds measured (default: by size; a tenth with --quick)")
    p.add_argument("--seed", type=int, default=1234)
    return p


def start_ranks(count: int, arguments: list[str]) -> int:
    """Run this script again as `count` ranks of one thread each; returns the exit status."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)]
    return subprocess.call([*launcher, sys.argv[0], *arguments], env={**os.environ, "OMP_NUM_THREADS": "1"})


def is_rank() -> bool:
    return "RANK" in os.environ


def write(args: argparse.Namespace, results: dict[str, Any]) -> None:
    """Write the file that the command line asks for, if it does. One rank does so."""
    if args.json and dist.get_rank() == 0:
        _report.write(args.json, results, ranks=dist.get_world_size())


def bytes_sent() -> int:
    """Bytes that this process has sent on its TCP sockets, as the kernel counts them (Linux)."""
    return sum(map(_sent_on, os.listdir("/proc/self/fd")))


def resident(what: str) -> float:
    """Megabytes of resident memory now ("VmRSS") or at its peak ("VmHWM")."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what + ":")) / 1024


class _MallocInfo(ctypes.Structure):
    """glibc's `mallinfo2`: what is used in its arenas, and what it has mapped apart."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def live() -> float:
    """Megabytes that the process has of glibc's allocator, those of torch's C++ included."""
    count = ctypes.CDLL(None).mallinfo2
    count.restype = _MallocInfo
    info = count()
    return (info.uordblks + info.hblkhd) / 2**20


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _sent_on(descriptor: str) -> int:
    try:
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
            return 0
        with socket.socket(fileno=os.dup(int(descriptor))) as s:
            info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 208)
    except OSError:  # no TCP socket, or closed meanwhile
        return 0
    # tcpi_bytes_sent, the 64-bit word at byte 200 of struct tcp_info since Linux 4.19
    return struct.unpack_from("=Q", info, 200)[0] if len(info) >= 208 else 0


def _over_ranks(record: Record) -> Record:
    every: list[dict] = [{}] * dist.get_world_size()
    dist.all_gather_object(every, asdict(record))
    slowest = max(every, key=lambda one: statistics.median(map(sum, zip(*one["ms"].values(), strict=True))))
    return Record(
        ms=slowest["ms"],
        cpu_ms=slowest["cpu_ms"],
        losses=[sum(losses) / len(every) for losses in zip(*(one["losses"] for one in every), strict=True)],
        sent=[max(sent) for sent in zip(*(one["sent"] for one in every), strict=True)],
        first_step_seconds=max(one["first_step_seconds"] for one in every),
        peak_megabytes=max(one["peak_megabytes"] for one in every),
        live_megabytes=max(one["live_megabytes"] for one in every),
    )

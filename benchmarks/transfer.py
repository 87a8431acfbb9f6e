"""Weights from one plan to another, in memory, beside full state dicts and a checkpoint on a memory file system.

    torchrun --nproc_per_node 4 benchmarks/transfer.py

A model of some 200 MiB on four ranks, by gloo. Each way moves the weights of one sharded model into another one. Bytes
are those that all ranks send, beside what the target's ranks lack. Memory is the largest growth of a rank's resident
set meanwhile, looked at every millisecond.
"""

from __future__ import annotations

import gc
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _report import alternate, compared, parser, write, written
from torch import nn

import shardlib as sl

WIDTH, LAYERS = 1024, 12
FOLDER = Path("/dev/shm/shardlib-transfer")
WHOLE = sl.Rules({"**": None})
MEGATRON = sl.Rules({"up": "colwise", "down": "rowwise"})
PAIRS: dict[str, tuple[str, sl.Rules, Any, str, sl.Rules, Any]] = {
    "fsdp to tp": ("dp=4", WHOLE, sl.fsdp(), "tp=4", MEGATRON, ()),
    "tp to fsdp": ("tp=4", MEGATRON, (), "dp=4", WHOLE, sl.fsdp()),
    "dp and tp to tp": ("dp=2,tp=2", MEGATRON, sl.zero(3), "tp=4", MEGATRON, ()),
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)


def made(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(layers)))


class Peak:
    """Inside the block, `bytes` becomes the largest growth of this process's resident set."""

    def __enter__(self) -> Peak:
        gc.collect()
        self.start, self.bytes, self.done = _resident(), 0, threading.Event()
        self.watcher = threading.Thread(target=self._watch, daemon=True)
        self.watcher.start()
        return self

    def _watch(self) -> None:
        while not self.done.wait(0.001):
            self.bytes = max(self.bytes, _resident() - self.start)

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.watcher.join()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def by_state_dict(source: nn.Module, target: nn.Module) -> None:
    target.load_state_dict(sl.full_state_dict(source))


def by_checkpoint(source: nn.Module, target: nn.Module) -> None:
    sl.save(FOLDER / "step", source, random=False)
    sl.load(FOLDER / "step", target, random=False)


def measured(way: Callable[[nn.Module, nn.Module], Any], source: nn.Module, target: nn.Module) -> tuple[float, int]:
    """Return the seconds of the slowest rank, and the largest growth of memory on a rank."""
    dist.barrier()
    with Peak() as peak:
        begun = time.perf_counter()
        way(source, target)
        seconds = time.perf_counter() - begun
    found = torch.tensor([seconds, peak.bytes], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found[0].item(), int(found[1])


def lacked(plan: sl.Plan, other: sl.Plan) -> int:
    """Return the bytes that target ranks need and do not hold, counted by masks of elements."""
    total = 0
    for row in other.rows:
        ids = torch.arange(torch.Size(row.global_shape).numel()).reshape(row.global_shape)
        for rank in range(other.mesh.world_size):
            need = row.stored.take(ids, other.mesh, other.mesh.coordinate(rank)).flatten()
            hold = plan[row.name].stored.take(ids, plan.mesh, plan.mesh.coordinate(rank)).flatten()
            has = torch.zeros(ids.numel(), dtype=torch.bool)
            has[hold] = True
            total += int((~has[need]).sum()) * row.dtype.itemsize
    return total


def main() -> None:
    args = parser(__doc__).parse_args()
    width, layers, rounds = (64, 2, 2) if args.quick else (WIDTH, LAYERS, 6)
    results: dict[str, Any] = {}
    ways: dict[str, Callable[[nn.Module, nn.Module], Any]] = {
        "transfer": lambda a, b: sl.transfer(a, b),
        "full state dict": by_state_dict,
        "checkpoint in memory": by_checkpoint,
    }
    for pair, (mesh, rules, transforms, other_mesh, other_rules, other_transforms) in PAIRS.items():
        first, second = made(width, layers), made(width, layers)
        source = sl.shard_model(first, mesh, rules, transforms=transforms)
        target = sl.shard_model(second, other_mesh, other_rules, transforms=other_transforms)
        rank = dist.get_rank()
        moves = sl.transfer(source, target)
        bound = lacked(sl.get_plan(source), sl.get_plan(target))
        taken: dict[str, list[float]] = {name: [] for name in ways}
        memory = dict.fromkeys(ways, 0)
        for order in alternate(list(ways), rounds):
            for name in order:
                seconds, grown = measured(ways[name], source, target)
                taken[name].append(seconds)
                memory[name] = max(memory[name], grown)
                if rank == 0:
                    shutil.rmtree(FOLDER, ignore_errors=True)
        results[pair] = {
            "model_bytes": sum(p.numel() * p.element_size() for p in made(width, layers).parameters()),
            "sent_bytes": moves.bytes, "bound_bytes": bound,
            "seconds": {name: min(each) for name, each in taken.items()},
            "ratios": {name: compared(taken[name], taken["transfer"]) for name in ways if name != "transfer"},
            "memory_bytes": memory,
        }  # fmt: skip
        if rank == 0:
            _show(pair, results[pair])
    if rank == 0 and args.json:
        write(args.json, results)
    dist.destroy_process_group()


def _show(pair: str, found: dict[str, Any]) -> None:
    mib = 2**20
    print(f"{pair}: a model of {found['model_bytes'] / mib:.0f} MiB; {found['sent_bytes'] / mib:.1f} MiB are sent, and")
    print(f"  {found['bound_bytes'] / mib:.1f} MiB are lacked", flush=True)
    for name, seconds in found["seconds"].items():
        ratio = "" if name == "transfer" else f", {written(found['ratios'][name])} times a transfer's"
        grown = found["memory_bytes"][name] / mib
        print(f"  {name:<20} {seconds:.3f} s{ratio}; memory grows by {grown:.0f} MiB", flush=True)


if __name__ == "__main__":
    main()

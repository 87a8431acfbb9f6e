"""Measure what a `Cluster` says, on the machine that runs this: products, memory, launches, and collectives of ranks.

Each figure is the best of several repetitions: other programs on the machine only make them slower. On a CPU whose
cores ranks share it is the median: they slow each other in training too.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from shardlib._measure import await_device
from shardlib._plan import KINDS, ByKind, Link, Rate, ring_bytes, ring_steps

__all__ = ["Effort", "Timing", "fit", "link_of", "measure_device", "measure_job", "time_collectives"]

SOURCE = "calibrated"
_LIMIT = 2.0  # seconds for one size of a product: CPUs without float16 take long
_DTYPES = "bfloat16", "float16", "float32", "float64"


@dataclass(frozen=True)
class Effort:
    """The sizes that are measured, and how often.

    Attributes:
        products: sides of square matrices; the highest rate of them counts.
        memory: bytes of a tensor that is copied; more than caches hold.
        payloads: bytes that a rank contributes to a collective.
        repeats: times that each is measured.
    """

    products: tuple[int, ...]
    memory: int
    payloads: tuple[int, ...]
    repeats: int

    @classmethod
    def of(cls, *, accelerator: bool, quick: bool) -> Effort:
        """Return what suits a device."""
        sides = (2048, 4096, 8192) if accelerator else (256, 512, 1024)
        memory = 2**30 if accelerator else 2**28
        payloads = tuple(4**power for power in range(5, 15 if accelerator else 13))
        if quick:
            return cls(sides[:1], memory // 16, payloads[::3], 3)
        return cls(sides, memory, payloads, 10)


class Timing(NamedTuple):
    """The seconds of one collective.

    Attributes:
        kind: as in `Cluster.collective_time`.
        payload: bytes that a rank contributes.
        seconds: of the slowest rank.
    """

    kind: str
    payload: int
    seconds: float


def measure_device(device: torch.device, effort: Effort) -> dict[str, Any]:
    """Return the arguments of `Cluster` that one device decides, but for the size of its memory."""
    launch = _launch(device, effort.repeats)
    copied = _copies(device, device, effort, launch)
    host = copied if device.type == "cpu" else _copies(torch.device("cpu"), device, effort, launch)
    return {
        "launch": _rounded(launch),
        "products": tuple(_products(device, effort, launch)),
        "memory_bandwidth": _rate(2 * copied),  # read and written
        "host_bandwidth": _rate(host),
    }


def measure_job(device: torch.device, effort: Effort, node: int) -> dict[str, Any]:
    """Return the arguments of `Cluster` that devices and links decide; every rank calls it, and rank 0's count.

    All ranks measure at once, as they work in training.

    Args:
        device: of this rank.
        effort: the sizes to measure.
        node: the number of ranks in each node.
    """
    found = measure_device(device, effort)
    world, rank = dist.get_world_size(), dist.get_rank()
    inside = [[*range(first, min(first + node, world))] for first in range(0, world, node)]
    between = [[*range(local, world, node)] for local in range(node)]
    links = []
    for name, groups, ranks in (("node", inside, node if world > node else 0), ("network", between, 0)):
        if len(groups[0]) > 1:
            made = [dist.new_group(group) for group in groups]  # every rank has to make every group
            own = next(group for group, members in zip(made, groups, strict=True) if rank in members)
            timings = time_collectives(device, effort, own)
            links.append(link_of(name, ranks, timings, dist.get_world_size(own), found["launch"]))
    return found | {"links": tuple(links), "overlap": _overlap(device, effort) if world > 1 else 1.0}


def _overlap(device: torch.device, effort: Effort) -> float:
    """Return the part of the shorter one of computation and communication that hides behind the other."""
    side, payload = effort.products[-1] // 2, torch.ones(effort.payloads[-1] // 16, device=device)
    a, b = torch.ones(side, side, device=device), torch.ones(side, side, device=device)

    def communicate() -> None:
        dist.all_reduce(payload)

    seconds = _best(communicate, device, effort.repeats)
    count = max(round(seconds / _best(lambda: torch.mm(a, b), device, effort.repeats)), 1)

    def compute() -> None:
        for _ in range(count):
            torch.mm(a, b)

    def both() -> None:
        work = dist.all_reduce(payload, async_op=True)
        compute()
        work.wait()

    taken = torch.tensor([_best(run, device, effort.repeats) for run in (communicate, compute, both)], device=device)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    alone, beside, together = taken.tolist()
    return round(min(max((alone + beside - together) / min(alone, beside), 0.0), 1.0), 2)


def _launch(device: torch.device, repeats: int) -> float:
    """Return the seconds of the shortest kernel, of many in a row."""
    one, count = torch.ones(1, device=device), 1000

    def many() -> None:
        for _ in range(count):
            one.add_(1)

    return _best(many, device, repeats) / count


def _products(device: torch.device, effort: Effort, launch: float) -> Iterable[tuple[str, Rate]]:
    for name in _DTYPES:
        try:
            rate = max(_product_rate(device, getattr(torch, name), side, effort, launch) for side in effort.products)
        except RuntimeError:  # a device without this dtype, as MPS without float64
            continue
        yield name, _rate(rate)


def _product_rate(device: torch.device, dtype: torch.dtype, side: int, effort: Effort, launch: float) -> float:
    a, b = (torch.ones(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2.0 * side**3 / _beyond(_best(lambda: torch.mm(a, b), device, effort.repeats, _LIMIT), launch)


def _copies(source: torch.device, target: torch.device, effort: Effort, launch: float) -> float:
    """Return the bytes a second of a copy; from the memory of a host to its device, the memory is pinned."""
    pinned = source.type == "cpu" and target.type == "cuda"
    sent = torch.empty(effort.memory, dtype=torch.uint8, device=source, pin_memory=pinned).fill_(1)
    kept = torch.empty(effort.memory, dtype=torch.uint8, device=target).fill_(1)
    return effort.memory / _beyond(_best(lambda: kept.copy_(sent, non_blocking=True), target, effort.repeats), launch)


def _beyond(seconds: float, launch: float) -> float:
    """Return the seconds of a kernel without its launch."""
    return max(seconds - launch, seconds / 10)


def _best(run: Callable[[], object], device: torch.device, repeats: int, limit: float = math.inf) -> float:
    """Return the seconds of the fastest of some runs, or of the median, after one that is not counted; of fewer runs
    after `limit` seconds."""
    run()
    found: list[float] = []
    while len(found) < repeats and sum(found) < limit:
        found.append(_seconds(run, device))
    shared = device.type == "cpu" and dist.is_initialized()
    return statistics.median(found) if shared else min(found)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    await_device(device)
    start = time.perf_counter()
    run()
    await_device(device)
    return time.perf_counter() - start


def time_collectives(device: torch.device, effort: Effort, group: dist.ProcessGroup | None = None) -> list[Timing]:
    """Return the timings of all kinds of collectives over a group, the same on each of its ranks; all ranks call it."""
    found, size = [], dist.get_world_size(group)
    for kind in KINDS:
        for payload in effort.payloads:
            mine = torch.ones(max(payload // 4 // size, 1) * size, device=device)
            run = _collective(kind, mine, group)
            seconds = torch.tensor(_best(run, device, effort.repeats), device=device, dtype=torch.float32)
            dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
            found.append(Timing(kind, mine.nbytes, seconds.item()))
    return found


def _collective(kind: str, mine: torch.Tensor, group: dist.ProcessGroup | None) -> Callable[[], object]:
    """Return a collective of a rank's flat tensor, whose other tensors are made already."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    match kind:
        case "all_reduce":
            return lambda: dist.all_reduce(mine, group=group)
        case "all_gather":
            every = mine.new_empty(size * mine.numel())
            return lambda: dist.all_gather_single(every, mine, group=group)
        case "reduce_scatter":
            part = mine.new_empty(mine.numel() // size)
            return lambda: dist.reduce_scatter_single(part, mine, group=group)
        case "all_to_all":
            other = torch.empty_like(mine)
            return lambda: dist.all_to_all_single(other, mine, group=group)
        case "broadcast":
            return lambda: dist.broadcast(mine, group_src=0, group=group)
    other = torch.empty_like(mine)
    ahead, behind = (rank + 1) % size, (rank - 1) % size

    def send() -> None:
        sent = dist.P2POp(dist.isend, mine, group_peer=ahead, group=group)
        received = dist.P2POp(dist.irecv, other, group_peer=behind, group=group)
        for work in dist.batch_isend_irecv([sent, received]):
            work.wait()

    return send


def link_of(name: str, ranks: int, timings: Sequence[Timing], size: int, launch: float) -> Link:
    """Return the link that timings of collectives of `size` ranks show.

    Args:
        name: its name.
        ranks: the ranks that it joins, 0 for all.
        timings: those of all kinds.
        size: the ranks that took part.
        launch: seconds of the shortest kernel.
    """
    by_kind = {kind: [each for each in timings if each.kind == kind] for kind in KINDS}
    kinds = tuple(ByKind(kind, *_fitted(own, size, launch)) for kind, own in by_kind.items() if own)
    return Link(name, ranks, *_fitted(timings, size, launch), kinds=kinds, source=SOURCE)


def _fitted(timings: Sequence[Timing], size: int, launch: float) -> tuple[float, Rate]:
    latency, bandwidth = fit(
        [ring_steps(each.kind, size) for each in timings],
        [ring_bytes(each.kind, each.payload, size) for each in timings],
        [each.seconds - launch for each in timings],
    )
    return _rounded(latency), _rate(bandwidth)


def fit(steps: Sequence[float], sent: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit latency and bandwidth to times: seconds = steps * latency + sent / bandwidth.

    It is a least-squares fit of relative errors, so that the short times, which show the latency, count as much as the
    long ones. Neither figure becomes negative: where the best latency would, it is 0.

    Args:
        steps: of each collective.
        sent: the bytes that a rank sends in it.
        seconds: its time.

    >>> latency, bandwidth = fit([1, 1, 2], [1e3, 1e9, 2e6], [1e-5 + 1e-6, 1e-5 + 1.0, 2e-5 + 2e-3])
    >>> round(latency * 1e6, 3), round(bandwidth / 1e9, 3)
    (10.0, 1.0)
    """
    times = np.maximum(np.asarray(seconds, float), 1e-9)
    columns = np.stack([np.asarray(steps, float), np.asarray(sent, float)], axis=1) / times[:, None]
    scale = np.linalg.norm(columns, axis=0)  # seconds and bytes are many powers of ten apart
    latency, per_byte = np.linalg.lstsq(columns / scale, np.ones(len(times)), rcond=None)[0] / scale
    if latency < 0:
        latency, per_byte = 0.0, 1 / _relative(columns[:, 1])
    if per_byte <= 0:  # sizes too small to show a bandwidth
        per_byte = float(np.min(times / np.asarray(sent, float)))
    return float(latency), float(1 / per_byte)


def _relative(column: np.ndarray) -> float:
    """Return 1 / x for the x with the least relative error of x * column against 1."""
    return float(np.sum(column**2) / np.sum(column))


def _rate(measured: float) -> Rate:
    """Return a measured rate: all of it is reached."""
    return Rate(_rounded(measured), source=SOURCE)


def _rounded(measured: float) -> float:
    return float(f"{measured:.3g}")

"""Measure what a `Cluster` says, on the machine that runs this: products, memory, launches, and collectives of ranks.

Each figure is the best of several repetitions: other programs on the machine only make them slower. Ranks on CPUs slow
each other, in training too. There a figure is a mean over a time in which all ranks work; and a collective follows a
product, so that it has the time for which ranks wait for the slower ones.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardlib._measure import await_device
from shardlib._plan import KINDS, ByKind, Link, Rate, ring_bytes, ring_steps
from shardlib.engine.ranks import transport

__all__ = ["Effort", "Timing", "fit", "link_of", "measure_device", "measure_job", "time_collectives"]

SOURCE = "calibrated"
_LIMIT = 2.0  # seconds for one size of a product: CPUs without float16 take long
_OF_THE_ENGINE = "all_reduce", "all_gather", "reduce_scatter"  # for parameters and gradients
_DTYPES = "bfloat16", "float16", "float32", "float64"


@dataclass(frozen=True)
class Effort:
    """The sizes that are measured, and how often.

    Attributes:
        products: features of linear layers, whose products are measured; the median of their rates counts.
        rows: of their inputs.
        memory: bytes of a tensor that is copied; more than caches hold.
        payloads: bytes that a rank contributes to a collective.
        repeats: times that each is measured.
        window: seconds for which ranks on CPUs do the same.
    """

    products: tuple[int, ...]
    rows: int
    memory: int
    payloads: tuple[int, ...]
    repeats: int
    window: float

    @classmethod
    def of(cls, *, accelerator: bool, quick: bool) -> Effort:
        """Return what suits a device."""
        sides = (2048, 4096, 8192) if accelerator else (256, 512, 1024)
        rows, memory = (4096, 2**30) if accelerator else (1024, 2**28)
        payloads = tuple(4**power for power in range(5, 15 if accelerator else 13))
        if quick:
            return cls(sides[:1], rows, memory // 16, payloads[::3], 3, 0.05)
        return cls(sides, rows, memory, payloads, 10, 0.5)


class Timing(NamedTuple):
    """The seconds of one collective.

    Attributes:
        kind: as in `Cluster.collective_time`.
        payload: bytes that a rank contributes.
        seconds: of the slowest rank; on CPUs the mean of ranks.
    """

    kind: str
    payload: int
    seconds: float


def measure_device(device: torch.device, effort: Effort) -> dict[str, Any]:
    """Return the arguments of `Cluster` that one device decides, but for the size of its memory."""
    launch = _launch(device, effort)
    copied = _copies(device, device, effort, launch)
    host = copied if device.type == "cpu" else _copies(torch.device("cpu"), device, effort, launch)
    reached = min(_elementwise(device, effort, launch) / (2 * copied), 1.0)  # a copy reads and writes
    return {
        "launch": _rounded(launch),
        "products": tuple(_products(device, effort, launch)),
        "memory_bandwidth": Rate(_rounded(2 * copied), round(reached, 2) or 0.01, SOURCE),
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
    """Return the part of the shorter one of computation and communication that hides behind the other: the mean of the
    collectives of parameters and gradients."""
    side, payload = effort.products[-1] // 2, effort.payloads[-1] // 4
    a, b = torch.ones(side, side, device=device), torch.ones(side, side, device=device)
    product = _of_ranks(_taken(lambda: torch.mm(a, b), device, effort), device)
    found = []
    for kind in _OF_THE_ENGINE:
        begin = _begin(kind, _ones(payload, dist.get_world_size(), device), transport.over(_world(), device))

        def send(begin: _Begin = begin) -> None:
            begin()()

        sent = _of_ranks(_of_collective(send, device, effort), device)
        count = max(round(sent / product), 1)

        def multiply(count: int = count) -> None:
            for _ in range(count):
                torch.mm(a, b)

        def both(begin: _Begin = begin, multiply: Callable[[], None] = multiply) -> None:
            wait = begin()
            multiply()
            wait()

        alone, together = (_of_ranks(_taken(run, device, effort, joint=True), device) for run in (multiply, both))
        found.append((sent + alone - together) / min(sent, alone))
    return round(min(max(statistics.mean(found), 0.0), 1.0), 2)


def _launch(device: torch.device, effort: Effort) -> float:
    """Return the seconds of the shortest kernel, of many in a row."""
    one, count = torch.ones(1, device=device), 1000

    def many() -> None:
        for _ in range(count):
            one.add_(1)

    return _taken(many, device, effort) / count


def _products(device: torch.device, effort: Effort, launch: float) -> Iterable[tuple[str, Rate]]:
    for name in _DTYPES:
        try:
            yield name, _rate(_product_rate(device, getattr(torch, name), effort, launch))
        except RuntimeError:  # a device without this dtype, as MPS without float64
            continue


def _product_rate(device: torch.device, dtype: torch.dtype, effort: Effort, launch: float) -> float:
    """Return the operations a second of the three products of a linear layer: of its output and of both gradients."""
    rates: list[float] = []
    for side in effort.products:
        rows = torch.ones(effort.rows, side, device=device, dtype=dtype)
        weight, grads = rows.new_ones(4 * side, side), rows.new_ones(effort.rows, 4 * side)

        def train(rows: torch.Tensor = rows, weight: torch.Tensor = weight, grads: torch.Tensor = grads) -> None:
            rows @ weight.T, grads @ weight, grads.T @ rows

        seconds = _taken(train, device, effort)
        rates.append(3 * 2.0 * effort.rows * weight.numel() / _beyond(seconds, 3 * launch))
        if _of_ranks(seconds, device) > _LIMIT:
            break
    return statistics.median(rates)


def _elementwise(device: torch.device, effort: Effort, launch: float) -> float:
    """Return the bytes a second of ops without products, as training has them, each with a new result: of small and of
    large tensors, whose memory a CPU gets from the system each time."""
    per_byte = []
    for part in (64, 16, 4):
        rows = torch.ones(max(effort.memory // part // 4096, 1), 1024, device=device)

        def ops(rows: torch.Tensor = rows) -> None:
            rows + rows
            F.gelu(rows)
            F.layer_norm(rows, rows.shape[1:])
            rows.softmax(-1)

        moved = 9 * rows.nbytes  # one of them reads two tensors
        per_byte.append(_beyond(_taken(ops, device, effort), 4 * launch) / moved)
    return 1 / statistics.mean(per_byte)


def _copies(source: torch.device, target: torch.device, effort: Effort, launch: float) -> float:
    """Return the bytes a second of a copy; from the memory of a host to its device, the memory is pinned."""
    pinned = source.type == "cpu" and target.type == "cuda"
    sent = torch.empty(effort.memory, dtype=torch.uint8, device=source, pin_memory=pinned).fill_(1)
    kept = torch.empty(effort.memory, dtype=torch.uint8, device=target).fill_(1)
    return effort.memory / _beyond(_taken(lambda: kept.copy_(sent, non_blocking=True), target, effort), launch)


def _beyond(seconds: float, launch: float) -> float:
    """Return the seconds of a kernel without its launch."""
    return max(seconds - launch, seconds / 10)


def _taken(run: Callable[[], object], device: torch.device, effort: Effort, *, joint: bool = False) -> float:
    """Return the seconds of a run, after one that is not counted: of the fastest of some; of ranks on CPUs, the mean
    of as many as end in a window of time.

    Args:
        run: what is measured.
        device: where it runs.
        effort: how often.
        joint: whether all ranks have to run it equally often, as a collective.
    """
    run()
    found: list[float] = []
    if not _shares_cores(device):
        while len(found) < effort.repeats and (joint or sum(found) < _LIMIT):
            found.append(_seconds(run, device))
        return min(found)
    dist.barrier()
    while len(found) < effort.repeats if joint else sum(found) < effort.window:
        found.append(_seconds(run, device))
    return statistics.mean(found)


def _shares_cores(device: torch.device) -> bool:
    return device.type == "cpu" and dist.is_initialized()


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    await_device(device)
    start = time.perf_counter()
    run()
    await_device(device)
    return time.perf_counter() - start


def time_collectives(device: torch.device, effort: Effort, group: dist.ProcessGroup | None = None) -> list[Timing]:
    """Return the timings of all kinds of collectives over a group, the same on each of its ranks; all ranks call it.

    All-reduces, all-gathers and reduce-scatters are sent as the engine sends those of parameters and gradients.
    """
    found, size = [], dist.get_world_size(group)
    for kind in KINDS:
        for payload in effort.payloads:
            mine = _ones(payload, size, device)
            taken = _of_collective(_collective(kind, mine, group or _world()), device, effort)
            found.append(Timing(kind, mine.nbytes, _of_ranks(taken, device, group)))
    return found


def _ones(payload: int, size: int, device: torch.device) -> torch.Tensor:
    """Return a flat tensor of about so many bytes, which a number of ranks divides."""
    return torch.ones(max(payload // 4 // size, 1) * size, device=device)


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _of_collective(run: Callable[[], object], device: torch.device, effort: Effort) -> float:
    """Return the seconds of a collective on this rank; on CPUs with what it waits for others after a product."""
    if not _shares_cores(device):
        return _taken(run, device, effort, joint=True)
    square = torch.ones(effort.products[-1], effort.products[-1])
    found: list[float] = []
    run()
    while len(found) < effort.repeats:
        square @ square
        found.append(_seconds(run, device))
    return statistics.mean(found)


def _of_ranks(seconds: float, device: torch.device, group: dist.ProcessGroup | None = None) -> float:
    """Return the seconds of the slowest rank; on CPUs, where each waits for the others in turn, the mean. All ranks
    call it."""
    if not dist.is_initialized():
        return seconds
    tensor, shared = torch.tensor(seconds, device=device, dtype=torch.float32), _shares_cores(device)
    dist.all_reduce(tensor, dist.ReduceOp.SUM if shared else dist.ReduceOp.MAX, group=group)
    return tensor.item() / (dist.get_world_size(group) if shared else 1)


_Begin = Callable[[], Callable[[], object]]


def _begin(kind: str, mine: torch.Tensor, over: transport.Transport) -> _Begin:
    """Return a function that begins a collective of the engine, and returns the one that waits for it."""
    if kind == "all_reduce":
        return lambda: over.all_reduce(mine).wait
    if kind == "all_gather":
        every = [*mine.new_empty(over.count, mine.numel())]
        return lambda: over.all_gather(every).wait
    parts, workspace = [*mine.view(over.count, -1)], transport.Workspace()

    def begin() -> Callable[[], object]:
        pending = over.reduce_scatter(parts, workspace)

        def finish() -> None:
            pending.wait()
            torch.stack(pending.blocks).sum(0)
            for buffer in pending.borrowed:
                workspace.give(buffer)

        return finish

    return begin


def _collective(kind: str, mine: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    """Return a collective of a rank's flat tensor, whose other tensors are made already."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if kind in _OF_THE_ENGINE:
        begin = _begin(kind, mine, transport.over(group, mine.device))
        return lambda: begin()()
    if kind == "all_to_all":
        received = torch.empty_like(mine)
        return lambda: dist.all_to_all_single(received, mine, group=group)
    if kind == "broadcast":
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

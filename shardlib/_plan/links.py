"""Links between the ranks of a cluster, level by level, and the time of a collective over them.

The model is alpha-beta: a message of m bytes over a link takes alpha + m/beta, its latency and its bandwidth (Thakur,
Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005, section 3). Collectives are
rings, and an all-to-all is pairwise exchanges (section 4). Of n ranks,

    all_gather, reduce_scatter   take n-1 steps
    all_reduce                   takes 2(n-1) steps
    broadcast                    takes n-1 steps, in which pieces follow each other
    all_to_all                   takes n-1 steps
    send                         takes 1 step, from each rank of the group to the next one

and the bytes are those of `ring_bytes`. Bandwidths are what nccl-tests calls bus bandwidth: the bytes that a rank of a
ring sends, over the time (NVIDIA/nccl-tests, doc/PERFORMANCE.md).

A group may span several levels: the ranks of a node, and the nodes of a network. A level that joins k parts of the
group has k-1 of the steps of a ring; NCCL counts them so (NVIDIA/nccl, src/graph/tuning.cc). A library of collectives
runs as many rings as a node has ranks of the group, each of which enters and leaves the node by another network
adapter. So the slowest level limits the bandwidth of the ring, and a level that joins parts of g ranks has g times the
bandwidth of one rank. Other groups on the same nodes use the adapters of their own ranks: the bandwidth is that of one
rank while all ranks send, and is not divided again.

In an all-to-all each byte goes over one level only, and the levels carry their bytes at the same time.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from shardlib._plan.report import ring_bytes
from shardlib.errors import PlanError, nearest

__all__ = ["KINDS", "ByKind", "CollectiveKind", "Link", "Rate", "collective_time", "ring_steps"]

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
KINDS: tuple[str, ...] = get_args(CollectiveKind)


@dataclass(frozen=True)
class Rate:
    """A rate of bytes or of operations a second.

    Attributes:
        peak: the rate that the vendor promises.
        reached: the part of it that real programs reach, above 0 and at most 1.
        source: where both are from.

    >>> Rate(3.35e12, reached=0.9).sustained
    3015000000000.0
    """

    peak: float
    reached: float = 1.0
    source: str = ""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.peak) and self.peak > 0):
            raise PlanError(
                f"The peak of a rate is {self.peak!r}; give a positive number of bytes or operations a second."
            )
        if not 0 < self.reached <= 1:
            raise PlanError(
                f"reached={self.reached!r} was given for a rate; give the part of the peak that is reached, above 0 "
                "and at most 1, as in 0.8."
            )

    @property
    def sustained(self) -> float:
        """The part of the peak that is reached."""
        return self.peak * self.reached


@dataclass(frozen=True)
class ByKind:
    """Figures of a link for one kind of collective, which replace its general ones.

    Attributes:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast" or "send".
        latency: seconds of a step; None for the link's.
        bandwidth: bytes a second; None for the link's.
    """

    kind: str
    latency: float | None = None
    bandwidth: Rate | None = None

    def __post_init__(self) -> None:
        _check_kind(self.kind)
        _check_latency(self.latency or 0.0)


@dataclass(frozen=True)
class Link:
    """One level of links.

    Attributes:
        name: as in "NVLink".
        ranks: the number of consecutive ranks that it joins, as 8 in a node; 0 for all ranks of a job.
        latency: seconds of a step from one rank to another.
        bandwidth: bytes a second that a rank sends, and receives at the same time, over this link.
        kinds: figures for some kinds of collectives, in the place of these.
        pairwise: whether each pair of ranks has a link of its own. The bandwidth is then that of all links of a rank,
            of which a group uses those between its ranks.
        source: where the latency is from.

    >>> link = Link("NVLink", 8, 3e-6, Rate(450e9), kinds=(ByKind("all_to_all", bandwidth=Rate(300e9)),))
    >>> link.latency_of("all_to_all"), link.bandwidth_of("all_to_all"), link.bandwidth_of("send")
    (3e-06, 300000000000.0, 450000000000.0)
    """

    name: str
    ranks: int
    latency: float
    bandwidth: Rate
    kinds: tuple[ByKind, ...] = ()
    pairwise: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.ranks, bool) or not isinstance(self.ranks, int) or self.ranks < 0:
            raise PlanError(
                f'Link "{self.name}" joins {self.ranks!r} ranks; give the number of consecutive ranks, or 0 for all.'
            )
        if self.pairwise and self.ranks < 2:
            raise PlanError(f'Link "{self.name}" is pairwise; give the number of ranks that it joins, 2 or more.')
        _check_latency(self.latency)
        if len({each.kind for each in self.kinds}) < len(self.kinds):
            raise PlanError(f'Link "{self.name}" has two entries for one kind of collective; give each kind once.')

    def latency_of(self, kind: str) -> float:
        """Return the seconds of a step of a collective."""
        own = self._of(kind)
        return self.latency if own is None or own.latency is None else own.latency

    def bandwidth_of(self, kind: str) -> float:
        """Return the bytes a second that one rank sends in a collective."""
        own = self._of(kind)
        return (self.bandwidth if own is None or own.bandwidth is None else own.bandwidth).sustained

    def block(self, rank: int) -> int:
        """Return which of the blocks of ranks that this link joins has a rank."""
        return rank // self.ranks if self.ranks else 0

    def _of(self, kind: str) -> ByKind | None:
        return next((each for each in self.kinds if each.kind == kind), None)


class _Crossing(NamedTuple):
    """A level at which parts of a group are joined.

    Attributes:
        link: the level.
        steps: of those of a ring, the ones that go over it.
        width: ranks of the smallest part that it joins: as many rings cross at once.
        peers: ranks that a rank reaches over this level and over no inner one.
    """

    link: Link
    steps: int
    width: int
    peers: int

    def bandwidth(self, kind: str) -> float:
        """Return the bytes a second that a rank of the group sends over this level."""
        used = min(1.0, self.peers / (self.link.ranks - 1)) if self.link.pairwise else 1.0
        return used * self.link.bandwidth_of(kind)


def ring_steps(kind: str, size: int) -> int:
    """Return the steps, one after the other, of a collective of `size` ranks.

    >>> ring_steps("all_reduce", 4), ring_steps("all_gather", 4), ring_steps("send", 4)
    (6, 3, 1)
    """
    return 1 if kind == "send" else (size - 1) * (2 if kind == "all_reduce" else 1)


def collective_time(links: tuple[Link, ...], kind: str, payload: float, group: Sequence[int]) -> float:
    """Return the seconds of a collective over links, innermost first, without the launch of its kernel.

    Raises:
        PlanError: an unknown kind, a rank that is there twice or negative, or ranks that no link joins.
    """
    _check_kind(kind)
    if len(group) < 2:
        return 0.0
    if kind == "send":
        return max(_ring_time(_crossings(links, pair), kind, payload, 2) for pair in itertools.pairwise(group))
    crossings = _crossings(links, tuple(group))
    if kind == "all_to_all":
        return _exchange_time(crossings, payload, len(group))
    return _ring_time(crossings, kind, payload, len(group))


def _ring_time(crossings: tuple[_Crossing, ...], kind: str, payload: float, size: int) -> float:
    laps = 2 if kind == "all_reduce" else 1
    latency = sum(laps * each.steps * each.link.latency_of(kind) for each in crossings)
    slowest = min(each.width * each.bandwidth(kind) for each in crossings)
    return latency + ring_bytes(kind, math.ceil(payload), size) / slowest


def _exchange_time(crossings: tuple[_Crossing, ...], payload: float, size: int) -> float:
    latency = sum(each.peers * each.link.latency_of("all_to_all") for each in crossings)
    busiest = max(each.peers / each.bandwidth("all_to_all") for each in crossings)
    return latency + payload / size * busiest


@functools.lru_cache(maxsize=4096)
def _crossings(links: tuple[Link, ...], group: tuple[int, ...]) -> tuple[_Crossing, ...]:
    """Find the levels at which a group's ranks are joined, innermost first."""
    if len(set(group)) < len(group) or min(group) < 0:
        raise PlanError(f"A group of ranks is {_shown(group)}; give ranks from 0 on, each once.")
    found, parts = [], [[rank] for rank in sorted(group)]
    for link in links:
        blocks: dict[int, list[list[int]]] = defaultdict(list)
        for part in parts:
            blocks[link.block(part[0])].append(part)
        joined = [block for block in blocks.values() if len(block) > 1]
        if joined:
            width = min(len(part) for block in joined for part in block)
            peers = max(sum(map(len, block)) - min(map(len, block)) for block in joined)
            found.append(_Crossing(link, len(parts) - len(blocks), width, peers))
        parts = [[rank for part in block for rank in part] for block in blocks.values()]
    if len(parts) > 1 and not links:
        raise PlanError(
            f"The cluster has no links, and a collective of ranks {_shown(group)} was asked for. Add a level."
        )
    if len(parts) > 1:
        raise PlanError(
            f'The outermost link, "{links[-1].name}", joins {links[-1].ranks} ranks, and the group {_shown(group)} is '
            "wider. Add a level to the cluster, or let this one join all ranks (ranks = 0)."
        )
    return tuple(found)


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise PlanError(
            f'"{kind}" is not a kind of collective; the kinds are {", ".join(map(repr, KINDS))}.{nearest(kind, KINDS)}'
        )


def _check_latency(latency: float) -> None:
    if not (math.isfinite(latency) and latency >= 0):
        raise PlanError(f"A latency is {latency!r}; give the seconds of a step, 0 or more.")


def _shown(group: Sequence[int]) -> str:
    return str([*group]) if len(group) <= 8 else f"[{group[0]}, {group[1]}, ..., {group[-1]}] of {len(group)} ranks"

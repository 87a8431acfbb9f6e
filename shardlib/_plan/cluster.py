"""The value `Cluster`: what the machines of a job compute, hold and send, as figures."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any

from shardlib._dtypes import name_of
from shardlib._mesh_shape import listed
from shardlib._plan import cluster_file
from shardlib._plan.links import Link, Rate, collective_time
from shardlib._plan.quantities import Unit, spell_quantity
from shardlib._plan.readable import aligned
from shardlib.errors import PlanError, nearest

__all__ = ["Cluster"]

_FOLDER = Path(__file__).resolve().parents[1] / "clusters"


@dataclass(frozen=True)
class Cluster:
    """The figures of the machines that a job runs on. A value: it needs no device, and no process group.

    Attributes:
        name: its name, as in "h100".
        devices: the devices of a node.
        memory: bytes of a device.
        memory_bandwidth: between a device and its memory.
        host_bandwidth: between a device and the memory of its host, in each direction, for offload.
        products: operations a second of matrix products without sparsity: pairs of a dtype's name and a `Rate`.
        launch: seconds that the shortest kernel takes.
        links: the levels of links between ranks, innermost first.
        overlap: the part of the time of communication that can hide behind computation: 1 where devices have engines of
            their own for it, less where both need the same cores, as on a CPU.
        description: which machines these are.
        source: where the number of devices, their memory, and `launch` are from.

    Raises:
        PlanError: figures that are not positive, or levels that do not contain each other.

    >>> cluster = Cluster.preset("h100")
    >>> cluster.devices, cluster.memory, [link.name for link in cluster.links]
    (8, 80000000000, ['NVLink 4', 'InfiniBand NDR'])
    >>> Cluster.from_toml(cluster.to_toml()) == cluster
    True
    """

    name: str
    devices: int
    memory: int
    memory_bandwidth: Rate
    host_bandwidth: Rate
    products: tuple[tuple[str, Rate], ...]
    launch: float
    links: tuple[Link, ...] = ()
    overlap: float = 1.0
    description: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        for key in ("devices", "memory"):
            if getattr(self, key) < 1:
                raise PlanError(f'Cluster "{self.name}" has {key} = {getattr(self, key)}; give a positive number.')
        if not (math.isfinite(self.launch) and self.launch >= 0):
            raise PlanError(f'Cluster "{self.name}" has launch = {self.launch}; give seconds, 0 or more.')
        if not 0 <= self.overlap <= 1:
            raise PlanError(f'Cluster "{self.name}" has overlap = {self.overlap}; give a part, from 0 to 1.')
        if len(dict(self.products)) < max(len(self.products), 1):
            raise PlanError(f'Cluster "{self.name}" needs a rate of products for each dtype once, and one at least.')
        _check_levels(self.name, self.links)

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a cluster file, as `shardlib calibrate` writes it (docs/clusters.md).

        Raises:
            PlanError: the file cannot be read as a cluster.
        """
        return cls(**cluster_file.read(Path(path)))

    @classmethod
    def from_toml(cls, text: str) -> Cluster:
        """Read the text of a cluster file.

        Raises:
            PlanError: it cannot be read as a cluster.
        """
        return cls(**cluster_file.read(text))

    @classmethod
    def preset(cls, name: str) -> Cluster:
        """Return a cluster that comes with shardlib, one of `presets()`.

        Raises:
            PlanError: no such name.

        >>> Cluster.preset("cpu").devices
        2
        """
        if name not in (known := _presets()):
            raise PlanError(
                f'No cluster is called "{name}"; there are {listed(known)}. Use one of them, or Cluster.load(path) for '
                f"a file of your own, which `shardlib calibrate` writes.{nearest(name, known)}"
            )
        return known[name]

    @classmethod
    def of(cls, given: Cluster | str | PathLike[str]) -> Cluster:
        """Return a cluster as it is, by the name of a preset, or from a file, whose name ends in .toml.

        Raises:
            PlanError: no such preset, or the file cannot be read as a cluster.

        >>> Cluster.of("h100") == Cluster.preset("h100")
        True
        """
        if isinstance(given, Cluster):
            return given
        if not isinstance(given, str | PathLike):
            raise PlanError(
                f'A cluster was given as {type(given).__name__}; give a Cluster, the name of a preset such as "h100", '
                "or the path of a cluster file."
            )
        return cls.load(Path(given)) if str(given).endswith(".toml") else cls.preset(str(given))

    @classmethod
    def presets(cls) -> dict[str, str]:
        """Return the names of the clusters that come with shardlib, each with its description.

        >>> sorted(Cluster.presets())
        ['a100-40', 'a100-80', 'b200', 'cpu', 'h100', 'h200', 'mi300x']
        """
        return {name: cluster.description for name, cluster in _presets().items()}

    def to_toml(self) -> str:
        """Return the text of a cluster file; `Cluster.from_toml(cluster.to_toml()) == cluster`."""
        return cluster_file.write(self)

    def replace(self, **changes: Any) -> Cluster:
        """Return a copy with some fields changed.

        >>> Cluster.preset("h100").replace(devices=4).devices
        4
        """
        return dataclasses.replace(self, **changes)

    def collective_time(self, kind: str, payload: float, group: Sequence[int]) -> float:
        """Return the seconds of a collective: a ring over the links that its ranks span, and the launch of its kernel.

        Each step of the ring takes the latency of the level that it crosses, and the bytes of all steps pass at the
        bandwidth of the slowest level: the alpha-beta model of Thakur, Rabenseifner, Gropp, "Optimization of
        Collective Communication Operations in MPICH", 2005, with what nccl-tests calls bus bandwidth. A level that
        joins parts of several ranks has the links of all of them (docs/clusters.md).

        Args:
            kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast" or "send".
            payload: bytes of the local tensors that one rank contributes, as in `Recorded.bytes`.
            group: global ranks, `devices` of them in each node; of a mesh axis, `shape.groups((axis,))[0]`. For "send",
                the ranks in their order: each sends to the next one, and the slowest counts.

        Raises:
            PlanError: an unknown kind, a rank that is there twice, or ranks that no link joins.

        >>> import shardlib as sl
        >>> shape, cluster = sl.MeshShape("dp=4,tp=8"), Cluster.preset("h100")
        >>> inside, between = (shape.groups((axis,))[0] for axis in ("tp", "dp"))
        >>> between
        [0, 8, 16, 24]
        >>> cluster.collective_time("all_reduce", 2**30, inside) < cluster.collective_time("all_reduce", 2**30, between)
        True
        """
        return self.launch + collective_time(self.links, kind, payload, group) if len(group) > 1 else 0.0

    def product_time(self, flops: float, bytes: float, dtype: Any) -> float:
        """Return the seconds of a matrix product: its operations or its bytes, whichever takes longer, and the launch.

        This is the roofline (Williams, Waterman, Patterson, "Roofline: An Insightful Visual Performance Model for
        Multicore Architectures", 2009) with the rates that are reached.

        Args:
            flops: its operations: two for each multiplication with its addition.
            bytes: what it reads from the device's memory and writes there.
            dtype: of its operands, as a dtype or by name.

        Raises:
            PlanError: the cluster has no rate for this dtype.

        >>> cluster = Cluster.preset("h100")
        >>> 1.0 < cluster.product_time(989.4e12, 0, "bfloat16") < 2.0
        True
        """
        products, name = dict(self.products), name_of(dtype)
        if name not in products:
            raise PlanError(
                f'Cluster "{self.name}" has no rate of products in {name}; it has {listed(products)}. Add one to '
                "[products] of its file, or cast to one of these."
            )
        return self.launch + max(flops / products[name].sustained, bytes / self.memory_bandwidth.sustained)

    def memory_time(self, bytes: float) -> float:
        """Return the seconds of a kernel that only reads and writes the device's memory, as an elementwise one."""
        return self.launch + bytes / self.memory_bandwidth.sustained

    def host_time(self, bytes: float) -> float:
        """Return the seconds of a copy between a device and the memory of its host, in one direction."""
        return self.launch + bytes / self.host_bandwidth.sustained

    def __str__(self) -> str:
        """Return a readable table."""
        head = f"{self.name}: {self.description}" if self.description else self.name
        facts = (
            f"{self.devices} devices a node, {_shown(self.memory, 'B')} each, "
            f"a kernel takes {_shown(self.launch, 's')} at least"
        )
        rows = [("", "ranks", "latency", "peak", "reached"), *self._rows()]
        return "\n".join([head, facts, "", aligned(rows, left=1)])

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for dtype, rate in self.products:
            yield _row(f"products, {dtype}", rate, "FLOP/s")
        yield _row("memory", self.memory_bandwidth, "B/s")
        yield _row("host", self.host_bandwidth, "B/s")
        for link in self.links:
            yield _row(link.name, link.bandwidth, "B/s", str(link.ranks or "all"), _shown(link.latency, "s"))
            for each in link.kinds:
                latency = _shown(link.latency_of(each.kind), "s")
                yield _row(f"  {each.kind}", each.bandwidth or link.bandwidth, "B/s", "", latency)


def _check_levels(name: str, links: Sequence[Link]) -> None:
    for inner, outer in itertools.pairwise(links):
        if not inner.ranks or (outer.ranks and (outer.ranks <= inner.ranks or outer.ranks % inner.ranks)):
            raise PlanError(
                f'Cluster "{name}": link "{outer.name}" joins {outer.ranks or "all"} ranks and stands after '
                f'"{inner.name}", which joins {inner.ranks or "all"}. Give the innermost level first; each joins a '
                "multiple of the ranks of the one before it, and only the last one all."
            )


@cache
def _presets() -> dict[str, Cluster]:
    return {path.stem: Cluster.load(path) for path in sorted(_FOLDER.glob("*.toml"))}


def _row(what: str, rate: Rate, unit: Unit, ranks: str = "", latency: str = "") -> tuple[str, ...]:
    return what, ranks, latency, _shown(rate.peak, unit), f"{rate.reached:.0%}"


def _shown(value: float, unit: Unit) -> str:
    return spell_quantity(value, unit, digits=3)

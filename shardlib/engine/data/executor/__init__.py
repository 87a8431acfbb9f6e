"""Carry out movements of the plan: pack tensors, send them, sum and unpack what arrives.

`Bucket` moves tensors with the same division, in either direction: it reduces shards to the ranks that own them, and
gathers them again. `AllReduceBucket` and `ReduceScatterBucket` reduce gradients. `schedule.py` decides when a
bucket begins and when it is waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardlib._plan import Movement
from shardlib.engine import _torch
from shardlib.engine.data.offload import Downloads
from shardlib.engine.ranks import transport
from shardlib.engine.ranks.transport import Compare, Sent, Transport, Workspace

__all__ = ["Executor"]


class Executor:
    """The transports and workspace buffers that the movements of one model share.

    Args:
        mesh: the whole mesh.
        device: the device of this rank.
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        self.mesh, self.device = mesh, device
        self.workspace, self.downloads = Workspace(), Downloads()
        self._transports: dict[tuple[tuple[str, ...], dist.ProcessGroup | None], Transport] = {}
        self._log: list[Sent] | None = None
        self._compare: Compare | None = None

    def transport(self, axes: tuple[str, ...], group: dist.ProcessGroup | None = None) -> Transport:
        """Return the transport among the ranks of some mesh axes, or among those of a group along these axes."""
        if (axes, group) not in self._transports:
            among = _torch.flattened(self.mesh, axes).get_group() if group is None else group
            made = transport.over(among, self.device, axes)
            made.log, made.compare = self._log, self._compare
            self._transports[axes, group] = made
        return self._transports[axes, group]

    def group(self, axes: tuple[str, ...]) -> dist.ProcessGroup:
        """Return the process group of some mesh axes."""
        return self.transport(axes).group

    def compare_calls(self, compare: Compare) -> None:
        """Let ranks compare each collective before it begins."""
        self._compare = compare
        for one in self._transports.values():
            one.compare = compare

    def copied(self, carries: Iterable[Movement]) -> None:
        """Record a copy between host and device, while calls are recorded."""
        if self._log is not None:
            self._log.append(Sent("copy", (), tuple(carries)))

    @contextmanager
    def recording(self) -> Iterator[list[Sent]]:
        """Record the calls of transports and the copies inside the block, in order."""
        log: list[Sent] = []
        self._set_log(log)
        try:
            yield log
        finally:
            self._set_log(None)

    def _set_log(self, log: list[Sent] | None) -> None:
        self._log = log
        for one in self._transports.values():
            one.log = log

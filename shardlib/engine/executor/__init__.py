"""Carry out movements of the plan: pack tensors, send them, sum and unpack what arrives.

`Bucket` moves tensors with the same division, in either direction: it reduces shards to the ranks that own them, and
gathers them again. `AllReduceBucket` and `ReduceScatterBucket` reduce gradients. `shardlib/engine/schedule.py` decides
when a bucket begins and when it is waited for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardlib.engine import _torch, transport
from shardlib.engine.offload import Downloads
from shardlib.engine.transport import Sent, Transport, Workspace

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
        self._transports: dict[tuple[str, ...], Transport] = {}
        self._log: list[Sent] | None = None

    def transport(self, axes: tuple[str, ...]) -> Transport:
        """Return the transport among the ranks of some mesh axes."""
        if axes not in self._transports:
            made = transport.over(_torch.flattened(self.mesh, axes).get_group(), self.device, axes)
            made.log = self._log
            self._transports[axes] = made
        return self._transports[axes]

    def group(self, axes: tuple[str, ...]) -> dist.ProcessGroup:
        """Return the process group of some mesh axes."""
        return self.transport(axes).group

    @contextmanager
    def recording(self) -> Iterator[list[Sent]]:
        """Record the calls of transports inside the block, in order."""
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

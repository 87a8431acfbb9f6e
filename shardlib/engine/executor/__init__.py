"""Carry out movements of the plan: pack tensors, send them, sum and unpack what arrives.

`Bucket` moves tensors that are divided alike, in either direction: it sums shards at the ranks that own them, and
gathers them again. `AllReduceBucket` and `ReduceScatterBucket` are the two ways of a gradient. When each of them begins
and is waited for is not decided here (`shardlib/engine/schedule.py`).
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
    """What the movements of one model share: transports, and the memory that they borrow.

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
        """The transport among the ranks of some mesh axes."""
        if axes not in self._transports:
            made = transport.over(_torch.flattened(self.mesh, axes).get_group(), self.device, axes)
            made.log = self._log
            self._transports[axes] = made
        return self._transports[axes]

    def group(self, axes: tuple[str, ...]) -> dist.ProcessGroup:
        """The process group of some mesh axes."""
        return self.transport(axes).group

    @contextmanager
    def recording(self) -> Iterator[list[Sent]]:
        """Record what is sent inside the block, in order."""
        log: list[Sent] = []
        self._let_note_in(log)
        try:
            yield log
        finally:
            self._let_note_in(None)

    def _let_note_in(self, log: list[Sent] | None) -> None:
        self._log = log
        for one in self._transports.values():
            one.log = log

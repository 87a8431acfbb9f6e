"""Copy between the device and host memory, where the plan offloads parameters, gradients or optimizer state.

The schedule is that of Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", USENIX ATC 2021, section
4: the device computes forward and backward; each rank copies its shard of the reduced gradients to the host, steps
there on state that never leaves the host, and copies its updated shard back, which is gathered on the device. Their
delayed update (section 5.2), which changes numbers, is not implemented.

Staging memory on the host is pinned, and reused in every step. Copies to the host run on a stream of their own, in
parallel with computation, and are waited for once. Where device memory is host memory, as on CPU, nothing is copied:
`ParamState.offloaded` is then empty.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from shardlib._plan import Row
from shardlib.engine import _torch
from shardlib.errors import PlanError

__all__ = [
    "HOST",
    "Downloads",
    "is_elsewhere",
    "joined",
    "offloaded_phases",
    "on_host",
    "refuse_what_does_not_run",
    "side_stream",
    "upload",
]

HOST = torch.device("cpu")


def is_elsewhere(device: torch.device) -> bool:
    """Tell whether host memory is another memory than this device's. Tests patch it for the CPU, to see every copy."""
    return device.type != "cpu"


def offloaded_phases(row: Row | None, device: torch.device) -> frozenset[str]:
    """Return the phases of a row that lie in another memory than the device's."""
    if row is None or not is_elsewhere(device):
        return frozenset()
    return frozenset(phase for phase, layout in row.layouts.items() if layout.memory == "host")


def refuse_what_does_not_run(row: Row, device: torch.device, *, stored_in_parts: bool) -> None:
    """Refuse rows with a phase on the host that torch needs on the device, since other phases of the row are there.

    torch keeps a gradient on the device of its parameter, and steps on state on the device of the parameter. State
    alone may be on the host, since the optimizer then steps on a copy of the parameter; a stored parameter or its
    gradient alone may not.

    Raises:
        PlanError: the row has such a phase.
    """
    host_phases = offloaded_phases(row, device)
    if "compute" in host_phases:
        raise PlanError(
            f'The plan computes with "{row.name}" in host memory ("{row.compute}"), and the model\'s mesh is on '
            f"{device.type}. Keep in host memory only what a step does not compute with: offload() moves optimizer "
            "state."
        )
    if "stored" in host_phases and not stored_in_parts:
        raise PlanError(
            f'The plan stores "{row.name}" in host memory, unsharded, and computes with it on {device.type}: no '
            "unshard would copy it there. Shard it with zero(3) or fsdp() over more than one rank, use "
            'offload("state"), or leave it out with only=.'
        )
    words = {"grad": "gradient", "state": "state"}
    apart = [words[phase] for phase in words if phase in row.layouts and phase not in host_phases]
    if "stored" in host_phases and apart:
        raise PlanError(
            f'The plan stores "{row.name}" in host memory and its {apart[0]} on {device.type}: torch keeps a '
            'gradient where its parameter is, and steps there. Move all three with offload("all"), or offload("state").'
        )
    if "grad" in host_phases and "stored" not in host_phases:
        raise PlanError(
            f'The plan keeps the gradient of "{row.name}" in host memory and the parameter on {device.type}: torch '
            'keeps a gradient where its parameter is. Use offload("state"), whose gradients are copied to the host for '
            'the step, or, with zero(3) or fsdp(), offload("all").'
        )


# --- copies -----------------------------------------------------------------------------------------------------------


def on_host(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy in host memory, pinned so that copies back to the device can be asynchronous."""
    return _host_buffer(tensor, device).copy_(tensor)


def joined(shards: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Concatenate flat tensors of host memory on the device."""
    sizes = [shard.numel() for shard in shards]
    flat = torch.empty(sum(sizes), dtype=shards[0].dtype, device=device)
    for target, shard in zip(flat.split(sizes), shards, strict=True):
        target.copy_(shard, non_blocking=True)
    return flat


def upload(stepped: torch.Tensor, memory: torch.Tensor, staging: torch.Tensor) -> None:
    """Round an updated tensor to the parameter's dtype on the host, and copy it to the device.

    The copy runs on the current stream, so that the following computation sees the updated values.
    """
    if stepped is not staging:
        staging.copy_(stepped)
    memory.copy_(staging, non_blocking=True)


class Downloads:
    """Pending copies to the host."""

    def __init__(self) -> None:
        self._sources: list[torch.Tensor] = []
        self._last: Any = None

    def begin(
        self, source: torch.Tensor, staging: dict[str, torch.Tensor] | None = None, key: str = ""
    ) -> torch.Tensor:
        """Begin to copy a tensor to the host; return the copy, not to be read before `wait`.

        Args:
            source: a tensor on the device.
            staging: host buffers by key, reused in every step and made in the first one; by default a new buffer.
            key: the key in `staging`.
        """
        target = None if staging is None else staging.get(key)
        if target is None or target.shape != source.shape or target.dtype != source.dtype:
            target = _host_buffer(source, source.device)
        if staging is not None:
            staging[key] = target
        with side_stream(source.device) as stream:
            target.copy_(source, non_blocking=True)
            self._last = None if stream is None else stream.record_event()
        self._sources.append(source)
        return target

    def wait(self) -> None:
        """Wait until all copies that have begun are complete."""
        if self._last is not None:
            self._last.synchronize()
        self._sources, self._last = [], None


@contextmanager
def side_stream(device: torch.device) -> Iterator[torch.Stream | None]:
    """Run the block on the copy stream, after all work that the current stream has been given so far."""
    stream = _stream_of(device)
    if stream is None:
        yield None
        return
    stream.wait_stream(torch.accelerator.current_stream(device))
    with stream:
        yield stream


def _host_buffer(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    pinned = _stream_of(device) is not None and _torch.has_values(like)
    return torch.empty_like(like, device=HOST, pin_memory=pinned)


@functools.cache
def _stream_of(device: torch.device) -> torch.Stream | None:
    """Return the device's stream for copies; None where there is no such device, as in a dry run."""
    current = torch.accelerator.current_accelerator(check_available=True)
    return torch.Stream(device) if current is not None and current.type == device.type else None

"""Two memories: what the plan keeps on the host while an accelerator computes, and the copies in between.

The schedule is that of Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", USENIX ATC 2021, section
4: the device computes forward and backward; each rank copies its part of the reduced gradients to the host, steps there
on state that never leaves it, and copies its updated part back, which is gathered on the device. Their delayed update
(section 5.2), which changes numbers, is not taken.

Host memory that copies go to and from is pinned, and the same in every step. Copies to the host run on a stream of
their own, beside what the device computes, and are waited for once. Where device memory is host memory, as on CPU,
nothing is copied: `Held.hosted` is then empty.
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
    "beside",
    "hosted",
    "is_elsewhere",
    "joined",
    "on_device",
    "on_host",
    "refuse_what_does_not_run",
    "upload",
]

HOST = torch.device("cpu")


def is_elsewhere(device: torch.device) -> bool:
    """Whether host memory is another memory than this device's. Tests say yes of a CPU, to see every copy made."""
    return device.type != "cpu"


def hosted(row: Row | None, device: torch.device) -> frozenset[str]:
    """The phases of a row that lie in another memory than the device's."""
    if row is None or not is_elsewhere(device):
        return frozenset()
    return frozenset(phase for phase, layout in row.layouts.items() if layout.memory == "host")


def refuse_what_does_not_run(row: Row, device: torch.device, *, stored_in_parts: bool) -> None:
    """Rows with a phase on the host that torch would have on the device, since others of the row are there.

    torch keeps a gradient on the device of its parameter, and steps on state that lies where the parameter does. So
    state may be on the host alone, since it steps on a copy of the parameter; a stored parameter or its gradient may
    not.

    Raises:
        PlanError: such a row.
    """
    there = hosted(row, device)
    if "compute" in there:
        raise PlanError(
            f'The plan computes with "{row.name}" in host memory ("{row.compute}"), and the model\'s mesh is on '
            f"{device.type}. Keep there what lies between steps: offload() moves state."
        )
    if "stored" in there and not stored_in_parts:
        raise PlanError(
            f'The plan stores "{row.name}" in host memory, and whole, as it is computed with on {device.type}: there '
            'would be nothing to copy it to. Divide it with zero(3) or fsdp(), use offload("state"), or leave it out '
            "with only=."
        )
    apart = [phase for phase in ("stored", "grad", "state") if phase in row.layouts and phase not in there]
    if "stored" in there and apart:
        raise PlanError(
            f'The plan stores "{row.name}" in host memory and its {_WORDS[apart[0]]} on {device.type}: torch keeps a '
            'gradient where its parameter is, and steps there. Move all three with offload("all"), or offload("state").'
        )
    if "grad" in there and "stored" not in there:
        raise PlanError(
            f'The plan keeps the gradient of "{row.name}" in host memory and the parameter on {device.type}: torch '
            'keeps a gradient where its parameter is. Use offload("state"), whose gradients are copied to the host for '
            'the step, or, with zero(3) or fsdp(), offload("all").'
        )


_WORDS = {"stored": "parameter", "grad": "gradient", "state": "state"}


# --- copies -----------------------------------------------------------------------------------------------------------


def on_host(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy in host memory, from which copies to the device need not be waited for."""
    return _room(tensor, device).copy_(tensor)


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor where it can travel to other ranks."""
    return tensor.to(device)


def joined(parts: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Flat tensors of host memory one behind the other on the device."""
    flat = torch.empty(sum(part.numel() for part in parts), dtype=parts[0].dtype, device=device)
    for place, part in zip(flat.split([part.numel() for part in parts]), parts, strict=True):
        place.copy_(part, non_blocking=True)
    return flat


def upload(stepped: torch.Tensor, memory: torch.Tensor, landing: torch.Tensor) -> None:
    """What was stepped on the host, rounded to the parameter's dtype there, into the device's memory.

    The device does this in the order of its own work, so that what it computes next is computed with that.
    """
    if stepped is not landing:
        landing.copy_(stepped)
    memory.copy_(landing, non_blocking=True)


class Downloads:
    """Copies to the host that are under way."""

    def __init__(self) -> None:
        self._sources: list[torch.Tensor] = []
        self._last: Any = None

    def begin(self, source: torch.Tensor, rooms: dict[str, torch.Tensor] | None = None, key: str = "") -> torch.Tensor:
        """Where `source` will be on the host; not to be read before `wait`.

        Args:
            source: on the device.
            rooms: host memory that is kept for this under a key, and made at the first time; by default new one.
            key: in `rooms`.
        """
        room = None if rooms is None else rooms.get(key)
        if room is None or room.shape != source.shape or room.dtype != source.dtype:
            room = _room(source, source.device)
        if rooms is not None:
            rooms[key] = room
        with beside(source.device):
            room.copy_(source, non_blocking=True)
        if (stream := _stream_of(source.device)) is not None:
            self._last = stream.record_event()
        self._sources.append(source)
        return room

    def wait(self) -> None:
        """All that have begun are there."""
        if self._last is not None:
            self._last.synchronize()
        self._sources, self._last = [], None


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """What is begun inside follows what the device has been given to do until now, beside what it is given next."""
    stream = _stream_of(device)
    if stream is None:
        yield
        return
    stream.wait_stream(torch.accelerator.current_stream(device))
    with stream:
        yield


def _room(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    pinned = _has_streams(device) and _torch.has_values(like)
    return torch.empty_like(like, device=HOST, pin_memory=pinned)


def _has_streams(device: torch.device) -> bool:
    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return current is not None and current.type == device.type


def _stream_of(device: torch.device) -> Any:
    """The device's stream for copies; None where there is no such device, as in a dry run."""
    return _stream(device) if _has_streams(device) else None


@functools.cache
def _stream(device: torch.device) -> Any:
    return torch.Stream(device)

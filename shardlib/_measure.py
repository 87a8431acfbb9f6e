"""The time of a forward and its backward, the peak of memory, and TensorBoard's writer."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch

from shardlib.errors import LaunchError

__all__ = ["await_device", "peak_bytes", "process_peak_bytes", "summary_writer", "timed"]

T = TypeVar("T")


def timed(
    forward: Callable[[], T], tensors_in: Callable[[T], Iterable[torch.Tensor]], device: torch.device
) -> tuple[float, T]:
    """Return the seconds of a forward and its backward on a device, and the output of forward."""
    await_device(device)
    start = time.perf_counter()
    output = forward()
    made = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    torch.autograd.backward(made, [torch.zeros_like(tensor) for tensor in made])
    await_device(device)
    return time.perf_counter() - start, output


def await_device(device: torch.device) -> None:
    """Wait until a device has done all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def peak_bytes() -> int:
    """Return the most bytes that this rank's accelerator has allocated, or on CPU that its process has used."""
    if torch.accelerator.is_available():
        return int(torch.accelerator.max_memory_allocated())
    return process_peak_bytes()


def process_peak_bytes() -> int:
    """Return the peak of this process's resident memory in bytes.

    >>> process_peak_bytes() > 2**20
    True
    """
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in kilobytes


def summary_writer(who: str, folder: str | Path | None) -> Any:
    """Return TensorBoard's writer for a folder; None for a rank that does not write, which has no folder.

    Raises:
        LaunchError: the package tensorboard is not installed; on every rank.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise LaunchError(
            f"{who} needs the package tensorboard, which is not installed: pip install 'shardlib[tensorboard]'."
        ) from error
    return None if folder is None else SummaryWriter(str(folder))

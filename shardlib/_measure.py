"""The peak of memory, and TensorBoard's writer, for objects that report on a training run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from shardlib.errors import LaunchError

__all__ = ["peak_bytes", "process_peak_bytes", "summary_writer"]


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

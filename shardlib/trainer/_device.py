"""The device of this rank."""

from __future__ import annotations

import torch

from shardlib._mesh import default_device_type, device_here
from shardlib.booster.launch import launched

__all__ = ["get_current_device"]


def get_current_device() -> torch.device:
    """Return the device of this rank: that of `launch` or a function like it, else this process's accelerator, or the
    CPU.

    >>> get_current_device()
    device(type='cpu')
    """
    job = launched()
    return device_here(default_device_type()) if job is None else job.device

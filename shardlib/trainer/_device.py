"""The device of this rank."""

from __future__ import annotations

import torch

from shardlib._mesh import default_device_type, device_here
from shardlib.booster.launch import launched

__all__ = ["get_current_device"]


def get_current_device() -> torch.device:
    """Where this rank computes: what `launch` or its like chose, else the accelerator of this process, or the CPU.

    >>> get_current_device()
    device(type='cpu')
    """
    job = launched()
    return device_here(default_device_type()) if job is None else job.device

"""The device of this rank."""

from __future__ import annotations

import torch

from shardlib._mesh import _default_device_type
from shardlib.booster.launch import launched

__all__ = ["get_current_device"]


def get_current_device() -> torch.device:
    """Where this rank computes: what `launch` or its like chose, else the accelerator of this process, or the CPU.

    >>> get_current_device()
    device(type='cpu')
    """
    job = launched()
    if job is not None:
        return job.device
    kind = _default_device_type()
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())

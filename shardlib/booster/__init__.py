"""How users of boosters and engines start and configure a job: their calls, on shardlib's machinery."""

from __future__ import annotations

from shardlib.booster.config import Config
from shardlib.booster.launch import Launched, launch, launch_from_openmpi, launch_from_slurm, launch_from_torch

__all__ = [
    "Config",
    "Launched",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
]

"""`launch` and its like as older scripts call them, with the config first."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from shardlib import booster
from shardlib.booster import Launched

__all__ = ["launch", "launch_from_openmpi", "launch_from_slurm", "launch_from_torch"]

ConfigLike = Mapping[str, Any] | str | Path | None
Timeout = float | timedelta | None


def launch(
    config: ConfigLike,
    rank: int,
    world_size: int,
    host: str,
    port: int,
    backend: str | None = None,
    local_rank: int | None = None,
    seed: int = 1024,
    verbose: bool = True,
    *,
    timeout: Timeout = None,
) -> Launched:
    """Call `shardlib.booster.launch`, with the config as the first argument.

    >>> launch({"BATCH_SIZE": 4}, rank=1, world_size=1, host="localhost", port=29500)
    Traceback (most recent call last):
        ...
    shardlib.errors.LaunchError: rank=1 was given; ranks of a job of 1 are 0 to 0.
    """
    return booster.launch(rank, world_size, host, port, backend, local_rank, seed, verbose, config, timeout=timeout)


def launch_from_torch(
    config: ConfigLike = None,
    backend: str | None = None,
    seed: int = 1024,
    verbose: bool = True,
    *,
    timeout: Timeout = None,
) -> Launched:
    """Call `shardlib.booster.launch_from_torch`, with the config as the first argument.

    >>> launch_from_torch("config.py").config.BATCH_SIZE  # doctest: +SKIP
    32
    """
    return booster.launch_from_torch(backend, seed, verbose, config, timeout=timeout)


def launch_from_slurm(
    config: ConfigLike,
    host: str,
    port: int,
    backend: str | None = None,
    seed: int = 1024,
    verbose: bool = True,
    *,
    timeout: Timeout = None,
) -> Launched:
    """Call `shardlib.booster.launch_from_slurm`, with the config as the first argument.

    >>> launch_from_slurm("config.py", "node-1", 29500).rank  # doctest: +SKIP
    0
    """
    return booster.launch_from_slurm(host, port, backend, seed, verbose, config, timeout=timeout)


def launch_from_openmpi(
    config: ConfigLike,
    host: str,
    port: int,
    backend: str | None = None,
    seed: int = 1024,
    verbose: bool = True,
    *,
    timeout: Timeout = None,
) -> Launched:
    """Call `shardlib.booster.launch_from_openmpi`, with the config as the first argument.

    >>> launch_from_openmpi("config.py", "node-1", 29500).rank  # doctest: +SKIP
    0
    """
    return booster.launch_from_openmpi(host, port, backend, seed, verbose, config, timeout=timeout)

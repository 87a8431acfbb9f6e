"""Functions of tests on warm ranks, each a process of torch and of JAX with one CPU device."""

from __future__ import annotations

import atexit
import socket
from collections.abc import Callable
from typing import Any

from shardlib.testing import Ranks, ranks

__all__ = ["COUNT", "run"]

COUNT = 4
_WARM: list[Ranks] = []


def run(function: Callable[..., Any], *args: Any) -> list[Any]:
    """What a module's function returns on each of the processes, with numbers of 64 bits."""
    if not _WARM:
        _WARM.append(ranks(COUNT))
        atexit.register(_WARM[0].close)
    return _WARM[0].run(_called, function, args)


def _called(function: Callable[..., Any], args: Any) -> Any:
    import jax

    if not jax.distributed.is_initialized():
        _meet(jax)
    return function(*args)


def _meet(jax: Any) -> None:
    """Let the processes meet, as those of torch have met already; once in their life."""
    import torch.distributed as dist

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = [f"127.0.0.1:{free.getsockname()[1]}"]
    dist.broadcast_object_list(address)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)
    jax.distributed.initialize(address[0], num_processes=dist.get_world_size(), process_id=dist.get_rank())

"""A warm process with a number of simulated CPU devices, which JAX needs to know before it starts.

A pool of one rank: what hangs, dies or raises there is reported as it is of ranks. Programs are tiny and run a few
times: they are compiled without LLVM's optimizations, which take most of the time and change no collective.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
from collections.abc import Callable
from importlib import metadata
from typing import Any

from shardlib.errors import ShardlibError
from shardlib.testing._pool import Ranks, ranks

__all__ = ["on_devices"]

_AT_LEAST = 8  # so that most meshes find the process warm
_FLAGS = (
    "--xla_force_host_platform_device_count={count} --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true"
)
# XLA compiles in a third of the time without them, and newer ones have no other way and no such flag.
_WITHOUT_FUSION_EMITTERS, _UNTIL = " --xla_cpu_use_fusion_emitters=false", (0, 10)
_WARM: dict[int, Ranks] = {}


def on_devices(count: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> Any:
    """Return `fn(*args)` from a process where JAX has at least `count` CPU devices, and 64-bit numbers.

    Raises:
        HangError, RankDied, RankError: as of ranks.
        ShardlibError: JAX is not installed, or not new enough.
    """
    have = next((known for known in _WARM if known >= count), None)
    if have is None:
        _close()
        have = max(count, _AT_LEAST)
        _WARM[have] = ranks(1)
    return _WARM[have].run(_call, have, fn, args, timeout=timeout)[0]


def _flags() -> str:
    known = tuple(int(part) for part in metadata.version("jaxlib").split(".")[:2])
    return _FLAGS + _WITHOUT_FUSION_EMITTERS * (known <= _UNTIL)


@atexit.register
def _close() -> None:
    for pool in _WARM.values():
        pool.close()
    _WARM.clear()


def _call(count: int, fn: Callable[..., Any], args: Any) -> Any:
    # Locks that libraries make (tqdm's) then have no name: a process that is killed leaves none behind.
    multiprocessing.set_start_method("fork", force=True)
    # Two programs under way at once, on several devices and few cores, can wait for each other's threads.
    os.environ.update(JAX_PLATFORMS="cpu", JAX_CPU_ENABLE_ASYNC_DISPATCH="false")
    importlib.import_module("shardlib.jax")  # which says what to do where JAX is missing
    import jax

    # Read at its first computation; the last one counts.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flags().format(count=count)}"

    jax.config.update("jax_enable_x64", True)
    if len(jax.devices()) != count:
        raise ShardlibError(
            f"JAX has {len(jax.devices())} devices in its process instead of {count}: it was started before it could "
            "be told. Leave jax.devices() out of what is imported."
        )
    return fn(*args)

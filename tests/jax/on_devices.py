"""A process of its own with eight pretended CPU devices, which JAX must be told of before it is imported.

One serves all tests of a session that ask for it. Its programs are tiny and run a few times: they are compiled without
LLVM's optimizations, which take most of the time and change no collective.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import Any
from unittest import mock

__all__ = ["run"]

_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    # Two programs under way at once, on eight devices and two cores, can wait for each other's threads.
    "JAX_CPU_ENABLE_ASYNC_DISPATCH": "false",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true",
}


_LONGEST = 600  # seconds; a call takes a few: what takes longer stands still, and must not keep the others waiting


def run(function: Callable[..., Any], *args: Any, x64: bool = True) -> Any:
    """What a module's function returns there, with or without numbers of 64 bits."""
    pool = _process()
    try:
        return pool.submit(_called, function, args, x64).result(_LONGEST)
    except TimeoutError:
        for process in multiprocessing.active_children():
            if process.pid in pool._processes:
                process.kill()
        _process.cache_clear()
        raise


@cache
def _process() -> ProcessPoolExecutor:
    with mock.patch.dict(os.environ, _ENVIRONMENT):
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        pool.submit(int).result()  # started, while the environment is this one
    atexit.register(pool.shutdown)
    return pool


def _called(function: Callable[..., Any], args: Any, x64: bool) -> Any:
    import jax

    jax.config.update("jax_enable_x64", x64)
    return function(*args)

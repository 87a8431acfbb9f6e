"""Ranks that may be killed while the others live on and speak: the pool ends all of its ranks when one dies."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist


def run(world_size: int, folder: Path, function: Callable[..., None], *args: Any, lost: int, seconds: float) -> None:
    """Call a function on so many processes that meet over gloo; wait until all but the lost one have ended."""
    context = multiprocessing.get_context("forkserver")
    processes = [
        context.Process(target=_rank, args=(rank, world_size, str(folder), sys.path, function, args), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        for rank, process in enumerate(processes):
            if rank != lost:
                process.join(seconds)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank(
    rank: int, world_size: int, folder: str, path: list[str], function: Callable[..., None], args: tuple[Any, ...]
) -> None:
    sys.path[:] = path
    code = 0
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
        function(*args)
    except BaseException:
        Path(folder, f"raised-{rank}").write_text(traceback.format_exc())
        code = 1
    finally:
        os._exit(code)  # not through the ends of libraries that wait for lost ranks

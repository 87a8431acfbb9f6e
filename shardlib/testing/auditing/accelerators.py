"""Answers to what foreign code asks of accelerators and process groups that are not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["answers"]

_ANSWERS: tuple[tuple[Any, str, Any], ...] = (
    (dist, "destroy_process_group", None),
    (dist.distributed_c10d, "destroy_process_group", None),
    (torch.cuda, "set_device", None),
    (torch.cuda, "synchronize", None),
    (torch.cuda, "empty_cache", None),
    (torch.cuda, "reset_peak_memory_stats", None),
    (torch.cuda, "manual_seed", None),
    (torch.cuda, "manual_seed_all", None),
    (torch.cuda, "current_device", 0),
    (torch.cuda, "max_memory_allocated", 0),
    (torch.cuda, "memory_allocated", 0),
    (torch.accelerator, "current_accelerator", torch.device("cpu")),
    (torch.accelerator, "set_device_index", None),
    (torch.accelerator, "synchronize", None),
)


def answers() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Iterate over modules, names of their functions, and functions that take anything to put in their places."""
    for owner, name, answer in _ANSWERS:
        yield owner, name, _always(answer)


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: answer

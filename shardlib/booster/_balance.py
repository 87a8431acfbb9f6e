"""Balances for `Pipe`, by the time or the memory that each layer of a sequential takes with a sample."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from shardlib._measure import timed
from shardlib.booster._chunks import chunk_sizes, mapped, rows, split, tensors_in
from shardlib.engine import record_collectives
from shardlib.errors import InputError, InputTypeError
from shardlib.rules.stages import partition

__all__ = ["balance_by_size", "balance_by_time"]


def balance_by_time(
    partitions: int, module: nn.Sequential, sample: Any, *, timeout: float = 1.0, device: Any = None
) -> list[int]:
    """Return a balance for `Pipe` whose slowest partition is as fast as possible.

    Each layer runs forward and backward, as a copy in training mode on one device, again and again until the time is
    over; its fastest run counts. The module and the random state stay as they are.

    Args:
        partitions: the number of partitions.
        module: the sequential.
        sample: an input of it, with any number of rows.
        timeout: seconds to measure for; every layer runs twice at least.
        device: where layers run; by default the accelerator that torch sees, else the CPU.

    Returns:
        The number of layers of each partition.

    Raises:
        InputTypeError: the module is not a sequential.
        InputError: fewer layers than partitions, or less than one partition.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> sum(balance_by_time(2, model, torch.ones(8, 4), timeout=0.01))
    3
    """
    device = _checked("balance_by_time", partitions, module, device)

    def seconds_of(layer: nn.Module, value: Any) -> tuple[float, Any]:
        return timed(lambda: layer(value), tensors_in, device)

    best = [float("inf")] * len(module)
    begun, runs = time.perf_counter(), 0
    while runs < 2 or time.perf_counter() - begun < timeout:
        runs += 1
        for index, seconds in enumerate(_each(module, sample, device, seconds_of)):
            best[index] = min(best[index], seconds)
    return _balance(best, partitions)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Any,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Any = None,
) -> list[int]:
    """Return a balance for `Pipe` whose largest partition is as small as possible.

    A layer's size is the memory that its forward on one chunk leaves allocated, its output and what backward needs, and
    that of its parameters, times `param_scale`. A copy of each layer runs once, in training mode. The module and the
    random state stay as they are.

    Args:
        partitions: the number of partitions.
        module: the sequential.
        input: an input of it, with as many rows as in training.
        chunks: the number of chunks that `Pipe` splits it into.
        param_scale: how often a parameter is in memory: 2 with its gradient, 4 with Adam's state too.
        device: where layers run; by default the accelerator that torch sees, else the CPU.

    Returns:
        The number of layers of each partition.

    Raises:
        InputTypeError: the module is not a sequential.
        InputError: fewer layers than partitions, or less than one partition; fewer rows than chunks.

    >>> model = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 4), nn.Linear(4, 4))
    >>> balance_by_size(2, model, torch.ones(8, 4), chunks=4)
    [1, 2]
    """
    device = _checked("balance_by_size", partitions, module, device)
    count = rows(input) or 0
    if not 1 <= chunks <= count:
        raise InputError(
            f"balance_by_size was given chunks={chunks!r} for an input of {count} rows; give a number from 1 to that."
        )
    chunk = split(input, chunk_sizes(count, chunks))[0]
    allocated = _each(module, chunk, device, _bytes)
    stored = [sum(param.nbytes for param in layer.parameters()) for layer in module]
    return _balance([a + param_scale * b for a, b in zip(allocated, stored, strict=True)], partitions)


def _checked(call: str, partitions: int, module: Any, device: Any) -> torch.device:
    if not isinstance(module, nn.Sequential):
        raise InputTypeError(f"{call} was given a {type(module).__name__}; give an nn.Sequential.")
    if type(partitions) is not int or not 1 <= partitions <= len(module):
        raise InputError(
            f"{call} was given partitions={partitions!r} for a sequential of {len(module)} layers; give a number from "
            f"1 to {len(module)}."
        )
    if device is not None:
        return torch.device(device)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _balance(weights: Sequence[float], partitions: int) -> list[int]:
    return [end - start for start, end in pairwise([0, *partition(weights, partitions)])]


def _each(
    module: nn.Sequential, value: Any, device: torch.device, measure: Callable[[nn.Module, Any], tuple[float, Any]]
) -> list[float]:
    """Measure each layer with the output of the one before it."""
    found, value = [], mapped(lambda x: _cut(x, device), value)
    devices = [] if device.type == "cpu" else [device]
    with torch.enable_grad(), torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        for layer in module:
            measured, value = measure(copy.deepcopy(layer).to(device).train(), value)
            value = mapped(lambda x: _cut(x, device), value)
            found.append(measured)
    return found


def _cut(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor without its graph, of which a gradient is computed as before."""
    return tensor.detach().to(device).requires_grad_(tensor.requires_grad)


def _bytes(layer: nn.Module, value: Any) -> tuple[float, Any]:
    with record_collectives(layer) as log:
        output = layer(value)
    return log.live.now - log.start_bytes, output

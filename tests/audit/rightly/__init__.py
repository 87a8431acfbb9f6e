"""Models that a library shards rightly, in each of several ways: an audit has nothing to say of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["Case"]


@dataclass(frozen=True)
class Case:
    """A model, and code that shards it, as somebody writes it.

    Attributes:
        name: the model's.
        how: what sharded it, in words.
        mesh: its axes; the data axes divide the rows of a batch.
        build: returns the model for one device.
        shard: a function (model, mesh) or (folder, mesh) -> the sharded model, or (the model, what trains it).
        batch: returns the global batch of a step.
        loss: a function (model, batch) -> a mean over rows; None for the loss in the model's output.
        context: what forward and backward run inside.
        split: a function (batch, index, count) -> the rows of a data rank; None for the rows of every tensor.
    """

    name: str
    how: str
    mesh: str
    build: Callable[[], nn.Module]
    shard: Callable[..., Any]
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    split: Callable[[Any, int, int], Any] | None = None

    def __str__(self) -> str:
        return f"{self.name}, {self.how} [{self.mesh}]"

"""Models that a host shards rightly: their numbers are those of one device. An audit must say so of each."""

from __future__ import annotations

import contextlib
import functools
import inspect
import shutil
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardlib._mesh_shape import MeshShape
from shardlib.axes import register_axis
from shardlib.testing import Report, equivalent, shared_pool

__all__ = ["Case", "prove", "reset_accelerate"]


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

    @property
    def takes_folder(self) -> bool:
        """Whether `shard` loads a model that was saved."""
        return next(iter(inspect.signature(self.shard).parameters)) == "folder"


def prove(case: Case, steps: int = 2, timeout: float = 120.0) -> Report:
    """Compare training steps with one device, on a warm pool of ranks."""
    ranks = shared_pool(MeshShape.of(case.mesh).world_size)
    return ranks.run(_prove_here, case, steps, timeout=timeout)[0]  # type: ignore[no-any-return]


def _prove_here(case: Case, steps: int) -> Report:
    reset_accelerate()
    for name in ("dp_shard_cp", "efsdp"):  # axes of shards of Accelerate, and of experts' shards of transformers
        register_axis(name, kind="data")
    with case.context():
        return equivalent(
            case.build, case.batch, case.mesh, shard=functools.partial(_sharded, case), loss=case.loss,
            split=case.split, steps=steps,
        )  # fmt: skip


def _sharded(case: Case, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    if case.takes_folder:
        with _saved(model) as folder:
            made = case.shard(folder, mesh)
    else:
        made = case.shard(model, mesh)
    sharded: nn.Module = made[0] if isinstance(made, tuple) else made
    if case.takes_folder:
        _widen_buffers(sharded, next(model.parameters()).dtype)
    return sharded


def _widen_buffers(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert buffers that no checkpoint has: a model that is loaded in float64 computes them anew, in float32."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


@contextlib.contextmanager
def _saved(model: Any) -> Any:
    """Save a model of transformers where all ranks find it."""
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        model.save_pretrained(folder[0])
    dist.barrier()
    try:
        yield Path(folder[0])
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0])


def reset_accelerate() -> None:
    """Forget the state that Accelerate keeps in a process: what a call before this one left."""
    try:
        from accelerate.state import AcceleratorState, GradientState, PartialState
    except ImportError:
        return
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()

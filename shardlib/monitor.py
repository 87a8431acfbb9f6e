"""Progress, loss, throughput and memory of a plain training loop.

Ranks compute together and rank 0 writes: a line to the terminal, a progress bar, TensorBoard.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardlib._measure import peak_bytes, summary_writer
from shardlib._mesh_shape import MeshShape
from shardlib._progress import Progress
from shardlib.errors import InputError

__all__ = ["Monitor"]


class Monitor:
    """Watches a training loop; call `step` on every rank, once after each step of the optimizer.

    Losses are added up on the device and read every `every` steps, so that no step waits for them. These reports are
    collective: the mean of each value over the data axes, the tokens of all data ranks a second, and the peak of memory
    of the rank that used most (of its accelerator, or of the process on CPU).

    Args:
        mesh: the mesh of the model, as `shardlib.mesh` makes it.
        steps: the number of steps of the loop, for the progress bar.
        start: the steps that were done before, of a run that is resumed; `steps` counts them too.
        every: steps between reports.
        tensorboard: a folder for TensorBoard, which needs the extra of that name; None writes none.
        write: called on rank 0 with the step and its values; by default a line is printed beside the progress bar.

    Raises:
        InputError: `steps` or `every` is not positive, or `start` is more than `steps`.
        LaunchError: TensorBoard is not installed.

    >>> import shardlib as sl
    >>> def show(step, values):
    ...     print(step, values["loss"])
    >>> with Monitor(sl.mesh("dp=1"), steps=4, every=2, write=show) as monitor:
    ...     for step in range(4):
    ...         monitor.step(loss=torch.tensor(float(step)), tokens=8)
    2 0.5
    4 2.5
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        steps: int,
        *,
        start: int = 0,
        every: int = 10,
        tensorboard: str | Path | None = None,
        write: Callable[[int, dict[str, float]], Any] | None = None,
    ) -> None:
        if steps < 1 or every < 1:
            raise InputError(f"Monitor: steps={steps}, every={every} were given; give positive numbers.")
        if not 0 <= start <= steps:
            raise InputError(
                f"Monitor: start={start} was given, of steps={steps}; give the steps that were done before."
            )
        shape = MeshShape.of(mesh)
        self._groups = [mesh[axis].get_group() for axis in shape.data_axes if shape[axis] > 1]
        self._data_ranks = shape.data_ranks
        self._device = torch.device(mesh.device_type)
        self._is_first = not dist.is_initialized() or dist.get_rank() == 0
        self._every, self._step = every, start
        self._board = None
        if tensorboard is not None:
            self._board = summary_writer("Monitor(tensorboard=...)", tensorboard if self._is_first else None)
        self._write = write or _print
        after = math.inf if write is not None else 0.0
        self._progress = Progress("training", unit="steps", total=steps, done=start, after=after)
        self._begin()

    def step(self, *, tokens: int = 0, **values: torch.Tensor | float) -> None:
        """Count a step.

        Args:
            tokens: the tokens (or examples) of this data rank in this step.
            values: numbers, or tensors of one element, such as loss= and grad_norm=: the same names in every step.
        """
        self._step += 1
        self._tokens += tokens
        for name, value in values.items():
            value = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(float(value))
            full = value.full_tensor() if hasattr(value, "full_tensor") else value
            self._sums[name] = self._sums.get(name, 0.0) + full.to(self._device, torch.float64)
        self._progress.advance()
        if self._step % self._every == 0:
            self._report()

    def _begin(self) -> None:
        self._sums: dict[str, Any] = {}
        self._tokens, self._reported, self._since = 0, self._step, time.perf_counter()

    def _report(self) -> None:
        count, seconds = self._step - self._reported, time.perf_counter() - self._since
        numbers = [*self._sums.values(), torch.tensor(float(self._tokens), dtype=torch.float64, device=self._device)]
        total, most = torch.stack(numbers), torch.tensor(float(peak_bytes()), device=self._device)
        for group in self._groups:
            dist.all_reduce(total, group=group)
        if dist.is_initialized():
            dist.all_reduce(most, dist.ReduceOp.MAX)
        if self._is_first:
            *sums, tokens = total.tolist()
            values = {name: each / count / self._data_ranks for name, each in zip(self._sums, sums, strict=True)}
            values["steps_per_second"] = count / seconds
            if tokens:
                values["tokens_per_second"] = tokens / seconds
            values["peak_gib"] = most.item() / 2**30
            if self._board is not None:
                for name, value in values.items():
                    self._board.add_scalar(name, value, self._step)
            self._write(self._step, values)
        self._begin()

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._progress.__exit__(kind, error, where)
        if self._board is not None:
            self._board.close()


def _print(step: int, values: dict[str, float]) -> None:
    print(f"step {step}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items()), flush=True)

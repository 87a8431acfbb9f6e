"""The dry run of a pipeline step on one rank, and the measurements of each of its stages."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardlib._plan import Plan, StageRun
from shardlib._plan.schedules import Action
from shardlib.engine._torch import pytree
from shardlib.engine.pipeline.batch import rows
from shardlib.engine.pipeline.step import Step
from shardlib.engine.recording import Recording
from shardlib.engine.sharded import record_of

__all__ = ["roots_of", "run"]


def run(model: nn.Module, plan: Plan, batch: Any, log: Recording | None = None) -> tuple[StageRun, ...]:
    """Run one training step and return the measurements of this rank's stages; none without a recording.

    The number of microbatches is that of the plan, or else twice the number of ranks, if the batch has so many rows.
    """
    for parameter in model.parameters():
        parameter.grad = None
    pipeline, total = record_of(model).pipeline, rows(batch)
    assert pipeline is not None
    count = plan.step.microbatches or min(2 * pipeline.stages.ranks, total)
    if log is None:
        Step(model, _as_one_number).run(batch, count)
        return ()
    seen = _Seen(log, plan.mesh.pipeline_axes)
    Step(model, _as_one_number, watch=seen.watch).run(batch, count)
    largest = total % count or count  # the number of microbatches of the largest size
    return tuple(
        StageRun(stage, pipeline.stages.index, seen.flops[stage], seen.left(stage, largest), seen.sent[stage])
        for stage in pipeline.stages.own
    )


def _as_one_number(output: Any, _batch: Any) -> torch.Tensor:
    return torch.stack([root.sum() for root in roots_of(output)]).sum()


def roots_of(output: Any) -> list[torch.Tensor]:
    """Return the tensors that backward of a dry run starts from: scalars, or else all differentiable outputs."""
    found = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
    return [t for t in found if t.ndim == 0] or found


class _Seen:
    """The measurements of each stage's actions."""

    def __init__(self, log: Recording, axes: tuple[str, ...]) -> None:
        self.log, self.axes = log, axes
        self.flops: Counter[int] = Counter()
        self.sent: Counter[int] = Counter()
        self._left: dict[int, list[int]] = defaultdict(list)

    def left(self, stage: int, microbatches: int) -> int:
        """Return the bytes that one of the first microbatches leaves alive.

        The very first one may also allocate memory that later ones reuse.
        """
        return min(self._left[stage][:microbatches], default=0)

    @contextmanager
    def watch(self, action: Action) -> Iterator[None]:
        log = self.log
        flops, alive, before = log.flops, log.live.now, len(log.collectives)
        yield
        self.flops[action.stage] += log.flops - flops
        if action.kind == "F":
            messages = [each for each in log.collectives[before:] if each.kind == "send" and each.axes == self.axes]
            self.sent[action.stage] = max(self.sent[action.stage], sum(each.bytes for each in messages))
            self._left[action.stage].append(log.live.now - alive)

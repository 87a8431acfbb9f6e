"""The dry run of a pipeline step on one rank, and the measurements of each of its stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from shardlib._plan import Plan, StageRun
from shardlib._plan.schedules import Action
from shardlib.engine._torch import pytree
from shardlib.engine.feature.recording import Recording
from shardlib.engine.pipeline.batch import rows
from shardlib.engine.pipeline.step import StepRun
from shardlib.engine.sharded import record_of

__all__ = ["roots_of", "run"]


class _Seen(NamedTuple):
    """The operations of an action, the bytes that it sent to the next stage, and the bytes that it left alive."""

    action: Action
    flops: int
    sent: int
    left: int


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
        StepRun(model, _as_one_number).run(batch, count)
        return ()
    seen, axes = list[_Seen](), plan.mesh.pipeline_axes

    @contextmanager
    def watch(action: Action) -> Iterator[None]:
        flops, alive, before = log.flops, log.live.now, len(log.collectives)
        yield
        sends = (each for each in log.collectives[before:] if each.kind == "send" and each.axes == axes)
        seen.append(_Seen(action, log.flops - flops, sum(each.bytes for each in sends), log.live.now - alive))

    StepRun(model, _as_one_number, watch=watch).run(batch, count)
    largest = total % count or count  # the number of microbatches of the largest size

    def of_stage(stage: int) -> StageRun:
        forwards = [one for one in seen if one.action.kind == "F" and one.action.stage == stage]
        return StageRun(
            stage,
            pipeline.stages.index,
            flops=sum(one.flops for one in seen if one.action.stage == stage),
            # The very first one may also allocate memory that later ones reuse.
            activation_bytes=min(one.left for one in forwards[:largest]),
            sent=max(one.sent for one in forwards),
        )

    return tuple(map(of_stage, pipeline.stages.own))


def _as_one_number(output: Any, _batch: Any) -> torch.Tensor:
    return torch.stack([root.sum() for root in roots_of(output)]).sum()


def roots_of(output: Any) -> list[torch.Tensor]:
    """Return the tensors that backward of a dry run starts from: scalars, or else all differentiable outputs."""
    found = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
    return [t for t in found if t.ndim == 0] or found

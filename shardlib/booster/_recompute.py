"""`gradient_checkpoint_config`: the share or number of blocks that each stage recomputes in backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from shardlib._plan import Plan
from shardlib.errors import InputError, PlanError
from shardlib.transforms import checkpoint_activations

__all__ = ["GradientCheckpointConfig", "PipelineGradientCheckpointConfig", "leave_to_plan", "recomputed_by"]


@dataclass
class GradientCheckpointConfig:
    """The share of each stage's repeated blocks whose activations are recomputed in backward: the first ones.

    Attributes:
        gradient_checkpointing_ratio: from 0 to 1; blocks are rounded down.

    Raises:
        InputError: a ratio outside of that.

    >>> GradientCheckpointConfig(0.5).counts([4, 3])
    [2, 1]
    """

    gradient_checkpointing_ratio: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.gradient_checkpointing_ratio <= 1:
            raise InputError(
                f"{type(self).__name__} was given gradient_checkpointing_ratio={self.gradient_checkpointing_ratio!r}; "
                "give the fraction of blocks, from 0 to 1."
            )

    def counts(self, blocks: Sequence[int]) -> Sequence[int]:
        """Return how many blocks each stage recomputes, of the numbers that they have."""
        return [int(self.gradient_checkpointing_ratio * count) for count in blocks]


@dataclass
class PipelineGradientCheckpointConfig(GradientCheckpointConfig):
    """The same, or the number of blocks by stage.

    Attributes:
        gradient_checkpointing_ratio: as for `GradientCheckpointConfig`.
        num_ckpt_layers_per_stage: the number of blocks of each stage, in the model's order; then the ratio is not used.

    Raises:
        InputError: a ratio that is none.

    >>> PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[2, 0]).counts([4, 4])
    [2, 0]
    """

    num_ckpt_layers_per_stage: Sequence[int] | None = None

    def counts(self, blocks: Sequence[int]) -> Sequence[int]:
        given = self.num_ckpt_layers_per_stage
        if given is None:
            return super().counts(blocks)
        if len(given) != len(blocks) or any(not 0 <= n <= there for n, there in zip(given, blocks, strict=False)):
            raise PlanError(
                f"PipelineGradientCheckpointConfig was given num_ckpt_layers_per_stage={list(given)}, and the stages "
                f"have {list(blocks)} blocks. Give a number for each, up to what it has."
            )
        return given


def recomputed_by(config: GradientCheckpointConfig) -> Callable[[Plan], Plan]:
    """Return the transform of a config: `checkpoint_activations` of the blocks that it counts."""

    def recompute(plan: Plan) -> Plan:
        by_stage = [[name for name in plan.repeated if name in stage.modules] for stage in plan.stages]
        by_stage = by_stage or [list(plan.repeated)]
        counts = config.counts([len(blocks) for blocks in by_stage])
        chosen = [f"^{name}" for blocks, n in zip(by_stage, counts, strict=True) for name in blocks[:n]]
        return checkpoint_activations(chosen)(plan) if chosen else plan

    return recompute


def leave_to_plan(model: nn.Module) -> None:
    """Switch off the recomputation of a model of transformers by itself, which would be done besides the plan's."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            vars(module)["gradient_checkpointing"] = False

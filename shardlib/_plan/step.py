"""How a training step runs: what no single tensor's layout says."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from shardlib.errors import PlanError

__all__ = ["LossScale", "Step"]


@dataclass(frozen=True)
class LossScale:
    """A dynamic scale of the loss, so that small gradients survive in float16.

    It is multiplied by `backoff_factor` after a step whose gradients were not finite, which is skipped, and by
    `growth_factor` after `growth_interval` good ones in a row (Micikevicius et al., "Mixed Precision Training", 2018).
    With a `hysteresis` of n, the first n - 1 such steps since it grew are skipped and leave it as it is.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 1.0
    max_scale: float = 2.0**32
    hysteresis: int = 1

    def __post_init__(self) -> None:
        ordered = 0 < self.min_scale <= self.init_scale <= self.max_scale
        moves = self.growth_factor >= 1 and 0 < self.backoff_factor <= 1 and self.growth_interval >= 1
        if not (ordered and moves and self.hysteresis >= 1):
            raise PlanError(
                f"{self}: give 0 < min_scale <= init_scale <= max_scale, growth_factor >= 1, 0 < backoff_factor <= 1, "
                "growth_interval >= 1 and hysteresis >= 1."
            )


@dataclass(frozen=True)
class Step:
    """How a step runs.

    Attributes:
        accumulate: microbatches whose gradients make one step.
        bucket_mb: how much travels in one collective, in MiB.
        reduce_dtype: in which gradients travel between ranks; None is the gradient's own.
        autocast: in which dtype ops of forward that gain from it compute; None is off.
        scaler: how the loss is scaled, or None.
        recompute: patterns of modules whose activations are computed again in backward.
        fp8: patterns of linear modules that compute in float8.
        overlap: updated parameters of repeated blocks are gathered while the next forward runs, until their block does.
        schedule: in which order a pipeline runs; "" is "1f1b", or "interleaved" where ranks have several stages.
        microbatches: into how many a pipeline cuts a batch; 0 where each step says so.
        capacity_factor: what a rank's tokens may ask of an expert that others have too, as a multiple of the mean;
            choices beyond it are dropped. None is without limit.
        fp8_history: steps whose largest magnitudes scale tensors for float8; 0 is for the tensor's own, as it is now.
    """

    accumulate: int = 1
    bucket_mb: float = 25
    reduce_dtype: torch.dtype | None = None
    autocast: torch.dtype | None = None
    scaler: LossScale | None = None
    recompute: tuple[str, ...] = ()
    fp8: tuple[str, ...] = ()
    overlap: bool = False
    fp8_history: int = 0
    schedule: str = ""
    microbatches: int = 0
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        if not self.bucket_mb > 0:
            raise PlanError(f"bucket_mb={self.bucket_mb!r} was given; give a positive number of megabytes, such as 25.")

    def replace(self, **changes: Any) -> Step:
        """A copy with some fields changed.

        >>> Step().replace(accumulate=4).accumulate
        4
        """
        known = [field.name for field in dataclasses.fields(self)]
        if unknown := set(changes) - set(known):
            raise PlanError(f"Step.replace was given {', '.join(sorted(unknown))}; a step has {', '.join(known)}.")
        return dataclasses.replace(self, **changes)

    def settings(self) -> dict[str, Any]:
        """What differs from the defaults."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}

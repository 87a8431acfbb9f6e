"""Settings of a training step as a whole: those of single tensors are in the rows of a plan."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardlib._dtypes import keeps_dtype_names
from shardlib.errors import PlanError

if TYPE_CHECKING:
    import torch

__all__ = ["LossScale", "Step"]


@dataclass(frozen=True)
class LossScale:
    """A dynamic scale of the loss, so that small gradients survive in float16.

    A step whose gradients are not finite is skipped, and the scale is multiplied by `backoff_factor`. After
    `growth_interval` finite steps in a row it is multiplied by `growth_factor` (Micikevicius et al., "Mixed Precision
    Training", 2018). With a `hysteresis` of n, the first n - 1 skipped steps since it grew do not change it.
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


@keeps_dtype_names
@dataclass(frozen=True)
class Step:
    """The settings of a training step.

    Attributes:
        accumulate: number of microbatches whose gradients are accumulated in one step.
        bucket_mb: size of one collective's bucket, in MiB.
        unbucketed_mb: size in MiB from which a tensor travels by itself, since copying it into a bucket would cost more
            than one more message, and from which units are not joined.
        reduce_dtype: dtype in which gradients are reduced between ranks; None is the gradient's own.
        autocast: dtype of `torch.autocast` in forward; None is off.
        scaler: the scale of the loss, or None.
        recompute: patterns of modules whose activations are recomputed in backward.
        fp8: patterns of linear modules that compute in float8.
        overlap: whether updated parameters of repeated blocks are gathered during the next forward, before their block.
        schedule: schedule of a pipeline; "" is "1f1b", or "interleaved" where ranks have several stages.
        microbatches: number of a pipeline's microbatches per batch; 0 where each step passes it.
        capacity_factor: limit on the tokens that a rank sends to one expert, as a multiple of the mean; choices beyond
            it are dropped. None is no limit.
        fp8_history: number of earlier steps whose absolute maximum scales tensors for float8; 0 uses the current
            tensor.
    """

    accumulate: int = 1
    bucket_mb: float = 25
    unbucketed_mb: float = 1
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
        for name, usual in (("bucket_mb", 25), ("unbucketed_mb", 1)):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value > 0:
                raise PlanError(f"{name}={value!r} was given; give a positive number of megabytes, such as {usual}.")

    @property
    def bucket_bytes(self) -> int:
        """The size of one collective's bucket, in bytes."""
        return int(self.bucket_mb * 2**20)

    @property
    def unbucketed_bytes(self) -> int:
        """The size from which a tensor travels by itself, in bytes."""
        return int(self.unbucketed_mb * 2**20)

    @property
    def joined_bytes(self) -> int:
        """The size up to which small units are joined, in bytes."""
        return min(self.bucket_bytes, self.unbucketed_bytes)

    def replace(self, **changes: Any) -> Step:
        """Return a copy with some fields changed.

        >>> Step().replace(accumulate=4).accumulate
        4
        """
        known = [field.name for field in dataclasses.fields(self)]
        if unknown := set(changes) - set(known):
            raise PlanError(f"Step.replace was given {', '.join(sorted(unknown))}; a step has {', '.join(known)}.")
        return dataclasses.replace(self, **changes)

    def settings(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}

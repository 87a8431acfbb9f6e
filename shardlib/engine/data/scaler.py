"""A dynamic loss scale that is the same on all ranks (Micikevicius et al., "Mixed Precision Training", ICLR 2018)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardlib._plan import LossScale
from shardlib.engine import _torch

__all__ = ["LossScaler"]


class LossScaler:
    """Scales the loss, so that gradients do not underflow in float16, and unscales gradients before a step.

    If any gradient on the mesh is not finite, the scale backs off (with a hysteresis of n, from the n-th such step
    since it last grew). It grows after a number of finite steps in a row.

    Args:
        settings: the initial scale and the factors and intervals of its changes.

    Attributes:
        scale: the current factor.
        overflowed: whether the gradients that were checked last are not all finite, on any rank.
    """

    def __init__(self, settings: LossScale) -> None:
        self.settings = settings
        self.scale = settings.init_scale
        self.good_steps, self.bad_steps = 0, 0
        self.overflowed = False

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the scale, in float32 or wider."""
        wide = loss if loss.dtype in (torch.float32, torch.float64) else loss.float()
        return wide * self.scale

    def look_at(self, gradients: Sequence[torch.Tensor], group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Check whether all elements of all local gradients are finite. Collective over the group, on a device."""
        bad = [~torch.isfinite(norm).to(device) for norm in _torch.norms_of(gradients, float("inf"))]
        flag = torch.stack(bad).any().float() if bad else torch.zeros((), device=device)
        if group is not None:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        self.overflowed = bool(flag.item())

    def update(self) -> None:
        """Update the scale after a step, taken or skipped."""
        s = self.settings
        if self.overflowed:
            self.good_steps, self.bad_steps = 0, self.bad_steps + 1
            if self.bad_steps >= s.hysteresis:
                self.scale = max(self.scale * s.backoff_factor, s.min_scale)
            return
        self.good_steps += 1
        if self.good_steps >= s.growth_interval:
            self.scale, self.good_steps, self.bad_steps = min(self.scale * s.growth_factor, s.max_scale), 0, 0

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self.good_steps, "bad_steps": self.bad_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
        self.bad_steps = int(state.get("bad_steps", 0))

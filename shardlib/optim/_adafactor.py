"""Adafactor is torch's own, under the keywords that ColossalAI's users have.

Shazeer & Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", 2018,
https://arxiv.org/abs/1804.04235.
"""

from __future__ import annotations

from typing import Any

import torch

from shardlib.engine.data.optimizer import register_optimizer
from shardlib.optim._step import refuse

__all__ = ["Adafactor", "DistributedAdaFactor"]

_SCALED = "torch's Adafactor scales each step by the size of its tensor, and lets it shrink with 1/sqrt(t)."


@register_optimizer(needs="tensor")
class Adafactor(torch.optim.Adafactor):
    r"""`torch.optim.Adafactor`.

    .. math:: w_t = (1 - \eta\lambda) w_{t-1} - \max(\epsilon_2, \text{RMS}(w)) \min(\eta, 1/\sqrt t)\, \hat u_t

    where :math:`\hat u` is the gradient over the root of its squares, which are averaged by row and column, clipped to
    an RMS of `clip_threshold`.

    Args:
        params: parameters, or groups of them.
        lr: the largest relative step; None is 1e-2.
        eps: the minimum of squares of gradients, None being torch's choice for the dtype, and `eps2`.
        clip_threshold: the RMS that an update is clipped to.
        decay_rate: squares are averaged with `1 - t**decay_rate`.
        beta1: None: the update is not averaged.
        weight_decay: decoupled.
        scale_parameter: True: steps are relative to the size of the tensor.
        relative_step: True: steps shrink with `1/sqrt(t)`.
        warmup_init: False; a scheduler such as `LinearWarmupLR` warms up.

    Raises:
        InputError: an option that has one meaning here.

    >>> Adafactor(torch.nn.Linear(3, 2).parameters(), clip_threshold=2.0).defaults["d"]
    2.0
    """

    def __init__(
        self,
        params: Any,
        lr: float | None = None,
        eps: tuple[float | None, float] = (None, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
    ) -> None:
        refuse(
            "Adafactor",
            [
                ("beta1", beta1, None, "torch's Adafactor keeps no average of the update; CAME does."),
                ("scale_parameter", scale_parameter, True, _SCALED),
                ("relative_step", relative_step, True, _SCALED),
                ("warmup_init", warmup_init, False, "warm up by a scheduler, such as LinearWarmupLR."),
            ],
        )
        # ColossalAI adds eps1 to squares; torch lets them be eps1**2 at least.
        least = None if eps[0] is None else eps[0] ** 0.5
        super().__init__(params, 1e-2 if lr is None else lr, decay_rate, (least, eps[1]), clip_threshold, weight_decay)


DistributedAdaFactor = Adafactor

"""SGD under ColossalAI's name, by torch's fused kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.sgd import sgd

from shardlib.engine.data.optimizer import FUSED_SGD_DTYPES, register_optimizer
from shardlib.optim._step import Closure, has_kernel, loss_of, with_gradients

__all__ = ["FusedSGD"]


@register_optimizer(needs="shard")
class FusedSGD(torch.optim.SGD):
    r"""SGD with momentum, by torch's fused kernel where the parameter's device has it.

    .. math:: v_t = \mu v_{t-1} + (1 - \tau)(g_t + \lambda w_{t-1}) \qquad w_t = w_{t-1} - \eta v_t

    Args:
        params: parameters, or groups of them.
        lr: the learning rate.
        momentum: `mu`.
        dampening: `tau`.
        weight_decay: `lambda`.
        nesterov: step along `g + mu v` instead.
        wd_after_momentum: add the decay to the step, not to the gradient that momentum averages.

    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> optimizer = FusedSGD(layer.parameters(), lr=1.0)
    >>> weight = torch.nn.init.zeros_(layer.weight)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> weight.detach()
    tensor([[-1., -1.]])
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
    ) -> None:
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)
        self.wd_after_momentum = wd_after_momentum

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:  # type: ignore[override]
        """Update the parameters; a closure computes the loss and its gradients, and returns it."""
        loss = loss_of(closure)
        for group in self.param_groups:
            # The kernel takes the momentum of all parameters or of none.
            groups: dict[tuple[bool, bool], list[tuple[torch.Tensor, torch.Tensor]]] = {}
            for param, grad in with_gradients(group):
                begun = "momentum_buffer" in self.state.get(param, {})
                groups.setdefault((has_kernel(param, grad, FUSED_SGD_DTYPES), begun), []).append((param, grad))
            for (fused, _), pairs in groups.items():
                self._update(group, pairs, fused)
        return loss

    def _update(self, group: dict[str, Any], pairs: list[tuple[torch.Tensor, torch.Tensor]], fused: bool) -> None:
        params = [param for param, _ in pairs]
        decay = group["weight_decay"]
        if self.wd_after_momentum and decay:
            for param in params:
                param.mul_(1 - group["lr"] * decay)
        keep = group["momentum"] != 0
        momenta = [self.state.get(param, {}).get("momentum_buffer") for param in params] if keep else []
        sgd(
            params,
            [grad for _, grad in pairs],
            momenta,
            fused=fused,
            foreach=None if fused else group["foreach"],
            weight_decay=0.0 if self.wd_after_momentum else decay,
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )
        for param, momentum in zip(params if keep else (), momenta, strict=True):
            self.state[param]["momentum_buffer"] = momentum

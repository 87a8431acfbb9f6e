"""LARS: SGD with a learning rate for each tensor.

You, Gitman & Ginsburg, "Large Batch Training of Convolutional Networks", 2017, https://arxiv.org/abs/1708.03888,
algorithm 1.
"""

from __future__ import annotations

from typing import Any

import torch

from shardlib.engine.data.optimizer import register_optimizer
from shardlib.optim._step import Closure, checked, loss_of, with_gradients

__all__ = ["Lars"]


@register_optimizer(needs="tensor")
class Lars(torch.optim.Optimizer):
    r"""LARS.

    .. math::
        \lambda_t &= \xi\, \|w_{t-1}\| / (\|g_t\| + \beta \|w_{t-1}\| + \epsilon) \\
        v_t &= \mu v_{t-1} + \eta \lambda_t (g_t + \beta w_{t-1}) \qquad w_t = w_{t-1} - v_t

    Where either norm is zero, the tensor's own rate counts as 1. A group with `lars=False` is trained by plain SGD, as
    biases and norms often are.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate, `eta`.
        momentum: `mu`.
        eeta: `xi`, how much of a tensor's norm a step of rate 1 may be.
        weight_decay: `beta`.
        epsilon: added to the denominator.

    Raises:
        InputError: a number that is out of range.

    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> optimizer = Lars(layer.parameters(), lr=1.0, eeta=0.01)
    >>> before = layer.weight.detach().clone()
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> torch.allclose((layer.weight.detach() - before).norm(), 0.01 * before.norm())
    True
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0,
        eeta: float = 1e-3,
        weight_decay: float = 0,
        epsilon: float = 0.0,
    ) -> None:
        checked("Lars", lr=lr, momentum=momentum, eeta=eeta, weight_decay=weight_decay, epsilon=epsilon)
        options = {"momentum": momentum, "eeta": eeta, "weight_decay": weight_decay, "epsilon": epsilon}
        super().__init__(params, {"lr": lr, **options, "lars": True})

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:  # type: ignore[override]
        """Update the parameters; a closure computes the loss and its gradients, and returns it."""
        loss = loss_of(closure)
        for group in self.param_groups:
            for param, grad in with_gradients(group):
                update = grad.add(param, alpha=group["weight_decay"]).mul_(_own_rate(param, grad, group) * group["lr"])
                if group["momentum"]:
                    state = self.state[param]
                    if not state:
                        state["momentum_buffer"] = torch.zeros_like(param)
                    update = state["momentum_buffer"].mul_(group["momentum"]).add_(update)
                param.sub_(update)
        return loss


def _own_rate(param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    one = torch.ones((), dtype=param.dtype, device=param.device)
    if not group["lars"]:
        return one
    param_norm, grad_norm = param.norm(), grad.norm()
    rate = group["eeta"] * param_norm / (grad_norm + group["weight_decay"] * param_norm + group["epsilon"])
    return torch.where((param_norm > 0) & (grad_norm > 0), rate, one)

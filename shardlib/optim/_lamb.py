"""LAMB: Adam with the step of each tensor scaled to the norm of the tensor.

You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2019,
https://arxiv.org/abs/1904.00962, algorithm 2.
"""

from __future__ import annotations

from typing import Any

import torch

from shardlib.engine.data.norms import clip_grad_norm_
from shardlib.engine.data.optimizer import register_optimizer
from shardlib.optim._step import Closure, checked, loss_of, refuse, with_gradients

__all__ = ["DistributedLamb", "FusedLAMB", "Lamb"]


@register_optimizer(needs="tensor")
class Lamb(torch.optim.Optimizer):
    r"""LAMB.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t \qquad v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2 \\
        r_t &= m_t / (\sqrt{v_t} + \epsilon) + \lambda w_{t-1} \\
        w_t &= w_{t-1} - \eta\, \frac{\|w_{t-1}\|}{\|r_t\|}\, r_t

    with `m / (1 - beta1**t)` and `v / (1 - beta2**t)` in `r` where `bias_correction` says so. Where either norm is
    zero, their ratio counts as 1.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate.
        betas: decay of the averages.
        eps: added to the denominator.
        weight_decay: `lambda`.
        adam: let the ratio of norms be 1: Adam.
        bias_correction: correct the averages for having begun at zero.

    Raises:
        InputError: a number that is out of range.

    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> optimizer = Lamb(layer.parameters(), lr=0.5)
    >>> before = layer.weight.detach().clone()
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> torch.allclose((layer.weight.detach() - before).norm(), 0.5 * before.norm())
    True
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        adam: bool = False,
        bias_correction: bool = False,
    ) -> None:
        checked(type(self).__name__, lr=lr, beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=weight_decay)
        options = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction}
        super().__init__(params, {"lr": lr, **options, "adam": adam})

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:  # type: ignore[override]
        """Update the parameters; a closure computes the loss and its gradients, and returns it."""
        loss = loss_of(closure)
        for group in self.param_groups:
            for param, grad in with_gradients(group):
                direction = self._direction(param, grad, group)
                param.add_(direction * _ratio(param, direction, group), alpha=-group["lr"])
        return loss

    def _direction(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        state = self.state[param]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
        state["step"] += 1
        beta1, beta2 = group["betas"]
        mean = state["exp_avg"].lerp_(grad, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        if group["bias_correction"]:
            mean = mean / (1 - beta1 ** state["step"])
            square = square / (1 - beta2 ** state["step"])
        return (mean / (square.sqrt() + group["eps"])).add_(param, alpha=group["weight_decay"])


def _ratio(param: torch.Tensor, direction: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """Return the norm of the parameter over that of its direction."""
    one = torch.ones((), dtype=param.dtype, device=param.device)
    if group["adam"] or not (group.get("always_adapt", True) or group["weight_decay"]):
        return one
    param_norm, step = param.norm(), direction.norm()
    return torch.where((param_norm > 0) & (step > 0), param_norm / step, one)


@register_optimizer(needs="tensor")
class DistributedLamb(Lamb):
    """`Lamb` with the defaults that ColossalAI's distributed one has; on one device it is the same.

    >>> DistributedLamb(torch.nn.Linear(2, 1).parameters()).defaults["bias_correction"]
    True
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        bias_correction: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, bias_correction=bias_correction)


@register_optimizer(needs="tensor")
class FusedLAMB(Lamb):
    """`Lamb` with the arguments and defaults of Apex's.

    Args:
        params: as for `Lamb`, and so are those that are not listed.
        lr: the same.
        bias_correction: the same.
        betas: the same.
        eps: the same.
        weight_decay: the same.
        amsgrad: False.
        adam_w_mode: True: the decay belongs to the direction, as in the paper.
        grad_averaging: True: gradients are weighted with `1 - beta1`, as in the paper.
        set_grad_none: True; `zero_grad(set_to_none=...)` says it.
        max_grad_norm: the norm that gradients are clipped to before the step; 0 is no clipping.
        use_nvlamb: take the ratio of norms in groups without decay too; else it is 1 there.

    Raises:
        InputError: a number that is out of range, or an option that has one meaning here.

    >>> layer = torch.nn.Linear(2, 1)
    >>> optimizer = FusedLAMB(layer.parameters(), max_grad_norm=0.5)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> torch.allclose(layer.weight.grad.norm() ** 2 + layer.bias.grad.norm() ** 2, torch.tensor(0.25))
    True
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        checked(type(self).__name__, max_grad_norm=max_grad_norm)
        refuse(
            type(self).__name__,
            [
                ("amsgrad", amsgrad, False, "LAMB has no such variant."),
                ("adam_w_mode", adam_w_mode, True, "the decay belongs to the direction, as in the paper."),
                ("grad_averaging", grad_averaging, True, "gradients are weighted with 1 - beta1, as in the paper."),
                ("set_grad_none", set_grad_none, True, "call zero_grad(set_to_none=False) instead."),
            ],
        )
        super().__init__(params, lr, betas, eps, weight_decay, bias_correction=bias_correction)
        self.max_grad_norm = max_grad_norm
        self.defaults["always_adapt"] = use_nvlamb
        for group in self.param_groups:
            group.setdefault("always_adapt", use_nvlamb)

    def step(self, closure: Closure = None) -> Any:  # type: ignore[override]
        """Clip the gradients and update the parameters; a closure computes the loss and its gradients."""
        loss = loss_of(closure)
        if self.max_grad_norm > 0:
            clip_grad_norm_([param for group in self.param_groups for param in group["params"]], self.max_grad_norm)
        self._update()
        return loss

    # A norm is of all gradients, and a rank steps on some tensors only: what replaces parameters during a step, the
    # hooks of all optimizers, goes around the update, and clipping comes before.
    step.hooked = True  # type: ignore[attr-defined]
    _update = torch.optim.Optimizer.profile_hook_step(Lamb.step)

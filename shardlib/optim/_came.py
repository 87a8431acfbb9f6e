"""CAME: Adafactor with updates that are scaled by how far they agree with earlier ones.

Luo et al., "CAME: Confidence-guided Adaptive Memory Efficient Optimization", 2023, https://arxiv.org/abs/2307.02047,
algorithm 2.
"""

from __future__ import annotations

from typing import Any

import torch

from shardlib.engine.data.optimizer import register_optimizer
from shardlib.errors import InputError
from shardlib.optim._step import Closure, checked, loss_of, with_gradients

__all__ = ["CAME", "DistributedCAME"]


@register_optimizer(needs="tensor")
class CAME(torch.optim.Optimizer):
    r"""CAME. Averages of squares are factored into rows and columns for a matrix, and full for other tensors.

    .. math::
        r_t, c_t &= \text{row and column means of } g_t^2 + \epsilon_1 \text{, averaged with } \beta_2 \\
        u_t &= g_t / \sqrt{r_t c_t / \bar r_t} \qquad \hat u_t = u_t / \max(1, \text{RMS}(u_t) / d) \\
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) \hat u_t \\
        R_t, C_t &= \text{row and column means of } (\hat u_t - m_t)^2 + \epsilon_2 \text{, averaged with } \beta_3 \\
        w_t &= (1 - \eta\lambda) w_{t-1} - \eta\, m_t / \sqrt{R_t C_t / \bar R_t}

    A tensor that is not a matrix steps along `m` itself. More than two dims are a stack of matrices.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate; it has to be given.
        eps: two numbers that are added to squares of gradients, and to squared differences.
        clip_threshold: `d`.
        betas: decay of the update, of its squares, and of what differs.
        weight_decay: `lambda`.

    Raises:
        InputError: a number that is out of range.

    >>> layer = torch.nn.Linear(3, 2)
    >>> optimizer = CAME(layer.parameters(), lr=2e-4)
    >>> layer(torch.ones(1, 3)).sum().backward()
    >>> optimizer.step()
    >>> {name: tuple(v.shape) for name, v in optimizer.state[layer.weight].items() if "row" in name}
    {'exp_avg_sq_row': (2, 1), 'exp_avg_res_row': (2, 1)}
    """

    def __init__(
        self,
        params: Any,
        lr: float | None = None,
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        weight_decay: float = 0.0,
    ) -> None:
        if lr is None:
            raise InputError("CAME was given no lr; give a learning rate, such as lr=2e-4.")
        numbers = {f"beta{i}": beta for i, beta in enumerate(betas, 1)} | {f"eps{i}": e for i, e in enumerate(eps, 1)}
        checked("CAME", lr=lr, clip_threshold=clip_threshold, weight_decay=weight_decay, **numbers)
        options = {"eps": eps, "clip_threshold": clip_threshold, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:  # type: ignore[override]
        """Update the parameters; a closure computes the loss and its gradients, and returns it."""
        loss = loss_of(closure)
        for group in self.param_groups:
            for param, grad in with_gradients(group):
                update = self._update(param, grad, group)
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])
        return loss

    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        state, factored = self.state[param], param.ndim >= 2
        (beta1, beta2, beta3), (eps1, eps2) = group["betas"], group["eps"]
        if not state:
            state["exp_avg"] = torch.zeros_like(param)
        square = grad.square() + eps1
        update = grad * _averaged(state, "exp_avg_sq", square, beta2, factored)
        rms = update.norm() / update.numel() ** 0.5
        update /= (rms / group["clip_threshold"]).clamp(min=1.0)
        mean = state["exp_avg"].lerp_(update, 1 - beta1)
        if not factored:
            return mean
        return mean * _averaged(state, "exp_avg_res", (update - mean).square() + eps2, beta3, factored)


def _averaged(state: dict[str, Any], name: str, square: torch.Tensor, beta: float, factored: bool) -> torch.Tensor:
    """Update the averages of squares, and return one over their root."""
    if not factored:
        return _into(state, name, square, beta).rsqrt()
    row = _into(state, f"{name}_row", square.mean(-1, keepdim=True), beta)
    column = _into(state, f"{name}_col", square.mean(-2, keepdim=True), beta)
    return (row / row.mean(-2, keepdim=True)).rsqrt() * column.rsqrt()


def _into(state: dict[str, Any], name: str, value: torch.Tensor, beta: float) -> torch.Tensor:
    if name not in state:
        state[name] = torch.zeros_like(value)
    average: torch.Tensor = state[name]
    return average.lerp_(value, 1 - beta)


DistributedCAME = CAME

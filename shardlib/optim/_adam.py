"""Adam under ColossalAI's names, by torch's fused kernels on every device."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.adam import adam

from shardlib.engine.data.optimizer import register_optimizer
from shardlib.optim._step import Closure, has_kernel, loss_of, refuse, with_gradients

__all__ = ["CPUAdam", "FusedAdam", "HybridAdam"]

_DISK = (
    'state is in device or host memory here, not on disk. For host memory shard with sl.offload("state"), or boost '
    "with a plugin's cpu_offload=True."
)


class _Adam(torch.optim.Adam):
    """Adam (Kingma & Ba 2014, https://arxiv.org/abs/1412.6980) or AdamW; see `HybridAdam`."""

    def __init__(
        self,
        params: Any,
        lr: Any,
        bias_correction: bool,
        betas: Any,
        eps: float,
        weight_decay: float,
        adamw_mode: bool,
        amsgrad: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, decoupled_weight_decay=bool(adamw_mode))
        self.defaults["bias_correction"] = bool(bias_correction)
        for group in self.param_groups:
            group.setdefault("bias_correction", bool(bias_correction))

    @torch.no_grad()
    def step(self, closure: Closure = None, div_scale: float = -1) -> Any:  # type: ignore[override]
        """Update the parameters.

        Args:
            closure: computes the loss and its gradients, and returns it.
            div_scale: a divisor of gradients, if it is positive; the gradients themselves do not change.
        """
        loss = loss_of(closure)
        for group in self.param_groups:
            kernels: dict[bool, list[tuple[torch.Tensor, torch.Tensor]]] = {True: [], False: []}
            for param, grad in with_gradients(group):
                grad = grad / div_scale if div_scale > 0 else grad
                kernels[group["bias_correction"] and has_kernel(param, grad)].append((param, grad))
            for fused, pairs in kernels.items():
                if pairs:
                    self._update(group, pairs, fused)
        return loss

    def _update(self, group: dict[str, Any], pairs: list[tuple[torch.Tensor, torch.Tensor]], fused: bool) -> None:
        states = [self._begun(param, group, fused) for param, _ in pairs]
        if not group["bias_correction"]:
            for (param, grad), state in zip(pairs, states, strict=True):
                _uncorrected(param, grad, state, group)
            return
        adam(
            [param for param, _ in pairs],
            [grad for _, grad in pairs],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
            [state["step"] for state in states],
            fused=fused,
            foreach=None if fused else group["foreach"],
            decoupled_weight_decay=group["decoupled_weight_decay"],
            amsgrad=group["amsgrad"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )

    def _begun(self, param: torch.Tensor, group: dict[str, Any], fused: bool) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])):
                state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
        if fused and state["step"].device != param.device:  # a loaded one may be on another device
            state["step"] = state["step"].to(param.device)
        return state


def _uncorrected(param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Update with Adam's averages without bias correction, for which torch has no kernel."""
    state["step"] += 1
    grad, decay = (-grad if group["maximize"] else grad), group["weight_decay"]
    if decay and group["decoupled_weight_decay"]:
        param.mul_(1 - group["lr"] * decay)
    elif decay:
        grad = grad.add(param, alpha=decay)
    beta1, beta2 = group["betas"]
    state["exp_avg"].lerp_(grad, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    square = state["exp_avg_sq"]
    if group["amsgrad"]:
        square = torch.maximum(state["max_exp_avg_sq"], square, out=state["max_exp_avg_sq"])
    param.add_(state["exp_avg"] / (square.sqrt() + group["eps"]) * -group["lr"])


@register_optimizer(needs="shard")
class HybridAdam(_Adam):
    r"""AdamW, or Adam, on parameters on the host and on a device: each is updated on its device, by a fused kernel.

    Under `sl.offload("state")` what is offloaded steps on the host, the rest on the device, in one `step()`.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t \qquad v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2 \\
        w_t &= (1 - \eta\lambda) w_{t-1} - \eta\, \hat m_t / (\sqrt{\hat v_t} + \epsilon)

    Args:
        model_params: parameters, or groups of them.
        lr: the learning rate.
        bias_correction: divide the averages by `1 - beta**t`; without, no fused kernel is used.
        betas: decay of the averages.
        eps: added to the denominator.
        weight_decay: decoupled, or with `adamw_mode=False` added to the gradient.
        adamw_mode: AdamW if true, else Adam.
        nvme_offload_fraction: 0; state is not kept on disk.
        nvme_offload_dir: None.

    Raises:
        InputError: state is asked for on disk.

    >>> layer = torch.nn.Linear(2, 1)
    >>> optimizer = HybridAdam(layer.parameters(), lr=1e-2)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> sorted(optimizer.state[layer.weight])
    ['exp_avg', 'exp_avg_sq', 'step']
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        adamw_mode: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | None = None,
    ) -> None:
        refuse(
            type(self).__name__,
            [
                ("nvme_offload_fraction", nvme_offload_fraction, 0.0, _DISK),
                ("nvme_offload_dir", nvme_offload_dir, None, _DISK),
            ],
        )
        super().__init__(model_params, lr, bias_correction, betas, eps, weight_decay, adamw_mode)


@register_optimizer(needs="shard")
class CPUAdam(HybridAdam):
    """`HybridAdam` under its name for parameters that are all on the host.

    >>> CPUAdam(torch.nn.Linear(2, 1).parameters()).defaults["lr"]
    0.001
    """


@register_optimizer(needs="shard")
class FusedAdam(_Adam):
    """`HybridAdam` with the arguments in Apex's order.

    Args:
        params: parameters, or groups of them.
        lr: as for `HybridAdam`, and so are those that are not listed.
        bias_correction: the same.
        betas: the same.
        eps: the same.
        adamw_mode: the same.
        weight_decay: the same.
        amsgrad: keep the largest second moment (Reddi et al. 2018).
        set_grad_none: True; `zero_grad(set_to_none=...)` says it.

    Raises:
        InputError: `set_grad_none=False`.

    >>> FusedAdam(torch.nn.Linear(2, 1).parameters(), adamw_mode=False).defaults["decoupled_weight_decay"]
    False
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adamw_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        why = "call zero_grad(set_to_none=False) instead."
        refuse(type(self).__name__, [("set_grad_none", set_grad_none, True, why)])
        super().__init__(params, lr, bias_correction, betas, eps, weight_decay, adamw_mode, amsgrad)

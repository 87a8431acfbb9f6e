"""GaLore: AdamW whose averages are kept in a low-rank projection of the gradient.

Zhao et al., "GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection", 2024,
https://arxiv.org/abs/2403.03507, algorithm 2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardlib.engine.data.optimizer import register_optimizer
from shardlib.errors import InputError, nearest
from shardlib.optim._step import Closure, checked, loss_of, with_gradients

__all__ = ["GaLoreAdamW", "get_galore_param_groups"]

_KINDS = ("std", "reverse_std")


def get_galore_param_groups(
    model: nn.Module,
    weight_decay: float,
    rank: int = 256,
    update_proj_gap: int = 200,
    scale: float = 0.25,
    proj_type: str = "std",
) -> list[dict[str, Any]]:
    """Return param groups for `GaLoreAdamW`: matrices are projected, other tensors are not, biases and norms do not
    decay.

    Args:
        model: its parameters.
        weight_decay: the decay of all parameters except biases and norms.
        rank: the rank of projections.
        update_proj_gap: steps after which a projection is computed again.
        scale: a factor of projected steps.
        proj_type: "std" projects the smaller dim, "reverse_std" the larger one.

    >>> groups = get_galore_param_groups(nn.Linear(4, 8), 0.1, rank=2)
    >>> [(group.get("rank"), len(group["params"])) for group in groups]
    [(2, 1), (None, 1)]
    """
    projected = {"rank": rank, "update_proj_gap": update_proj_gap, "scale": scale, "proj_type": proj_type}
    groups: list[dict[str, Any]] = [
        {"params": [], **projected, "weight_decay": weight_decay},
        {"params": [], "weight_decay": weight_decay},
        {"params": [], "weight_decay": 0.0},
    ]
    for name, param in model.named_parameters():
        spared = name.endswith("bias") or "norm" in name.lower() or param.ndim < 2
        groups[2 if spared else 0 if param.ndim == 2 else 1]["params"].append(param)
    return [group for group in groups if group["params"]]


@register_optimizer(needs="tensor")
class GaLoreAdamW(torch.optim.Optimizer):
    r"""GaLore with AdamW. In groups with a `rank` matrices are projected; everything else is trained by AdamW.

    .. math::
        P_t &= \text{the first rank left singular vectors of } G_t \text{, computed every gap steps} \\
        R_t &= P_t^\top G_t \qquad N_t = \text{Adam}(R_t) \qquad
        W_t = (1 - \eta\lambda) W_{t-1} - \eta\alpha\, P_t N_t

    Where a matrix has more rows than columns it is projected from the right instead, on right singular vectors, and
    with `proj_type="reverse_std"` the other way around. Signs of singular vectors are fixed, so that a projection
    depends on the gradient alone; directions that the gradient does not have at all are not part of it.

    Args:
        params: parameters, or groups such as those of `get_galore_param_groups`.
        lr: the learning rate.
        betas: decay of the averages.
        eps: added to the denominator.
        weight_decay: decoupled.

    Raises:
        InputError: a number that is out of range, or a `proj_type` that there is not.

    >>> layer = nn.Linear(6, 4)
    >>> optimizer = GaLoreAdamW(get_galore_param_groups(layer, 0.1, rank=2), lr=1e-2)
    >>> layer(torch.randn(8, 6)).square().sum().backward()
    >>> optimizer.step()
    >>> tuple(optimizer.state[layer.weight]["exp_avg"].shape)
    (2, 6)
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        checked("GaLoreAdamW", lr=lr, beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=weight_decay)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; one with a `rank` gets the paper's defaults for what else a projection is made by."""
        super().add_param_group(param_group)
        if param_group.get("rank") is None:
            return
        for name, value in (("update_proj_gap", 200), ("scale", 0.25), ("proj_type", "std")):
            param_group.setdefault(name, value)
        kind, gap, rank = param_group["proj_type"], param_group["update_proj_gap"], param_group["rank"]
        if kind not in _KINDS:
            raise InputError(
                f'GaLoreAdamW: proj_type={kind!r}; give "std" or "reverse_std".{nearest(str(kind), _KINDS)}'
            )
        if gap < 1 or rank < 1:
            raise InputError(f"GaLoreAdamW: rank={rank!r} and update_proj_gap={gap!r}; give integers from 1 up.")

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:  # type: ignore[override]
        """Update the parameters; a closure computes the loss and its gradients, and returns it."""
        loss = loss_of(closure)
        for group in self.param_groups:
            for param, grad in with_gradients(group):
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                param.mul_(1 - group["lr"] * group["weight_decay"])
                if group.get("rank") is None or param.ndim != 2:
                    param.sub_(_adam(grad, state, group), alpha=group["lr"])
                    continue
                basis, left = self._basis(grad, state, group), _projects_rows(grad, group)
                update = _adam(basis.mT @ grad if left else grad @ basis, state, group)
                full = basis @ update if left else update @ basis.mT
                param.sub_(full, alpha=group["lr"] * group["scale"])
        return loss

    def _basis(self, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        """Return the projection, as columns; it is recomputed every `update_proj_gap` steps."""
        if "projection" not in state or (state["step"] - 1) % group["update_proj_gap"] == 0:
            found = _directions(grad, group["rank"], _projects_rows(grad, group))
            if not found.any():  # the gradient is zero, and says nothing about later ones
                return state.get("projection", found)
            state["projection"] = found
        known: torch.Tensor = state["projection"]
        return known


def _projects_rows(grad: torch.Tensor, group: dict[str, Any]) -> bool:
    """Return whether the projection is multiplied from the left."""
    return (grad.shape[0] < grad.shape[1]) == (group["proj_type"] == "std")


def _directions(grad: torch.Tensor, rank: int, left: bool) -> torch.Tensor:
    """Return the strongest singular vectors as columns, at most `rank` of them.

    A singular vector may be turned around, and LAPACK turns it by the last bits of its input: here its entry of largest
    absolute value is positive. Where a singular value is zero but for rounding, any vector would do; it becomes zero.
    """
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    u, s, vh = torch.linalg.svd(wide, full_matrices=False)
    vectors = (u if left else vh.mT)[:, :rank]
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    rounding = s[0] * max(grad.shape) * torch.finfo(s.dtype).eps
    kept = s[: vectors.shape[1]] > rounding
    return (vectors * largest.sign() * kept).to(grad.dtype).contiguous()


def _adam(grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
    """Return Adam's direction (Kingma & Ba 2014, algorithm 1), in the space of the given gradient."""
    if "exp_avg" not in state:
        state.update(exp_avg=torch.zeros_like(grad), exp_avg_sq=torch.zeros_like(grad))
    (beta1, beta2), step = group["betas"], state["step"]
    mean = state["exp_avg"].lerp_(grad, 1 - beta1) / (1 - beta1**step)
    square = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2) / (1 - beta2**step)
    return mean / (square.sqrt() + group["eps"])

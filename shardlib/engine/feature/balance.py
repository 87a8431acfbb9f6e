"""The router's load balancing loss over the tokens of all data ranks, in place of transformers' per-rank loss.

For each expert it multiplies the fraction of choices with the mean router probability (Fedus et al., "Switch
Transformers", arXiv 2101.03961, equations 4 to 6). The mean over ranks of such products is not the product of the
means, so that per-rank losses would give another number, and another gradient, than one device.

With F the fractions over all ranks, which have no gradient, and P_r the sums of probabilities of rank r, the loss of
one device is `experts * sum_e F_e * (sum_r P_re) / rows`. It is linear in P: if each rank replaces the sum by `P_re`
times the number of ranks, the mean of the losses over ranks is that number, and likewise for gradients. The only
communication is one all-reduce of the counts.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardlib.engine import _torch
from shardlib.engine.model.region import unwrap_dtensor
from shardlib.engine.ops.redistribute import to_full_tensor

__all__ = ["balance_over", "install"]

_NAME = "load_balancing_loss_func"
_PARAMETERS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


class _Running(threading.local):
    """The data ranks of the sharded models whose forward runs in this thread, the innermost one last."""

    def __init__(self) -> None:
        self.groups: list[dist.ProcessGroup] = []


_running = _Running()


def install(model: nn.Module, group: dist.ProcessGroup) -> list[Any]:
    """Compute the balance loss over all ranks of `group` while `model` runs, and return the handles of hooks.

    The loss is a global function of the Python modules in which transformers defines models. It is replaced there by a
    wrapper, which calls the original unless such a model is running in this thread. Without such a function there are
    no hooks.
    """
    python_modules = list(_modules_with_loss(model))
    if not python_modules:
        return []
    for module in python_modules:
        _torch.patch((module.__name__, _NAME), functools.partial(_replace, module))
    return [
        model.register_forward_pre_hook(lambda *_: _running.groups.append(group), prepend=True),
        model.register_forward_hook(lambda *_: _leave(), always_call=True),
    ]


def _leave() -> None:
    _running.groups.pop()


def _modules_with_loss(model: nn.Module) -> Iterator[ModuleType]:
    names = {cls.__module__ for module in model.modules() for cls in type(module).__mro__}
    for name in sorted(names):
        module = sys.modules.get(name)
        function = getattr(module, _NAME, None)
        if module is not None and callable(function) and list(inspect.signature(function).parameters) == _PARAMETERS:
            yield module


def _replace(module: ModuleType) -> Callable[[], None]:
    original = getattr(module, _NAME)
    setattr(module, _NAME, _wrapped(original))
    return functools.partial(setattr, module, _NAME, original)


def _wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def loss(
        gate_logits: Any, num_experts: int | None = None, top_k: int = 2, attention_mask: torch.Tensor | None = None
    ) -> Any:
        if not _running.groups or not isinstance(gate_logits, tuple) or num_experts is None:
            return original(gate_logits, num_experts, top_k, attention_mask)
        return balance_over(_running.groups[-1], gate_logits, num_experts, top_k, attention_mask)

    return loss


def balance_over(
    group: dist.ProcessGroup,
    gate_logits: tuple[torch.Tensor, ...],
    num_experts: int,
    top_k: int,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute this rank's balance loss; its mean over the ranks of `group` is the loss of all their tokens.

    Args:
        group: ranks with different tokens. Collective over it.
        gate_logits: the router logits of each layer, (token, expert), before softmax.
        num_experts: the number of experts.
        top_k: the number of experts that each token chooses.
        attention_mask: (batch, sequence), 1 for tokens that count; by default all count.
    """
    logits = [unwrap_dtensor(layer) for layer in gate_logits]
    like = logits[0].to(torch.promote_types(logits[0].dtype, torch.float32))
    counting = None if attention_mask is None else to_full_tensor(attention_mask).reshape(-1).to(like)
    choices, likely, rows = like.new_zeros(num_experts), like.new_zeros(num_experts), like.new_zeros(1)
    for layer in logits:
        probabilities = layer.softmax(-1).to(like.dtype)
        each = like.new_ones(len(layer)) if counting is None else counting
        chosen = probabilities.detach().topk(top_k, dim=-1).indices
        choices = choices.index_add(0, chosen.reshape(-1), each.repeat_interleave(top_k))
        likely = likely + (probabilities * each[:, None]).sum(0)
        rows = rows + each.sum()
    total = torch.cat([choices, rows]).detach()
    dist.all_reduce(total, group=group)
    share = total[:-1] / total[-1]
    return num_experts * (share * likely).sum() * dist.get_world_size(group) / total[-1]

"""The router's balance loss of all data ranks' tokens, where transformers computes that of a rank's own.

It multiplies, for each expert, the share of choices that fell on it with the mean probability that it got (Fedus et
al., "Switch Transformers", arXiv 2101.03961, equations 4 to 6). A mean over ranks of such products is not the product
of the means, so that each rank's own loss would give another number, and another gradient, than one device.

With F the shares over all ranks, which have no gradient, and P_r the sums of probabilities of rank r, the loss of one
device is `experts * sum_e F_e * (sum_r P_re) / rows`. It is linear in P: a rank that takes `P_re` times the number of
ranks for the sum has a loss whose mean over ranks is that number, and so is the mean of the gradients. One all-reduce
of the counts is all that is sent.
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

from shardlib.engine.plain import plain
from shardlib.engine.region import made_plain

__all__ = ["balance_over", "install"]

_NAME = "load_balancing_loss_func"
_PARAMETERS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


class _Running(threading.local):
    """The data ranks of the sharded models whose forward runs in this thread, the innermost one last."""

    def __init__(self) -> None:
        self.groups: list[dist.ProcessGroup] = []


_running = _Running()


def install(model: nn.Module, group: dist.ProcessGroup) -> list[Any]:
    """While `model` runs, let the balance loss that its classes' modules call be that of all ranks of `group`.

    The function is a global one of the module in which transformers defines a model. It goes by way of ours from now
    on, which calls it unless such a model is running in this thread. Returns handles of hooks; none where there is no
    such function.
    """
    defining = list(_defining(model))
    if not defining:
        return []
    for module in defining:
        if not hasattr(getattr(module, _NAME), "of_one_rank"):
            setattr(module, _NAME, _by_way_of_ours(getattr(module, _NAME)))
    return [
        model.register_forward_pre_hook(lambda *_: _running.groups.append(group), prepend=True),
        model.register_forward_hook(lambda *_: _leave(), always_call=True),
    ]


def _leave() -> None:
    _running.groups.pop()


def _defining(model: nn.Module) -> Iterator[ModuleType]:
    names = {cls.__module__ for module in model.modules() for cls in type(module).__mro__}
    for name in sorted(names):
        module = sys.modules.get(name)
        function = getattr(module, _NAME, None)
        if module is not None and callable(function) and list(inspect.signature(function).parameters) == _PARAMETERS:
            yield module


def _by_way_of_ours(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def loss(
        gate_logits: Any, num_experts: int | None = None, top_k: int = 2, attention_mask: torch.Tensor | None = None
    ) -> Any:
        if not _running.groups or not isinstance(gate_logits, tuple) or num_experts is None:
            return original(gate_logits, num_experts, top_k, attention_mask)
        return balance_over(_running.groups[-1], gate_logits, num_experts, top_k, attention_mask)

    loss.of_one_rank = original  # type: ignore[attr-defined]
    return loss


def balance_over(
    group: dist.ProcessGroup,
    gate_logits: tuple[torch.Tensor, ...],
    num_experts: int,
    top_k: int,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """This rank's balance loss, whose mean over the ranks of `group` is that of all their tokens.

    Args:
        group: ranks with different tokens; all call it.
        gate_logits: of each layer, (token, expert), before softmax.
        num_experts: how many there are.
        top_k: how many each token chooses.
        attention_mask: 1 for the tokens that count, (batch, sequence); None where all do.
    """
    logits = [made_plain(layer) for layer in gate_logits]
    like = logits[0].to(torch.promote_types(logits[0].dtype, torch.float32))
    counting = None if attention_mask is None else plain(attention_mask).reshape(-1).to(like)
    asked, likely, rows = like.new_zeros(num_experts), like.new_zeros(num_experts), like.new_zeros(1)
    for layer in logits:
        probabilities = layer.softmax(-1).to(like.dtype)
        each = like.new_ones(len(layer)) if counting is None else counting
        chosen = probabilities.detach().topk(top_k, dim=-1).indices
        asked = asked.index_add(0, chosen.reshape(-1), each.repeat_interleave(top_k))
        likely = likely + (probabilities * each[:, None]).sum(0)
        rows = rows + each.sum()
    total = torch.cat([asked, rows]).detach()
    dist.all_reduce(total, group=group)
    share = total[:-1] / total[-1]
    return num_experts * (share * likely).sum() * dist.get_world_size(group) / total[-1]

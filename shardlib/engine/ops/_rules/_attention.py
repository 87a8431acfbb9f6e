"""Scaled dot-product attention on every back end: batch, heads or queries may be sharded; under a causal mask queries
on CPU only. On CPU queries, keys and values may all be sharded on the sequence, over an axis named `cp` (`_ring.py`).

With grouped queries (Ainslie et al., arXiv 2305.13245) there may be fewer key heads than ranks: then every rank has all
key heads and computes with those that its own query heads share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from shardlib.engine._torch import named_arguments, schema_of
from shardlib.engine.ops._rows import RING_AXIS, Call, Here, Meta, Op, P, R, Row, S, aten, row, rule
from shardlib.engine.ops._rules._ring import Ring

__all__: list[str] = []

# Outputs by position. "q": sharded as the query, "kv": as key and value, "bias": as the mask, None: replicated.
_ROLES: dict[str, tuple[str | None, ...]] = {
    "_scaled_dot_product_flash_attention_for_cpu": ("q", "q"),
    "_scaled_dot_product_efficient_attention": ("q", "q", None, None),
    "_scaled_dot_product_flash_attention": ("q", "q", None, None, None, None, None, None, None),
    "_scaled_dot_product_cudnn_attention": ("q", "q", None, None, None, None, None, None, None),
    "_scaled_dot_product_fused_attention_overrideable": ("q", "q", None, None, None, None, None, None, None),
    "_scaled_dot_product_attention_math_for_mps": ("q", "weights"),
    "_scaled_dot_product_flash_attention_for_cpu_backward": ("q", "kv", "kv"),
    "_scaled_dot_product_efficient_attention_backward": ("q", "kv", "kv", "bias"),
    "_scaled_dot_product_flash_attention_backward": ("q", "kv", "kv"),
    "_scaled_dot_product_cudnn_attention_backward": ("q", "kv", "kv"),
    "_scaled_dot_product_fused_attention_overrideable_backward": ("q", "kv", "kv", "bias"),
}
_QUERY_LIKE = {"query", "grad_out", "grad_out_", "out", "logsumexp", "log_sumexp", "grad"}
_KEY_LIKE = {"key", "value"}
_BIAS = {"attn_mask", "attn_bias"}


@rule(*map(aten, _ROLES))
def attention(call: Call) -> Iterator[Row]:
    roles = _roles(call.op)
    by_name = dict(zip(call.names, call.inputs, strict=True))
    query, key = by_name["query"], by_name["key"]
    if call.values.get("dropout_p"):
        return  # kernels draw by local index, so that ranks, which share one generator's state, would repeat masks
    yield _row(call, roles, 0, shared_kv=False)
    yield _row(call, roles, 1, shared_kv=key.shape[1] == 1 and query.shape[1] > 1)
    if 1 < key.shape[1] < query.shape[1] and key.shape[1] % call.size:
        yield _row(call, roles, 1, shared_kv=True, compute=_attend)
    bias = next((by_name[n] for n in _BIAS if n in by_name), None)
    by_rows = bias is None or bias.shape[-2] == query.shape[2]
    if call.values.get("is_causal"):
        if _on_cpu(call):  # the other kernels take no mask with is_causal
            yield _row(call, roles, 2, shared_kv=True, compute=_attend)
    elif by_rows:
        yield _row(call, roles, 2, shared_kv=True)
    if call.axis == RING_AXIS and _on_cpu(call) and by_rows and all(dim != 2 for dim, _ in key.cut):
        yield _row(call, roles, 2, shared_kv=False, compute=_attend)


def _roles(op: Op) -> tuple[str | None, ...]:
    return _ROLES[schema_of(op).name.removeprefix("aten::")]


def _on_cpu(call: Call) -> bool:
    return "for_cpu" in schema_of(call.op).name


def _row(call: Call, roles: tuple[str | None, ...], dim: int, *, shared_kv: bool, **options: Any) -> Row:
    """Make the row that splits dim 0 (batch), 1 (heads) or 2 (queries); `shared_kv`: key and value are replicated."""
    split: list[Any] = []
    for name, meta in zip(call.names, call.inputs, strict=True):
        if name in _QUERY_LIKE:
            split.append(S(dim))
        elif name in _KEY_LIKE:
            split.append(R if shared_kv else S(dim))
        elif name in _BIAS:
            split.append(_bias(meta, dim))
        else:
            split.append(R)
    outs = [_out(role, meta, dim, shared_kv) for role, meta in zip(roles, call.outputs, strict=True)]
    return row(outs, split, **options)


def _attend(op: Op, args: list[Any], kwargs: dict[str, Any], here: Here) -> Any:
    """Compute the results of this rank's queries and query heads."""
    roles = _roles(op)
    given = named_arguments(op, tuple(args))
    query, key = given["query"], given["key"]
    number, of_key = (1, 2) if "kv" in roles else (0, 1)  # in backward the gradient is the first operand
    run: Callable[..., Any] = op
    causal = bool(given.get("is_causal"))
    if key.shape[2] < here.shape(of_key)[2]:
        ring = Ring(here, number, of_key, causal)
        run = partial(ring.backward if "kv" in roles else ring.forward, op)
    elif causal and query.shape[2] < here.shape(number)[2]:
        given["is_causal"] = False
        kwargs = {**kwargs, "attn_mask": _until(here.offset(number, 2), query.shape[2], key)}
    group = here.shape(number)[1] // here.shape(of_key)[1]
    if query.shape[1] == key.shape[1] * group:
        return run(*given.values(), **kwargs)
    shared = _shared_heads(here.offset(number, 1), query.shape[1], group)
    heads = torch.tensor(shared, device=key.device)
    own = [x.index_select(1, heads) if name in _KEY_LIKE else x for name, x in given.items()]
    result = run(*own, **kwargs)
    key_and_value = iter((key, given["value"]))
    return tuple(
        torch.zeros_like(next(key_and_value)).index_add_(1, heads, out) if role == "kv" else out
        for role, out in zip(roles, result, strict=True)
    )


def _until(first: int, count: int, key: torch.Tensor) -> torch.Tensor:
    """Return the rows of a causal mask for some queries: 0 for keys up to each query, minus infinity for later keys.

    >>> _until(1, 2, torch.zeros(1, 1, 4, 8))
    tensor([[0., 0., -inf, -inf],
            [0., 0., 0., -inf]])
    """
    later = torch.full((count, key.shape[2]), -torch.inf, dtype=key.dtype, device=key.device)
    return later.triu_(first + 1)


def _shared_heads(first: int, count: int, group: int) -> list[int]:
    """Return the key heads of query heads [first, first + count); one per query head if groups are incomplete.

    >>> _shared_heads(2, 2, group=4), _shared_heads(8, 8, group=4), _shared_heads(3, 3, group=4)
    ([0], [2, 3], [0, 1, 1])
    """
    heads = [head // group for head in range(first, first + count)]
    shared = sorted(set(heads))
    return shared if len(shared) == 1 or count == group * len(shared) else heads


def _bias(meta: Meta, dim: int) -> Any:
    own = dim - (4 - meta.ndim)
    return S(own) if own >= 0 and meta.shape[own] > 1 else R


def _out(role: str | None, meta: Meta | None, dim: int, shared_kv: bool) -> Any:
    if meta is None or role is None:
        return None if meta is None else R
    if role == "kv":
        return P if shared_kv else S(dim)
    if role == "bias":
        placement = _bias(meta, dim)
        return P if placement is R else placement
    return S(dim)

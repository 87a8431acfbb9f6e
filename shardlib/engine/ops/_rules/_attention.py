"""Scaled dot-product attention on every back end: batch, heads, or (without a causal mask) queries may be split."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from shardlib.engine.ops._rows import Call, Meta, P, R, Row, S, aten, row, rule

__all__: list[str] = []

# Outputs by position. "q": laid out as the query, "kv": as key and value, "bias": as the mask, None: whole.
_FORWARD: dict[str, tuple[str | None, ...]] = {
    "_scaled_dot_product_flash_attention_for_cpu": ("q", "q"),
    "_scaled_dot_product_efficient_attention": ("q", "q", None, None),
    "_scaled_dot_product_flash_attention": ("q", "q", None, None, None, None, None, None, None),
    "_scaled_dot_product_cudnn_attention": ("q", "q", None, None, None, None, None, None, None),
    "_scaled_dot_product_fused_attention_overrideable": ("q", "q", None, None, None, None, None, None, None),
    "_scaled_dot_product_attention_math_for_mps": ("q", "weights"),
}
_BACKWARD: dict[str, tuple[str | None, ...]] = {
    "_scaled_dot_product_flash_attention_for_cpu_backward": ("q", "kv", "kv"),
    "_scaled_dot_product_efficient_attention_backward": ("q", "kv", "kv", "bias"),
    "_scaled_dot_product_flash_attention_backward": ("q", "kv", "kv"),
    "_scaled_dot_product_cudnn_attention_backward": ("q", "kv", "kv"),
    "_scaled_dot_product_fused_attention_overrideable_backward": ("q", "kv", "kv", "bias"),
}
_QUERY_LIKE = {"query", "grad_out", "grad_out_", "out", "logsumexp", "log_sumexp", "grad"}
_KEY_LIKE = {"key", "value"}
_BIAS = {"attn_mask", "attn_bias"}


def _rows(call: Call, roles: tuple[str | None, ...]) -> Iterator[Row]:
    by_name = dict(zip(call.names, call.inputs, strict=True))
    query, key = by_name["query"], by_name["key"]
    if call.values.get("dropout_p") and _on_cpu(call):
        return  # one random draw for all heads: the ranks' own draws would not be the single device's
    yield _row(call, roles, 0, shared_kv=False)
    yield _row(call, roles, 1, shared_kv=key.shape[1] == 1 and query.shape[1] > 1)
    bias = next((by_name[n] for n in _BIAS if n in by_name), None)
    if not call.values.get("is_causal") and (bias is None or bias.shape[-2] == query.shape[2]):
        yield _row(call, roles, 2, shared_kv=True)


def _on_cpu(call: Call) -> bool:
    return "for_cpu" in call.op._schema.name


def _row(call: Call, roles: tuple[str | None, ...], dim: int, *, shared_kv: bool) -> Row:
    """Split dim 0 (batch), 1 (heads) or 2 (queries); `shared_kv`: every rank needs all of key and value."""
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
    return row(outs, split)


def _bias(meta: Meta, dim: int) -> Any:
    own = dim - (4 - meta.ndim)
    return S(own) if own >= 0 and meta.shape[own] > 1 else R


def _out(role: str | None, meta: Meta | None, dim: int, shared_kv: bool) -> Any:
    if meta is None or role is None:
        return None if meta is None else R
    if role == "kv":
        return P if shared_kv else S(dim)
    if role == "bias":
        place = _bias(meta, dim)
        return P if place is R else place
    return S(dim)


def _register() -> None:
    for name, roles in {**_FORWARD, **_BACKWARD}.items():

        def rows(call: Call, roles: tuple[str | None, ...] = roles) -> Iterable[Row]:
            return _rows(call, roles)

        rule(aten(name))(rows)


_register()

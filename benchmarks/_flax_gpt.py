"""The example GPT written in flax, with the operations of the other two, and its parameters from torch's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from torch import Tensor

import shardlib as sl

RULES = sl.Rules(
    {
        "qkv.kernel": "in qkv heads@tp head",
        "qkv.bias": "qkv heads@tp head",
        "proj.kernel": "in@tp out",
        "up.*": "... out@tp",
        "down.kernel": "in@tp out",
        "embed.embedding": "vocab@tp embed",
    },
    unmatched="replicate",
)


class Block(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, seq, width = x.shape
        head = width // self.heads
        causal = jnp.tril(jnp.ones((seq, seq), bool))
        qkv = nn.DenseGeneral((3, self.heads, head), name="qkv")(_norm("norm1")(x))
        q, k, v = (qkv[:, :, at].swapaxes(1, 2) for at in range(3))
        scores = jnp.where(causal, (q / math.sqrt(head)) @ k.swapaxes(-1, -2), -jnp.inf)
        mixed = (jax.nn.softmax(scores) @ v).swapaxes(1, 2).reshape(batch, seq, width)
        x = x + nn.Dense(width, name="proj")(mixed)
        hidden = nn.Dense(4 * width, name="up")(_norm("norm2")(x))
        return x + nn.Dense(width, name="down")(nn.gelu(hidden, approximate=False))


class GPT(nn.Module):
    vocab: int
    context: int
    layers: int
    heads: int
    width: int

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocab, self.width, name="embed")
        x = embed(ids) + nn.Embed(self.context, self.width, name="position")(jnp.arange(ids.shape[1]))
        for at in range(self.layers):
            x = Block(self.heads, name=f"blocks_{at}")(x)
        return embed.attend(_norm("norm")(x))


def _norm(name: str) -> nn.LayerNorm:
    return nn.LayerNorm(epsilon=1e-5, use_fast_variance=False, name=name)


def params_of(state: Mapping[str, Tensor], layers: int, heads: int) -> dict[str, Any]:
    """flax's tree of the tensors of torch's GPT: kernels are `in out`, those of q, k and v have heads as dims."""

    def linear(name: str) -> dict[str, Tensor]:
        return {"kernel": state[f"{name}.weight"].T, "bias": state[f"{name}.bias"]}

    def norm(name: str) -> dict[str, Tensor]:
        return {"scale": state[f"{name}.weight"], "bias": state[f"{name}.bias"]}

    def block(name: str) -> dict[str, Any]:
        qkv = {key: tensor.unflatten(-1, (3, heads, -1)) for key, tensor in linear(f"{name}.attn.qkv").items()}
        mlp = {part: linear(f"{name}.mlp.{part}") for part in ("up", "down")}
        norms = {part: norm(f"{name}.{part}") for part in ("norm1", "norm2")}
        return {"qkv": qkv, "proj": linear(f"{name}.attn.proj"), **mlp, **norms}

    embeddings = {name: {"embedding": state[f"{name}.weight"]} for name in ("embed", "position")}
    blocks = {f"blocks_{at}": block(f"blocks.{at}") for at in range(layers)}
    return {**embeddings, **blocks, "norm": norm("norm")}

"""A GPT of two blocks in flax.nnx, equinox and haiku, with Megatron's rules for each, and without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["GPTS", "Example", "gpt"]

WIDTH, HEADS, CONTEXT, VOCAB, LAYERS = 32, 8, 16, 64, 2


@dataclass(frozen=True)
class Example:
    """A model of one library.

    Attributes:
        params: its parameters.
        apply: from parameters and token ids to logits.
        rules: query, key, value, up and head split by columns, out and down by rows.
        names: the names of query, out, up and down in these rules.
    """

    params: Any
    apply: Callable[[Any, Any], Any]
    rules: dict[str, Any]
    names: tuple[str, str, str, str]


def _nnx() -> Example:
    import nnx_gpt
    from flax import nnx

    graph, params, *rest = nnx.split(nnx_gpt.build(CONTEXT, WIDTH, HEADS, LAYERS), nnx.Param, ...)
    split = {"query": "colwise", "key": "colwise", "value": "colwise", "out": "rowwise"}
    split |= {"up": "colwise", "down": "rowwise", "head": "colwise"}
    return Example(params, lambda p, x: nnx.merge(graph, p, *rest)(x), split, ("query", "out", "up", "down"))


def _equinox() -> Example:
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    class Block(eqx.Module):
        norms: list[eqx.nn.LayerNorm]
        attention: eqx.nn.MultiheadAttention
        up: eqx.nn.Linear
        down: eqx.nn.Linear

        def __init__(self, key: Any) -> None:
            keys = jax.random.split(key, 3)
            self.norms = [eqx.nn.LayerNorm(WIDTH) for _ in "ab"]
            self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=keys[0])
            self.up = eqx.nn.Linear(WIDTH, 4 * WIDTH, key=keys[1])
            self.down = eqx.nn.Linear(4 * WIDTH, WIDTH, key=keys[2])

        def __call__(self, x: Any) -> Any:
            h = jax.vmap(self.norms[0])(x)
            x = x + self.attention(h, h, h, mask=jnp.tril(jnp.ones((len(x), len(x)), bool)))
            return x + jax.vmap(lambda row: self.down(jax.nn.gelu(self.up(row))))(jax.vmap(self.norms[1])(x))

    class GPT(eqx.Module):
        embed: eqx.nn.Embedding
        position: Any
        blocks: list[Block]
        head: eqx.nn.Linear

        def __init__(self, key: Any) -> None:
            keys = jax.random.split(key, LAYERS + 3)
            self.embed = eqx.nn.Embedding(VOCAB, WIDTH, key=keys[0])
            self.position = jax.random.normal(keys[1], (CONTEXT, WIDTH))
            self.blocks = [Block(each) for each in keys[3:]]
            self.head = eqx.nn.Linear(WIDTH, VOCAB, key=keys[2])

        def __call__(self, ids: Any) -> Any:
            x = jax.vmap(self.embed)(ids) + self.position
            for block in self.blocks:
                x = block(x)
            return jax.vmap(self.head)(x)

    params, rest = eqx.partition(GPT(jax.random.key(0)), eqx.is_array)
    split = {"query_proj": "colwise", "key_proj": "colwise", "value_proj": "colwise", "output_proj": "rowwise"}
    split |= {"up": "colwise", "down": "rowwise", "head": "colwise"}
    names = ("query_proj", "output_proj", "up", "down")
    return Example(params, lambda p, x: jax.vmap(eqx.combine(p, rest))(x), split, names)


def _haiku() -> Example:
    import haiku as hk
    import jax
    import jax.numpy as jnp

    start = hk.initializers.VarianceScaling(1.0)

    def norm(x: Any) -> Any:
        return hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)

    def model(ids: Any) -> Any:
        x = hk.Embed(VOCAB, WIDTH, name="embed")(ids) + hk.get_parameter("position", (CONTEXT, WIDTH), init=start)
        mask = jnp.tril(jnp.ones((1, 1, CONTEXT, CONTEXT)))
        for _ in range(LAYERS):
            h = norm(x)
            x = x + hk.MultiHeadAttention(HEADS, WIDTH // HEADS, w_init=start, name="attention")(h, h, h, mask)
            x = x + hk.Linear(WIDTH, name="down")(jax.nn.gelu(hk.Linear(4 * WIDTH, name="up")(norm(x))))
        return hk.Linear(VOCAB, name="head")(x)

    made: Any = hk.without_apply_rng(hk.transform(model))
    params = made.init(jax.random.key(0), jnp.zeros((2, CONTEXT), "int32"))
    split = {"query": "colwise", "key": "colwise", "value": "colwise", "attention*.linear": "rowwise"}
    split |= {"up*": "colwise", "down*": "rowwise", "head": "colwise"}
    return Example(params, made.apply, split, ("query", "attention*.linear", "up*", "down*"))


GPTS = {"nnx": _nnx, "equinox": _equinox, "haiku": _haiku}


def gpt(name: str) -> Example:
    return GPTS[name]()

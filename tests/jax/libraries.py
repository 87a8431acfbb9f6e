"""Tiny models of flax, equinox, haiku and Keras, with the layouts that roles give their layers."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["LIBRARIES", "Library", "library"]

WIDTH, INNER, VOCAB = 8, 16, 24


@dataclass(frozen=True)
class Library:
    """A model of one library: a table of embeddings, a layer that widens, a norm and a layer that narrows.

    Attributes:
        params: its parameters.
        apply: from parameters and token ids to an array.
        shapes: the same parameters as shapes, from an abstract initialization.
        prefix: the name of the level with the layers.
        specs: the spec of each parameter, by the end of its name.
    """

    params: Any
    apply: Callable[[Any, Any], Any]
    shapes: Any
    prefix: str
    specs: dict[str, tuple[Any, ...]]


IN_OUT: dict[str, tuple[Any, ...]] = {
    "table.embedding": ("tp", None),
    "up.kernel": (None, "tp"),
    "up.bias": ("tp",),
    "norm.scale": (None,),
    "norm.bias": (None,),
    "down.kernel": ("tp", None),
    "down.bias": (None,),
}


def _nnx() -> Library:
    import jax
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.table = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
            self.up = nnx.Linear(WIDTH, INNER, rngs=rngs)
            self.norm = nnx.LayerNorm(INNER, rngs=rngs)
            self.down = nnx.Linear(INNER, WIDTH, rngs=rngs)
            self.drop = nnx.Dropout(0.0, rngs=rngs)

        def __call__(self, ids: Any) -> Any:
            return self.drop(self.down(jax.nn.relu(self.norm(self.up(self.table(ids))))))

    graph, params, rest = nnx.split(Model(), nnx.Param, ...)
    shapes = nnx.eval_shape(lambda: nnx.state(Model(), nnx.Param))
    return Library(params, lambda p, x: nnx.merge(graph, p, rest)(x), shapes, "", IN_OUT)


def _linen() -> Library:
    import jax
    import jax.numpy as jnp
    from flax import linen

    class Model(linen.Module):
        @linen.compact
        def __call__(self, ids: Any) -> Any:
            x = linen.Embed(VOCAB, WIDTH, name="table")(ids)
            x = linen.LayerNorm(name="norm")(linen.Dense(INNER, name="up")(x))
            return linen.Dense(WIDTH, name="down")(jax.nn.relu(x))

    model, ids = Model(), jnp.zeros((2, 3), "int32")
    shapes = jax.eval_shape(model.init, jax.random.key(0), ids)
    return Library(model.init(jax.random.key(0), ids), model.apply, shapes, "params.", IN_OUT)


def _equinox() -> Library:
    import equinox as eqx
    import jax

    class Model(eqx.Module):
        table: eqx.nn.Embedding
        up: eqx.nn.Linear
        norm: eqx.nn.LayerNorm
        down: eqx.nn.Linear

        def __init__(self, key: Any) -> None:
            keys = jax.random.split(key, 3)
            self.table = eqx.nn.Embedding(VOCAB, WIDTH, key=keys[0])
            self.up = eqx.nn.Linear(WIDTH, INNER, key=keys[1])
            self.norm = eqx.nn.LayerNorm(INNER)
            self.down = eqx.nn.Linear(INNER, WIDTH, key=keys[2])

        def __call__(self, token: Any) -> Any:
            return self.down(jax.nn.relu(self.norm(self.up(self.table(token)))))

    specs = {
        "table.weight": ("tp", None),
        "up.weight": ("tp", None),
        "up.bias": ("tp",),
        "norm.weight": (None,),
        "norm.bias": (None,),
        "down.weight": (None, "tp"),
        "down.bias": (None,),
    }
    params, rest = eqx.partition(Model(jax.random.key(0)), eqx.is_array)
    shapes = eqx.filter(eqx.filter_eval_shape(Model, jax.random.key(0)), lambda leaf: hasattr(leaf, "dtype"))
    return Library(params, lambda p, x: jax.vmap(jax.vmap(eqx.combine(p, rest)))(x), shapes, "", specs)


def _haiku() -> Library:
    import haiku as hk
    import jax
    import jax.numpy as jnp

    def model(ids: Any) -> Any:
        x = hk.Linear(INNER, name="up")(hk.Embed(VOCAB, WIDTH, name="table")(ids))
        x = hk.LayerNorm(-1, create_scale=True, create_offset=True, name="norm")(x)
        return hk.Linear(WIDTH, name="down")(jax.nn.relu(x))

    made, ids = hk.without_apply_rng(hk.transform(model)), jnp.zeros((2, 3), "int32")
    specs = {
        "table.embeddings": ("tp", None),
        "up.w": (None, "tp"),
        "up.b": ("tp",),
        "norm.scale": (None,),
        "norm.offset": (None,),
        "down.w": ("tp", None),
        "down.b": (None,),
    }
    shapes = jax.eval_shape(made.init, jax.random.key(0), ids)
    return Library(made.init(jax.random.key(0), ids), made.apply, shapes, "", specs)


def _keras() -> Library:
    os.environ["KERAS_BACKEND"] = "jax"  # Keras reads it once
    import jax
    import keras

    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    layers = [
        keras.Input((3,), dtype="int32"),
        keras.layers.Embedding(VOCAB, WIDTH, name="table"),
        keras.layers.Dense(INNER, name="up"),
        keras.layers.ReLU(),
        keras.layers.Dense(WIDTH, name="down"),
    ]
    model = keras.Sequential(layers, name="net")
    keras.config.set_floatx(before)
    params = {variable.path: variable.value for variable in model.trainable_variables}
    order = [variable.path for variable in model.trainable_variables]

    def apply(p: Any, x: Any) -> Any:
        return model.stateless_call([p[path] for path in order], [], x)[0]

    # Its norms compute in float32 whatever their dtype, so the model has none.
    specs = {name.replace("embedding", "embeddings"): spec for name, spec in IN_OUT.items() if "norm" not in name}
    return Library(params, apply, jax.eval_shape(lambda: params), "net.", specs)


LIBRARIES = {"nnx": _nnx, "linen": _linen, "equinox": _equinox, "haiku": _haiku, "keras": _keras}


def library(name: str) -> Library:
    return LIBRARIES[name]()

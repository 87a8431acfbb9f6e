"""Functions of JAX typed on meshes of devices that are not there, and compiled on eight that are. Runs where JAX is."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

import shardlib as sl
import shardlib.jax as sj
from tests.jax.gpts import CONTEXT, gpt

__all__ = [
    "COLUMNS",
    "ROWS",
    "compiled",
    "forward",
    "gradient",
    "of_mlp",
    "program",
    "unlike_unrolled",
]

COLUMNS, ROWS = "in out@tp", "in@tp out"


def _rules(name: str, changes: Mapping[str, Any]) -> sl.Rules:
    """Megatron's rules, with changes; None leaves a rule out."""
    example = gpt(name)
    named = dict(zip(("query", "out", "up", "down"), example.names, strict=True))
    rules = example.rules | {named.get(key, key): layout for key, layout in changes.items()}
    return sl.Rules({key: layout for key, layout in rules.items() if layout is not None}, unmatched="replicate")


def forward(name: str, mesh: str, changes: Mapping[str, Any] = {}) -> sj.LayoutReport:
    example, ids = gpt(name), jax.ShapeDtypeStruct((512, CONTEXT), "int32")
    return sj.check_layouts(example.apply, mesh, _rules(name, changes), example=(example.params, ids))


def gradient(name: str, mesh: str) -> sj.LayoutReport:
    example, ids = gpt(name), jax.ShapeDtypeStruct((512, CONTEXT), "int32")

    def loss(params: Any, ids: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(example.apply(params, ids), ids).mean()

    return sj.check_layouts(jax.value_and_grad(loss), mesh, _rules(name, {}), example=(example.params, ids))


def compiled(name: str, mesh: str, changes: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """The communications that are typed, and the collectives that XLA compiles."""
    example, ids, on = gpt(name), jax.ShapeDtypeStruct((8, CONTEXT), "int32"), sj.make_mesh(mesh)
    rules = _rules(name, changes)
    report = sj.check_layouts(example.apply, on, rules, example=(example.params, ids))
    shardings = sj.shardings(example.params, on, rules), jax.NamedSharding(on, jax.P("dp"))
    return dict(report.moved), _collectives(jax.jit(example.apply, in_shardings=shardings), example.params, ids)


def _collectives(jitted: Any, *args: Any) -> dict[str, int]:
    text = jitted.lower(*args).compile().as_text() or ""
    kinds = {"all-reduce": "sum", "all-gather": "gather", "all-to-all": "exchange", "collective-permute": "exchange"}
    return dict(Counter(kinds[kind] for kind in re.findall(rf" ({'|'.join(kinds)})(?:-start)?\(", text)))


# --- programs of programs --------------------------------------------------------------------------------------------

LAYERS, ROWS_OF_BATCH, WIDTH, INNER = 3, 64, 16, 32


def _block(h: Any, w: Any) -> Any:
    return h + jnp.tanh(h @ w["up"]) @ w["down"]


def _layer(p: Any, i: Any) -> Any:
    return jax.tree.map(lambda a: a[i], p)


def _unrolled(p: Any, x: Any, block: Callable[[Any, Any], Any] = _block) -> Any:
    for i in range(LAYERS):
        x = block(x, _layer(p, i))
    return x


def _branched(h: Any, w: Any) -> Any:
    return jax.lax.cond(h.shape[0] > jnp.int32(3), _block, lambda h, w: _block(h, w), h, w)


@jax.custom_vjp
def _custom(h: Any, w: Any) -> Any:
    return _block(h, w)


_custom.defvjp(lambda h, w: jax.vjp(_block, h, w), lambda pulled, g: pulled(g))

ALIKE: dict[str, Callable[[Any, Any], Any]] = {
    "scan": lambda p, x: jax.lax.scan(lambda h, w: (_block(h, w), None), x, p)[0],
    "scan backwards": lambda p, x: jax.lax.scan(lambda h, w: (_block(h, w), None), x, p, reverse=True)[0],
    "scan, unsharded start": lambda p, x: jax.lax.scan(
        lambda h, w: (_block(h + x, w), None), jnp.zeros((ROWS_OF_BATCH, WIDTH)), p
    )[0],
    "scan in scan": lambda p, x: jax.lax.scan(
        lambda h, w: (jax.lax.scan(lambda h, _: (_block(h, w), None), h, jnp.zeros(1))[0], None), x, p
    )[0],
    "fori_loop": lambda p, x: jax.lax.fori_loop(0, LAYERS, lambda i, h: _block(h, _layer(p, i)), x),
    "jit": lambda p, x: _unrolled(p, x, jax.jit(_block)),
    "cond": lambda p, x: _unrolled(p, x, _branched),
    "custom_vjp": lambda p, x: _unrolled(p, x, _custom),
    "checkpoint": lambda p, x: _unrolled(p, x, jax.checkpoint(_block)),
    "vmap": lambda p, x: jax.vmap(lambda row: _unrolled(p, row))(x),
}


def unlike_unrolled(name: str, gradients: bool) -> tuple[list[str], int]:
    """Layouts for which a program finds something else than the same blocks one after the other; how many it finds."""
    layouts = {"whole": None, "columns": f"layer {COLUMNS}", "rows": f"layer {ROWS}"}
    wrong, found = [], 0
    for up, down in itertools.product(layouts, repeat=2):
        rules = {"up": layouts[up], "down": layouts[down]}
        reports = [_stacked(function, rules, gradients=gradients) for function in (ALIKE[name], _unrolled)]
        # After a finding, which layout typing goes on with is arbitrary.
        mine, theirs = (
            ({f.conflict for f in r.findings} or dict(r.moved), [f.conflict for f in r.reshards]) for r in reports
        )
        found += len(reports[1].findings) + sum(reports[1].moved.values())
        if mine != theirs:
            wrong.append(f"up {up}, down {down}: {mine}, and unrolled {theirs}")
    return wrong, found


def _stacked(function: Callable[..., Any], rules: Mapping[str, Any], *, gradients: bool) -> sj.LayoutReport:
    shape = jax.ShapeDtypeStruct
    params = {
        "up": shape((LAYERS, WIDTH, INNER), jnp.float32),
        "down": shape((LAYERS, INNER, WIDTH), jnp.float32),
    }
    used = jax.grad(lambda p, x: jnp.square(function(p, x)).mean(), argnums=(0, 1)) if gradients else function
    return sj.check_layouts(used, "dp=4,tp=8", rules, example=(params, shape((ROWS_OF_BATCH, WIDTH), jnp.float32)))


def of_mlp(function: Callable[..., Any], *batch: Any, mesh: Any = "dp=4,tp=8", **rules: Any) -> sj.LayoutReport:
    """Check a function of two weights "a" and "b", of 64 by 64, and of a batch of 256 rows."""
    shape = jax.ShapeDtypeStruct
    params = {"a": shape((64, 64), jnp.float32), "b": shape((64, 64), jnp.float32)}
    batch = batch or (shape((256, 64), jnp.float32),)
    return sj.check_layouts(function, mesh, {"a": None, "b": None} | rules, example=(params, *batch))


def _psum(p: Any, x: Any) -> Any:
    def local(x: Any, w: Any) -> Any:
        return jax.lax.psum(x @ w, "tp")

    return jax.shard_map(local, in_specs=(jax.P("dp", "tp"), jax.P("tp")), out_specs=jax.P("dp"))(x, p["a"])


def _over_dp(p: Any, x: Any) -> Any:
    """Gather over one axis by hand, while the other one is the partitioner's."""

    def local(h: Any) -> Any:
        return jax.lax.all_gather(h, "dp", tiled=True)

    gathered = jax.shard_map(local, axis_names={"dp"}, in_specs=jax.P("dp"), out_specs=jax.P(), check_vma=False)
    return gathered(x @ p["a"]) * 2.0


def _summed_over_dp(p: Any, x: Any) -> Any:
    """Sum over one axis by hand, beside a constant, which is cast to vary over it."""

    def local(h: Any) -> Any:
        return jax.lax.psum(h.sum(0, keepdims=True) + jnp.ones((1, 64)), "dp")

    return jax.shard_map(local, axis_names={"dp"}, in_specs=jax.P("dp"), out_specs=jax.P())(x @ p["a"]) * 2.0


def _to_tokens(p: Any, x: Any) -> Any:
    return jax.lax.with_sharding_constraint(x @ p["a"], jax.P(None, "dp"))


def _disagree(p: Any, x: Any) -> Any:
    turned = jax.lax.with_sharding_constraint(x, jax.P("tp"))
    return jax.lax.cond(x[0, 0] > 0, lambda: x, lambda: turned)


def _turning(p: Any, x: Any) -> Any:
    return jax.lax.fori_loop(0, 3, lambda _, h: jax.lax.with_sharding_constraint(h, jax.P(None, "dp")), x)


def _turning_back(p: Any, x: Any) -> Any:
    start = jax.lax.with_sharding_constraint(x, jax.P(None, "tp"))
    return jax.lax.fori_loop(0, 3, lambda _, h: jax.lax.with_sharding_constraint(h, jax.P("tp")), start)


def _while(p: Any, x: Any) -> Any:
    return jax.lax.while_loop(lambda h: h[0, 0] > 0, lambda h: jnp.tanh(h @ p["a"]), x)


def _branches(p: Any, x: Any) -> Any:
    return jax.lax.switch(jnp.int32(x[0, 0]), [lambda: x, lambda: x @ p["a"], lambda: x @ p["a"] @ p["b"]])


def _labels(p: Any, x: Any) -> Any:
    labels = x.argmax(1)
    return jnp.square(jnp.take_along_axis(jax.nn.log_softmax(x @ p["a"]), labels[:, None], axis=1)).sum()


def _callback(p: Any, x: Any) -> Any:
    return jax.pure_callback(lambda h: h, jax.ShapeDtypeStruct(x.shape, x.dtype), x @ p["a"])


PROGRAMS: dict[str, tuple[Callable[..., Any], dict[str, str]]] = {
    "psum": (_psum, {"a": ROWS}),
    "psum of columns": (_psum, {"a": COLUMNS}),
    "all_gather": (_over_dp, {"a": COLUMNS}),
    "psum over one axis": (_summed_over_dp, {"a": COLUMNS}),
    "constraint": (_to_tokens, {}),
    "gradient of a sum": (jax.grad(lambda p, x: (x @ p["a"]).sum()), {"a": COLUMNS}),
    "cond of two layouts": (_disagree, {}),
    "loop that turns its carry back": (_turning_back, {}),
    "loop that turns its carry": (_turning, {}),
    "while": (_while, {"a": ROWS}),
    "while of columns": (_while, {"a": COLUMNS}),
    "switch": (_branches, {"a": ROWS, "b": ROWS}),
    "scan over a sharded dim": (lambda p, x: jax.lax.map(lambda row: row @ p["a"], x), {}),
    "labels": (jax.grad(_labels), {"a": COLUMNS}),
    "callback": (_callback, {"a": COLUMNS}),
}


def program(name: str) -> sj.LayoutReport:
    function, rules = PROGRAMS[name]
    return of_mlp(function, **rules)

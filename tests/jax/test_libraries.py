"""Models of flax, equinox, haiku and Keras are laid out by roles, and train on eight devices as on one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.jax import on_devices
from tests.jax.libraries import LIBRARIES, Library, library

ROLES = {"table": "vocab@tp embed", "up": "colwise", "norm": None, "down": "rowwise"}
OPTIMIZERS = ("adamw", "chain", "masked", "adafactor")


def _named(tree: Any) -> dict[str, Any]:
    from shardlib.rules.trees import Tree

    read = Tree.of(tree)
    return {name: leaf for name, leaf in zip(read.names, read.leaves, strict=True) if name is not None}


def _roles(made: Library) -> dict[str, Any]:
    layers = {name.partition(".")[0] for name in made.specs}
    return {layer: role for layer, role in ROLES.items() if layer in layers}


def _specs_of(name: str) -> dict[str, Any]:
    import jax

    import shardlib as sl
    import shardlib.jax as sj
    from shardlib.jax import rules as tree_rules

    made = library(name)
    rules = sl.Rules(_roles(made))
    plan = tree_rules.plan(made.params, "dp=2,tp=4", rules)
    assert plan == tree_rules.plan(made.shapes, "dp=2,tp=4", rules)
    coverage = rules.coverage(made.params)
    assert coverage.unmatched_bytes == 0 and all(row.tensors for row in coverage.rows)
    specs = sj.shardings(made.params, sj.make_mesh("dp=2,tp=4"), plan)
    found = dict(zip(_named(made.params), jax.tree.leaves(specs), strict=True))
    explained = [rules.explain(each, made.shapes, "dp=2,tp=4") for each in found]
    assert all(f"spec     {found[each].spec}" in text for each, text in zip(found, explained, strict=True))
    prefixed = {made.prefix + key: jax.P(*spec) for key, spec in made.specs.items()}
    return {
        "specs": {key: str(each.spec) for key, each in found.items()},
        "wanted": {k: str(v) for k, v in prefixed.items()},
    }


@pytest.mark.parametrize("name", LIBRARIES)
def test_roles_split_the_dims_that_the_layers_of_a_library_have(name: str):
    found = on_devices.run(_specs_of, name)
    assert found["specs"] == found["wanted"]


def _optimizer(name: str, params: Any) -> Any:
    import jax
    import optax

    made = {
        "adamw": lambda: optax.adamw(1e-2),
        "chain": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
        "masked": lambda: optax.masked(optax.adamw(1e-2), jax.tree.map(lambda leaf: leaf.ndim > 1, params)),
        "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    }
    return made[name]()


def _trained(name: str, optimizer: str) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import shardlib as sl
    import shardlib.jax as sj
    from shardlib.jax import rules as tree_rules

    made, mesh = library(name), sj.make_mesh("dp=2,tp=4")
    params = jax.tree.map(lambda leaf: leaf.astype("float64"), made.params)
    ids = jnp.asarray(np.arange(12).reshape(4, 3) % 24)
    opt = _optimizer(optimizer, params)

    def loss(p: Any) -> Any:
        return (made.apply(p, ids) ** 2).mean()

    def step(p: Any, state: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(p)
        updates, state = opt.update(grads, state, p)
        return value, optax.apply_updates(p, updates), state, grads

    plan = tree_rules.plan(params, mesh, sl.Rules(_roles(made)), transforms=[sl.zero(1)])
    of = {phase: sj.shardings(params, mesh, plan, phase=phase) for phase in ("stored", "grad")}
    state_shapes = jax.eval_shape(opt.init, params)
    of_state = sj.shardings(state_shapes, mesh, plan, phase="state")
    assert jax.tree.structure(of_state) == jax.tree.structure(state_shapes)
    placed, state = jax.device_put(params, of["stored"]), jax.jit(opt.init, out_shardings=of_state)(params)
    outs = (None, of["stored"], of_state, of["grad"])
    sharded, alone = jax.jit(step, out_shardings=outs), jax.jit(step)
    p, s = params, opt.init(params)
    for _ in range(2):
        value, placed, state, grads = sharded(placed, state)
        other, p, s, g = alone(p, s)
        compared = zip(jax.tree.leaves((value, placed, state, grads)), jax.tree.leaves((other, p, s, g)), strict=True)
        worst = max(float(abs(np.asarray(a) - np.asarray(b)).max()) for a, b in compared)
    by_size = [(leaf.sharding.spec, leaf.shape) for leaf in jax.tree.leaves(state) if leaf.ndim > 1]
    specs = {name.replace("params.", ""): str(leaf.sharding.spec) for name, leaf in _named(state).items()}
    return {
        "worst": worst,
        "split": sum("dp" in str(spec) for spec, _ in by_size),
        "matrices": len(by_size),
        "means": {name[2:]: specs[name] for name in specs if "v_" in name and "kernel" in name},
    }


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [(name, "adamw") for name in LIBRARIES] + [("linen", each) for each in OPTIMIZERS[1:]] + [("nnx", "adafactor")],
)
def test_a_library_trains_on_a_mesh_as_on_one_device(name: str, optimizer: str):
    """Sums over tp are reassociated, so numbers differ in the last bits: 1e-10 in float64, as everywhere."""
    found = on_devices.run(_trained, name, optimizer)
    assert found["worst"] < 1e-10
    if optimizer != "adafactor":
        assert found["split"] == found["matrices"] > 0
        return
    # Of kernels with layouts "in@dp out@tp" and "in@(tp,dp) out"; the larger dim is reduced for rows.
    assert found["means"] == {
        "v_row.up.kernel": "P('dp',)",
        "v_col.up.kernel": "P('tp',)",
        "v_row.down.kernel": "P(None,)",
        "v_col.down.kernel": "P(('tp', 'dp'),)",
    }

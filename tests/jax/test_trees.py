"""Trees of arrays are laid out by the rules that models are, and flax's logical axes say the same."""

from __future__ import annotations

from typing import Any

import torch

from tests.jax import on_devices
from tests.jax.refusals import raised


def _laid_out() -> dict[str, Any]:
    import jax.numpy as jnp
    import numpy as np

    import shardlib as sl
    import shardlib.jax as sj

    logical = {"layers": [{"kernel": ("embed", "mlp"), "bias": ("mlp",)}], "square": ("mlp", None), "scale": ()}
    rules = sl.Rules.from_logical_axes(logical, [("embed", "dp"), ("mlp", ("dp", "tp")), ("mlp", "tp")])
    tree = {
        "layers": [{"kernel": torch.arange(32.0).view(4, 8), "bias": np.arange(8, dtype="float32")}],
        "square": jnp.ones((8, 8)),
        "scale": jnp.ones(()),
    }
    laid = sj.shard_params(tree, sj.make_mesh("dp=2,tp=4"), rules)
    assert np.array_equal(laid["layers"][0]["kernel"], np.arange(32.0).reshape(4, 8))
    specs = {"kernel": laid["layers"][0]["kernel"], "bias": laid["layers"][0]["bias"], "square": laid["square"]}
    found: dict[str, Any] = {name: str(array.sharding.spec) for name, array in specs.items()}
    mesh = sj.make_mesh("tp=8")
    found["odd"] = raised(lambda: sj.shard_params({"odd": jnp.ones(6)}, mesh, {"odd": "rows@tp"}))
    found["text"] = raised(lambda: sj.shard_params({"even": jnp.ones(8)}, "tp=8", {"even": "rows@tp"}))  # type: ignore[arg-type]
    found["step"] = raised(lambda: sj.shard_params({"step": 3}, mesh, {"step": None}))
    found["wide"] = raised(lambda: sj.shard_params({"wide": np.ones(6)}, mesh, {"wide": None}))
    found["dots"] = raised(lambda: sj.shard_params({"a.b": np.ones(1), "a": {"b": np.ones(1)}}, mesh, {"a.b": None}))
    return found


def test_logical_axes_lay_out_a_tree_as_flax_does():
    """The first rule whose axes are free: `embed` takes dp before `mlp` would."""
    found = on_devices.run(_laid_out, x64=False)
    assert '"odd" of global shape (6,)' in found["odd"] and "uneven shards in dim 0" in found.pop("odd")
    assert "A mesh was given as str, and a sharding needs devices" in found.pop("text")
    assert 'A tree was given with int 3 at "step"; its leaves must be arrays' in found.pop("step")
    assert '"wide" is float64, and JAX would silently make it float32' in found.pop("wide")
    assert 'Two paths of the tree make the name "a.b"' in found.pop("dots")
    assert found == {
        "kernel": "P('dp', 'tp')",
        "bias": "P(('dp', 'tp'),)",
        "square": "P(('dp', 'tp'), None)",
    }


REFUSED = {
    "phase": "InputError: shardings(phase='states') was given; give one of stored, compute, grad, state.",
    "transforms beside a plan": "InputError: shardings was given a plan, and transforms beside it",
    "plan of another tree": 'InputError: The plan has no "v" of shape (8, 8): it was made of another tree',
    "plan of another shape": 'InputError: The plan has no "w" of shape (8, 4)',
    "cast by rules": "InputError: cast was given dict; give a plan",
    "cast of another tree": 'InputError: The plan has no "v"',
    "offload": 'PlanError: "w" is in host memory in phase state',
    "no master": 'PlanError: The plan stores "w" as bfloat16 without a master copy',
    "gradients": 'PlanError: The plan has gradients of "w" in bfloat16',
    "no rules": "PlanError: A tree of arrays was given with rules=None",
    "texts": 'InputError: A tree was given with an array of <U1 at "name"',
    "spec": "RuleError: Rule \"w\": P(None, 'tp') is JAX's way to write a layout. Convert all of them by Rules.fr",
    "bracket": 'The name has characters that a pattern reads otherwise; write "tensor re:.*w\\[0\\]".',
    "haiku's key": 'Names of a tree have dots where keys of haiku have slashes: write "^mlp.linear.w".',
    "haiku's regex": "Names of a tree have dots where keys of haiku have slashes.",
    "overlap": "PlanError: The plan asks for overlap=True, by zero(1, overlap=True); XLA overlaps communication by",
    "wrapped": 'InputError: "w" holds int64 numbers that int32 cannot hold, and jax_enable_x64 is off',
    "wrapped argument": "InputError: An argument holds int64 numbers that int32 cannot hold",
    "wrapped batch": 'InputError: The batch at "n" holds int64 numbers that int32 cannot hold',
    "halved batch": "InputError: The batch is float64, and JAX would silently make it float32",
    "argument elsewhere": 'InputError: An argument is an array on cpu:3, and the mesh "dp=2,tp=4" has other devices',
    "parameter elsewhere": 'InputError: "weight" is an array on cpu:3',
    "shapes of a model": "InputError: A compiled model was called with shapes, and computes with values",
    "seed of a model": "InputError: rng= was given 3; give one key of JAX, another one at each step",
    "no argument": "PlanError: Embedding cannot be exported: missing a required argument: 'input'.",
    "text among buffers": """InputError: A tree was given with str 'x' at "n\"""",
    "no module": "InputError: compile_model was given function; give a module of torch",
    "no parameters": "InputError: A compiled model was given ArrayImpl as its parameters or buffers",
    "tensors": "InputError: A compiled model was given dict as its parameters or buffers",
    "phase of a model": "InputError: shardings(phase='states') was given",
}


def _refused() -> dict[str, str]:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from torch import nn

    import shardlib as sl
    import shardlib.jax as sj

    mesh, tree, other, rules = sj.make_mesh("dp=2,tp=4"), {"w": jnp.ones((8, 8))}, {"v": jnp.ones((8, 8))}, {"w": None}
    plan, big = sj.plan(tree, mesh, rules), np.array([2**33])
    fn, params = sj.compile_model(nn.Embedding(4, 4), mesh, {"*": None})

    def made(*transforms: Any) -> Any:
        return sj.train_step(lambda p, _: p["w"].sum(), optax.sgd(0.1), rules, mesh, transforms=transforms)

    def step(transform: Any) -> Any:
        return made(transform).init(tree)

    def stepped(batch: Any) -> Any:
        return made()(made().init(tree), batch)

    def elsewhere(array: Any) -> Any:
        return jax.device_put(array, jax.devices()[3])

    calls = {
        "phase": lambda: sj.shardings(tree, mesh, rules, phase="states"),  # type: ignore[arg-type]
        "transforms beside a plan": lambda: sj.shardings(tree, mesh, plan, transforms=sl.zero(3)),
        "plan of another tree": lambda: sj.shard_params(other, mesh, plan),
        "plan of another shape": lambda: sj.shard_params({"w": jnp.ones((8, 4))}, mesh, plan),
        "cast by rules": lambda: sj.cast(tree, mesh, rules),  # type: ignore[arg-type]
        "cast of another tree": lambda: sj.cast(other, mesh, plan),
        "offload": lambda: step(sl.offload("state")),
        "no master": lambda: step(sl.precision("bf16", master=False)),
        "gradients": lambda: step(sl.precision("bf16", grads="bfloat16")),
        "no rules": lambda: sj.plan(tree, mesh, None),  # type: ignore[arg-type]
        "texts": lambda: sj.plan({**tree, "name": np.array(["a"])}, mesh, rules),
        "spec": lambda: sj.plan(tree, mesh, {"w": jax.P(None, "tp")}),
        "bracket": lambda: sj.plan({"w[0]": jnp.ones(8)}, mesh, {"w[0]": "rows@tp"}),
        "haiku's key": lambda: sj.plan({"mlp/~/linear": {"w": jnp.ones(8)}}, mesh, {"^mlp/~/linear/w": "rows@tp"}),
        "haiku's regex": lambda: sj.plan({"mlp/~/linear": {"w": jnp.ones(8)}}, mesh, {"re:mlp/.*": "rows@tp"}),
        "overlap": lambda: made(sl.zero(1, overlap=True)).init(tree),
        "wrapped": lambda: sj.shard_params({"w": big}, mesh, rules),
        "wrapped argument": lambda: fn(params, big),
        "wrapped batch": lambda: stepped({"n": big}),
        "halved batch": lambda: stepped(np.ones(3)),
        "argument elsewhere": lambda: fn(params, elsewhere(jnp.ones(2, int))),
        "parameter elsewhere": lambda: fn(elsewhere(params), jnp.ones(2, int)),
        "shapes of a model": lambda: fn(fn.abstract(), jnp.ones(2, int)),
        "seed of a model": lambda: fn(params, jnp.ones(2, int), rng=3),
        "no argument": lambda: fn(params),
        "text among buffers": lambda: sj.train_step(step, optax.sgd(0.1), rules, mesh, has_buffers=True).init(
            tree, {"n": "x"}
        ),
        "no module": lambda: sj.compile_model(lambda x: x, mesh, {}),  # type: ignore[arg-type]
        "no parameters": lambda: fn(jnp.ones(3), jnp.ones(2, int)),  # type: ignore[arg-type]
        "tensors": lambda: fn({"weight": torch.ones(4, 4)}, jnp.ones(2, int)),
        "phase of a model": lambda: fn.shardings(params, "states"),  # type: ignore[arg-type]
    }
    return {name: raised(call) for name, call in calls.items()}


def test_what_would_be_ignored_is_refused():
    found = on_devices.run(_refused, x64=False)
    assert found.keys() == REFUSED.keys()
    for name, words in REFUSED.items():
        assert words in found[name], f"{name}: {found[name]}"


def _cast() -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    import shardlib as sl
    import shardlib.jax as sj

    mesh, tree = sj.make_mesh("dp=2,tp=4"), {"w": jnp.ones((8, 8), jnp.float32)}
    plan = sj.plan(tree, mesh, {"w": "in out@tp"}, transforms=[sl.precision("bf16"), sl.fsdp()])
    sharded = sj.shard_params(tree, mesh, plan)
    grads = jax.jit(jax.grad(lambda p: (sj.cast(p, mesh, plan)["w"].astype(jnp.float32) ** 2).sum()))(sharded)
    logical = sl.Rules.from_logical_axes({"w[0]": ("mlp",)}, [("mlp", "tp")])
    kept = sj.shard_params({"n": np.array([2**31 - 1, -(2**31)])}, mesh, {"n": None})["n"]
    return {
        "tree": str(sharded["w"].sharding.spec),
        "grads": (str(grads["w"].sharding.spec), str(grads["w"].dtype), float(grads["w"].sum())),
        "logical": str(logical.to_partition_specs({"w[0]": jnp.ones(8)}, "tp=2")["w[0]"]),
        "kept": np.asarray(kept).tolist(),
    }


def test_gradients_come_back_in_the_layout_of_the_plan():
    found = on_devices.run(_cast, x64=False)
    assert found == {
        "tree": "P('dp', 'tp')",
        "grads": ("P('dp', 'tp')", "float32", 128.0),
        "logical": "P('tp',)",
        "kept": [2**31 - 1, -(2**31)],
    }

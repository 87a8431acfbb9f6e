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

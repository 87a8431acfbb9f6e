"""The JAX engine: the same module, rules and plan, run by XLA's partitioner.

`torch.export` gives the graph of a module, a table of small lowerings interprets it on JAX arrays, the plan says how
parameters are sharded. Needs the extra `shardlib[jax]`; `import shardlib` alone never imports JAX.

    mesh = shardlib.jax.make_mesh("dp=2,tp=4")
    fn, params = shardlib.jax.compile_model(model, mesh, rules)
    loss, grads = jax.jit(jax.value_and_grad(lambda p, x, y: loss_of(fn(p, x), y)))(params, x, y)
"""

from __future__ import annotations

from shardlib.jax._require import require_jax

require_jax()

from shardlib.jax._check import LayoutReport, check_layouts  # noqa: E402
from shardlib.jax._compile import Compiled, compile_model  # noqa: E402
from shardlib.jax._exchange import shares_memory, to_jax, to_torch  # noqa: E402
from shardlib.jax._load import load  # noqa: E402
from shardlib.jax._mesh import from_named_sharding, make_mesh, named_sharding  # noqa: E402
from shardlib.jax._module import JaxModule  # noqa: E402
from shardlib.jax._step import TrainState, TrainStep, train_step  # noqa: E402
from shardlib.jax._table import Lowering, known_ops, lowering  # noqa: E402
from shardlib.jax._trees import shard_params  # noqa: E402
from shardlib.jax._typer import Finding  # noqa: E402

__all__ = [
    "Compiled",
    "Finding",
    "JaxModule",
    "LayoutReport",
    "Lowering",
    "TrainState",
    "TrainStep",
    "check_layouts",
    "compile_model",
    "from_named_sharding",
    "known_ops",
    "load",
    "lowering",
    "make_mesh",
    "named_sharding",
    "shard_params",
    "shares_memory",
    "to_jax",
    "to_torch",
    "train_step",
]

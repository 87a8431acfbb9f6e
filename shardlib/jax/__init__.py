"""The JAX engine: the same module, rules and plan, run by XLA's partitioner.

Names are imported at their first use: rules on trees of arrays (`shardlib.jax.rules`) need no torch.

`torch.export` gives the graph of a module, a table of small lowerings interprets it on JAX arrays, the plan says how
parameters are sharded. Needs the extra `shardlib[jax]`; `import shardlib` alone never imports JAX.

    mesh = shardlib.jax.make_mesh("dp=2,tp=4")
    fn, params = shardlib.jax.compile_model(model, mesh, rules)
    loss, grads = jax.jit(jax.value_and_grad(lambda p, x, y: loss_of(fn(p, x), y)))(params, x, y)
"""

from __future__ import annotations

from typing import Any

from shardlib._supported import offered
from shardlib.jax._require import require_jax

require_jax()

import lazy_loader  # noqa: E402

_offered, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    return offered(__name__, name, _offered)

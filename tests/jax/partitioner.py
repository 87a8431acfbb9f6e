"""Convolutions that XLA's partitioner computes wrong, in plain JAX. Runs on the devices, in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

__all__ = ["FAULTS", "factors", "forgotten_groups"]

# Mesh, groups, specs of the input (rows, channels, window) and of the kernel (outputs, inputs, window). In each, the
# axis tp shards nothing, and what is summed over dp is summed over tp too.
FAULTS: dict[str, tuple[dict[str, int], int, tuple[Any, ...], tuple[Any, ...]]] = {
    "gradient of a grouped kernel, tp=2": ({"dp": 2, "tp": 2}, 4, ("dp",), ()),
    "gradient of a grouped kernel, tp=4": ({"dp": 2, "tp": 4}, 4, ("dp",), ()),
    "gradient of a kernel, window over dp": ({"dp": 2, "tp": 2}, 1, (None, None, "dp"), ()),
    "output, window and kernel over dp": ({"dp": 2, "tp": 2}, 1, (None, None, "dp"), (None, "dp")),
}


def factors(name: str) -> dict[str, float]:
    """What the output and the kernel's gradient of a case are multiplied by, beside one device."""
    sizes, groups, *specs = FAULTS[name]
    draw = np.random.default_rng(0)
    arrays = draw.normal(size=(4, 4, 8)), draw.normal(size=(4, 4 // groups, 3))

    def loss_of(kernel: Any, x: Any) -> Any:
        y = lax.conv_general_dilated(x, kernel, (1,), [(1, 1)], feature_group_count=groups)
        return (y * jnp.sin(jnp.arange(y.size, dtype=y.dtype).reshape(y.shape))).sum(), y

    def run(x: Any, kernel: Any) -> Any:
        grad, y = jax.jit(jax.grad(loss_of, has_aux=True))(kernel, x)
        return {"output": np.asarray(y), "gradient": np.asarray(grad)}

    count = int(np.prod(list(sizes.values())))
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * 2, devices=jax.devices()[:count])
    sharded = (
        jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))
        for array, spec in zip(arrays, specs, strict=True)
    )
    alone, spread = run(*arrays), run(*sharded)
    return {what: round(float(np.median(spread[what] / value)), 9) for what, value in alone.items()}


def forgotten_groups() -> float:
    """How far the gradient of a grouped kernel is from one device's, where a window has one element; 0 is right."""
    draw = np.random.default_rng(0)
    x, kernel = draw.normal(size=(3, 16, 16)), draw.normal(size=(16, 4, 1))

    def loss_of(kernel: Any, x: Any) -> Any:
        return (lax.conv_general_dilated(x, kernel, (1,), [(0, 0)], feature_group_count=4) ** 2).sum()

    mesh = jax.make_mesh((2, 2), ("dp", "tp"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    gradient = jax.jit(jax.grad(loss_of))
    alone = np.asarray(gradient(kernel, x))
    by_channels = jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "tp")))
    spread = np.asarray(gradient(jax.device_put(kernel, NamedSharding(mesh, PartitionSpec())), by_channels))
    return float(np.abs(spread - alone).max() / np.abs(alone).max())

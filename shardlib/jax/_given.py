"""Checks of what compiled functions and training steps are given: arrays and keys of JAX, on their mesh's devices."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from shardlib._mesh_shape import MeshShape
from shardlib.errors import InputError
from shardlib.jax._narrow import fitting, refuse_narrowed
from shardlib.rules.trees import name_of_path

__all__ = ["check_keys", "fitting_batch", "is_array", "is_placed", "refuse_elsewhere"]


def is_array(leaf: Any) -> bool:
    """Return whether a leaf is an array of numbers or of keys, or a number of Python: what a program of JAX takes."""
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype.kind not in "OSUMm" and leaf.dtype.names is None
    return isinstance(leaf, jax.Array | bool | int | float | complex) or hasattr(leaf, "__jax_array__")


def is_placed(leaf: Any, mesh: Mesh) -> bool:
    """Return whether an array is on the devices of a mesh, in the mesh's order."""
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding):  # most arrays are on the mesh itself, and there can be many
        return sharding.mesh == mesh or tuple(sharding.mesh.devices.flat) == tuple(mesh.devices.flat)
    return sharding.device_set == set(mesh.devices.flat)  # type: ignore[no-any-return]


def refuse_elsewhere(leaf: Any, mesh: Any, what: str) -> None:
    """Refuse an array that is deleted, or that was put on other devices than those of a mesh."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer) or not isinstance(mesh, Mesh):
        return
    if leaf.is_deleted():
        raise InputError(f"{what} is an array whose memory was deleted or handed on. Give an array that has values.")
    if leaf.committed and not is_placed(leaf, mesh):
        shape, here = MeshShape.of(mesh), sorted(map(str, leaf.sharding.device_set))
        raise InputError(
            f'{what} is an array on {", ".join(here)}, and the mesh "{shape}" has other devices, or another '
            "order of them. Give an array of numpy, or put it there: jax.device_put(array, jax.NamedSharding(mesh, "
            f"jax.P({shape.data_axes or None})))."
        )


def fitting_batch(batch: Any, mesh: Mesh, *, shapes: bool = False) -> Any:
    """Return a batch whose integers of numpy have the dtype that JAX has for them. `shapes` may be in place of arrays.

    Raises:
        InputError: a leaf is not an array, is on other devices, or holds numbers that JAX would change.
    """

    def fit(path: Any, leaf: Any) -> Any:
        is_shape = shapes and isinstance(leaf, jax.ShapeDtypeStruct)
        return leaf if is_shape else _fitting(name_of_path(path), leaf, mesh)

    return jax.tree_util.tree_map_with_path(fit, batch)


def _fitting(name: str, leaf: Any, mesh: Mesh) -> Any:
    what = f'The batch at "{name}"' if name else "The batch"
    if not is_array(leaf):
        raise InputError(f"{what} is {_described(leaf)}, and a step takes arrays of numbers. {_advice(leaf)}")
    refuse_elsewhere(leaf, mesh, what)
    if not isinstance(leaf, np.ndarray | np.generic):
        return leaf
    refuse_narrowed(leaf.dtype, what)
    return fitting(leaf, what)


def _advice(leaf: Any) -> str:
    if hasattr(leaf, "untyped_storage"):  # a tensor of torch
        return "Give tensor.numpy()."
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return "step.lower(state, batch) takes shapes."
    return "Leave it out of the batch; loss_fn may close over it."


def _described(leaf: Any) -> str:
    if hasattr(leaf, "untyped_storage"):
        return "a tensor of torch"
    if isinstance(leaf, np.ndarray | np.generic):
        return f"an array of {leaf.dtype}"
    return f"{type(leaf).__name__} {leaf!r}"


def check_keys(rng: Any, *, several: bool = False) -> None:
    """Refuse what is not a key of JAX, or where it may be a tree of keys, has another leaf."""
    for leaf in jax.tree.leaves(rng) if several else [rng]:
        if not _is_key(leaf):
            shown = f"an array {jax.typeof(leaf).str_short()}" if hasattr(leaf, "dtype") else repr(leaf)
            raise InputError(
                f"rng= was given {shown}; give one key of JAX{', or a tree of such keys' if several else ''}, another "
                "one at each step: jax.random.fold_in(jax.random.key(0), step)."
            )


def _is_key(leaf: Any) -> bool:
    if not isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return False
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf.ndim == 0
    kind = jax.config.jax_default_prng_impl  # type: ignore[attr-defined]
    return leaf.dtype == jnp.uint32 and leaf.shape == _shape_of_old_keys(kind)


@functools.cache
def _shape_of_old_keys(_kind: str) -> tuple[int, ...]:
    """Return the shape of what `jax.random.PRNGKey` returns."""
    return jax.eval_shape(jax.random.PRNGKey, 0).shape  # type: ignore[no-any-return]

"""Sharding constraints under the transforms of JAX that code may run in: manual axes, explicit axes, vmap, jvp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, get_abstract_mesh, reshard

from shardlib.errors import InputError

__all__ = [
    "REDISTRIBUTED",
    "by_shard",
    "constrained",
    "is_explicit",
    "manual_axes",
    "redistributed",
    "refuse_explicit",
]


def constrained(value: Any, sharding: NamedSharding) -> Any:
    """Constrain a value to a sharding, but for mesh axes that are manual where this runs.

    Inside `shard_map`, a value is the local one, and global over the other axes alone. `pmap` is a `shard_map` over an
    axis of its own. Where axes are Explicit, the value is of that type then.
    """
    here = _here(sharding)
    if here is None:
        return value
    return (reshard if get_abstract_mesh().explicit_axes else lax.with_sharding_constraint)(value, here)


def redistributed(value: Any, there: NamedSharding, back: NamedSharding) -> Any:
    """Redistribute a value to a sharding, and its cotangent to another one."""
    forward, backward = _here(there), _here(back)
    if forward is None or backward is None:
        return value
    if get_abstract_mesh().explicit_axes:
        return reshard(value, forward)  # whose cotangent has the value's own type
    return _redistributed.bind(value, there=forward, back=backward)


def manual_axes() -> frozenset[Any]:
    """Return the mesh axes that are manual where this runs."""
    return frozenset(get_abstract_mesh().manual_axes)


def by_shard(function: Callable[..., Any], mesh: Mesh, axes: set[str], ins: Any, outs: Any) -> Callable[..., Any]:
    """Return a function of global arrays that calls `function` on the shards over some axes, which are not manual."""
    context = get_abstract_mesh()
    inside = context if context.manual_axes else mesh
    return jax.jit(jax.shard_map(function, mesh=inside, in_specs=ins, out_specs=outs, axis_names=axes))


def is_explicit(mesh: Any) -> bool:
    """Return whether all axes of a mesh are of type Explicit, as those that `jax.make_mesh` makes."""
    return bool(getattr(mesh, "axis_types", ())) and all(each is AxisType.Explicit for each in mesh.axis_types)


def refuse_explicit(call: str, advice: str) -> None:
    """Refuse a mesh with axes of type Explicit that was set around a call."""
    if explicit := get_abstract_mesh().explicit_axes:
        raise InputError(
            f"{call} was called under a mesh whose axes {', '.join(map(str, explicit))} are Explicit, and leaves "
            f"layouts of activations to XLA's partitioner. {advice}"
        )


def _here(sharding: NamedSharding) -> NamedSharding | None:
    """Return a sharding without the axes that are manual, or None if no axis is left."""
    context = get_abstract_mesh()
    if not context.manual_axes:
        same = context.axis_names == sharding.mesh.axis_names  # whose axes may be of another type
        return NamedSharding(context, sharding.spec, memory_kind=sharding.memory_kind) if same else sharding
    free = {name for name in context.auto_axes if dict(sharding.mesh.shape).get(name) == dict(context.shape)[name]}
    if not free:
        return None
    entries = (entry if entry is PartitionSpec.UNCONSTRAINED else _among(entry, free) for entry in sharding.spec)
    return NamedSharding(context, PartitionSpec(*entries))


def _among(entry: Any, free: set[Any]) -> Any:
    axes = tuple(axis for axis in (entry if isinstance(entry, tuple) else (entry,)) if axis in free)
    return axes or None


# A primitive, because JAX has no other linear function whose transpose is chosen and which can be batched: a
# custom_vjp refuses jvp, and linear_call refuses vmap.
REDISTRIBUTED = "shardlib_redistributed"
_redistributed = Primitive(REDISTRIBUTED)


@_redistributed.def_impl
def _run(value: Any, *, there: NamedSharding, back: NamedSharding) -> Any:
    return lax.with_sharding_constraint(value, there)


@_redistributed.def_abstract_eval
def _typed(value: Any, *, there: NamedSharding, back: NamedSharding) -> Any:
    return value


def _transposed(cotangent: Any, _: Any, *, there: NamedSharding, back: NamedSharding) -> Any:
    return [cotangent if type(cotangent) is ad.Zero else _redistributed.bind(cotangent, there=back, back=there)]


def _batched(values: Any, dims: Any, *, there: NamedSharding, back: NamedSharding) -> Any:
    def with_dim(sharding: NamedSharding) -> NamedSharding:
        entries = [*sharding.spec, *[None] * (value.ndim - 1 - len(sharding.spec))]
        return NamedSharding(sharding.mesh, PartitionSpec(*entries[:dim], PartitionSpec.UNCONSTRAINED, *entries[dim:]))

    (value,), (dim,) = values, dims
    return _redistributed.bind(value, there=with_dim(there), back=with_dim(back)), dim


ad.deflinear2(_redistributed, _transposed)
batching.primitive_batchers[_redistributed] = _batched
mlir.register_lowering(_redistributed, mlir.lower_fun(_run, multiple_results=False))

"""Meshes of JAX devices, and layouts on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from shardlib._mesh_shape import MeshLike, MeshShape
from shardlib.errors import LayoutError, MeshError
from shardlib.layout import Layout

__all__ = ["from_named_sharding", "make_mesh", "named_sharding", "shape_of"]


def make_mesh(spec: MeshLike, *, devices: Sequence[Any] | None = None) -> Mesh:
    """Create a `jax.sharding.Mesh` with named axes over JAX's devices, for XLA's partitioner.

    Devices are taken process by process, the last axis fastest: rank `r` of a torch mesh of the same shape and device
    `r` of this one then hold the same shards. Axes are of type Auto, whatever JAX's own default is.

    Args:
        spec: "dp=2,tp=4", a `MeshShape`, a mapping or a torch `DeviceMesh`; one size may be -1.
        devices: by default all of `jax.devices()`.

    Raises:
        MeshError: there are not as many devices as the sizes multiply to.

    >>> make_mesh("dp=1,tp=1").axis_names
    ('dp', 'tp')
    """
    found = sorted(jax.devices(), key=lambda d: (d.process_index, d.id)) if devices is None else list(devices)
    shape = MeshShape.of(spec)
    known = math.prod(size for size in shape.sizes if size != -1)
    if -1 in shape.sizes and len(found) % known == 0:
        shape = shape.resolve(len(found))
    if shape.world_size != len(found):
        raise _other_number(shape, known, found, "JAX sees" if devices is None else "devices= has")
    grid = np.array(found, dtype=object).reshape(shape.sizes)
    return Mesh(grid, shape.names, axis_types=(AxisType.Auto,) * len(shape))


def _other_number(shape: MeshShape, known: int, found: Sequence[Any], seen: str) -> MeshError:
    """Return the error for a mesh that has fewer or more devices than there are."""
    open_size = -1 in shape.sizes
    advice = (
        "pass devices=, or on CPU pretend more with "
        f"XLA_FLAGS=--xla_force_host_platform_device_count={known}, set before JAX is imported"
    )
    if known < len(found):
        used = len(found) // known * known if open_size else known
        advice = f"or leave devices idle: devices=jax.devices()[:{used}]"
    return MeshError(
        f'Mesh "{shape}" needs {"a multiple of " if open_size else ""}{known} devices; {seen} {len(found)} '
        f"({', '.join(sorted({d.platform for d in found}))}). Change an axis (one size may be -1), {advice}."
    )


def shape_of(mesh: Any) -> MeshShape:
    """Return names and sizes of a mesh's axes.

    Raises:
        MeshError: it is not a mesh of JAX, has axes of type Explicit or Manual, or axes of unknown kind.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise MeshError(
            f"A mesh was given as {type(mesh).__name__}; give a jax.sharding.Mesh, as "
            'shardlib.jax.make_mesh("dp=2,tp=4") makes it.'
        )
    if other := [f"{n} ({t.name})" for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t.name != "Auto"]:
        raise MeshError(
            f"The mesh has the axes {', '.join(other)}; the engine leaves layouts of activations to XLA's partitioner, "
            "which serves axes of type Auto. Make the mesh with shardlib.jax.make_mesh, or pass "
            "axis_types=(jax.sharding.AxisType.Auto, ...)."
        )
    return MeshShape(dict(mesh.shape))


def named_sharding(layout: Layout | str, mesh: Mesh, *, ndim: int | None = None) -> NamedSharding:
    """Return the sharding of a layout on a JAX mesh: its `devices_indices_map` has the layout's `local_slices`.

    Args:
        layout: a `Layout` or its text.
        mesh: a JAX mesh.
        ndim: the number of dims, where the layout leaves it open with "...".

    Raises:
        LayoutError: JAX has no such sharding: a sharded factor of a fused dim, a partial axis, or something still open.
        MeshError: the layout names an axis that the mesh has not.

    >>> named_sharding("batch@dp seq embed", make_mesh("dp=1,tp=1")).spec
    P('dp', None, None)
    """
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    layout = layout if ndim is None else layout.with_ndim(ndim)
    for axis in sorted(layout.axes):
        MeshShape(dict(mesh.shape))[axis]
    memory = {"memory_kind": "pinned_host"} if layout.memory == "host" else {}
    return NamedSharding(mesh, layout.partition_spec(), **memory)


def from_named_sharding(sharding: NamedSharding, ndim: int, *, dim_names: Sequence[str] | None = None) -> Layout:
    """Return the layout that a `NamedSharding` describes; the inverse of `named_sharding`.

    Raises:
        LayoutError: another kind of sharding, or a spec that leaves a dim to the compiler.

    >>> mesh = make_mesh("dp=1,tp=1")
    >>> from_named_sharding(NamedSharding(mesh, jax.P("dp")), 2, dim_names=["batch", "embed"])
    Layout("batch@dp embed")
    """
    if not isinstance(sharding, NamedSharding):
        raise LayoutError(
            f"A sharding was given as {type(sharding).__name__}, which has no axes by name; give a NamedSharding. "
            "jax.device_put(array, named_sharding(layout, mesh)) makes one."
        )
    return Layout.from_partition_spec(sharding.spec, ndim, dim_names=dim_names)

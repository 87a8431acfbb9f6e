"""Storage of a tensor of the plan as a `jax.Array`: in parts where its layout is fused, padded where it is uneven.

JAX splits a dim into equal pieces or refuses. Rows of zeros are therefore added at the end of an uneven dim, taken off
before the model sees the tensor, and so have a gradient of zero: they stay zeros under any optimizer that updates
elements by themselves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardlib._mesh_shape import MeshShape
from shardlib._plan import Phase, Row
from shardlib.errors import InputError, PlanError
from shardlib.jax._bits import to_numpy, to_tensor
from shardlib.jax._context import constrained, redistributed
from shardlib.jax._dtypes import as_dtype
from shardlib.jax._fused import Fused
from shardlib.jax._narrow import fitting, refuse_narrowed
from shardlib.layout import Dim, Layout

__all__ = ["Storage", "by_pieces", "storage_of"]


@dataclass(frozen=True)
class Storage:
    """One tensor's way from torch to JAX and back.

    Attributes:
        name: as in the plan.
        global_shape: the global shape of the tensor.
        dtype: the stored dtype; that of the master copy, if the plan has one.
        parts: for each dim of the tensor the sizes of its parts; `(n,)` but for fused layouts.
        padded: the same, with padding to even shards.
        specs: for each phase the axes of each dim of the array.
        mesh: a JAX mesh.
        compute_dtype: the dtype that the model computes with.
    """

    name: str
    global_shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[tuple[int, ...], ...]
    padded: tuple[tuple[int, ...], ...]
    specs: Mapping[Phase, PartitionSpec]
    mesh: Mesh
    compute_dtype: torch.dtype

    @property
    def array_shape(self) -> tuple[int, ...]:
        """The shape of the `jax.Array`."""
        return tuple(size for sizes in self.padded for size in sizes)

    @property
    def uneven(self) -> bool:
        """Whether zeros were added to make pieces even."""
        return self.padded != self.parts

    def sharding(self, phase: Phase = "stored") -> NamedSharding:
        """Return the sharding of the `jax.Array` in a phase; frozen tensors have only the first two phases."""
        if phase not in self.specs:
            raise PlanError(f'"{self.name}" has no {phase} phase; it has {", ".join(self.specs)}.')
        return NamedSharding(self.mesh, self.specs[phase])

    def abstract(self) -> jax.ShapeDtypeStruct:
        """Return shape, dtype and sharding of the array, without values."""
        return jax.ShapeDtypeStruct(self.array_shape, as_dtype(self.dtype), sharding=self.sharding())

    def to_array(self, tensor: torch.Tensor) -> Any:
        """Convert a tensor to the array, always a copy; a tensor on meta gives only `abstract`."""
        if tuple(tensor.shape) != self.global_shape:
            raise InputError(
                f'"{self.name}" was given with global shape {tuple(tensor.shape)}; the plan has {self.global_shape}.'
            )
        if tensor.is_meta:
            return self.abstract()
        values = self._split(self._exact(tensor))
        return jax.make_array_from_callback(
            self.array_shape, self.sharding(), lambda index: np.array(values[index], order="C")
        )

    def read(self, read: Callable[[tuple[slice, ...]], torch.Tensor]) -> Any:
        """Build the array of a tensor that is read by slices of its global dims, each device's shard separately."""
        return by_pieces(self.array_shape, self.sharding(), lambda index: self._piece(index, read))

    def _piece(self, index: tuple[slice, ...], read: Callable[[tuple[slice, ...]], torch.Tensor]) -> np.ndarray:
        bounds = [(part.start, part.stop) for part in index]
        values = np.zeros([stop - start for start, stop in bounds], as_dtype(self.dtype))
        at = itertools.accumulate((len(sizes) for sizes in self.parts), initial=0)
        dims = [list(_runs(sizes, bounds[i : i + len(sizes)])) for i, sizes in zip(at, self.parts, strict=False)]
        for runs in itertools.product(*dims):
            where = tuple(one for _, inside in runs for one in inside)
            values[where] = self._exact(read(tuple(taken for taken, _ in runs)))
        return values

    def _exact(self, tensor: torch.Tensor) -> np.ndarray:
        """Convert values to their JAX dtype, and refuse values that it changes."""
        return fitting(to_numpy(tensor.detach().to(self.dtype)), f'"{self.name}"')

    def _split(self, values: np.ndarray) -> np.ndarray:
        values = values.reshape([size for sizes in self.parts for size in sizes])
        added = [big - small for big, small in zip(self.array_shape, values.shape, strict=True)]
        return np.pad(values, [(0, extra) for extra in added]) if any(added) else values

    def to_torch(self, array: Any) -> torch.Tensor:
        """Convert an array, or anything of its shape such as a gradient, to the unsharded tensor; always a copy."""
        if tuple(array.shape) != self.array_shape:
            raise InputError(f'"{self.name}" was given as an array of shape {array.shape}; it is {self.array_shape}.')
        if not getattr(array, "is_fully_addressable", True):  # of several processes, all of which are here
            array = multihost_utils.process_allgather(array, tiled=True)
        values = np.asarray(array)[tuple(slice(size) for sizes in self.parts for size in sizes)]
        tensor = to_tensor(np.ascontiguousarray(values).reshape(self.global_shape))
        # Integers of 64 bits have 32 in JAX without jax_enable_x64.
        return tensor.to(self.dtype) if values.dtype == as_dtype(self.dtype) else tensor

    def value(self, array: Any) -> Any:
        """Return the value that the model computes with: gathered as the plan says, unpadded, in the compute dtype."""
        compute = self.sharding("compute")
        trained = "grad" in self.specs
        value = redistributed(array, compute, self.sharding("grad")) if trained else constrained(array, compute)
        value = value[tuple(slice(size) for sizes in self.parts for size in sizes)]
        if jnp.issubdtype(value.dtype, jnp.floating):
            value = value.astype(as_dtype(self.compute_dtype))
        return Fused(value, self.parts) if any(len(sizes) > 1 for sizes in self.parts) else value

    def kept(self, value: Any) -> Any:
        """Convert a computed value back to its stored form, for a new buffer."""
        value = value.array if isinstance(value, Fused) else value
        value = value.reshape([size for sizes in self.parts for size in sizes])
        added = [(0, big - small, 0) for big, small in zip(self.array_shape, value.shape, strict=True)]
        value = lax.pad(value, jnp.zeros((), value.dtype), added).astype(as_dtype(self.dtype))
        return constrained(value, self.sharding())


def by_pieces(shape: tuple[int, ...], sharding: Any, piece: Callable[[tuple[slice, ...]], np.ndarray]) -> Any:
    """Build an array from `piece`, which returns a device's shard by its slices; equal shards share one call."""
    made: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def of_device(index: Any) -> np.ndarray:
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        if bounds not in made:
            made[bounds] = piece(tuple(slice(*each) for each in bounds))
        return made[bounds]

    return jax.make_array_from_callback(shape, sharding, of_device)


def storage_of(row: Row, mesh: Mesh, shape: MeshShape) -> Storage:
    """Return the storage of a row of the plan on a JAX mesh.

    Raises:
        InputError: a dtype that JAX has not, or would narrow.
        PlanError: a phase is offloaded, or still to be reduced.
    """
    stored, computed = row.stored.dtype or row.dtype, row.compute.dtype or row.dtype
    if row.has_master and row.state is not None:  # the master copy is the array, and is rounded where it is used
        stored = row.state.dtype or row.dtype
    for dtype in {stored, computed}:
        refuse_narrowed(dtype, f'"{row.name}"', convert="the model with .float()")
    layouts = {phase: layout.resolve(row.global_shape, shape) for phase, layout in row.layouts.items()}
    for phase, layout in layouts.items():
        _check(row, phase, layout)
    breaks = [_breaks(layouts.values(), dim, shape) for dim in range(len(row.global_shape))]
    parts = tuple(_cut(size, at) for size, at in zip(row.global_shape, breaks, strict=True))
    axes = {phase: _axes(layout, breaks, shape) for phase, layout in layouts.items()}
    padded = tuple(
        tuple(_round_up(size, [each[dim][i] for each in axes.values()], shape) for i, size in enumerate(sizes))
        for dim, sizes in enumerate(parts)
    )
    specs = {phase: PartitionSpec(*(_entry(a) for dim in each for a in dim)) for phase, each in axes.items()}
    return Storage(row.name, row.global_shape, stored, parts, padded, specs, mesh, computed)


def _check(row: Row, phase: Phase, layout: Layout) -> None:
    if layout.partials:
        raise PlanError(f'"{row.name}" is a partial sum in phase {phase} ("{layout}"); reduce it first.')


def _factors(layout: Layout, dim: int, shape: MeshShape) -> list[tuple[int, tuple[str, ...]]]:
    """Return for each factor of a dim the number of elements from it on inwards, and the axes that split it."""
    entry = layout.dims[dim]
    assert isinstance(entry, Dim)
    if not entry.fused:
        return [(0, entry.axes)]
    sizes = [factor.size or 1 for factor in entry.factors]
    return [
        (math.prod(sizes[at:]) if at else 0, tuple(a for a in factor.axes if shape[a] > 1))
        for at, factor in enumerate(entry.factors)
    ]


def _breaks(layouts: Iterable[Layout], dim: int, shape: MeshShape) -> list[int]:
    """Return the positions at which a dim is divided into parts, for all phases: before each split factor but the
    outermost."""
    inside = {at for layout in layouts for at, axes in _factors(layout, dim, shape) if at and axes}
    return sorted(inside, reverse=True)


def _cut(size: int, breaks: Sequence[int]) -> tuple[int, ...]:
    bounds = [size, *breaks, 1]
    return tuple(outer // inner for outer, inner in itertools.pairwise(bounds)) if breaks else (size,)


def _axes(layout: Layout, breaks: Sequence[Sequence[int]], shape: MeshShape) -> list[list[tuple[str, ...]]]:
    """Return the axes of each part of each dim."""
    found = []
    for dim, at in enumerate(breaks):
        split = dict(_factors(layout, dim, shape))
        found.append([split.get(inside, ()) for inside in (0, *at)])
    return found


def _runs(sizes: Sequence[int], bounds: Sequence[tuple[int, int]]) -> Iterator[tuple[slice, tuple[Any, ...]]]:
    """Iterate over the contiguous runs of a dim in parts: the slice of the dim, and the position in the shard.

    >>> list(_runs((3, 4), [(1, 3), (2, 5)]))  # indices 1 and 2 of three, of each the end of four; the rest is padding
    [(slice(6, 8, None), (0, slice(0, 2, None))), (slice(10, 12, None), (1, slice(0, 2, None)))]
    """
    *outer, (start, stop) = bounds
    stop = min(stop, sizes[-1])
    outermost = (range(first, min(last, size)) for (first, last), size in zip(outer, sizes, strict=False))
    for indices in itertools.product(*outermost) if stop > start else ():
        base = 0
        for index, size in zip(indices, sizes[1:], strict=True):
            base = (base + index) * size
        inside = (*(index - first for index, (first, _) in zip(indices, outer, strict=True)), slice(0, stop - start))
        yield slice(base + start, base + stop), inside


def _round_up(size: int, axes: Iterable[tuple[str, ...]], shape: MeshShape) -> int:
    pieces = math.lcm(*(math.prod(shape[axis] for axis in each) for each in axes))
    return -(-size // pieces) * pieces


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    return axes if len(axes) > 1 else axes[0] if axes else None

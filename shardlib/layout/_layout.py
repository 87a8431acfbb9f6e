"""The value `Layout`: how one tensor is sharded over a mesh."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any

from shardlib._dtypes import keeps_dtype_names
from shardlib._mesh_shape import MeshLike, MeshShape
from shardlib.errors import LayoutError
from shardlib.layout import _fit, _picture, _spec, _text
from shardlib.layout._dims import Dim, Dims, axes_of_dims, plain
from shardlib.layout._local import Slices, dim_slices, intervals, joined, put_shard, replica_id
from shardlib.layout._text import Memory, Parts

if TYPE_CHECKING:
    import torch
    from jax.sharding import PartitionSpec
    from torch.distributed.tensor import Placement

__all__ = ["Layout"]


@keeps_dtype_names
@dataclass(frozen=True, repr=False)
class Layout:
    """The layout of one tensor on a mesh: the axes that shard each dim, outermost first, and the axes over which its
    value is still to be reduced. A frozen, hashable value; it needs no process group and no device.

    Text form, which `parse` reads and `str` gives back:

        "vocab@tp embed"                     one dim sharded
        "batch@dp seq embed"                 an activation
        "embed@(fsdp,tp)"                    one dim sharded over two axes, fsdp outermost
        "(qkv heads@tp head) embed"          a fused dim: sharded over heads inside each of q, k, v
        "(kv@tp? head) embed"                sharded over those axes that divide it; settled by `resolve`
        "... ff@tp"                          any leading dims
        "_ embed@tp"                         a dim without a name
        "batch embed + sum@tp"               partial: the true value is the sum over tp
        "embed@fsdp : float32 host"          dtype and memory kind, where a phase fixes them

    Attributes:
        dims: one `Dim` per dim; `...` stands for any number of leading dims.
        partials: pairs (axis, reduction), sorted; see `partial`.
        dtype: the dtype that a phase fixes, or None.
        memory: "device" or "host".

    Raises:
        LayoutError: one axis is used twice.

    >>> layout = Layout.parse("(qkv heads@tp head) embed", sizes={"qkv": 3, "heads": 12})
    >>> layout.placements("dp=2,tp=4")
    (Replicate(), _StridedShard(dim=0, sf=3))
    >>> str(layout), layout.local_shape((2304, 768), "dp=2,tp=4", {"dp": 0, "tp": 1})
    ('(qkv heads@tp head) embed', (576, 768))
    """

    dims: Dims
    partials: tuple[tuple[str, str], ...] = ()
    dtype: torch.dtype | None = None
    memory: Memory = "device"

    def __post_init__(self) -> None:
        object.__setattr__(self, "partials", tuple(sorted(self.partials)))
        used = [*axes_of_dims(self.dims), *(axis for axis, _ in self.partials)]
        if repeated := [axis for axis in used if used.count(axis) > 1]:
            raise LayoutError(
                f'Layout "{self}": axis "{repeated[0]}" is used twice. Each axis shards one dim of a tensor or is '
                "reduced over, once; drop one of the two, or use another axis of the mesh."
            )

    @classmethod
    def parse(cls, text: str, *, sizes: Mapping[str, int] | None = None) -> Layout:
        """Read the text form.

        Args:
            text: an einops pattern with axes attached; the class shows the forms.
            sizes: sizes of named factors. A fused dim whose other factors are known may leave one open.

        Raises:
            LayoutError: the text cannot be read; the message shows it and the offending part.

        >>> Layout.parse("vocab@tp  embed")
        Layout("vocab@tp embed")
        """
        if not isinstance(text, str):
            raise LayoutError(
                f'A layout was given as {type(text).__name__} {text!r}; give text such as "vocab@tp embed", or for '
                "placements call Layout.from_placements."
            )
        return _parse(text, tuple((sizes or {}).items()))

    @classmethod
    def replicate(cls, ndim: int) -> Layout:
        """Return the layout of a tensor of `ndim` dims that is replicated on every rank.

        >>> Layout.replicate(2)
        Layout("_ _")
        """
        return _replicated(ndim)

    @property
    def text(self) -> str:
        """The text form with every known factor size, so that `Layout.parse(layout.text) == layout`."""
        return _text_of(self)

    @property
    def _dtype_name(self) -> str | None:
        return vars(self)["dtype"]  # type: ignore[no-any-return]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """The hash of the fields. Kept: a layout is looked up several times for each tensor of a model."""
        return hash((self.dims, self.partials, self._dtype_name, self.memory))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the fields alone: another process hashes text otherwise."""
        return Layout, (self.dims, self.partials, self._dtype_name, self.memory)

    def __str__(self) -> str:
        return _text.write(self._parts, sizes=False)

    def __repr__(self) -> str:
        return f'Layout("{self.text}")'

    @property
    def partial(self) -> dict[str, str]:
        """The axes over which the value is still to be reduced, each with its reduction ("sum", "avg", "max", ...)."""
        return dict(self.partials)

    @property
    def ndim(self) -> int | None:
        """The number of dims, or None where "..." leaves it open."""
        return None if ... in self.dims else len(self.dims)

    @cached_property
    def axes(self) -> frozenset[str]:
        """The axes that shard a dim or are partial."""
        return frozenset(chain(axes_of_dims(self.dims), self.partial))

    def axes_of(self, dim: int) -> tuple[str, ...]:
        """Return the axes that shard one dim, in the order of its factors.

        >>> Layout.parse("batch@(dp,fsdp) embed").axes_of(0)
        ('dp', 'fsdp')
        """
        entry = self.dims[dim]
        return entry.axes if isinstance(entry, Dim) else ()

    def with_axes(self, dim: int, axes: Sequence[str], *, factor: int = 0) -> Layout:
        """Return the layout with one dim (of a fused dim, one factor) sharded over exactly these axes, outermost first.

        >>> Layout.parse("vocab@tp embed").with_axes(0, ("fsdp", "tp"))
        Layout("vocab@(fsdp,tp) embed")
        """
        entry = self.dims[dim]
        if not isinstance(entry, Dim):
            raise LayoutError(f'Layout "{self}": dim {dim} is "...", which is never sharded. Call with_ndim first.')
        factors = list(entry.factors)
        factors[factor] = replace(factors[factor], axes=tuple(axes), optional=factors[factor].optional and bool(axes))
        dims = list(self.dims)
        dims[dim] = Dim(tuple(factors))
        return replace(self, dims=tuple(dims))

    def with_axes_dropped(self, names: Iterable[str]) -> Layout:
        """Return the layout on a mesh without these axes: they neither shard nor reduce anything.

        >>> Layout.parse("embed@(fsdp,tp) + sum@dp").with_axes_dropped(["fsdp", "dp"])
        Layout("embed@tp")
        """
        gone = frozenset(names)
        if gone.isdisjoint(self.axes):
            return self
        dims = tuple(dim.without(gone) if isinstance(dim, Dim) else dim for dim in self.dims)
        return replace(self, dims=dims, partials=tuple(pair for pair in self.partials if pair[0] not in gone))

    def with_ndim(self, ndim: int) -> Layout:
        """Return the layout with "..." expanded to `ndim` dims.

        Raises:
            LayoutError: the layout cannot have that many dims.

        >>> Layout.parse("... ff@tp").with_ndim(3)
        Layout("_ _ ff@tp")
        """
        dims = _fit.expand(self.dims, ndim)
        if len(dims) != ndim or ... in dims:
            named = len(dims) - dims.count(...)
            raise LayoutError(
                f'Layout "{self}" names {named} dim{"s" * (named != 1)} and was asked for {ndim}. '
                'Name every dim of the tensor once; leading dims may be written "...".'
            )
        return replace(self, dims=dims)

    def resolve(self, global_shape: Sequence[int], mesh: MeshLike) -> Layout:
        """Return the concrete layout of one tensor on one mesh: "..." expanded, the open factor of each fused dim
        inferred and every "?" resolved. The result is checked against both.

        Plain dims may be uneven; the factors of a fused dim must divide.

        Raises:
            LayoutError: it does not fit the tensor or the mesh.

        >>> Layout.parse("(kv@tp? head) embed", sizes={"kv": 2}).resolve((128, 64), "tp=4")
        Layout("(kv=2 head=64) embed")
        """
        return _resolve(self, tuple(global_shape), MeshShape.of(mesh))

    def validate(self, global_shape: Sequence[int], mesh: MeshLike) -> None:
        """Check that the layout fits a tensor and a mesh; `resolve` does the same and returns the concrete layout.

        Raises:
            LayoutError: an unknown axis, another number of dims, factor sizes that contradict the tensor or that do
                not divide.
        """
        self.resolve(global_shape, mesh)

    def placements(self, mesh: MeshLike, *, ndim: int | None = None) -> tuple[Placement, ...]:
        """Return the DTensor placements of the layout: one per mesh axis, in mesh order.

        A fused dim, or axes whose order differs from the mesh's, becomes `_StridedShard`. An axis of size one is
        `Replicate()`. Where a dim is uneven and its axes stand in another order than the mesh's, build the DTensor with
        `take` and `DTensor.from_local`, or redistribute: `distribute_tensor` shards in mesh order instead (torch 2.13).

        Args:
            mesh: a `MeshShape`, its text, or a `DeviceMesh`.
            ndim: the number of dims, where the layout leaves it open with "...".

        Raises:
            LayoutError: an axis is not on the mesh, or "...", "?" or a factor size is still open.

        >>> Layout.parse("embed@(tp,dp)").placements("dp=2,tp=4")
        (_StridedShard(dim=0, sf=4), Shard(dim=0))
        """
        return _placements_on(self if ndim is None else self.with_ndim(ndim), MeshShape.of(mesh))

    @classmethod
    def from_placements(
        cls,
        placements: Sequence[Placement],
        mesh: MeshLike,
        *,
        ndim: int | None = None,
        global_shape: Sequence[int] | None = None,
        dim_names: Sequence[str] | None = None,
    ) -> Layout:
        """Return the layout that DTensor placements describe; the inverse of `placements`.

        Args:
            placements: one per mesh axis, in mesh order.
            mesh: the mesh that they are for.
            ndim: the number of dims; or give `global_shape`, or `dim_names`.
            global_shape: also gives fused dims all their factor sizes, and is checked.
            dim_names: names for the dims, "_" by default.

        Raises:
            LayoutError: a placement that no layout has: a `_StridedShard` whose shards cross the boundary of an
                earlier shard, or a partial kind of torch's own such as a masked one.

        >>> from torch.distributed.tensor import Replicate, Shard
        >>> from torch.distributed.tensor.placement_types import _StridedShard
        >>> Layout.from_placements((Shard(1), Replicate()), "dp=2,tp=4", ndim=2)
        Layout("_ _@dp")
        >>> Layout.from_placements([_StridedShard(0, split_factor=3)], "tp=2", global_shape=(24,), dim_names=["qkv"])
        Layout("(3 qkv=8@tp)")
        """
        shape = MeshShape.of(mesh)
        from shardlib.layout import _placements  # it imports torch

        names = _dim_names(ndim, global_shape, dim_names)
        context = f'Placements {tuple(placements)} on mesh "{shape}" for a tensor of {len(names)} dims'
        _raise_first(context, _placements.problems(placements, shape, len(names)))
        try:
            dims = _placements.dims_of(placements, shape, names)
        except ValueError as error:
            raise LayoutError(
                f"{context}: {error}. Redistribute the tensor to plain Shard or Replicate placements first."
            ) from None
        layout = cls(dims, _placements.partials_of(placements, shape))
        return layout if global_shape is None else layout.resolve(global_shape, shape)

    def partition_spec(self) -> PartitionSpec:
        """Return the layout as a `jax.sharding.PartitionSpec`, which has no dtype and no memory kind. Imports jax.

        Raises:
            LayoutError: JAX has no spec for it: a sharded factor of a fused dim, a partial axis, or "?" or "..." still
                open.

        >>> Layout.parse("batch@(dp,fsdp) seq embed").partition_spec()  # doctest: +SKIP
        P(('dp', 'fsdp'), None, None)
        """
        _raise_first(f'Layout "{self}" as a PartitionSpec', _spec.problems(self.dims, self.partials))
        return _spec.spec_of(self.dims)

    @classmethod
    def from_partition_spec(cls, spec: PartitionSpec, ndim: int, *, dim_names: Sequence[str] | None = None) -> Layout:
        """Return the layout that a `jax.sharding.PartitionSpec` describes. Dims beyond the end of the spec are not
        split.

        Raises:
            LayoutError: the spec is longer than `ndim`, or leaves a dim unconstrained.

        >>> Layout.from_partition_spec(jax.P(("fsdp", "tp")), 2)  # doctest: +SKIP
        Layout("_@(fsdp,tp) _")
        """
        names = _dim_names(ndim, None, dim_names)
        _raise_first(f"{spec} for a tensor of {len(names)} dims", _spec.problems_in(spec, len(names)))
        return cls(_spec.dims_of(spec, names))

    def local_slices(
        self, global_shape: Sequence[int], mesh: MeshLike, coordinate: Mapping[str, int]
    ) -> tuple[Slices, ...]:
        """Return the slices of the global tensor that the rank at `coordinate` holds.

        For each dim the slices that, joined in this order, are the local dim: one slice for a plain dim, several for
        a sharded factor of a fused dim, never none. The local tensor is the product of the dims' slices; `take`
        applies them, `put` undoes it.

        The axes of a dim shard it one after another, outermost first, each as `torch.chunk` does, so that shards may be
        uneven and the last ones empty. DTensor shards of the same placements are the same.

        Args:
            global_shape: the global shape of the tensor.
            mesh: names and sizes of the axes.
            coordinate: axis to index, for at least the axes that shard the tensor; `MeshShape.coordinate(rank)`.

        >>> layout = Layout.parse("(qkv heads@tp head) embed", sizes={"qkv": 3, "heads": 2})
        >>> layout.local_slices((12, 5), "tp=2", {"tp": 1})
        ((slice(2, 4, None), slice(6, 8, None), slice(10, 12, None)), (slice(0, 5, None),))
        """
        return _slices_at(self, tuple(global_shape), MeshShape.of(mesh), tuple(coordinate.items()))

    def local_shape(
        self, global_shape: Sequence[int], mesh: MeshLike, coordinate: Mapping[str, int]
    ) -> tuple[int, ...]:
        """Return the local shape on the rank at `coordinate`.

        >>> Layout.parse("vocab@tp embed").local_shape((50257, 768), "tp=4", {"tp": 3})
        (12562, 768)
        """
        return _shape_at(self, tuple(global_shape), MeshShape.of(mesh), tuple(coordinate.items()))

    def local_bytes(
        self,
        global_shape: Sequence[int],
        dtype: torch.dtype,
        mesh: MeshLike,
        coordinate: Mapping[str, int] | None = None,
    ) -> int:
        """Return the size in bytes of one rank's local shard.

        Args:
            global_shape: the global shape of the tensor.
            dtype: the dtype of the tensor; a dtype of the layout takes precedence.
            mesh: names and sizes of the axes.
            coordinate: the rank's coordinate; by default the first rank, whose shard is the largest.

        >>> Layout.parse("vocab@tp embed").local_bytes((50257, 768), torch.float32, "tp=4")
        38599680
        """
        shape = MeshShape.of(mesh)
        where = dict.fromkeys(shape.names, 0) if coordinate is None else coordinate
        return math.prod(self.local_shape(global_shape, shape, where)) * (self.dtype or dtype).itemsize

    def uneven_dims(self, global_shape: Sequence[int], mesh: MeshLike) -> tuple[int, ...]:
        """Return the dims whose local sizes differ between ranks.

        >>> Layout.parse("vocab@tp embed").uneven_dims((50257, 768), "tp=4")
        (0,)
        """
        return _uneven_dims(self, tuple(global_shape), MeshShape.of(mesh))

    def replica_id(self, mesh: MeshLike, coordinate: Mapping[str, int]) -> int:
        """Return the index of a rank among those that hold the same shard, in mesh order: 0 is its owner.

        Of several ranks with the same elements, the owner counts, saves and sends them. JAX numbers the replicas of a
        shard so, in `Shard.replica_id`.

        >>> [Layout.parse("out@tp in").replica_id("dp=2,tp=2", {"dp": dp, "tp": 1}) for dp in range(2)]
        [0, 1]
        """
        return replica_id(self.axes, dict(MeshShape.of(mesh).items()), coordinate)

    def take(self, tensor: torch.Tensor, mesh: MeshLike, coordinate: Mapping[str, int]) -> torch.Tensor:
        """Return the local shard of a global tensor on the rank at `coordinate`: a view where every dim is one slice.

        >>> Layout.parse("(2 half@tp)").take(torch.arange(8), "tp=2", {"tp": 1})
        tensor([2, 3, 6, 7])
        """
        for dim, slices in enumerate(self.local_slices(tensor.shape, mesh, coordinate)):
            parts = [tensor.narrow(dim, part.start, part.stop - part.start) for part in slices]
            tensor = parts[0] if len(parts) == 1 else joined(parts, dim)
        return tensor

    def put(self, shards: Sequence[torch.Tensor], global_shape: Sequence[int], mesh: MeshLike) -> torch.Tensor:
        """Assemble the global tensor from the shards of all ranks, in rank order; the inverse of `take`.

        No communication and no reduction: partial axes are an error, ranks that hold the same elements overwrite each
        other in rank order.

        Raises:
            LayoutError: not one shard per rank, a shard of another shape than `local_shape`, or a partial axis.

        >>> layout, full = Layout.parse("(2 half@tp)"), torch.arange(8)
        >>> shards = [layout.take(full, "tp=2", {"tp": rank}) for rank in (0, 1)]
        >>> layout.put(shards, (8,), "tp=2")
        tensor([0, 1, 2, 3, 4, 5, 6, 7])
        """
        shape = MeshShape.of(mesh)
        self._check_shards(shards, tuple(global_shape), shape)
        full = shards[0].new_empty(tuple(global_shape))
        for rank, shard in enumerate(shards):
            put_shard(full, self.local_slices(global_shape, shape, shape.coordinate(rank)), shard)
        return full

    def picture(self, global_shape: Sequence[int], mesh: MeshLike) -> str:
        """Draw the tensor and the local shards of ranks, with characters: where each shard begins, and its ranks.

        Of more than two dims those that are sharded are drawn. A DTensor's picture is that of
        `Layout.from_placements(tensor.placements, tensor.device_mesh, global_shape=tensor.shape)`, a `jax.Array`'s that
        of `shardlib.jax.from_named_sharding(array.sharding, array.ndim)`; there ranks are devices in the mesh's order.

        Raises:
            LayoutError: the layout does not fit the tensor or the mesh.

        >>> print(Layout.parse("(qkv heads@tp) embed@dp", sizes={"qkv": 2}).picture((8, 6), "dp=2,tp=2"))
        (8, 6) "(qkv heads@tp) embed@dp" on "dp=2,tp=2"
                   embed
        qkv heads  0   3
                  ┌───┬───┐
        0         │ 0 │ 2 │
                  ├───┼───┤
        2         │ 1 │ 3 │
                  ├───┼───┤
        4         │ 0 │ 2 │
                  ├───┼───┤
        6         │ 1 │ 3 │
                  └───┴───┘
        """
        mesh = MeshShape.of(mesh)
        return _picture.draw(self.resolve(global_shape, mesh), tuple(global_shape), mesh)

    def _check_shards(self, shards: Sequence[torch.Tensor], global_shape: tuple[int, ...], mesh: MeshShape) -> None:
        context = f'Layout "{self}" for a tensor of global shape {global_shape} on mesh "{mesh}"'
        if self.partials:
            raise LayoutError(f"{context}: partial values cannot be joined into one tensor. Reduce them first.")
        if len(shards) != mesh.world_size:
            raise LayoutError(
                f"{context}: shards of {len(shards)} ranks were given, the mesh has {mesh.world_size}. Give one per "
                "rank, in rank order."
            )
        for rank, shard in enumerate(shards):
            expected = self.local_shape(global_shape, mesh, mesh.coordinate(rank))
            if tuple(shard.shape) != expected:
                raise LayoutError(
                    f"{context}: the shard of rank {rank} has shape {tuple(shard.shape)}, expected {expected}. "
                    "Give local tensors without padding, in rank order."
                )

    @property
    def _concrete_dims(self) -> tuple[Dim, ...]:
        return tuple(dim for dim in self.dims if isinstance(dim, Dim))

    def _dims_at(self, global_shape: Sequence[int], mesh: MeshShape, coordinate: Mapping[str, int]) -> tuple[Dim, ...]:
        layout = _resolve(self, tuple(global_shape), mesh)
        layout._check_coordinate(coordinate, mesh)
        return layout._concrete_dims

    def _check_coordinate(self, coordinate: Mapping[str, int], mesh: MeshShape) -> None:
        for axis in axes_of_dims(self.dims):
            if not 0 <= coordinate.get(axis, -1) < mesh[axis]:
                raise LayoutError(
                    f'Layout "{self}" on mesh "{mesh}": coordinate {dict(coordinate)} gives no index on axis "{axis}". '
                    f"Give an index from 0 to {mesh[axis] - 1}, as MeshShape.coordinate(rank) does for every axis."
                )

    @property
    def _parts(self) -> Parts:
        return Parts(self.dims, self.partials, self._dtype_name, self.memory)


@lru_cache(maxsize=65536)
def _parse(text: str, sizes: tuple[tuple[str, int], ...]) -> Layout:
    return Layout(*_text.read(text, dict(sizes)))


@cache
def _replicated(ndim: int) -> Layout:
    return Layout(tuple(plain() for _ in range(ndim)))


@lru_cache(maxsize=65536)
def _resolve(layout: Layout, global_shape: tuple[int, ...], mesh: MeshShape) -> Layout:
    dims = _fit.expand(layout.dims, len(global_shape))
    context = f'Layout "{layout}" for a tensor of global shape {global_shape} on mesh "{mesh}"'
    _raise_first(context, _fit.axis_problems(sorted(layout.axes), mesh))
    _raise_first(context, _fit.shape_problems(dims, global_shape))
    fitted = tuple(
        _fit.fit_dim(dim, size, mesh) if isinstance(dim, Dim) else dim
        for dim, size in zip(dims, global_shape, strict=True)
    )
    _raise_first(context, _fit.mesh_problems(fitted, mesh))
    return replace(layout, dims=fitted)


# A model has thousands of tensors and a few layouts, so that what follows from a layout alone is computed once.


@lru_cache(maxsize=65536)
def _text_of(layout: Layout) -> str:
    return _text.write(layout._parts, sizes=True)


@lru_cache(maxsize=65536)
def _slices_at(
    layout: Layout, global_shape: tuple[int, ...], mesh: MeshShape, coordinate: tuple[tuple[str, int], ...]
) -> tuple[Slices, ...]:
    at = dict(coordinate)
    dims = layout._dims_at(global_shape, mesh, at)
    return tuple(dim_slices(dim, size, mesh, at) for dim, size in zip(dims, global_shape, strict=True))


@lru_cache(maxsize=65536)
def _shape_at(
    layout: Layout, global_shape: tuple[int, ...], mesh: MeshShape, coordinate: tuple[tuple[str, int], ...]
) -> tuple[int, ...]:
    at = dict(coordinate)
    dims = layout._dims_at(global_shape, mesh, at)
    held = (intervals(dim, size, mesh, at) for dim, size in zip(dims, global_shape, strict=True))
    return tuple(math.prod(stop - start for start, stop in dim) for dim in held)


@lru_cache(maxsize=65536)
def _uneven_dims(layout: Layout, global_shape: tuple[int, ...], mesh: MeshShape) -> tuple[int, ...]:
    dims = _resolve(layout, global_shape, mesh)._concrete_dims
    pieces = [math.prod(mesh[axis] for axis in dim.axes) for dim in dims]
    return tuple(i for i, size in enumerate(global_shape) if size % pieces[i])


@lru_cache(maxsize=65536)
def _placements_on(layout: Layout, mesh: MeshShape) -> tuple[Placement, ...]:
    context = f'Layout "{layout}" on mesh "{mesh}"'
    _raise_first(context, _fit.axis_problems(sorted(layout.axes), mesh))
    if layout.ndim is None:
        raise LayoutError(f'{context}: "..." leaves the number of dims open. Pass ndim=, or call with_ndim first.')
    _raise_first(context, _fit.mesh_problems(layout.dims, mesh))
    from shardlib.layout import _placements  # it imports torch

    return _placements.placements_of(layout.dims, layout.partial, mesh)


def _dim_names(
    ndim: int | None, global_shape: Sequence[int] | None, dim_names: Sequence[str] | None
) -> tuple[str, ...]:
    counts = [ndim, *(len(given) for given in (global_shape, dim_names) if given is not None)]
    known = {count for count in counts if count is not None}
    if len(known) != 1:
        raise LayoutError(
            f"The number of dims was given as ndim={ndim}, global_shape={global_shape}, dim_names={dim_names}. "
            "Give at least one of them, and let them agree."
        )
    return tuple(dim_names) if dim_names is not None else ("_",) * known.pop()


def _raise_first(context: str, problems: Iterable[_fit.Problem]) -> None:
    for fact, advice in problems:
        raise LayoutError(f"{context}: {fact}. {advice}")

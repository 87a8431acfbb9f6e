"""The value: how one tensor lies on a mesh."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

import torch
from torch.distributed.tensor import Placement

from shardlib._mesh import MeshLike, MeshShape
from shardlib.errors import LayoutError
from shardlib.layout import _fit, _placements, _text
from shardlib.layout._dims import Dim, Dims, axes_of_dims, plain
from shardlib.layout._text import Memory, Parts

__all__ = ["Layout"]


@dataclass(frozen=True, repr=False)
class Layout:
    """How one tensor lies on a mesh: for each dim the axes that split it, outermost first, and the axes over which
    it is still to be reduced. A frozen, hashable value; it needs no process group and no device.

    Text form, which `parse` reads and `str` gives back:

        "vocab@tp embed"                     one dim split
        "batch@dp seq embed"                 an activation
        "embed@(fsdp,tp)"                    one dim split by two axes, fsdp outermost
        "(qkv heads@tp head) embed"          a fused dim: split over heads inside each of q, k, v
        "(kv@tp? head) embed"                split if it divides, otherwise replicate; settled by `resolve`
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
                f'Layout "{self}": axis "{repeated[0]}" is used twice. Each axis splits one dim of a tensor or is '
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
        """A tensor of `ndim` dims that every rank holds whole.

        >>> Layout.replicate(2)
        Layout("_ _")
        """
        return cls(tuple(plain() for _ in range(ndim)))

    @property
    def text(self) -> str:
        """The text form with every known factor size, so that `Layout.parse(layout.text) == layout`."""
        return _text.write(self._parts, sizes=True)

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

    @property
    def axes(self) -> frozenset[str]:
        """The axes that split a dim or are partial."""
        return frozenset(chain(axes_of_dims(self.dims), self.partial))

    def axes_of(self, dim: int) -> tuple[str, ...]:
        """The axes that split one dim, in the order of its factors.

        >>> Layout.parse("batch@(dp,fsdp) embed").axes_of(0)
        ('dp', 'fsdp')
        """
        entry = self.dims[dim]
        return entry.axes if isinstance(entry, Dim) else ()

    def with_axes(self, dim: int, axes: Sequence[str], *, factor: int = 0) -> Layout:
        """The layout with one dim (of a fused dim, one factor) split by exactly these axes, outermost first.

        >>> Layout.parse("vocab@tp embed").with_axes(0, ("fsdp", "tp"))
        Layout("vocab@(fsdp,tp) embed")
        """
        entry = self.dims[dim]
        if not isinstance(entry, Dim):
            raise LayoutError(f'Layout "{self}": dim {dim} is "...", which is never split. Call with_ndim first.')
        factors = list(entry.factors)
        factors[factor] = replace(factors[factor], axes=tuple(axes), optional=factors[factor].optional and bool(axes))
        dims = list(self.dims)
        dims[dim] = Dim(tuple(factors))
        return replace(self, dims=tuple(dims))

    def with_axes_dropped(self, names: Iterable[str]) -> Layout:
        """The layout as seen on a mesh without these axes: they split nothing and reduce nothing.

        >>> Layout.parse("embed@(fsdp,tp) + sum@dp").with_axes_dropped(["fsdp", "dp"])
        Layout("embed@tp")
        """
        gone = frozenset(names)
        if gone.isdisjoint(self.axes):
            return self
        dims = tuple(dim.without(gone) if isinstance(dim, Dim) else dim for dim in self.dims)
        return replace(self, dims=dims, partials=tuple(pair for pair in self.partials if pair[0] not in gone))

    def with_ndim(self, ndim: int) -> Layout:
        """The layout with "..." expanded to `ndim` dims.

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
        """The layout made concrete for one tensor on one mesh: "..." expanded, the open factor of each fused dim
        inferred, every "?" settled, and all of it checked.

        Plain dims may be uneven; the factors of a fused dim must divide.

        Raises:
            LayoutError: it does not fit the tensor or the mesh.

        >>> Layout.parse("(kv@tp? head) embed", sizes={"kv": 2}).resolve((128, 64), "tp=4")
        Layout("(kv=2 head=64) embed")
        """
        return _resolve(self, tuple(global_shape), MeshShape.of(mesh))

    def validate(self, global_shape: Sequence[int], mesh: MeshLike) -> None:
        """Check that the layout fits a tensor and a mesh; see `resolve`, which also returns what it means there.

        Raises:
            LayoutError: an unknown axis, another number of dims, factor sizes that contradict the tensor or that do
                not divide.
        """
        self.resolve(global_shape, mesh)

    def placements(self, mesh: MeshLike, *, ndim: int | None = None) -> tuple[Placement, ...]:
        """The same as DTensor placements: one per mesh axis, in mesh order.

        A fused dim, or axes whose order differs from the mesh's, becomes `_StridedShard`. An axis of size one is
        `Replicate()`.

        Args:
            mesh: a `MeshShape`, its text, or a `DeviceMesh`.
            ndim: the number of dims, where the layout leaves it open with "...".

        Raises:
            LayoutError: an axis is not on the mesh, or "...", "?" or a factor size is still open.

        >>> Layout.parse("embed@(tp,dp)").placements("dp=2,tp=4")
        (_StridedShard(dim=0, sf=4), Shard(dim=0))
        """
        return _placements_on(self if ndim is None else self.with_ndim(ndim), MeshShape.of(mesh))

    @property
    def _parts(self) -> Parts:
        return Parts(self.dims, self.partials, self.dtype, self.memory)


@lru_cache(maxsize=65536)
def _parse(text: str, sizes: tuple[tuple[str, int], ...]) -> Layout:
    return Layout(*_text.read(text, dict(sizes)))


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


@lru_cache(maxsize=65536)
def _placements_on(layout: Layout, mesh: MeshShape) -> tuple[Placement, ...]:
    context = f'Layout "{layout}" on mesh "{mesh}"'
    _raise_first(context, _fit.axis_problems(sorted(layout.axes), mesh))
    if layout.ndim is None:
        raise LayoutError(f'{context}: "..." leaves the number of dims open. Pass ndim=, or call with_ndim first.')
    _raise_first(context, _fit.mesh_problems(layout.dims, mesh))
    return _placements.placements_of(layout.dims, layout.partial, mesh)


def _raise_first(context: str, problems: Iterable[_fit.Problem]) -> None:
    for fact, advice in problems:
        raise LayoutError(f"{context}: {fact}. {advice}")

"""Shapes, and layouts of a tensor of a shape on a mesh."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

from hypothesis import strategies as st

from shardlib._mesh_shape import MeshLike, MeshShape
from shardlib.errors import InputError
from shardlib.layout import Dim, Factor, Layout
from shardlib.testing.strategies._draws import among, check_size, often

__all__ = ["draw_layout", "layouts", "shapes"]


def shapes(
    mesh: MeshLike, *, min_dims: int = 1, max_dims: int = 3, uneven: bool = True
) -> st.SearchStrategy[tuple[int, ...]]:
    """Generate global shapes of tensors for a mesh: sizes from 0 to 14, and multiples of its axes' products.

    Shrinks towards one dim of size zero (of size one, where nothing may be uneven).

    >>> from hypothesis import find
    >>> find(shapes("dp=2,tp=2"), lambda shape: len(shape) == 2)
    (0, 0)
    """
    shape = MeshShape.of(mesh)
    for name, size in (("min_dims", min_dims), ("max_dims", max_dims)):
        check_size("shapes", name, size)
    return _shapes(shape, min_dims, max_dims, uneven)


@st.composite
def _shapes(draw: st.DrawFn, mesh: MeshShape, min_dims: int, max_dims: int, uneven: bool) -> tuple[int, ...]:
    def size() -> int:
        kind = draw(st.sampled_from(["small", "multiple", "multiple"] if uneven else ["multiple"]))
        if kind == "small":
            return draw(st.integers(0, 14))
        pieces = math.prod(each if draw(often) else 1 for each in mesh.sizes)
        return pieces * draw(st.integers(1, 3)) * draw(st.integers(1, 3))

    return tuple(size() for _ in range(draw(st.integers(min_dims, max_dims))))


def layouts(
    shape: Sequence[int],
    mesh: MeshLike,
    *,
    axes: Sequence[str] | None = None,
    dims: Sequence[str] | None = None,
    uneven: bool = True,
    fused: bool = True,
    partial: bool = False,
) -> st.SearchStrategy[Layout]:
    """Generate layouts of a tensor of this global shape: any axes on any dims, in any order.

    Shrinks towards nothing sharded, then towards one axis on an early dim that is not fused.

    Args:
        shape: global sizes of the tensor's dims.
        mesh: the mesh, or its text.
        axes: the axes that may shard; all of the mesh by default.
        dims: names of the dims, "d0", "d1", ... by default. Factors of a fused dim are numbered after it.
        uneven: whether axes may shard a dim that they do not divide.
        fused: whether dims may be products of two or three factors, any of them sharded.
        partial: whether the tensor may be a sum still to be taken over axes that shard nothing.

    Raises:
        InputError: a size that is negative, an axis that the mesh does not have, more or fewer names than dims.

    >>> from hypothesis import find
    >>> find(layouts((4, 6), "dp=2,tp=2"), lambda layout: True)
    Layout("d0 d1")
    >>> find(layouts((4, 6), "dp=2,tp=2"), lambda layout: "tp" in layout.axes)
    Layout("d0@tp d1")
    """
    mesh_shape, sizes = MeshShape.of(mesh), tuple(shape)
    wrong = [size for size in sizes if isinstance(size, bool) or not isinstance(size, int) or size < 0]
    if wrong:
        raise InputError(f"layouts({sizes}): {wrong[0]!r} is not a size of a dim; give integers from 0 up.")
    for axis in axes or ():
        if axis not in mesh_shape:
            raise InputError(f'layouts(axes={tuple(axes or ())}): mesh "{mesh_shape}" has no axis "{axis}".')
    if dims is not None and len(dims) != len(sizes):
        raise InputError(f"layouts({sizes}, dims={tuple(dims)}): give one name for each of the {len(sizes)} dims.")
    names = tuple(dims) if dims is not None else tuple(f"d{at}" for at in range(len(sizes)))
    within = mesh_shape.names if axes is None else tuple(axes)
    most = len(within) if fused else -1
    return _layouts(sizes, mesh_shape, within, names, uneven=uneven, fused=most, fuse_whole=fused, partial=partial)


def draw_layout(
    draw: st.DrawFn,
    shape: tuple[int, ...],
    mesh: MeshShape,
    axes: tuple[str, ...],
    names: tuple[str, ...],
    *,
    uneven: bool = True,
    fused: int = -1,
    fuse_whole: bool = False,
    partial: bool = False,
    shared: int = 0,
) -> Layout:
    """Draw the layout of one tensor.

    `fused` is how many axes may split a fused dim, -1 for no such dim; `fuse_whole` says whether none may, too. With
    `shared` axes of one dim stand in the mesh's order unless they divide what each of so many data ranks has of it.
    """
    axes_of: list[list[str]] = [[] for _ in shape]
    last = 0
    for axis in axes:
        # Two axes on one dim are rare where each takes any: one number more says "where the last one is".
        at = draw(st.integers(0, len(shape) + 1))
        last = at if at <= len(shape) else last
        if last:
            axes_of[last - 1].append(axis)
    dims = []
    for at, (name, size, mine) in enumerate(zip(names, shape, axes_of, strict=True)):
        order = list(draw(st.permutations(mine))) if len(mine) > 1 else mine
        if shared and size % (shared * math.prod(mesh[axis] for axis in mine)):
            order = mine
        kept = order if uneven else _dividing(order, size, mesh)
        most = fused if kept or fuse_whole else -1
        stem = f"d{at}f" if name == "_" else name
        dims.append(_dim(draw, name, stem, size, tuple(kept), mesh, most))
    split = {axis for dim in dims for axis in dim.axes}
    sums = [(axis, "sum") for axis in axes if partial and axis not in split and draw(st.booleans())]
    return Layout(tuple(dims), tuple(sums))


_layouts = st.composite(draw_layout)


def _dividing(axes: Iterable[str], size: int, mesh: MeshShape) -> list[str]:
    """Return the axes that divide the rest of a dim after those before them."""
    kept = []
    for axis in axes:
        if size % mesh[axis] == 0:
            kept.append(axis)
            size //= mesh[axis]
    return kept


def _dim(draw: st.DrawFn, name: str, stem: str, size: int, axes: tuple[str, ...], mesh: MeshShape, fused: int) -> Dim:
    """Draw a dim that these axes split: plain, or the product of factors that they divide."""
    pieces = math.prod(mesh[axis] for axis in axes)
    # Drawn where it decides nothing, too: an axis that goes away takes no draws with it, and so can go away.
    wanted = fused >= 0 and draw(often if fused > 1 else st.booleans())
    if not wanted or len(axes) > fused or not size or size % pieces:
        return Dim((Factor(name, axes),))
    count = draw(st.integers(2, 3))
    at = {axis: draw(st.integers(0, count - 1)) for axis in mesh.names}
    axes_of = [[axis for axis in axes if at[axis] == factor] for factor in range(count)]
    left, factors = size // pieces, []
    for factor, mine in enumerate(axes_of):
        more = draw(among(_divisors(left))) if factor < count - 1 else left
        left //= more
        factors.append(Factor(f"{stem}{factor}", tuple(mine), more * math.prod(mesh[a] for a in mine)))
    return Dim(tuple(factors))


@lru_cache(maxsize=1024)
def _divisors(size: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, size + 1) if size % d == 0)

"""Named meshes as values: names and sizes of axes, which need no process and no torch."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Literal, Union

import numpy as np

from shardlib._again import is_again
from shardlib.errors import MeshError, nearest

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "AxisKind",
    "MeshLike",
    "MeshShape",
    "kind_of",
    "listed",
    "order_of",
    "rank_groups",
    "register_axis",
    "taken_for_model_axes",
]

AxisKind = Literal["data", "model", "expert", "pipeline", "overlay"]

_KINDS: dict[str, AxisKind] = {
    "dp": "data",
    "ddp": "data",
    "fsdp": "data",
    "dp_replicate": "data",
    "dp_shard": "data",
    "replicate": "data",
    "shard": "data",
    "data": "data",
    "zero": "data",
    "tp": "model",
    "sp": "model",
    "cp": "model",
    "model": "model",
    "tensor": "model",
    "depth": "model",
    "row": "model",
    "col": "model",
    "ep": "expert",
    "pp": "pipeline",
    "stage": "pipeline",
    # The names of Keras, MaxText and torchax.
    "batch": "data",
    "diloco": "data",
    "fsdp_transpose": "data",
    "attn_dp": "data",
    "attn_dp_expert": "data",
    "expert": "expert",
    "context": "model",
    "context_autoregressive": "model",
    "context_usp_ulysses": "model",
    "sequence": "model",
    "tensor_sequence": "model",
    "tensor_transpose": "model",
    "autoregressive": "model",
}
_PART = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*(-?\d+)\s*")


RankGroups = Callable[["MeshShape"], Sequence[Sequence[int]]]

_GROUPS: dict[str, RankGroups] = {}


def register_axis(name: str, *, kind: AxisKind) -> Callable[[RankGroups], RankGroups]:
    """Register the kind of a mesh axis: "data", "model", "expert", "pipeline", or "overlay".

    Data axes carry different examples, model axes divide the work on one example, a pipeline axis divides the list of
    modules. An expert axis is a data axis over which rules may shard experts; tokens are then sent to them. The usual
    names (dp, fsdp, tp, sp, cp, ep, pp, ...) are registered already.

    As a decorator it also registers the axis' groups, where they do not follow from the order of ranks: the function
    gets the mesh's shape and returns lists of ranks. The groups of a mesh axis contain every rank once, and ranks
    ascend along every axis, as in a process group of torch. An overlay axis is not an axis of a mesh: its groups may
    have any size and share ranks. It shards nothing, and is for your own collectives, in a gradient handler or a
    schedule; `axis_groups` creates its process groups.

    Raises:
        MeshError: the kind is not one of these, or the name has another kind or groups already.

    >>> register_axis("rows", kind="model")  # doctest: +ELLIPSIS
    <function ...>
    >>> MeshShape("dp=2,rows=2").model_axes
    ('rows',)
    >>> @register_axis("far", kind="data")  # its groups are half a job wide, those of tp are next door
    ... def far(shape):
    ...     half = shape.world_size // 2
    ...     return [[rank, rank + half] for rank in range(half)]
    >>> [MeshShape("tp=2,far=2").coordinate(rank) for rank in (0, 2)]
    [{'tp': 0, 'far': 0}, {'tp': 0, 'far': 1}]
    """
    if kind not in ("data", "model", "expert", "pipeline", "overlay"):
        raise MeshError(
            f'Axis "{name}" was registered with kind "{kind}"; give "data", "model", "expert", "pipeline" or "overlay".'
        )
    known = _KINDS.setdefault(name, kind)
    if known != kind:
        raise MeshError(f'Axis "{name}" already is a {known} axis and cannot become a {kind} axis; use another name.')

    def register(groups: RankGroups) -> RankGroups:
        before = _GROUPS.get(name, groups)
        if not is_again(before, groups):
            raise MeshError(f'Axis "{name}" has rank groups already, those of {before.__qualname__}; use another name.')
        _GROUPS[name] = groups
        order_of.cache_clear()
        return groups

    return register


@contextmanager
def taken_for_model_axes(names: Iterable[str]) -> Iterator[None]:
    """Let shapes have axes of these names inside the block, of which nothing is known: those of foreign meshes."""
    unknown = [name for name in dict.fromkeys(names) if name not in _KINDS]
    _KINDS.update(dict.fromkeys(unknown, "model"))
    try:
        yield
    finally:
        for name in unknown:
            del _KINDS[name]


def kind_of(name: str) -> AxisKind | None:
    """Return the registered kind of an axis, or None.

    >>> kind_of("tp"), kind_of("never_registered")
    ('model', None)
    """
    return _KINDS.get(name)


def rank_groups(name: str, shape: MeshShape) -> list[list[int]]:
    """Return the groups of an axis with a registered function, checked.

    Raises:
        MeshError: the axis has no such function, or it returned what are not groups of this mesh's ranks.
    """
    if name not in _GROUPS:
        raise MeshError(
            f'Axis "{name}" has no rank groups of its own; put @shardlib.axes.register_axis("{name}", kind=...) over '
            f"the function that makes them.{nearest(name, _GROUPS)}"
        )
    made = _GROUPS[name](shape)
    try:
        found = [[int(rank) for rank in group] for group in made]
    except (TypeError, ValueError):
        raise MeshError(f'The rank groups of axis "{name}" are {made!r}; return a list of lists of ranks.') from None
    for group in found:
        if len(set(group)) < len(group) or not all(0 <= rank < shape.world_size for rank in group):
            raise MeshError(
                f'The rank groups of axis "{name}" on mesh "{shape}" have {group}; a group has ranks 0 to '
                f"{shape.world_size - 1}, each once."
            )
    return found


@lru_cache(maxsize=256)
def order_of(shape: MeshShape) -> tuple[int, ...] | None:
    """Return the ranks in the order of the mesh, the last axis fastest; None where it is 0, 1, ..."""
    own = [axis for axis in shape.names if axis in _GROUPS]
    if not own:
        return None
    if -1 in shape.sizes:
        raise MeshError(f'Mesh "{shape}" has an axis with rank groups of its own; give all sizes.')
    axis, groups = own[0], rank_groups(own[0], shape)
    every = sorted(rank for group in groups for rank in group)
    if any(len(group) != shape[axis] for group in groups) or every != list(range(shape.world_size)):
        raise MeshError(
            f'The rank groups of axis "{axis}" on mesh "{shape}" are {groups}; return '
            f"{shape.world_size // shape[axis]} groups of {shape[axis]} in which every rank is once, or register the "
            'axis with kind="overlay".'
        )
    others = [size for name, size in shape.axes if name != axis]
    table = np.moveaxis(np.array(sorted(groups)).reshape(*others, shape[axis]), -1, shape.names.index(axis))
    for other in own[1:]:
        lines = np.moveaxis(table, shape.names.index(other), -1).reshape(-1, shape[other]).tolist()
        wanted = rank_groups(other, shape)
        if sorted(map(sorted, lines)) != sorted(map(sorted, wanted)):
            raise MeshError(
                f'On mesh "{shape}" axes "{axis}" and "{other}" have rank groups of their own that do not cross: with '
                f'those of "{axis}", the groups of "{other}" are {lines}, and its function returned {wanted}.'
            )
    _refuse_descent(shape, table, axis)
    return tuple(table.flatten().tolist())


def _refuse_descent(shape: MeshShape, table: np.ndarray, axis: str) -> None:
    """Refuse coordinates that do not ascend with ranks: collectives use the order of the process group, which torch
    sorts."""
    for dim, name in enumerate(shape.names):
        for line in np.moveaxis(table, dim, -1).reshape(-1, shape[name]).tolist():
            if line != sorted(line):
                raise MeshError(
                    f'On mesh "{shape}" the rank groups of axis "{axis}" make {line} a group of axis "{name}"; ranks '
                    "have to ascend along every axis, as they do in process groups of torch. Return each group in "
                    "ascending order, and groups that cross the other axes so."
                )


@dataclass(frozen=True, init=False)
class MeshShape:
    """Names and sizes of mesh axes, outermost first. A value: no process group, no device.

    Build it from text or keywords. One size may be -1 until `resolve` gets the number of processes.

    Raises:
        MeshError: text that cannot be read, a repeated axis, a size that is not positive, an axis of unknown kind.

    >>> shape = MeshShape("dp=2,tp=4")
    >>> shape == MeshShape(dp=2, tp=4), shape.world_size, shape["tp"], str(shape)
    (True, 8, 4, 'dp=2,tp=4')
    >>> shape.data_axes, shape.model_axes
    (('dp',), ('tp',))
    """

    axes: tuple[tuple[str, int], ...]

    def __init__(self, spec: str | Mapping[str, int] | None = None, /, **axes: int) -> None:
        if spec is not None and not isinstance(spec, str | Mapping):
            raise MeshError(
                f'A mesh shape was given as {spec!r}; give text such as "dp=2,tp=4", a mapping from axis name to size, '
                "or keywords, as in MeshShape(dp=2, tp=4)."
            )
        pairs = _parse(spec) if isinstance(spec, str) else list((spec or {}).items())
        pairs += list(axes.items())
        _check_axes(pairs)
        object.__setattr__(self, "axes", tuple((name, int(size)) for name, size in pairs))

    @classmethod
    def of(cls, mesh: Any) -> MeshShape:
        """Return the shape of a mesh from text, a mapping, a `MeshShape`, a named `DeviceMesh`, or a mesh of JAX."""
        if isinstance(mesh, MeshShape):
            return mesh
        if _is_device_mesh(mesh):
            return _of_sizes(_names(mesh), tuple(mesh.shape))
        if _is_jax_mesh(mesh):
            return _of_sizes(tuple(mesh.axis_names), tuple(mesh.shape.values()))
        if isinstance(mesh, str | Mapping):
            return cls(mesh)
        raise MeshError(
            f'A mesh was given as {type(mesh).__name__}; give text such as "dp=2,tp=4", a MeshShape, a mapping from '
            "axis name to size, a torch DeviceMesh with mesh_dim_names, or a mesh of JAX."
        )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes that carry different examples; those of experts are among them."""
        return self._of_kind("data", "expert")

    @property
    def model_axes(self) -> tuple[str, ...]:
        return self._of_kind("model")

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """The data axes on which rules may spread experts.

        >>> MeshShape("dp=2,ep=4").expert_axes, MeshShape("dp=2,ep=4").data_ranks
        (('ep',), 8)
        """
        return self._of_kind("expert")

    @property
    def pipeline_axes(self) -> tuple[str, ...]:
        return self._of_kind("pipeline")

    def kind(self, axis: str) -> AxisKind:
        """Return the kind of an axis of this mesh."""
        self[axis]
        return _KINDS[axis]

    def items(self) -> tuple[tuple[str, int], ...]:
        """Return pairs of name and size, outermost first."""
        return self.axes

    def __getitem__(self, axis: str) -> int:
        for name, size in self.axes:
            if name == axis:
                return size
        raise MeshError(f'Mesh "{self}" has no axis "{axis}"; it has {listed(self.names)}.{nearest(axis, self.names)}')

    def __contains__(self, axis: object) -> bool:
        return axis in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.axes)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)

    def __repr__(self) -> str:
        return f'MeshShape("{self}")'

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank: axis name to index, the last axis fastest.

        >>> MeshShape("dp=2,tp=4").coordinate(5)
        {'dp': 1, 'tp': 1}
        """
        if not 0 <= rank < self.world_size:
            raise MeshError(f'Mesh "{self}" has ranks 0 to {self.world_size - 1}; rank {rank} is not one of them.')
        order = order_of(self)
        return self.at(rank if order is None else order.index(rank))

    def at(self, position: int) -> dict[str, int]:
        """Return the coordinate of a position: of the rank itself, unless an axis has rank groups of its own."""
        found: dict[str, int] = {}
        for name, size in reversed(self.axes):
            position, found[name] = divmod(position, size)
        return {name: found[name] for name in self.names}

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks in the order of positions: 0, 1, ... unless an axis has rank groups of its own."""
        return order_of(self) or tuple(range(self.world_size))

    @property
    def data_ranks(self) -> int:
        """The number of blocks of rows that a global batch is divided into: the product of the data axes' sizes."""
        return math.prod(self[axis] for axis in self.data_axes)

    def data_place(self, coordinate: Mapping[str, int]) -> tuple[int, int]:
        """Return the index of the block of a global batch's rows for the rank at a coordinate, and the number of
        blocks.

        >>> shape = MeshShape("dp=2,tp=2")
        >>> [shape.data_place(shape.coordinate(rank)) for rank in range(4)]
        [(0, 2), (0, 2), (1, 2), (1, 2)]
        """
        index = 0
        for axis in self.data_axes:
            index = index * self[axis] + coordinate[axis]
        return index, self.data_ranks

    def groups(self, axes: Iterable[str]) -> list[list[int]]:
        """Group the ranks that differ only in their coordinates on these axes.

        Raises:
            MeshError: the mesh does not have one of them.

        >>> MeshShape("dp=2,tp=2").groups(("tp",))
        [[0, 1], [2, 3]]
        """
        ranks = self.ranks
        return [[ranks[position] for position in line] for line in self.lines(axes)]

    def lines(self, axes: Iterable[str]) -> list[list[int]]:
        """Group positions in the mesh in the same way, whatever their ranks."""
        axes, found = self._known(axes), dict[tuple[int, ...], list[int]]()
        for position in range(self.world_size):
            key = tuple(index for axis, index in self.at(position).items() if axis not in axes)
            found.setdefault(key, []).append(position)
        return list(found.values())

    def only(self, axes: tuple[str, ...]) -> MeshShape:
        """Return the sub-shape of some axes, in this mesh's order.

        Raises:
            MeshError: the mesh does not have one of them.
        """
        known = self._known(axes)
        return MeshShape({name: size for name, size in self.axes if name in known})

    def resolve(self, world_size: int) -> MeshShape:
        """Infer the size given as -1, and check that the sizes multiply to `world_size`.

        >>> MeshShape("dp=2,tp=-1").resolve(8)
        MeshShape("dp=2,tp=4")
        """
        known = math.prod(size for size in self.sizes if size != -1)
        if -1 in self.sizes and world_size % known == 0:
            return MeshShape({n: world_size // known if s == -1 else s for n, s in self.axes})
        if -1 in self.sizes or known != world_size:
            raise MeshError(
                f'Mesh "{self}" needs {"a multiple of " if -1 in self.sizes else ""}{known} processes, but '
                f"{world_size} {'is' if world_size == 1 else 'are'} running. Start them with `torchrun "
                f"--nproc_per_node {known}`, or change an axis (one size may be -1 and is then inferred)."
            )
        return self

    def _known(self, axes: Iterable[str]) -> set[str]:
        known = set(axes)
        for axis in known:
            self[axis]  # raises for an axis that the mesh does not have
        return known

    def _of_kind(self, *kinds: AxisKind) -> tuple[str, ...]:
        return tuple(name for name in self.names if _KINDS[name] in kinds)


MeshLike = Union[str, Mapping[str, int], MeshShape, "DeviceMesh"]


def _parse(text: str) -> list[tuple[str, int]]:
    pairs = []
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise MeshError(
                f'Mesh "{text}": cannot read "{part.strip()}"; write axis=size, separated by commas, as in "dp=2,tp=4".'
            )
        pairs.append((match[1], int(match[2])))
    return pairs


def _check_axes(pairs: list[tuple[str, Any]]) -> None:
    if not pairs:
        raise MeshError('A mesh needs at least one axis, as in MeshShape("dp=2,tp=4") or MeshShape(dp=2, tp=4).')
    text = ",".join(f"{name}={size}" for name, size in pairs)
    names = [name for name, _ in pairs]
    for name, size in pairs:
        if names.count(name) > 1:
            raise MeshError(f'Mesh "{text}" names axis "{name}" twice; each axis has one name and one size.')
        if name not in _KINDS:
            raise MeshError(
                f'Mesh "{text}": axis "{name}" is of no known kind; known are {listed(_KINDS)}. For an axis of your '
                f'own call shardlib.axes.register_axis("{name}", kind="data" or "model" or "pipeline") first.'
                f"{nearest(name, _KINDS)}"
            )
        if _KINDS[name] == "overlay":
            raise MeshError(
                f'Mesh "{text}": "{name}" is an overlay, which is not an axis of a mesh; leave it out, '
                f"and open its groups with shardlib.axes.axis_groups({name!r}, mesh)."
            )
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            raise MeshError(f'Mesh "{text}": axis "{name}" has size {size!r}; give a positive integer, or -1 once.')
    if [size for _, size in pairs].count(-1) > 1:
        raise MeshError(f'Mesh "{text}": only one axis size may be -1.')


def _is_device_mesh(mesh: Any) -> bool:
    """Tell whether a mesh is torch's; there is none before torch is imported."""
    module = sys.modules.get("torch.distributed.device_mesh")
    return module is not None and isinstance(mesh, module.DeviceMesh)


def _is_jax_mesh(mesh: Any) -> bool:
    """Tell whether a mesh is JAX's; there is none before JAX is imported."""
    module = sys.modules.get("jax.sharding")
    return module is not None and isinstance(mesh, module.Mesh | module.AbstractMesh)


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    if mesh.mesh_dim_names is None:
        raise MeshError(
            f"A DeviceMesh of shape {tuple(mesh.shape)} without axis names was given; pass mesh_dim_names to "
            'init_device_mesh, or build it with shardlib.mesh("dp=2,tp=4").'
        )
    return mesh.mesh_dim_names


@cache
def _of_sizes(names: tuple[str, ...], sizes: tuple[int, ...]) -> MeshShape:
    return MeshShape(dict(zip(names, sizes, strict=True)))


def listed(names: Any) -> str:
    return ", ".join(f'"{name}"' for name in names)

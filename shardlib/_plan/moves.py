"""Moves of a model's weights from one plan to another: which box of which tensor each rank sends to which rank.

Both layouts say which elements a rank holds. A rank needs the elements of its target shard, and lacks those of them
that it does not hold as a source rank. Each element that it lacks is in one box of the source's grid, which one or
several ranks hold; the nearest one sends it. So what is sent is exactly what is lacked, for any two plans of one model:
other meshes, fused dims with other factors, uneven dims, replicated heads, experts over other axes, other stages.

Nothing here talks: every rank computes the same moves from the two plans.
"""

from __future__ import annotations

import bisect
import functools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from numbers import Integral
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from shardlib._dtypes import name_of
from shardlib._mesh_shape import MeshShape
from shardlib._plan import page
from shardlib._plan.fold import fold
from shardlib._plan.memory import of_ranks
from shardlib._plan.readable import aligned, human_bytes
from shardlib._plan.rows import Phase, Row
from shardlib._plan.table import PlanTable
from shardlib.errors import PlanError, nearest
from shardlib.layout import Layout
from shardlib.layout._boxes import Box, Part, parts

if TYPE_CHECKING:
    import torch

__all__ = [
    "Laid",
    "Move",
    "Moves",
    "Names",
    "Pair",
    "Pieces",
    "check_node",
    "find_moves",
    "laid_by",
    "matched",
    "renamed",
]

Holding: TypeAlias = dict[tuple[int, ...], dict[int, Part]]
Places: TypeAlias = Callable[[Row], tuple[tuple[int, int], ...]]
Names: TypeAlias = Mapping[str, str | None] | Callable[[str], str | None]

_COLUMNS = ["tensor", "from", "to", "sent as", "bytes"]
_SHOWN = 16  # ranks up to which links are shown one by one


@dataclass(frozen=True)
class Move:
    """A box of a tensor that lies on one rank and is needed on one: on another, or in another place of the same.

    Attributes:
        name, source_name: the tensor's name in the target plan and in the source plan.
        source, target: global ranks.
        box: the box in the global tensor.
        source_local, target_local: the box in the local tensors of the two ranks.
        dtype: the dtype that is sent, the smaller one of both sides.
    """

    name: str
    source_name: str
    source: int
    target: int
    box: Box
    source_local: Box
    target_local: Box
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.box.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Pieces:
    """The boxes of a tensor that ranks need where no layout says it, such as those that an engine's loader reads.

    Attributes:
        of_rank: for each rank disjoint boxes of the global tensor, with their boxes in its local tensor.
    """

    of_rank: tuple[tuple[Part, ...], ...]

    def parts(self, index: int) -> tuple[Part, ...]:
        return self.of_rank[index]

    def __str__(self) -> str:
        return "as read"


@dataclass(frozen=True)
class Laid:
    """A tensor as it lies on ranks of a job.

    Attributes:
        names: its names: those of a tied tensor, the first of which is that of moves.
        shape, dtype: its global shape, and the dtype that it is stored in.
        layout, mesh: the layout, on a mesh; of a target, `Pieces` may stand for a layout.
        ranks: the ranks that hold it: on the mesh, and in the job. Of a pipeline, those of its stages.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout | Pieces
    mesh: MeshShape
    ranks: tuple[tuple[int, int], ...]

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True)
class Pair:
    """A tensor as it lies before and after its moves."""

    source: Laid
    target: Laid

    @property
    def sent(self) -> torch.dtype:
        """The smaller dtype; where both take as many bytes, the target's."""
        here, there = self.source.dtype, self.target.dtype
        return here if here.itemsize < there.itemsize else there


@dataclass(frozen=True, eq=False)
class Moves:
    """A value that says what is sent between ranks for tensors to lie in another way. It prints as a table, and goes to
    JSON. `Plan.moves_to` makes it.

    Attributes:
        pairs: the tensors.
        node: ranks that share a node: those with equal `rank // node` are near.
    """

    pairs: tuple[Pair, ...]
    node: int = 8
    _grids: dict[object, _Grid] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        check_node(self.node)

    @functools.cached_property
    def all(self) -> tuple[Move, ...]:
        """All moves, in the order of the target's tensors and ranks: also those of a rank to itself."""
        return tuple(self._iterate())

    @functools.cached_property
    def sent(self) -> tuple[Move, ...]:
        """The moves between different ranks."""
        return tuple(move for move in self.all if move.source != move.target)

    @property
    def bytes(self) -> int:
        """The bytes that all ranks send."""
        return sum(self.links.values())

    @property
    def kept_bytes(self) -> int:
        """The bytes of target shards that their ranks hold already, as they would be sent."""
        return sum(move.bytes for move in self.all if move.source == move.target)

    @functools.cached_property
    def links(self) -> dict[tuple[int, int], int]:
        """The bytes from each rank to each other one."""
        found: Counter[tuple[int, int]] = Counter()
        for move in self.sent:
            found[move.source, move.target] += move.bytes
        return dict(sorted(found.items()))

    @property
    def busiest(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The rank that sends most with its bytes, and the rank that receives most with its bytes; (-1, 0) of none."""
        links = self.links.items()
        return _largest((a, n) for (a, _), n in links), _largest((b, n) for (_, b), n in links)

    def buckets(self, limit: int) -> Iterator[list[Move]]:
        """Cut all moves into runs in which no rank sends or receives more than `limit` bytes. A move that is larger is
        cut along its dims, the first ones first; a single element that is larger goes alone."""
        bucket: list[Move] = []
        load: Counter[tuple[str, int]] = Counter()
        for move in self.all:
            for part in _cut(move, limit):
                ends = () if part.source == part.target else (("from", part.source), ("to", part.target))
                if any(load[end] and load[end] + part.bytes > limit for end in ends):
                    yield bucket
                    bucket, load = [], Counter[tuple[str, int]]()
                bucket.append(part)
                for end in ends:
                    load[end] += part.bytes
        if bucket:
            yield bucket

    def to_json(self) -> str:
        """Serialize as JSON: the bytes in total and by link, and for each tensor its boxes by ranks."""
        tensors: dict[str, list[object]] = defaultdict(list)
        for move in self.sent:
            tensors[move.name].append(
                {"from": move.source, "to": move.target, "offsets": move.box.offsets, "sizes": move.box.sizes}
            )
        data = {
            "source": _meshes(pair.source for pair in self.pairs),
            "target": _meshes(pair.target for pair in self.pairs),
            "bytes": self.bytes,
            "kept_bytes": self.kept_bytes,
            "links": [{"from": a, "to": b, "bytes": n} for (a, b), n in self.links.items()],
            "dtypes": {pair.target.name: name_of(pair.sent) for pair in self.pairs},
            "tensors": tensors,
        }
        return json.dumps(data, indent=2) + "\n"

    def picture(self) -> str:
        """Draw the bytes of every link as a matrix: a line for each rank that sends, a column for each that receives.
        Above 16 ranks, lines and columns are nodes."""
        what, places, found = self._matrix()
        head = [f"from \\ to {what}", *map(str, places)]
        lines = [[str(a), *(human_bytes(found[a, b]) if found[a, b] else "." for b in places)] for a in places]
        return aligned([head, *lines], left=1)

    def html(self, path: str | PathLike[str]) -> None:
        """Write a self-contained HTML page: the matrix of all links, shaded by bytes, and a table of the tensors."""
        page.write_body(self._repr_html_(), self._headline(), path)

    def _matrix(self) -> tuple[str, list[int], Counter[tuple[int, int]]]:
        """Return what sends, "rank" or "node"; the numbers of these; and the bytes of each pair."""
        ranks = sorted({rank for pair in self.pairs for laid in (pair.source, pair.target) for _, rank in laid.ranks})
        by_node = len(ranks) > _SHOWN
        found: Counter[tuple[int, int]] = Counter()
        for (a, b), n in self.links.items():
            found[(a // self.node, b // self.node) if by_node else (a, b)] += n
        places = sorted({rank // self.node for rank in ranks}) if by_node else ranks
        return "node" if by_node else "rank", places, found

    def _headline(self) -> str:
        here, there = _meshes(pair.source for pair in self.pairs), _meshes(pair.target for pair in self.pairs)
        return (
            f"Moves of {len(self.pairs)} tensors from {_listed(here)} to {_listed(there)}: "
            f"{human_bytes(self.bytes)} are sent, {human_bytes(self.kept_bytes)} stay"
        )

    def _busy(self) -> str:
        (first, sends), (second, receives) = self.busiest
        return f"Rank {first} sends most, {human_bytes(sends)}; rank {second} receives most, {human_bytes(receives)}"

    def __str__(self) -> str:
        if not self.links:
            return self._headline()
        table = aligned([_COLUMNS, *self._rows()], left=4)
        return "\n".join([self._headline(), self._busy(), "", table, "", self.picture()])

    def _repr_html_(self) -> str:
        rows = self._rows()
        return page.moves_body(self._headline(), self._busy() if rows else "", _COLUMNS, rows, *self._matrix())

    def _rows(self) -> list[list[str]]:
        sent: Counter[str] = Counter()
        for move in self.sent:
            sent[move.name] += move.bytes
        folded = fold(
            self.pairs,
            name=lambda pair: pair.target.name,
            same=lambda pair: (pair.source.layout, pair.target.layout, pair.sent, sent[pair.target.name]),
        )
        return [
            [each.title, str(one.source.layout), str(one.target.layout), name_of(one.sent), human_bytes(each.count * n)]
            for each in folded
            if (n := sent[(one := each.first).target.name])
        ]

    # --- the moves of one tensor --------------------------------------------------------------------------------------

    def _iterate(self) -> Iterator[Move]:
        load: Counter[int] = Counter()
        for pair in self.pairs:
            grid = self._grid(pair.source)
            wanted = pair.target.layout if isinstance(pair.target.layout, Pieces) else self._grid(pair.target)
            holding = grid.held_by(pair.source.ranks)
            for index, target in pair.target.ranks:
                for part in wanted.parts(index):
                    for box, cell in grid.meet(part.box):
                        ranks = holding[cell]
                        source = target if target in ranks else self._nearest(ranks, target, load)
                        move = Move(
                            pair.target.name, pair.source.name, source, target, box,
                            _within(box, ranks[source]), _within(box, part), pair.sent,
                        )  # fmt: skip
                        if source != target:
                            load[source] += move.bytes
                        yield move

    def _grid(self, laid: Laid) -> _Grid:
        assert isinstance(laid.layout, Layout), "a source lies by a layout"
        key = (laid.mesh, laid.layout, laid.shape)
        if key not in self._grids:
            self._grids[key] = _Grid(*key)
        return self._grids[key]

    def _nearest(self, ranks: Iterable[int], target: int, load: Mapping[int, int]) -> int:
        """Return the rank of the same node that has sent least so far, else of any node."""
        return min(ranks, key=lambda rank: (rank // self.node != target // self.node, load[rank], rank))


def check_node(node: Any) -> None:
    if not isinstance(node, int) or node < 1:
        raise PlanError(f"node={node!r} was given; give the number of ranks that share a node, 1 or more.")


def find_moves(
    source: PlanTable,
    target: PlanTable,
    *,
    names: Names | None = None,
    padded: Iterable[str] = (),
    phase: Phase = "stored",
    source_ranks: Sequence[int] | None = None,
    target_ranks: Sequence[int] | None = None,
    node: int = 8,
) -> Moves:
    """Return the moves between two plans; `Plan.moves_to` documents the arguments."""
    if not isinstance(target, PlanTable):
        raise PlanError(
            f"moves_to() was given a {type(target).__name__}; give the other plan: shardlib.plan(model, mesh, rules)."
        )
    if phase not in get_args(Phase):
        raise PlanError(f"moves_to(phase={phase!r}) was given; give one of {get_args(Phase)}.")
    here = laid_by(source, _ranks("source_ranks", source_ranks, source.mesh.world_size), phase)
    there = laid_by(target, _ranks("target_ranks", target_ranks, target.mesh.world_size), phase)
    return Moves(matched(here, there, names=names, padded=padded), node)


def laid_by(plan: PlanTable, ranks: Sequence[int], phase: Phase = "stored") -> Iterator[Laid]:
    """Iterate over the tensors of a plan as they lie in a phase, on ranks of a job in the order of the mesh."""
    places = _places(plan, ranks)
    for row in plan.rows:
        if (layout := row.layouts.get(phase)) is not None:
            yield Laid(row.tied, row.global_shape, layout.dtype or row.dtype, layout, plan.mesh, places(row))


def matched(
    source: Iterable[Laid], target: Iterable[Laid], *, names: Names | None = None, padded: Iterable[str] = ()
) -> tuple[Pair, ...]:
    """Return the tensors of two sides as pairs, in the target's order; `Plan.moves_to` documents the arguments.

    Raises:
        PlanError: a name that only one of them has, two tensors of the source for one of the target, or other shapes.
    """
    new_name, longer = renamed(names), frozenset(padded)
    by_name: dict[str, list[Laid]] = defaultdict(list)
    given, target, pairs, missing = list(source), list(target), list[Pair](), list[str]()
    _check_given(names, longer, given, target)
    for laid in given:
        for new in dict.fromkeys(map(new_name, laid.names)):
            if new is not None:
                by_name[new].append(laid)
    known = set[str]()
    for laid in target:
        known |= {*laid.names}
        found = {one.name: one for name in laid.names for one in by_name.get(name, ())}
        if not found:
            missing.append(laid.name)
        else:
            pairs.append(Pair(_only(found, laid), laid))
            _check_shapes(pairs[-1].source, laid, longer)
            _check_kinds(pairs[-1].source, laid)
    kept = [(laid.name, {new_name(name) for name in laid.names} - {None}) for laid in given]
    unused = [name for name, new in kept if new and not new & known]
    if missing or unused:
        lines = []
        if missing:
            lines.append(f"only the target has {_listed(missing)}.{nearest(missing[0], by_name)}")
        if unused:
            lines.append(f"only the source has {_listed(unused)}.")
        raise PlanError(
            f"The tensors are not those of one model: {' '.join(lines)} names= maps the source's names to the "
            "target's; None leaves a tensor out."
        )
    return tuple(pairs)


def _only(found: Mapping[str, Laid], target: Laid) -> Laid:
    """Return the one tensor of the source that a target gets."""
    if len(found) > 1:
        tied = f"tied as {_listed(target.names)}" if len(target.names) > 1 else f'"{target.name}"'
        raise PlanError(
            f"{_listed([*found])} are {len(found)} tensors in the source, and one in the target, {tied}. Leave out all "
            f'but one, as by names={{"{[*found][-1]}": None}}.'
        )
    return next(iter(found.values()))


def _ranks(what: str, given: Sequence[int] | None, count: int) -> tuple[int, ...]:
    ranks = tuple(range(count)) if given is None else tuple(given) if isinstance(given, Iterable) else ()
    whole = all(isinstance(rank, Integral) and rank >= 0 for rank in ranks)
    if len(ranks) != count or len(set(ranks)) != count or not whole:
        raise PlanError(
            f"moves_to({what}={given}) was given for a mesh of {count} ranks; give {count} different ranks of "
            "the job, in the order of the mesh."
        )
    return ranks


def _check_shapes(source: Laid, target: Laid, padded: frozenset[str]) -> None:
    here, there = source.shape, target.shape
    if here == there or (len(here) == len(there) and padded & {*source.names, *target.names}):
        return
    raise PlanError(
        f'"{target.name}" has global shape {here} in the source and {there} in the target. Rows that only pad a tensor '
        f'are left out with padded=["{target.name}"].'
    )


def _check_kinds(source: Laid, target: Laid) -> None:
    """Refuse to turn numbers of one kind into those of another, where parts of them would be dropped."""
    if (source.dtype.is_complex, source.dtype.is_floating_point) != (
        target.dtype.is_complex,
        target.dtype.is_floating_point,
    ):
        raise PlanError(
            f'"{target.name}" has {name_of(source.dtype)} in the source and {name_of(target.dtype)} in the target: '
            "numbers of another kind. Let both be floating-point, complex or integer; or leave the tensor out."
        )


def _check_given(names: Names | None, padded: frozenset[str], source: Iterable[Laid], target: Iterable[Laid]) -> None:
    """Refuse names that no tensor has: a slip would be ignored."""
    here = {name for laid in source for name in laid.names}
    both = here | {name for laid in target for name in laid.names}
    for what, asked, known in (("names", names if isinstance(names, Mapping) else (), here), ("padded", padded, both)):
        if unknown := [name for name in asked if name not in known]:
            raise PlanError(f'{what}= has "{unknown[0]}", and no tensor has this name.{nearest(unknown[0], known)}')


def renamed(names: Names | None) -> Callable[[str], str | None]:
    """Return the function from a name to the new one that `names` describes."""
    if names is None:
        return lambda name: name
    if callable(names):
        return names
    if isinstance(names, Mapping):
        strange = next((new for new in names.values() if new is not None and not isinstance(new, str)), None)
        if strange is not None:
            raise PlanError(f"names= maps a name to {strange!r}; give the new name, or None to leave the tensor out.")
        return lambda name: names.get(name, name)
    raise PlanError(
        f"names= was given as {type(names).__name__}; give a function from a name to the new one, or a mapping."
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


class _Grid:
    """The boxes into which a layout cuts a tensor, as a grid: intervals of every dim.

    Attributes:
        axes: the axes that cut it; ranks with equal coordinates on them hold the same.
    """

    def __init__(self, mesh: MeshShape, layout: Layout, shape: tuple[int, ...]) -> None:
        self.mesh, self.layout, self.shape = mesh, layout, shape
        self.axes = [axis for axis in mesh.names if axis in layout.axes and mesh[axis] > 1]
        self._holding: dict[tuple[tuple[int, int], ...], Holding] = {}

    def parts(self, index: int) -> list[Part]:
        """Return what a rank of the mesh holds."""
        coordinate = self.mesh.coordinate(index)
        return self._parts[tuple(coordinate[axis] for axis in self.axes)]

    def held_by(self, ranks: tuple[tuple[int, int], ...]) -> Holding:
        """Return the ranks that hold each cell of the grid, by its offsets, with the cell in their local tensors.

        Args:
            ranks: the ranks that hold the tensor: on the mesh, and in the job.
        """
        if ranks not in self._holding:
            found: Holding = defaultdict(dict)
            for index, rank in ranks:
                for part in self.parts(index):
                    found[part.box.offsets][rank] = part
            self._holding[ranks] = found
        return self._holding[ranks]

    @functools.cached_property
    def _parts(self) -> dict[tuple[int, ...], list[Part]]:
        """The boxes that each coordinate on the axes that cut the tensor holds."""
        origin = dict.fromkeys(self.mesh.names, 0)
        found = {}
        for at in product(*(range(self.mesh[axis]) for axis in self.axes)):
            coordinate = origin | dict(zip(self.axes, at, strict=True))
            found[at] = parts(self.layout, self.shape, self.mesh, coordinate)
        return found

    @functools.cached_property
    def _cuts(self) -> list[list[tuple[int, int]]]:
        """The intervals of every dim, as (start, length), in order."""
        cells = [part.box for of_one in self._parts.values() for part in of_one]
        return [sorted({(box.offsets[dim], box.sizes[dim]) for box in cells}) for dim in range(len(self.shape))]

    def meet(self, box: Box) -> Iterator[tuple[Box, tuple[int, ...]]]:
        """Iterate over the cells that a box meets: the part that they have in common, and the offsets of the cell."""
        runs = [
            list(_met(cuts, start, size)) for cuts, start, size in zip(self._cuts, box.offsets, box.sizes, strict=True)
        ]
        for chosen in product(*runs):
            yield Box(tuple(c[0] for c in chosen), tuple(c[1] for c in chosen)), tuple(c[2] for c in chosen)


def _met(cuts: Sequence[tuple[int, int]], start: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Iterate over the intervals that meet [start, start + size): start, length, and the start of the whole one."""
    first = max(0, bisect.bisect_right(cuts, (start, 1 << 62)) - 1)
    for at, length in cuts[first:]:
        if at >= start + size:
            return
        low, high = max(at, start), min(at + length, start + size)
        if low < high:
            yield low, high - low, at


def _within(box: Box, part: Part) -> Box:
    """Return the box in the local tensor of a rank that holds a part around it."""
    offsets = tuple(
        at + local - whole for at, local, whole in zip(box.offsets, part.local.offsets, part.box.offsets, strict=True)
    )
    return Box(offsets, box.sizes)


def _places(plan: PlanTable, ranks: Sequence[int]) -> Places:
    """Return a function from a row to the ranks that hold it: on the mesh, and in the job."""
    axes = plan.mesh.pipeline_axes
    every = tuple(enumerate(ranks))
    if not axes:
        return lambda _: every
    order = list(product(*(range(plan.mesh[axis]) for axis in axes)))
    of_stage: list[list[tuple[int, int]]] = [[] for _ in order]
    for index, rank in every:
        coordinate = plan.mesh.coordinate(index)
        of_stage[order.index(tuple(coordinate[axis] for axis in axes))].append((index, rank))
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for stage, rows in enumerate(of_ranks(plan.rows, plan.mesh, plan.blocks, plan.stages, plan.step)):
        for row in rows:
            found[row.name] += of_stage[stage]
    return lambda row: tuple(found[row.name])


def _meshes(tensors: Iterable[Laid]) -> list[str]:
    return list(dict.fromkeys(str(laid.mesh) for laid in tensors))


def _cut(move: Move, limit: int) -> Iterator[Move]:
    """Cut a move that is larger than `limit` bytes along the dims of its box, the first ones first."""
    if move.bytes <= limit or not move.box.sizes:
        yield move
        return
    dim = next((d for d, size in enumerate(move.box.sizes) if size > 1), None)
    if dim is None:
        yield move
        return
    size = move.box.sizes[dim]
    step = max(1, size * limit // move.bytes)
    for at in range(0, size, step):
        piece = (dim, at, min(step, size - at))
        part = replace(
            move,
            box=_narrowed(move.box, *piece),
            source_local=_narrowed(move.source_local, *piece),
            target_local=_narrowed(move.target_local, *piece),
        )
        yield from _cut(part, limit)


def _narrowed(box: Box, dim: int, at: int, size: int) -> Box:
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[dim], sizes[dim] = offsets[dim] + at, size
    return Box(tuple(offsets), tuple(sizes))


def _largest(counted: Iterable[tuple[int, int]]) -> tuple[int, int]:
    total: Counter[int] = Counter()
    for rank, n in counted:
        total[rank] += n
    return max(total.items(), key=lambda item: (item[1], -item[0]), default=(-1, 0))

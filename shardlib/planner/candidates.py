"""Candidates of a search: meshes, shardings over data ranks, schedules; and the reasons for which some are refused."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardlib._mesh_shape import MeshShape
from shardlib.transforms import Transform, fsdp, hsdp, offload, zero

__all__ = ["Grid", "Refusals", "Schedule", "Sharding", "divisors", "grids", "microbatches", "schedules", "shardings"]

_MOST_CONTEXT = 16
_INTERLEAVED = (2, 4)


@dataclass
class Refusals:
    """The candidates that cannot be, counted by reason, each with the first example."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, example: str, count: int = 1) -> None:
        """Count a refusal."""
        self.counts[reason] += count
        self.examples.setdefault(reason, example)

    def lines(self) -> list[str]:
        """Return a line for each reason, the most frequent first."""
        return [f"{count} x {reason}; as {self.examples[reason]}" for reason, count in self.counts.most_common()]


@dataclass(frozen=True)
class Grid:
    """Sizes of the axes, and the mode of the rules."""

    mesh: MeshShape
    mode: str | None = None

    @property
    def model_axes(self) -> MeshShape:
        """The axes that change what a rank computes; "dp=1" where there are none."""
        axes = (*self.mesh.model_axes, *self.mesh.expert_axes)
        return self.mesh.only(axes) if axes else MeshShape("dp=1")

    @property
    def stages(self) -> int:
        """The ranks of the pipeline axis."""
        return self.mesh.only(self.mesh.pipeline_axes).world_size if self.mesh.pipeline_axes else 1

    def __str__(self) -> str:
        return f'{self.mesh} in mode "{self.mode}"' if self.mode else str(self.mesh)


@dataclass(frozen=True)
class Sharding:
    """The sharing of parameters, gradients and state among data ranks. `rank` orders it from plain to elaborate."""

    rank: int
    transform: Transform | None

    def offloaded(self) -> Sharding:
        """Return the same with optimizer state in the memory of the host."""
        away = offload("state")
        return Sharding(self.rank + 10, away if self.transform is None else self.transform | away)


@dataclass(frozen=True)
class Schedule:
    """A schedule of a pipeline, and the stages of each rank."""

    name: str = ""
    per_rank: int = 1


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, smallest first.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return small + [number // each for each in reversed(small) if each * each != number]


def grids(
    world: int,
    *,
    node: int,
    blocks: int,
    experts: int,
    axes: Sequence[str],
    modes: Sequence[str],
    fixed: Mapping[str, int],
    long: bool,
    refused: Refusals,
) -> Iterator[Grid]:
    """Iterate over the meshes of a world.

    Args:
        world: the number of ranks.
        node: the ranks of a node, within which `tp` stays.
        blocks: repeated blocks of the model, which a pipeline divides.
        experts: of a mixture; 0 for none.
        axes: the model axes and expert axes that the rules name.
        modes: the modes of the rules.
        fixed: sizes that the caller asks for.
        long: whether sequences are so long that a rank may hold a part of them only.
        refused: counts what cannot be.
    """
    every = divisors(world)

    def sizes(axis: str, most: int, *, wanted: bool) -> list[int]:
        if axis in fixed:
            return [fixed[axis]]
        return [each for each in every if each <= most] if wanted else [1]

    contexts = sizes("cp", _MOST_CONTEXT, wanted=long and "ring" in modes)
    for tp, cp, pp, ep in itertools.product(
        sizes("tp", node, wanted="tp" in axes),
        contexts,
        sizes("pp", max(blocks, 1), wanted=blocks > 1),
        sizes("ep", max(experts, 1), wanted="ep" in axes),
    ):
        shown = ",".join(
            f"{name}={size}" for name, size in (("pp", pp), ("ep", ep), ("cp", cp), ("tp", tp)) if size > 1
        )
        if world % (tp * cp * pp * ep):
            refused.add("the axes do not divide the world", f"{shown} of {world} ranks")
            continue
        if pp > max(blocks, 1):
            refused.add("fewer blocks than stages", f"pp={pp} for {blocks} blocks")
            continue
        if experts and experts % ep:
            refused.add("experts do not divide", f"{experts} experts over ep={ep}")
            continue
        data = world // (tp * cp * pp * ep)
        mesh = _mesh(pp, data, {"ep": ep, "cp": cp, "tp": tp})
        if data != fixed.get("dp", data):
            refused.add("the axes that are asked for make another world", f"dp={fixed['dp']}: {mesh}")
            continue
        yield from (Grid(mesh, mode) for mode in _modes(tp, cp, modes))


def _mesh(pp: int, data: int, inner: Mapping[str, int]) -> MeshShape:
    """Return the mesh: axes that send most stand last, so that their ranks are neighbours."""
    sizes = {"pp": pp, "dp": data, **inner}
    kept = {axis: size for axis, size in sizes.items() if size > 1}
    return MeshShape(kept or {"dp": 1})


def _modes(tp: int, cp: int, modes: Sequence[str]) -> list[str | None]:
    if cp > 1:
        return ["ring"]
    return [None, "sequence"] if tp > 1 and "sequence" in modes else [None]


def shardings(grid: Grid, node: int) -> Iterator[tuple[MeshShape, Sharding]]:
    """Iterate over the shardings of a mesh, each with the mesh that it needs: `hsdp` divides the data axis in two."""
    mesh = grid.mesh
    data = dict(mesh.items()).get("dp", 1)
    yield mesh, Sharding(0, None)
    if mesh.data_ranks == 1:
        return
    for stage in (1, 2):
        yield mesh, Sharding(stage, zero(stage))
    yield mesh, Sharding(4, fsdp())
    if grid.stages > 1:
        yield mesh, Sharding(3, fsdp(reshard_after_forward=False))
    if mesh.expert_axes:
        return
    inner = mesh.only(mesh.model_axes).world_size if mesh.model_axes else 1
    near = {max(node // inner, 1), *(each for each in (32, 64, 128) if data > each)}
    for shard in sorted(near):
        if 1 < shard < data and data % shard == 0:
            pairs = [(axis, size) for axis, size in mesh.items() if axis != "dp"]
            at = [axis for axis, _ in mesh.items()].index("dp")
            split = MeshShape(dict([*pairs[:at], ("dp", data // shard), ("fsdp", shard), *pairs[at:]]))
            yield split, Sharding(5, hsdp(shard="fsdp", replicate="dp"))


def microbatches(batch: int, grid: Grid, refused: Refusals) -> list[tuple[int, int]]:
    """Return pairs of the rows of a microbatch and the number of microbatches of a data rank.

    Each has at least twice the rows of the one before it.

    >>> microbatches(130, Grid(MeshShape("dp=2")), Refusals()), microbatches(6, Grid(MeshShape("dp=1")), Refusals())
    ([(1, 65), (5, 13), (13, 5), (65, 1)], [(1, 6), (2, 3), (6, 1)])
    """
    ranks = grid.mesh.data_ranks
    if batch % ranks:
        refused.add("the batch does not divide over data ranks", f"{batch} rows over {ranks}: {grid}")
        return []
    own = batch // ranks
    tried: list[int] = []
    for rows in divisors(own):
        if not tried or rows >= 2 * tried[-1]:
            tried.append(rows)
    return [(rows, own // rows) for rows in tried]


def schedules(grid: Grid, blocks: int, count: int, refused: Refusals) -> list[Schedule]:
    """Return the schedules of a pipeline with so many microbatches."""
    ranks = grid.stages
    if ranks == 1:
        return [Schedule()]
    found = [Schedule("1f1b")]
    for per_rank in _INTERLEAVED:
        if blocks < ranks * per_rank:
            refused.add("fewer blocks than stages", f'"interleaved" with {per_rank} stages on each of {ranks} ranks')
        elif count % ranks:
            refused.add("microbatches do not divide over stages", f"{count} over pp={ranks}")
        else:
            found.append(Schedule("interleaved", per_rank))
    if blocks >= 2 * ranks and count >= 2 * ranks:
        found.append(Schedule("zbv", 2))
    return found

"""Assignment of writers. Every rank computes the same result from the layouts, and only for its own part.

A box that several ranks hold is written by one of them. Its *turn* is the index of the copy that is written. It is the
same for all boxes of a tensor, and chosen so that ranks write about equally many bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardlib._mesh_shape import MeshShape
from shardlib.checkpoint._items import Item, RankMesh
from shardlib.checkpoint._peers import Peers
from shardlib.errors import CheckpointError
from shardlib.layout import Layout
from shardlib.layout._boxes import Box, Part, full_box, parts

__all__ = ["Source", "agreed", "file_groups", "packed", "sources", "turns", "written_by"]


def agreed(items: Sequence[Item], peers: Peers) -> list[Item]:
    """Return the items of all ranks in one order, after all ranks have checked that their descriptions agree.

    Normally all ranks hold the same names in the same layouts, and only checksums are exchanged. A tensor that only
    some ranks hold (a stage of a pipeline) is an item without a local shard on the others. If two groups of ranks hold
    a name, the item is that of the group with the lowest rank.

    Raises:
        CheckpointError: ranks give one name different shapes or dtypes.
    """
    names = {rank_mesh: _digest(rank_mesh) for rank_mesh in {item.rank_mesh for item in items}}
    mine = {f"{item.section}:{item.name}": _description(item, names[item.rank_mesh]) for item in items}
    marks = peers.exchange("compare", zlib.crc32(json.dumps(mine).encode()))
    if len(set(marks)) == 1:
        return list(items)
    reports_names = marks.index(marks[peers.rank]) == peers.rank
    table = {name: (str(rank_mesh.mesh), rank_mesh.ranks) for rank_mesh, name in names.items()}
    reports = [
        reports for reports in peers.exchange("compare names", (mine, table) if reports_names else None) if reports
    ]
    first: dict[str, list[Any]] = {}
    for key, description in (pair for every, _ in reports for pair in every.items()):
        known = first.setdefault(key, description)
        if known[:2] != description[:2]:
            raise CheckpointError(
                f'The ranks hold different tensors under the name "{key.partition(":")[2]}": {known[1]} of shape '
                f"{tuple(known[0])}, and {description[1]} of shape {tuple(description[0])}. Give every rank the "
                "same model."
            )
    rank_meshes = {
        n: RankMesh(MeshShape(mesh), tuple(ranks)) for _, table in reports for n, (mesh, ranks) in table.items()
    }
    own = {key: item for item, key in zip(items, mine, strict=True) if first[key] == mine[key]}
    return [own.get(key) or _of_others(key, description, rank_meshes) for key, description in first.items()]


def _digest(rank_mesh: RankMesh) -> str:
    return hashlib.sha256(repr(rank_mesh).encode()).hexdigest()[:16]


def _description(item: Item, rank_mesh: str) -> list[Any]:
    return [list(item.shape), str(item.dtype).removeprefix("torch."), item.layout.text, rank_mesh]


def _of_others(key: str, description: Sequence[Any], rank_meshes: Mapping[str, RankMesh]) -> Item:
    """Return an item of which this rank holds no part."""
    section, _, name = key.partition(":")
    shape, dtype, layout, rank_mesh = description
    kind = getattr(torch, dtype)
    return Item(
        section, name, tuple(shape), kind, Layout.parse(layout), rank_meshes[rank_mesh], torch.empty(0, dtype=kind)
    )


def turns(items: Iterable[Item]) -> list[int]:
    """Choose the replica of each item to write: among equal ones, that with the fewest bytes so far."""
    loads: dict[tuple[RankMesh, tuple[str, ...]], list[int]] = {}
    found = []
    for item in items:
        copies = len(item.rank_mesh.ranks) // math.prod(item.rank_mesh.mesh[axis] for axis in item.axes)
        load = loads.setdefault((item.rank_mesh, item.axes), [0] * copies)
        turn = min(range(copies), key=load.__getitem__)
        load[turn] += math.prod(item.shape) * item.dtype.itemsize
        found.append(turn)
    return found


def _writer(item: Item, coordinate: dict[str, int], turn: int) -> int:
    """Return the rank that writes the shard of the rank at a coordinate."""
    index = tuple(coordinate[axis] if axis in item.axes else slice(None) for axis in item.rank_mesh.mesh.names)
    return int(item.rank_mesh.array[index].reshape(-1)[turn])


def written_by(item: Item, turn: int, rank: int) -> list[Part]:
    """Return the parts of an item that a rank writes."""
    if math.prod(item.shape) == 0:  # one rank alone writes that it is empty
        return [Part(full_box(item.shape), full_box(item.shape))] if rank == item.rank_mesh.ranks[0] else []
    if rank not in item.rank_mesh.ranks:
        return []
    own = item.layout.replica_id(item.rank_mesh.mesh, item.rank_mesh.coordinate(rank)) == turn
    return item.parts(rank) if own else []


@dataclass(frozen=True)
class Source:
    """A part of a global tensor, and the rank that sends it."""

    rank: int
    part: Part


def sources(item: Item, turn: int, target: int) -> Iterator[Source]:
    """Iterate over all parts of an item, each with its sender: the gathering rank itself, where it has a copy."""
    own = item.rank_mesh.coordinate(target) if target in item.rank_mesh.ranks else None
    split = MeshShape({axis: item.rank_mesh.mesh[axis] for axis in item.axes} or {"dp": 1})
    for index in range(split.world_size if item.axes else 1):
        coordinate = dict.fromkeys(item.rank_mesh.mesh.names, 0) | (split.at(index) if item.axes else {})
        is_local = own is not None and all(own[axis] == coordinate[axis] for axis in item.axes)
        rank = target if is_local else _writer(item, coordinate, turn)
        for part in parts(item.layout, item.shape, item.rank_mesh.mesh, coordinate):
            yield Source(rank, part)


def packed(pieces: Sequence[tuple[str, Box, int]], limit: int) -> list[int]:
    """Return the file of each piece (name, box, bytes) of one rank: no file exceeds the limit or has a name twice."""
    files: list[tuple[set[str], int]] = []
    found = []
    for name, _, nbytes in pieces:
        fits = (
            i
            for i, (names, nbytes_in_file) in enumerate(files)
            if name not in names and nbytes_in_file + nbytes <= limit
        )
        at = next(fits, len(files))
        if at == len(files):
            files.append((set(), 0))
        files[at] = (files[at][0] | {name}, files[at][1] + nbytes)
        found.append(at)
    return found


def file_groups(items: Sequence[Item], limit: float, size: int) -> list[tuple[int, list[int]]]:
    """Group full tensors into files, in order: the rank that writes each file, and the indices of its items."""
    groups: list[list[int]] = []
    filled = 0
    for i, item in enumerate(items):
        nbytes = math.prod(item.shape) * item.dtype.itemsize
        if not groups or (filled + nbytes > limit and groups[-1]):
            groups.append([])
            filled = 0
        groups[-1].append(i)
        filled += nbytes
    return [(at * size // len(groups), group) for at, group in enumerate(groups)]

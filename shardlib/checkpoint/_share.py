"""Who writes what. Every rank computes the same answer from the layouts, and only for what concerns itself.

A box that several ranks hold is written by one of them. Which one is its *turn*: the place among the copies, the same
for all boxes of a tensor, chosen so that copies share the bytes.
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

from shardlib._mesh import MeshShape
from shardlib.checkpoint._boxes import Box, Part, parts, whole
from shardlib.checkpoint._items import Home, Item
from shardlib.checkpoint._peers import Peers
from shardlib.errors import CheckpointError
from shardlib.layout import Layout

__all__ = ["Source", "agreed", "file_groups", "packed", "sources", "turns", "written_by"]


def agreed(items: Sequence[Item], peers: Peers) -> list[Item]:
    """The items of all ranks, in one order, once ranks know that they mean the same by them.

    Normally all ranks hold the same names in the same layouts, and only checksums are exchanged. A tensor may be known
    to some ranks alone (the stage of a pipeline), and is an item without a part on the others; known to two groups of
    ranks, it is that of the one with the lowest.

    Raises:
        CheckpointError: ranks give one name different shapes or dtypes.
    """
    names = {home: _digest(home) for home in {item.home for item in items}}
    mine = {f"{item.section}:{item.name}": _description(item, names[item.home]) for item in items}
    marks = peers.exchange("compare", zlib.crc32(json.dumps(mine).encode()))
    if len(set(marks)) == 1:
        return list(items)
    tells = marks.index(marks[peers.rank]) == peers.rank
    table = {name: (str(home.mesh), home.ranks) for home, name in names.items()}
    told = [told for told in peers.exchange("compare names", (mine, table) if tells else None) if told]
    first: dict[str, list[Any]] = {}
    for key, description in (pair for every, _ in told for pair in every.items()):
        known = first.setdefault(key, description)
        if known[:2] != description[:2]:
            raise CheckpointError(
                f'The ranks hold different tensors under the name "{key.partition(":")[2]}": {known[1]} of shape '
                f"{tuple(known[0])}, and {description[1]} of shape {tuple(description[0])}. Give every rank the "
                "same model."
            )
    homes = {n: Home(MeshShape(mesh), tuple(ranks)) for _, table in told for n, (mesh, ranks) in table.items()}
    own = {key: item for item, key in zip(items, mine, strict=True) if first[key] == mine[key]}
    return [own.get(key) or _of_others(key, description, homes) for key, description in first.items()]


def _digest(home: Home) -> str:
    return hashlib.sha256(repr(home).encode()).hexdigest()[:16]


def _description(item: Item, home: str) -> list[Any]:
    return [list(item.shape), str(item.dtype).removeprefix("torch."), item.layout.text, home]


def _of_others(key: str, description: Sequence[Any], homes: Mapping[str, Home]) -> Item:
    """An item of which this rank has nothing."""
    section, _, name = key.partition(":")
    shape, dtype, layout, home = description
    kind = getattr(torch, dtype)
    return Item(section, name, tuple(shape), kind, Layout.parse(layout), homes[home], torch.empty(0, dtype=kind))


def turns(items: Iterable[Item]) -> list[int]:
    """For each item, which of its copies is written: the one with the fewest bytes so far among those alike."""
    loads: dict[tuple[Home, tuple[str, ...]], list[int]] = {}
    found = []
    for item in items:
        copies = len(item.home.ranks) // math.prod(item.home.mesh[axis] for axis in item.axes)
        load = loads.setdefault((item.home, item.axes), [0] * copies)
        turn = min(range(copies), key=load.__getitem__)
        load[turn] += math.prod(item.shape) * item.dtype.itemsize
        found.append(turn)
    return found


def _writer(item: Item, coordinate: dict[str, int], turn: int) -> int:
    """The rank that writes what the rank at a coordinate holds."""
    place = tuple(coordinate[axis] if axis in item.axes else slice(None) for axis in item.home.mesh.names)
    return int(item.home.array[place].reshape(-1)[turn])


def written_by(item: Item, turn: int, rank: int) -> list[Part]:
    """The parts of an item that a rank writes."""
    if math.prod(item.shape) == 0:  # one rank alone writes that it is empty
        return [Part(whole(item.shape), whole(item.shape))] if rank == item.home.ranks[0] else []
    if rank not in item.home.ranks or _writer(item, item.home.coordinate(rank), turn) != rank:
        return []
    return item.parts(rank)


@dataclass(frozen=True)
class Source:
    """A part of a whole tensor, and the rank that has it."""

    rank: int
    part: Part


def sources(item: Item, turn: int, target: int) -> Iterator[Source]:
    """All parts of an item, each with the rank to take it from: the one that gathers them, where it has a copy."""
    own = item.home.coordinate(target) if target in item.home.ranks else None
    split = MeshShape({axis: item.home.mesh[axis] for axis in item.axes} or {"dp": 1})
    for index in range(split.world_size if item.axes else 1):
        coordinate = dict.fromkeys(item.home.mesh.names, 0) | (split.at(index) if item.axes else {})
        held = own is not None and all(own[axis] == coordinate[axis] for axis in item.axes)
        rank = target if held else _writer(item, coordinate, turn)
        for part in parts(item.layout, item.shape, item.home.mesh, coordinate):
            yield Source(rank, part)


def packed(pieces: Sequence[tuple[str, Box, int]], limit: int) -> list[int]:
    """The file of each piece (name, box, bytes) of one rank: no file over the limit, no name twice in a file."""
    files: list[tuple[set[str], int]] = []
    found = []
    for name, _, nbytes in pieces:
        fits = (i for i, (names, held) in enumerate(files) if name not in names and held + nbytes <= limit)
        at = next(fits, len(files))
        if at == len(files):
            files.append((set(), 0))
        files[at] = (files[at][0] | {name}, files[at][1] + nbytes)
        found.append(at)
    return found


def file_groups(items: Sequence[Item], limit: float, size: int) -> list[tuple[int, list[int]]]:
    """For whole tensors: files in order, each as the rank that writes it and the numbers of its items."""
    groups: list[list[int]] = []
    held = 0
    for i, item in enumerate(items):
        nbytes = math.prod(item.shape) * item.dtype.itemsize
        if not groups or (held + nbytes > limit and groups[-1]):
            groups.append([])
            held = 0
        groups[-1].append(i)
        held += nbytes
    return [(at * size // len(groups), group) for at, group in enumerate(groups)]

"""Plans of any mesh move what vLLM's workers read of real families, as tests/vllm has recorded it, and no more."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib._mesh_shape import MeshShape
from shardlib._plan.moves import Moves, Pair, laid_by
from shardlib.layout._boxes import Box
from shardlib.weights._names import saved_names
from shardlib.weights._views import View, on_meta, views_of
from tests.vllm.families import FAMILIES, model_of

RECORDED = Path(__file__).parents[1] / "vllm" / "recorded"
FAMILY = pytest.mark.parametrize("family", FAMILIES)


def _read(family: str) -> dict[str, list[list[Box]]]:
    """Return the boxes of each tensor of the checkpoint that each of two workers reads."""
    recorded = json.loads((RECORDED / f"{family}.json").read_text())
    return {
        name: [[Box(tuple(b[: len(b) // 2]), tuple(b[len(b) // 2 :])) for b in boxes] for boxes in workers]
        for name, workers in recorded.items()
    }


def _moves(family: str, mesh: str, transforms: tuple[Any, ...]) -> tuple[Moves, list[View], dict[str, torch.Tensor]]:
    """Return the moves from a model's plan into two workers, with ranks behind those of the mesh."""
    model, read = model_of(family), _read(family)
    plan = sl.plan(model, mesh, transforms=transforms)
    ranks = range(plan.mesh.world_size)
    sources = {laid.name: laid for laid in laid_by(plan, ranks)}
    plain = {name: on_meta(laid.shape, laid.dtype) for name, laid in sources.items() if name in model.state_dict()}
    views = [view for view in views_of(saved_names(model, "huggingface"), plain) if view.name in read]
    pairs = []
    for view in views:
        boxes = {len(ranks) + worker: each for worker, each in enumerate(read[view.name]) if each}
        pairs.append(Pair(sources[view.source], view.laid(sources[view.source], boxes)))
    return Moves(tuple(pairs)), views, model.state_dict()


@FAMILY
def test_the_names_are_those_that_vllm_reads(family: str):
    _, views, _ = _moves(family, "dp=1", ())
    assert {view.name for view in views} == set(_read(family))


@FAMILY
def test_two_workers_share_what_tensor_parallelism_cuts_and_both_read_the_rest(family: str):
    shapes = {view.name: view.shape for view in _moves(family, "dp=1", ())[1]}
    for name, (first, second) in _read(family).items():
        whole = torch.Size(shapes[name]).numel()
        both = sum(a.numel for a in first), sum(b.numel for b in second)
        meet = sum(m.numel for a in first for b in second if (m := a.meet(b)) is not None)
        assert both[0] + both[1] - meet == whole, f"{name}: not all of it is read"
        assert meet in (0, whole), f"{name}: a part is read twice"
        assert ("norm" in name or ".gate.weight" in name) == (meet == whole), name


@FAMILY
@pytest.mark.parametrize(
    ("mesh", "transforms"), [("dp=2,tp=2", ()), ("dp=4", (sl.zero(3),)), ("tp=2", ()), ("dp=3", (sl.fsdp(),))]
)
def test_moves_bring_what_is_read_and_nothing_else(family: str, mesh: str, transforms: tuple[Any, ...]):
    moves, views, full = _moves(family, mesh, transforms)
    read = _read(family)
    assert moves.bytes == 4 * sum(box.numel for view in views for of_one in read[view.name] for box in of_one)
    came: dict[tuple[str, int], dict[Box, torch.Tensor]] = defaultdict(dict)
    for move in moves.all:
        came[move.name, move.target][move.target_local] = full[move.source_name][move.box.slices]
    for view in views:
        want = view.of(full[view.source][view.box.slices].contiguous())
        for worker, boxes in enumerate(read[view.name]):
            buffer = torch.full(view.box.sizes, torch.nan)
            for box, values in came[view.name, MeshShape(mesh).world_size + worker].items():
                buffer[box.slices] = values
            for box in boxes:
                assert torch.equal(view.of(buffer)[box.slices], want[box.slices]), view.name
            assert (~buffer.isnan()).sum() == sum(box.numel for box in boxes)

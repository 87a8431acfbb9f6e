"""Moves between plans: applied to shards they give the target's shards, and they are the least that can be sent."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shardlib as sl
from shardlib._mesh_shape import MeshShape
from shardlib._plan import Plan
from shardlib._plan.moves import Laid, Move, Moves
from shardlib._plan.readable import human_bytes
from shardlib._plan.rows import Row
from shardlib.errors import PlanError
from shardlib.layout import Layout
from shardlib.testing import strategies


def _row(layout: Layout, shape: tuple[int, ...], dtype: torch.dtype, name: str = "weight") -> Row:
    return Row(name, "parameter", shape, dtype, True, True, (name,), layout, layout, layout, layout)


@dataclass(frozen=True)
class Drawn:
    source: Plan
    target: Plan
    moves: Moves
    full: torch.Tensor

    def source_shards(self) -> dict[int, torch.Tensor]:
        return _shards(self.moves.pairs[0].source, self.full)

    def target_shards(self) -> dict[int, torch.Tensor]:
        return _shards(self.moves.pairs[0].target, self.full)

    def held(self) -> dict[int, set[float]]:
        return {rank: set(shard.flatten().tolist()) for rank, shard in self.source_shards().items()}


@st.composite
def _drawn(draw: st.DrawFn) -> Drawn:
    source, target = (draw(strategies.mesh_shapes(8, model_axes=("tp", "sp"), data_axes=("dp",))) for _ in range(2))
    shape = draw(strategies.shapes(draw(st.sampled_from([source, target]))))
    here, there = (draw(strategies.layouts(shape, mesh)) for mesh in (source, target))
    dtypes = [draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64])) for _ in range(2)]
    plans = [
        Plan(mesh, (_row(layout, shape, dtype),))
        for mesh, layout, dtype in zip((source, target), (here, there), dtypes, strict=True)
    ]
    job = draw(st.permutations(range(12)))
    moves = plans[0].moves_to(
        plans[1],
        source_ranks=job[: source.world_size],
        target_ranks=draw(st.permutations(range(12)))[: target.world_size],
        node=draw(st.integers(1, 12)),
    )
    return Drawn(*plans, moves, torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape))


def _shards(laid: Laid, full: torch.Tensor) -> dict[int, torch.Tensor]:
    return {rank: laid.layout.take(full, laid.mesh, laid.mesh.coordinate(index)).clone() for index, rank in laid.ranks}


def _applied(moves: Sequence[Move], source: dict[int, torch.Tensor], target: dict[int, torch.Tensor]) -> None:
    for move in moves:
        target[move.target][move.target_local.slices] = source[move.source][move.source_local.slices]


@given(_drawn())
def test_moves_of_shards_give_the_shards_of_the_target(drawn: Drawn):
    source = drawn.source_shards()
    want = drawn.target_shards()
    got = {rank: torch.full_like(shard, -1) for rank, shard in want.items()}
    _applied(drawn.moves.all, source, got)
    assert all(torch.equal(got[rank], want[rank]) for rank in want)


@given(_drawn())
def test_what_is_sent_is_what_the_target_lacks(drawn: Drawn):
    held = drawn.held()
    needed = drawn.target_shards()
    lacks = sum(len(set(shard.flatten().tolist()) - held.get(rank, set())) for rank, shard in needed.items())
    smaller = min(drawn.source["weight"].dtype.itemsize, drawn.target["weight"].dtype.itemsize)
    assert drawn.moves.bytes == lacks * smaller
    assert drawn.moves.bytes + drawn.moves.kept_bytes == sum(shard.numel() for shard in needed.values()) * smaller


@given(_drawn(), st.integers(1, 64))
def test_buckets_have_all_of_it_and_their_bound(drawn: Drawn, limit: int):
    buckets = list(drawn.moves.buckets(limit))
    want = drawn.target_shards()
    got = {rank: torch.full_like(shard, -1) for rank, shard in want.items()}
    source = drawn.source_shards()
    for bucket in buckets:
        _applied(bucket, source, got)
        for end in ("source", "target"):
            for rank in range(12):
                sent = [m.bytes for m in bucket if m.source != m.target and getattr(m, end) == rank]
                assert sum(sent) <= limit or (len(sent) == 1 and max(sent) <= 8)
    assert all(torch.equal(got[rank], want[rank]) for rank in want)
    assert sum(m.bytes for bucket in buckets for m in bucket if m.source != m.target) == drawn.moves.bytes


@given(_drawn())
def test_nothing_moves_from_a_plan_to_itself(drawn: Drawn):
    moves = drawn.source.moves_to(drawn.source)
    assert moves.bytes == 0 and not moves.links


@given(_drawn())
def test_a_rank_of_the_same_node_sends_where_one_holds_it(drawn: Drawn):
    moves, node = drawn.moves, drawn.moves.node
    held = drawn.held()
    for move in moves.sent:
        elements = set(drawn.full[move.box.slices].flatten().tolist())
        near = [rank for rank, own in held.items() if rank // node == move.target // node and elements <= own]
        assert not near or move.source in near


# --- models -----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)


class Model(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight


RULES = sl.Rules({"up": "colwise", "down": "rowwise", "embed": "vocab@tp embed"}, unmatched="replicate")
STAGED = sl.Rules(dict.fromkeys(["**"]), stages="embed, blocks.0, blocks.1 | blocks.2, blocks.3, head")


def test_a_tied_tensor_moves_once_and_stages_send_to_those_that_lack_it():
    staged = sl.plan(Model(), "pp=2", STAGED)
    whole = sl.plan(Model(), "tp=2", sl.Rules({"**": None}))
    moves = staged.moves_to(whole)
    table, block = 16 * 8 * 4, (8 * 32 + 32 + 32 * 8 + 8) * 4
    assert moves.links == {(0, 1): 2 * block, (1, 0): 2 * block}  # both stages hold the tied table
    assert moves.kept_bytes == 2 * table + 4 * block
    back = whole.moves_to(staged)
    assert back.bytes == 0


def test_disjoint_ranks_share_the_sending():
    moves = sl.plan(Model(), "dp=4", sl.Rules({"**": None})).moves_to(
        sl.plan(Model(), "tp=4", RULES), target_ranks=[4, 5, 6, 7], node=1
    )
    sends = [sum(n for (a, _), n in moves.links.items() if a == rank) for rank in range(4)]
    assert max(sends) - min(sends) <= 8 * 32 * 4  # one tensor
    text = str(moves)
    assert 'from "dp=4" to "tp=4"' in text and "blocks.{0-3}.up.weight x4" in text
    assert "from \\ to rank" in text and "from \\ to node" in str(
        sl.plan(Model(), "dp=4", sl.Rules({"**": None})).moves_to(
            sl.plan(Model(), "tp=2,dp=8", RULES), target_ranks=range(4, 20)
        )
    )
    data = json.loads(moves.to_json())
    assert data["bytes"] == moves.bytes == sum(link["bytes"] for link in data["links"])
    assert (
        sum(torch.Size(each["sizes"]).numel() * 4 for boxes in data["tensors"].values() for each in boxes)
        == moves.bytes
    )


def test_names_dtypes_and_padding():
    source = sl.plan(Model(), "tp=2", RULES)
    wide = Model()
    wide.embed = nn.Embedding(24, 8)
    wide.head = nn.Linear(8, 24, bias=False)
    wide.head.weight = wide.embed.weight
    target = sl.plan(nn.ModuleDict({"model": wide.to(torch.bfloat16)}), "tp=4", RULES)
    with pytest.raises(
        PlanError, match=r'"model.embed.weight" has global shape \(16, 8\) .*padded=\["model.embed.weight"\]'
    ):
        source.moves_to(target, names=lambda name: f"model.{name}")
    moves = source.moves_to(target, names=lambda name: f"model.{name}", padded=["model.embed.weight"])
    table = [move for move in moves.all if move.name == "model.embed.weight"]
    assert {move.dtype for move in table} == {torch.bfloat16}
    assert sum(move.box.numel for move in table) == 16 * 8
    assert max(move.target for move in table) == 2  # rows 18 to 23 are padding


def _of_integers() -> nn.Module:
    model = Model()
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                module._parameters[name] = nn.Parameter(param.int(), requires_grad=False)
    return model


@pytest.mark.parametrize(
    ("other", "options", "said"),
    [
        (Model(2), {}, r'only the source has "blocks.2.up.weight", .* and 4 more.* None leaves a tensor out'),
        (Model(5), {}, r'only the target has "blocks.4.up.weight"'),
        (Model(), {"source_ranks": [0]}, r"source_ranks=\[0\].*2 ranks; give 2 different ranks"),
        (Model(), {"target_ranks": [0, 0]}, r"target_ranks=\[0, 0\]"),
        (Model(), {"node": 0}, "node=0"),
        (Model(), {"node": "a"}, "node='a'"),
        (Model(), {"phase": "kept"}, "phase='kept'"),
        (Model(), {"names": {"embed.weight": 3}}, "maps a name to 3"),
        (
            Model(),
            {"names": {"embed.wait": None}},
            r'names= has "embed.wait", and no tensor has this name.*embed.weight',
        ),
        (Model(), {"padded": ["embed.wait"]}, r'padded= has "embed.wait", and no tensor'),
        (Model(), {"source_ranks": 2}, r"source_ranks=2\) was given for a mesh of 2 ranks"),
        (Model(), {"source_ranks": [0, 1.5]}, r"source_ranks=\[0, 1.5\]"),
        (_of_integers(), {}, "float32 in the source and int32 in the target"),
    ],
)
def test_plans_that_do_not_fit_are_refused(other: nn.Module, options: dict[str, Any], said: str):
    with pytest.raises(PlanError, match=said):
        sl.plan(Model(), "tp=2", RULES).moves_to(sl.plan(other, "tp=2", RULES), **options)


def test_a_text_is_no_plan():
    with pytest.raises(PlanError, match=r"was given a str; give the other plan"):
        sl.plan(Model(), "tp=2", RULES).moves_to("dp=2")  # type: ignore[arg-type]


def test_two_tensors_for_one_that_is_tied_are_refused():
    apart, tied = Model(2), Model(2)
    apart.head.weight = nn.Parameter(apart.embed.weight.detach().clone())
    source, target = sl.plan(apart, "tp=2", RULES), sl.plan(tied, "tp=2", RULES)
    with pytest.raises(PlanError, match=r"are 2 tensors in the source, and one in the target, tied as"):
        source.moves_to(target)
    kept = source.moves_to(target, names={"head.weight": None})
    assert len(kept.pairs) == len(target.rows)
    assert len(target.moves_to(source).pairs) == len(source.rows)  # each gets the one
    with pytest.raises(PlanError, match="are 2 tensors in the source"):
        source.moves_to(source, names={"head.weight": "embed.weight"})


def test_the_page_needs_nothing_else_and_shows_what_every_link_and_tensor_sends(tmp_path: Path):
    moves = sl.plan(Model(4), "dp=4", RULES).moves_to(sl.plan(Model(4), "tp=2", RULES), target_ranks=[4, 5])
    moves.html(tmp_path / "moves.html")
    page = (tmp_path / "moves.html").read_text(encoding="utf-8")
    assert moves._repr_html_() in page
    assert not re.search(r"(?:src|href)=|@import|url\(", page)
    for (source, target), size in moves.links.items():
        assert f'title="rank {source} to rank {target}: {human_bytes(size)}"' in page
    assert len(re.findall('title="rank', page)) == len(moves.links)
    assert max(map(int, re.findall(r"(\d+)%, white", page))) == 100
    assert "<td>blocks.{0-3}.up.weight x4</td>" in page and "from &quot;dp=4&quot;" in page


def test_the_page_of_nothing_says_so():
    plan = sl.plan(Model(4), "dp=4", RULES)
    assert "0 B are sent" in plan.moves_to(plan)._repr_html_()


def test_names_leave_tensors_out():
    moves = sl.plan(Model(), "tp=2", RULES).moves_to(
        sl.plan(Model(2), "tp=2", RULES), names=lambda name: None if name.startswith(("blocks.2", "blocks.3")) else name
    )
    assert moves.bytes == 0 and len(moves.pairs) == 9


def test_heads_that_one_side_replicates():
    """Keys of 2 heads on 4 ranks: ranks 2k and 2k+1 hold head k."""
    layer = nn.Linear(8, 8, bias=False)
    source = sl.plan(layer, "tp=2", {"weight": "out@tp in"})
    target = sl.plan(layer, MeshShape("row=2,col=2"), {"weight": "out@row in"})
    moves = source.moves_to(target, target_ranks=[2, 3, 4, 5])
    assert moves.links == {(0, 2): 128, (0, 3): 128, (1, 4): 128, (1, 5): 128}


def test_moves_of_a_large_job_take_seconds():
    with torch.device("meta"):
        model = nn.ModuleDict({f"blocks.{i}".replace(".", "_"): nn.Linear(4096, 4096, bias=False) for i in range(32)})
    source = sl.plan(model, "dp=32,tp=8", sl.Rules({"**": "out@(tp,dp) in"}))
    target = sl.plan(model, "tp=8", sl.Rules({"**": "out in@tp"}))
    moves = source.moves_to(target, target_ranks=range(256, 264))
    assert moves.bytes == 32 * 4096 * 4096 * 4

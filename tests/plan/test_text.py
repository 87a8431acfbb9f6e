"""What readers see: the table, the difference of two plans, the page."""

from __future__ import annotations

import io
import pickle
import re
import xml.etree.ElementTree as ElementTree
from collections import OrderedDict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import shardlib as sl
from shardlib._mesh_shape import MeshShape
from shardlib._plan import DryRun, Gathered, Plan, Recorded, make_plan
from shardlib._plan.page import picture
from shardlib._plan.pictures import drawn
from shardlib._plan.readable import human_bytes, human_count
from shardlib._plan.report import StageRun
from shardlib._plan.schedules import order, timeline
from shardlib.errors import PlanError
from shardlib.layout import Layout
from shardlib.testing._standing import Standing, table
from tests.plan.cases import MLP_RULES, gpt_plan, mlp

GATHERED = Gathered("aten.nonzero.default", "blocks.0.mlp", "its result depends on values")
REPORT = DryRun(
    collectives=(
        *(Recorded("all_reduce", ("tp",), 2048, 4, f"blocks.{i}.attn.proj", "forward") for i in range(4)),
        Recorded("all_reduce", ("dp",), 4096, 2, "", "backward"),
    ),
    gathered=(GATHERED,),
    start_bytes=1 << 20,
    peak_bytes=3 << 20,
)


def _cells(text: str, start: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.lstrip().startswith(start))
    return re.split(r" {2,}", line.strip())


def _condensed(text: str) -> list[str]:
    """Lines with something on them, one bar between cells."""
    lines = (" | ".join(re.split(r" {2,}", line.strip())) for line in text.splitlines())
    return [line for line in lines if line.strip("─")]


class _Net(nn.Module):
    """Blocks, a norm with buffers, what is frozen, tied, uneven, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.zeros(2, 2), persistent=False)


def _net() -> Plan:
    rules = {"embed.weight": "vocab@tp embed", "blocks.*": "colwise", "norm": None, "frozen": None}
    return make_plan(_Net(), "dp=2,tp=4", sl.Rules(rules, unmatched="replicate"))


PARTED = (sl.zero(3), sl.accumulate(2), sl.offload("grads"))


def test_a_whole_plan():
    made = _net()
    for transform in PARTED:
        made = made | transform
    assert _condensed(str(made)) == [
        'Plan on dp=2,tp=4 (8 ranks) after zero(3), accumulate(2), offload("grads"): 12 tensors, 88 parameters, 352 B',
        "Largest rank: parameters 88 B, gradients 56 B, optimizer state (2 tensors, AdamW) 112 B, buffers 56 B; "
        "total 312 B, of which 56 B in host memory; buckets take up to 472 B more in a step",
        "Tensors",
        "tensor | global shape | local shape | stored = state | compute | grad | per rank | rule | note",
        "mask | (2, 2) | (2, 2) | replicated | replicated | - | 16 B | - | buffer, not in the state dict; replicated: "
        "buffer",
        "embed.weight | (6, 4) | (<=1, 4) | vocab@(tp,dp) embed | vocab@tp embed | vocab@(tp,dp) embed : host | 16 B | "
        "embed.weight | row-parallel (vocab dim); uneven; also head.weight; stays unsharded until its backward",
        "blocks.{0-1}.weight x2 | (4, 4) | (1, 2) | out@tp in@dp | out@tp in | out@tp in@dp : host | 16 B | blocks.* | "
        "column-parallel (out dim)",
        "blocks.{0-1}.bias x2 | (4) | (1) | out@tp | out@tp | out@tp : host | 8 B | blocks.* | column-parallel (out "
        "dim); too small to shard over dp",
        "norm.weight | (4) | (2) | _@dp | replicated | _@dp : host | 8 B | norm | replicated",
        "norm.bias | (4) | (2) | _@dp | replicated | _@dp : host | 8 B | norm | replicated",
        "norm.running_mean | (4) | (4) | replicated | replicated | - | 16 B | norm | buffer; replicated",
        "norm.running_var | (4) | (4) | replicated | replicated | - | 16 B | norm | buffer; replicated",
        "norm.num_batches_tracked | () | () | replicated | replicated | - | 8 B | norm | buffer; replicated",
        "frozen.weight | (4, 4) | (2, 4) | _@dp _ | replicated | - | 32 B | frozen | replicated; frozen",
        "Activations at module boundaries",
        "activation | layout | rule | why",
        "embed.output | replicated | - | sum over tp of a row-parallel output",
        "norm.output | unchanged | - | its gradient is reduced here",
        "frozen.output | unchanged | - | its gradient is reduced here",
        "Sent by one rank in a training step, for parameters, gradients and state",
        "what | collective | over | tensors | times | bytes",
        "parameters, forward | all_gather | dp | 6 | 2 | 152 B",
        "parameters, backward | all_gather | dp | 5 | 2 | 128 B",
        "gradients | reduce_scatter | dp | 5 | 2 | 88 B",
        "gradients | all_reduce | dp | 2 | 1 | 8 B",
        "Step: buckets of 25 MiB, accumulate 2",
    ]


def test_a_whole_difference():
    before = after = _net()
    for transform in PARTED:
        after = after | transform
    there = [
        ("transforms:", "none", 'zero(3), accumulate(2), offload("grads")'),
        ("step: accumulate", "1", "2"),
        ("embed.weight: resharded after forward", "yes", "no"),
        ("stored, state", "vocab@tp embed", "vocab@(tp,dp) embed"),
        ("grad", "vocab@tp embed", "vocab@(tp,dp) embed : host"),
        ("blocks.{0-1}.weight x2: stored, state", "out@tp in", "out@tp in@dp"),
        ("grad", "out@tp in", "out@tp in@dp : host"),
        ("blocks.{0-1}.bias x2: grad", "out@tp", "out@tp : host"),
        ("norm.weight: stored, state", "replicated", "_@dp"),
        ("grad", "replicated", "_@dp : host"),
        ("norm.bias: stored, state", "replicated", "_@dp"),
        ("grad", "replicated", "_@dp : host"),
        ("frozen.weight: stored", "replicated", "_@dp _"),
        ("largest rank, parameters:", "168 B", "88 B"),
        ("largest rank, gradients:", "104 B", "56 B"),
        ("largest rank, state:", "208 B", "112 B"),
        ("largest rank, buckets:", "104 B", "472 B"),
        ("largest rank, host:", "0 B", "56 B"),
        ("sent, parameters, forward:", "0 B", "152 B"),
        ("sent, parameters, backward:", "0 B", "128 B"),
    ]
    back = [(title, new, old) for title, old, new in there]
    for made, other, expected in ((before, after, there), (after, before, back)):
        said = [part for line in made.diff(other).splitlines() for part in line.removeprefix("~ ").split("; ")]
        assert said == [f"{title} {old} -> {new}" for title, old, new in expected]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "buffer"}, "kind parameter -> buffer"),
        ({"global_shape": (4, 8)}, "global shape (4, 4) -> (4, 8)"),
        ({"dtype": torch.bfloat16}, "dtype float32 -> bfloat16"),
        ({"requires_grad": True}, "trained no -> yes"),
        ({"persistent": False}, "in state dict yes -> no"),
        ({"tied": ("frozen.weight", "other")}, "names frozen.weight -> frozen.weight, other"),
        ({"rule": None}, "rule frozen -> none"),
        ({"reshard": False}, "resharded after forward yes -> no"),
        ({"stored": Layout.parse("a b : bfloat16"), "note": "new"}, "stored replicated -> a b : bfloat16"),
    ],
)
def test_a_difference_of_one_field(change: dict[str, Any], said: str):
    made = _net()
    row = made["frozen.weight"].replace(**change)
    other = made.map_rows(lambda each: row if each.name == row.name else each)
    assert made.diff(other).splitlines()[0] == f"~ frozen.weight: {said}"


def test_a_pipeline_that_was_run_dry_tells_what_its_stages_do():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    made = make_plan(model, "pp=2,dp=2", sl.Rules({"**": None}, stages="0 | 1-2"))
    report = DryRun(
        (),
        (),
        10,
        2000,
        flops=5,
        stages=tuple(StageRun(i, i, 1000 * (i + 1), 10 * (i + 1), 5 * (i + 1)) for i in range(2)),
        ranks=tuple(
            DryRun((Recorded("all_reduce", ("dp",), 12, 2, "1", "forward"),) * (i + 1), (GATHERED,), 5, 100 * (i + 1))
            for i in range(2)
        ),
    )
    run = made.replace(report=report)
    assert _condensed(str(run)) == [
        "Plan on pp=2,dp=2 (4 ranks): 6 tensors, 60 parameters, 240 B",
        "Largest rank: parameters 160 B, gradients 160 B, optimizer state (2 tensors, AdamW) 320 B, buffers 0 B; "
        "total 640 B; buckets take up to 160 B more in a step",
        "2 stages on 2 ranks by 1f1b, 4 microbatches, if there are so many: ranks stand idle for 20.0% of a step if "
        "all stages take equally long and sending takes no time",
        "One training step of the rank with the highest peak: 0 collectives, whose inputs take 0 B on a rank, 0 B sent "
        "by ring algorithms; live tensors take 10 B before it, 1.95 KiB at the peak, without optimizer state; 5 "
        "floating-point operations",
        "Tensors",
        "tensor | global shape | local shape | layout | per rank | rule | note",
        "{0-2}.weight x3 | (4, 4) | (4, 4) | replicated | 192 B | ** | replicated",
        "{0-2}.bias x3 | (4) | (4) | replicated | 48 B | ** | replicated",
        "Stages of the pipeline",
        "stage | rank | modules | parameters | per rank | microbatches held | FLOPs | activations of one | sent on | "
        "peak of its rank",
        "0 | 0 | 0 | 20 | 80 B | 2 | 1.00 k | 10 B | 5 B | 100 B",
        "1 | 1 | {1-2} x2 | 40 | 160 B | 1 | 2.00 k | 20 B | 10 B | 200 B",
        "Sent by one rank in a training step, for parameters, gradients and state",
        "what | collective | over | tensors | times | bytes",
        "gradients | all_reduce | dp | 4 | 1 | 160 B",
        "Collectives of one training step, rank 0 of pp",
        "caused by | phase | collective | over | calls | bytes each | bytes",
        "1 | forward | all_reduce | dp | 1 | 12 B | 12 B",
        "Collectives of one training step, rank 1 of pp",
        "caused by | phase | collective | over | calls | bytes each | bytes",
        "1 | forward | all_reduce | dp | 2 | 12 B | 24 B",
        "Ops that all-gather their operands",
        "op | in | calls | why",
        "aten.nonzero.default | blocks.0.mlp | 2 | its result depends on values",
        "Step: buckets of 25 MiB",
    ]
    assert Plan.from_json(run.to_json()) == run
    lines = made.diff(made.replace(stages=made.stages[:1], units=(), repeated=("0",))).splitlines()
    assert lines[:3] == ["~ units: {0-2} x3 -> none", "~ repeated blocks: none -> 0", "~ stages: 0 | {1-2} x2 -> 0"]


@pytest.mark.parametrize(
    ("count", "in_bytes", "in_thousands"),
    [
        (0, "0 B", "0"),
        (999, "999 B", "999"),
        (1000, "0.98 KiB", "1.00 k"),
        (1024, "1.00 KiB", "1.02 k"),
        (10 * 1024 - 1, "10.0 KiB", "10.2 k"),
        (99_949, "97.6 KiB", "99.9 k"),
        (99_950, "97.6 KiB", "100 k"),
        (1 << 20, "1.00 MiB", "1.05 M"),
        (405_853_388_800, "378 GiB", "406 G"),
        (5 << 60, "5120 PiB", "5764608 T"),
    ],
)
def test_counts_have_three_digits_and_a_unit(count: int, in_bytes: str, in_thousands: str):
    assert (human_bytes(count), human_count(count)) == (in_bytes, in_thousands)


def test_a_report_counts_by_kind_axis_and_phase():
    assert (REPORT.count(), REPORT.bytes()) == (5, 4 * 2048 + 4096)
    assert (REPORT.count(axis="tp"), REPORT.bytes(axis="tp")) == (4, 4 * 2048)
    assert (REPORT.count(phase="backward"), REPORT.bytes(phase="backward")) == (1, 4096)
    assert (REPORT.count(kind="all_reduce", axis="dp"), REPORT.count(kind="broadcast")) == (1, 0)
    assert REPORT.collectives[0].sent == 2 * 3 * 2048 // 4


def test_the_table_folds_blocks_and_shows_one_layout_column_where_phases_agree():
    text = str(gpt_plan())
    assert text.splitlines()[0] == "Plan on dp=2,tp=4 (8 ranks): 52 tensors, 842 k parameters, 3.21 MiB"
    assert _cells(text, "tensor") == ["tensor", "global shape", "local shape", "layout", "per rank", "rule", "note"]
    assert _cells(text, "blocks.{0-3}.attn.qkv.weight x4")[:6] == [
        "blocks.{0-3}.attn.qkv.weight x4",
        "(384, 128)",
        "(96, 128)",
        "(qkv heads@tp head) in",
        "192 KiB",
        "attn.qkv",
    ]
    assert "row-parallel" in " ".join(_cells(text, "blocks.{0-3}.attn.proj.weight x4"))
    assert "blocks.{0-3}.attn.proj.output x4" in text


def test_phases_that_differ_have_columns_of_their_own():
    text = str(make_plan(mlp(), "fsdp=2,tp=2", {"0": "out@(fsdp,tp)", "2": "replicate"}))
    assert _cells(text, "tensor")[3:5] == ["stored = grad = state", "compute"]
    assert _cells(text, "0.weight")[3:5] == ["out@(fsdp,tp) in", "out@tp in"]


def test_uneven_pieces_are_marked():
    assert _cells(str(make_plan(mlp(33), "tp=4", MLP_RULES)), "0.weight")[2] == "(<=9, 16)"


def test_a_report_is_part_of_the_table():
    text = str(gpt_plan().replace(report=REPORT))
    assert (
        "One training step: 5 collectives, whose inputs take 12.0 KiB on a rank, 16.0 KiB sent by ring algorithms; "
        "live tensors take 1.00 MiB before it, 3.00 MiB at the peak, without optimizer state"
    ) in text
    assert _cells(text, "blocks.{0-3}.attn.proj x4") == [
        "blocks.{0-3}.attn.proj x4", "forward", "all_reduce", "tp", "4", "2.00 KiB", "8.00 KiB",
    ]  # fmt: skip
    gradients = ["(gradients of parameters)", "backward", "all_reduce", "dp", "1", "4.00 KiB", "4.00 KiB"]
    assert _cells(text, "(gradients") == gradients
    assert "all_reduce over tp, forward" in _cells(text, "blocks.{0-3}.attn.proj.output x4")
    assert _cells(text, "aten.nonzero.default")[1:] == ["blocks.0.mlp", "1", "its result depends on values"]


def test_a_report_with_nothing_gathered_says_so():
    text = str(gpt_plan().replace(report=DryRun((), (), 0, 0)))
    assert "Every op has a proven sharding strategy; no op all-gathers its operands." in text


def test_a_rich_console_prints_the_table_and_takes_nothing_for_markup():
    model = nn.ModuleDict({"up": nn.Linear(4, 8, bias=False)})
    made = make_plan(model, "tp=2", {"[u]p.weight": "out@tp in"})
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    console.print(made.table())
    assert "[u]p.weight" in re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue())


def test_every_tensor_has_a_line_when_nothing_is_folded():
    console = Console(file=io.StringIO(), width=1000)
    console.print(gpt_plan().table(fold=False))
    assert len(re.findall(r"^ *blocks\.\d\.attn\.qkv\.weight ", console.file.getvalue(), re.MULTILINE)) == 4


def test_equal_plans_differ_in_nothing():
    assert gpt_plan().diff(gpt_plan()) == ""


def test_a_difference_is_told_in_lines():
    before = make_plan(mlp(), "dp=2,tp=2", MLP_RULES)
    after = make_plan(mlp(), "dp=2,tp=4", {"0": "replicate", "2": "rowwise"})
    assert before.diff(after) == "\n".join(
        [
            "~ mesh: dp=2,tp=2 -> dp=2,tp=4",
            "~ 0.weight: stored, compute, grad, state out@tp in -> replicated",
            "~ 0.bias: stored, compute, grad, state out@tp -> replicated",
            "+ activation 0.output: unchanged",
            "~ largest rank, parameters: 2.12 KiB -> 2.69 KiB",
            "~ largest rank, gradients: 2.12 KiB -> 2.69 KiB",
            "~ largest rank, state: 4.25 KiB -> 5.38 KiB",
            "~ largest rank, buckets: 2.12 KiB -> 2.69 KiB",
            "~ sent, gradients: 2.12 KiB -> 2.69 KiB",
        ]
    )


def test_a_difference_names_tensors_that_only_one_plan_has_with_blocks_folded():
    small, large = gpt_plan(n_layer=2), gpt_plan(n_layer=4)
    lines = small.diff(large).splitlines()
    assert "+ blocks.{2-3}.mlp.up.weight x2: ff@tp in" in lines
    assert any(line.startswith("+ activation blocks.{2-3}.attn.proj.output x2: ") for line in lines)
    assert "- blocks.{2-3}.mlp.up.weight x2: ff@tp in" in large.diff(small).splitlines()


def test_a_difference_tells_fields_of_a_row():
    before = make_plan(mlp(), "tp=2", MLP_RULES)
    frozen = mlp()
    frozen[0].weight.requires_grad_(False)
    lines = before.diff(make_plan(frozen, "tp=2", MLP_RULES)).splitlines()
    assert "~ 0.weight: trained yes -> no; grad, state out@tp in -> -" in lines


def test_the_page_needs_nothing_else_and_shows_every_split_tensor(tmp_path: Path):
    made = gpt_plan().replace(report=REPORT)
    made.html(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert not re.search(r"(?:src|href)=|@import|url\(", page.replace('xmlns="http://www.w3.org/2000/svg"', ""))
    for row in made.rows:
        if row.stored.axes and row.name.startswith("blocks.0"):
            assert row.name.replace("blocks.0", "blocks.{0-3}") in page
    pictures = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    assert pictures


def _area(svg: str) -> list[float]:
    """The area of each piece in a picture, its stripes together."""
    groups = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}g")
    rects = [[r.attrib for r in group if r.tag.endswith("rect")] for group in groups]
    return [sum(float(r["width"]) * float(r["height"]) for r in group) for group in rects]


@pytest.mark.parametrize(
    ("text", "pieces", "stripes"),
    [("out@tp in", 4, 4), ("out@dp in@tp", 8, 8), ("(qkv heads@tp head) embed", 4, 12), ("out in", 1, 1)],
)
def test_the_pieces_of_a_picture_cover_the_tensor(text: str, pieces: int, stripes: int):
    layout = Layout.parse(text, sizes={"qkv": 3, "heads": 4, "head": 8})
    svg = picture(layout, (96, 96), MeshShape("dp=2,tp=4"))
    assert len(_area(svg)) == pieces
    assert svg.count("<rect") == stripes + 1
    assert sum(_area(svg)) == pytest.approx(200 * 200, rel=0.01)


def test_a_whole_picture():
    layout = Layout.parse("(two a@tp) b@dp", sizes={"two": 2})
    pieces = [
        (hue, f"dp={d} tp={t}", 25 * d, 50 * t)
        for hue, (d, t) in zip((0, 90, 180, 270), product((0, 1), repeat=2), strict=True)
    ]
    assert picture(layout, (8, 2), MeshShape("dp=2,tp=2")) == (
        '<svg xmlns="http://www.w3.org/2000/svg" width="50" height="200" role="img">'
        + "".join(
            f'<g fill="hsl({hue} 62% 72%)" stroke="#fff" stroke-width=".5"><title>{name}</title>'
            f'<rect x="{x:.1f}" y="{y:.1f}" width="25.0" height="50.0"/>'
            f'<rect x="{x:.1f}" y="{y + 100:.1f}" width="25.0" height="50.0"/></g>'
            for hue, name, x, y in pieces
        )
        + '<rect width="50" height="200" fill="none" stroke="#1c2330"/></svg>'
    )
    uneven = picture(Layout.parse("a b@tp"), (2, 3), MeshShape("tp=2,dp=2"))
    assert re.findall(r' width="([0-9.]+)" height="([0-9.]+)"', uneven) == [
        ("200", "133.333"), ("133.3", "133.3"), ("66.7", "133.3"), ("200", "133.333"),
    ]  # fmt: skip
    assert re.findall(r'x="([0-9.]+)" y="0.0"', uneven) == ["0.0", "133.3"]
    thin = picture(Layout.parse("a b"), (100, 1), MeshShape("tp=2"))
    assert 'width="40" height="200"' in thin and "<title>every rank</title>" in thin


def test_a_schedule_is_drawn_to_scale():
    svg = drawn(timeline(order("1f1b", 2, 2, 1)))
    assert svg.startswith('<svg xmlns="http://www.w3.org/2000/svg" width="192" height="48" font-size="10" role="img">')
    assert re.findall(r'<text x="([0-9]+)" y="([0-9]+)">([^<]*)</text>', svg) == [
        ("0", "14", "rank 0"), ("64", "14", "0"), ("152", "14", "0"),
        ("0", "38", "rank 1"), ("86", "38", "0"), ("108", "38", "0"),
    ]  # fmt: skip
    assert re.findall(
        r'<title>([^<]*)</title><rect x="(\d+)" y="(\d+)" width="(\d+)" height="20" fill="(#\w+)"', svg
    ) == [
        ("forward of microbatch 0 on stage 0", "60", "0", "22", "#8db7e8"),
        ("backward of microbatch 0 on stage 0", "148", "0", "44", "#f2b38f"),
        ("forward of microbatch 0 on stage 1", "82", "24", "22", "#8db7e8"),
        ("backward of microbatch 0 on stage 1", "104", "24", "44", "#f2b38f"),
    ]


def test_a_tensor_has_a_row_of_pictures_with_a_column_for_each_phase():
    page = (_net() | sl.zero(1))._repr_html_()
    page = re.sub(r'<div class="keys">.*?</div>', "", page.replace("<br>", " "))
    tables = ElementTree.fromstring(page).findall("table")
    assert [table.get("class") for table in tables] == [None, None, None, "shards"]  # the plan comes first
    head, *rows = tables[-1].findall("tr")
    assert ["".join(cell.itertext()) for cell in head] == ["tensor", "stored", "compute", "grad", "state"]
    shown = []
    for row in rows:
        name, *cells = row
        captions = ["".join(cell.find("figure/figcaption").itertext()) for cell in cells]
        shown.append(("".join(name.itertext()), *zip((cell.get("colspan") for cell in cells), captions, strict=True)))
    on_dp, on_tp = "the same on every rank of dp", "the same on every rank of tp"
    assert shown == [
        ("embed.weight (6, 4)", ("3", f"vocab@tp embed {on_dp}"), ("1", "vocab@(tp,dp) embed")),
        ("blocks.{0-1}.weight x2 (4, 4)", ("3", f"out@tp in {on_dp}"), ("1", "out@tp in@dp")),
        ("blocks.{0-1}.bias x2 (4,)", ("4", f"out@tp {on_dp}")),
        ("norm.weight, norm.bias (4,)", ("3", f"_ {on_dp}, tp"), ("1", f"_@dp {on_tp}")),
    ]  # fmt: skip


def test_the_page_draws_memory_to_scale():
    plan = _net() | sl.zero(1)
    page, memory = plan._repr_html_(), plan.memory()
    bar = dict(re.findall(r'<div title="(\w+) [^"]*" style="width:([\d.]+)%', page))
    assert {name: float(share) for name, share in bar.items()} == {
        name: pytest.approx(100 * getattr(memory, name) / memory.total, abs=0.01)
        for name in ("parameters", "gradients", "state", "buffers")
    }


def test_labels_that_do_not_fit_stand_below_the_picture():
    plan = sl.plan(nn.Linear(64, 2, bias=False), "dp=2,tp=8", {"weight": "out in@tp"})
    assert re.findall(r"<i style=[^>]*></i>([^<]*)", plan._repr_html_()) == [f"tp={i}" for i in range(8)]
    plan = sl.plan(nn.Linear(64, 2, bias=False), "dp=2,tp=4", {"weight": "out in@tp"})
    assert "<i style" not in plan._repr_html_()  # each stands in its shard


def test_a_picture_with_too_many_pieces_says_how_many():
    assert "1024 shards" in picture(Layout.parse("out@tp in"), (4096, 8), MeshShape("tp=1024"))


@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 4, 5), (0, 4)])
def test_tensors_of_every_rank_can_be_drawn(shape: tuple[int, ...]):
    ElementTree.fromstring(picture(Layout.replicate(len(shape)), shape, MeshShape("tp=2")))


def test_notebooks_show_the_page(tmp_path: Path):
    made: Plan = gpt_plan()
    made.html(tmp_path / "plan.html")
    assert made._repr_html_() in (tmp_path / "plan.html").read_text(encoding="utf-8")


def test_a_terminal_obeys_nothing_that_stands_in_a_name():
    model = nn.Sequential(OrderedDict([("up\x1b[2J\u202e", nn.Linear(4, 4))]))
    name = next(iter(model.state_dict()))
    rules = sl.Rules({"**": None})
    made = sl.plan(model, "dp=2", rules)
    with pytest.raises(PlanError) as caught:
        made["up\x1b[2J"]
    standing = Standing(0, "raised", module=name, said=name)
    texts = [
        str(made),
        str(rules.coverage(model)),
        rules.explain(name, model),
        rules.explain(name),
        str(caught.value),
        table([standing]),
        str(pickle.loads(pickle.dumps(caught.value))),
    ]
    for text in texts:
        assert "\x1b" not in text and "\u202e" not in text
    assert all("up\\x1b[2J" in text for text in texts if text != texts[1])

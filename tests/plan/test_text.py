"""What readers see: the table, the difference of two plans, the page."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from rich.console import Console
from torch import nn

from shardlib._mesh import MeshShape
from shardlib._plan import DryRun, Gathered, Plan, Recorded, plan
from shardlib._plan.page import picture
from shardlib.layout import Layout
from tests.plan.cases import MLP_RULES, gpt_plan, mlp

REPORT = DryRun(
    collectives=(
        *(Recorded("all_reduce", ("tp",), 2048, 4, f"blocks.{i}.attn.proj", "forward") for i in range(4)),
        Recorded("all_reduce", ("dp",), 4096, 2, "", "backward"),
    ),
    gathered=(Gathered("aten.nonzero.default", "blocks.0.mlp", "its result depends on values"),),
    start_bytes=1 << 20,
    peak_bytes=3 << 20,
)


def _cells(text: str, start: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.lstrip().startswith(start))
    return re.split(r" {2,}", line.strip())


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
    text = str(plan(mlp(), "fsdp=2,tp=2", {"0": "out@(fsdp,tp)", "2": "replicate"}))
    assert _cells(text, "tensor")[3:5] == ["stored = grad = state", "compute"]
    assert _cells(text, "0.weight")[3:5] == ["out@(fsdp,tp) in", "out@tp in"]


def test_uneven_pieces_are_marked():
    assert _cells(str(plan(mlp(33), "tp=4", MLP_RULES)), "0.weight")[2] == "(<=9, 16)"


def test_a_report_is_part_of_the_table():
    text = str(gpt_plan().replace(report=REPORT))
    assert (
        "One training step: 5 collectives, 12.0 KiB put in by a rank, 16.0 KiB sent as rings; tensors alive 1.00 MiB "
        "before it, 3.00 MiB at the peak, without optimizer state"
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
    assert "Every op has a proven sharding strategy; none is gathered." in text


def test_a_rich_console_prints_the_table_and_takes_nothing_for_markup():
    model = nn.ModuleDict({"up": nn.Linear(4, 8, bias=False)})
    made = plan(model, "tp=2", {"[u]p.weight": "out@tp in"})
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
    before = plan(mlp(), "dp=2,tp=2", MLP_RULES)
    after = plan(mlp(), "dp=2,tp=4", {"0": "replicate", "2": "rowwise"})
    assert before.diff(after) == "\n".join(
        [
            "~ mesh: dp=2,tp=2 -> dp=2,tp=4",
            "~ 0.weight: stored, compute, grad, state out@tp in -> replicated",
            "~ 0.bias: stored, compute, grad, state out@tp -> replicated",
            "+ border 0.output: as it is",
            "~ largest rank, parameters: 2.12 KiB -> 2.69 KiB",
            "~ largest rank, gradients: 2.12 KiB -> 2.69 KiB",
            "~ largest rank, state: 4.25 KiB -> 5.38 KiB",
            "~ sent over data axes, gradients: 2.12 KiB -> 2.69 KiB",
        ]
    )


def test_a_difference_names_tensors_that_only_one_plan_has_with_blocks_folded():
    small, large = gpt_plan(n_layer=2), gpt_plan(n_layer=4)
    lines = small.diff(large).splitlines()
    assert "+ blocks.{2-3}.mlp.up.weight x2: ff@tp in" in lines
    assert any(line.startswith("+ border blocks.{2-3}.attn.proj.output x2: ") for line in lines)
    assert "- blocks.{2-3}.mlp.up.weight x2: ff@tp in" in large.diff(small).splitlines()


def test_a_difference_tells_fields_of_a_row():
    before = plan(mlp(), "tp=2", MLP_RULES)
    frozen = mlp()
    frozen[0].weight.requires_grad_(False)
    lines = before.diff(plan(frozen, "tp=2", MLP_RULES)).splitlines()
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


def test_a_picture_with_too_many_pieces_says_how_many():
    assert "1024 pieces" in picture(Layout.parse("out@tp in"), (4096, 8), MeshShape("tp=1024"))


@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 4, 5), (0, 4)])
def test_tensors_of_every_rank_can_be_drawn(shape: tuple[int, ...]):
    ElementTree.fromstring(picture(Layout.replicate(len(shape)), shape, MeshShape("tp=2")))


def test_notebooks_show_the_page(tmp_path: Path):
    made: Plan = gpt_plan()
    made.html(tmp_path / "plan.html")
    assert made._repr_html_() in (tmp_path / "plan.html").read_text(encoding="utf-8")

"""`check_layouts`: layouts that say one thing are let through, others are found where they are, all at once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.jax import on_devices, typed

FAMILIES = ("gpt2",)
MORE = ("example_gpt", "llama", "mixtral", "bert", "vit", "t5", "resnet")


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(f, marks=pytest.mark.deep) for f in MORE)])
def test_layouts_that_ship_are_clear_and_move_nothing_that_they_do_not_say(family: str):
    report = on_devices.run(typed.family, family, "dp=2,tp=4", x64=False)
    assert (report.findings, report.reshards) == ((), ())
    assert report.ops > report.modules > 10


def test_a_block_costs_two_sums_on_thousands_of_devices_that_are_not_there():
    """As XLA compiles it (Shoeybi et al., arXiv 1909.08053); the look-up of the vocabulary's rows is one more."""
    report = on_devices.run(typed.large_gpt, "dp=128,tp=64", x64=False)
    assert report.ok
    assert not report.reshards
    assert (report.mesh.world_size, dict(report.moved)) == (8192, {"sum": 2 * 2 + 1})
    assert str(report).startswith("nothing ambiguous: ")
    assert " modules on 8,192 devices (dp=128,tp=64)" in str(report)


def test_the_sequence_is_gathered_where_borders_say_so():
    report = on_devices.run(typed.large_gpt, "dp=128,tp=64", "sequence", x64=False)
    assert report.ok
    assert not report.reshards
    assert report.moved["gather"] == 2 * 2 + 1  # after each norm


@pytest.mark.parametrize(("mode", "mesh"), [("2d", "row=16,col=16"), ("3d", "depth=8,row=8,col=8")])
def test_a_product_gathers_on_a_grid_as_its_matrix_means(mode: str, mesh: str):
    """Both operands; in 3D the product is summed over the third axis. A norm sums twice, the look-up of rows once."""
    report = on_devices.run(typed.large_gpt, mesh, mode, x64=False)
    products, norms = 2 * 4 + 1, 2 * 2 + 1
    assert report.ok
    assert report.moved["sum"] == 2 * norms + 1 + (products if mode == "3d" else 0)
    assert 2 * (products - 1) <= report.moved["gather"] <= 2 * products  # the head's may be an exchange


MLP: dict[str, tuple[dict[str, Any], str]] = {
    "column after column": ({"up": "colwise", "down": "colwise"}, "and tp shards another dim"),
    "whole after column": ({"up": "colwise"}, "in one operand only"),
    "column, row": ({"up": "colwise", "down": "rowwise"}, ""),
    "row alone": ({"down": "rowwise"}, ""),
    "replicated by a rule": ({"up": "colwise", "up.output": "batch seq ff"}, ""),
}


@pytest.mark.parametrize("case", MLP)
def test_contractions_that_layouts_leave_open_are_found_at_their_modules(case: str):
    rules, words = MLP[case]
    report = on_devices.run(typed.small, typed.Blocks, "dp=512,tp=8", rules, x64=False)
    found = {finding.module: finding.conflict for finding in report.findings if finding.module.endswith("down")}
    assert found.keys() == ({"blocks.0.down", "blocks.1.down"} if words else set())
    assert all(words in conflict for conflict in found.values())
    assert report.ok == (not words)
    assert all(finding.op == "linear" for finding in report.findings)


def test_what_two_activations_leave_open_is_found():
    column = {"q": "colwise", "k": "colwise"}
    summed = on_devices.run(typed.small, typed.Heads, "dp=4,tp=8", {**column, "q.output": "b s e@tp"}, x64=False)
    texts = {finding.conflict for finding in summed.findings}
    assert any("partial sum over tp that no rule asks for" in text for text in texts), texts
    rows = {"q.output": "batch@dp rows@tp embed", "k.output": "batch@dp rows@tp embed"}
    twice = on_devices.run(typed.small, typed.Heads, "dp=4,tp=8", rows, x64=False)
    assert "axis tp would shard two dims of the result" in twice.findings[0].conflict
    assert twice.findings[0].operands == ("(4096@dp 64@tp 64)", "(4096@dp 64 64@tp)")
    unlike = on_devices.run(
        typed.small, typed.Heads, "dp=4,sp=2,tp=8", {"q.output": "b s@tp e", "out.output": "b s@sp e"}, x64=False
    )
    assert [f.op for f in unlike.findings] == ["add.Tensor"]
    assert "dim 1 is sharded over" in unlike.findings[0].conflict


def test_what_leaves_two_modules_passes_the_inner_one_s_border_first():
    borders = {"inner.0.output": "batch@dp seq@tp embed", "inner.output": "batch@dp seq embed", "after": "colwise"}
    report = on_devices.run(typed.small, typed.Nested, "dp=4,tp=8", borders, x64=False)
    assert report.ok
    assert report.moved == {"gather": 1}


def test_where_jax_has_an_answer_ours_is_the_same():
    wrong, answers = on_devices.run(typed.unlike_jax, x64=False)
    assert wrong == []
    assert answers > 50


def test_what_a_transform_gathers_is_counted():
    found = on_devices.run(typed.gathered, x64=False)
    assert found == {"nothing": {"sum": 1}, "zero(2)": {"sum": 1}, "zero(3)": {"gather": 4, "sum": 1}}

"""`explain` and `coverage`: what rules do, told to a person."""

from __future__ import annotations

import pytest
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from shardlib.errors import RuleError
from shardlib.rules import Rules
from tests.rules.zoo import TINY_RULES, TINY_SIZES, Tiny, on_meta

RULES = Rules({**TINY_RULES, "head": "vocab@tp", "mlp.output": "batch seq embed"}, sizes=TINY_SIZES)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "blocks.0.attn.qkv.weight",
            '"blocks.0.attn.qkv.weight": parameter, global shape (48, 16), float32, 3.0 KiB\n'
            '  rule     "attn.qkv": "(qkv heads@tp head)"\n'
            "  layout   (qkv heads@tp head) in\n"
            "  meaning  column-parallel (out dim)\n"
            '  on mesh  "dp=2,tp=2": rank 0 holds local shape (24, 16)\n'
            "  placed   (Replicate(), _StridedShard(dim=0, sf=3))",
        ),
        (
            "head.weight",
            '"embed.weight": parameter, global shape (32, 16), float32, 2.0 KiB\n'
            '  tied to  "head.weight"\n'
            '  rule     "embed": "rowwise"\n'
            '  rule     "head": "vocab@tp" (overridden, or the same)\n'
            "  layout   vocab@tp embed\n"
            "  meaning  row-parallel (vocab dim)\n"
            '  on mesh  "dp=2,tp=2": rank 0 holds local shape (16, 16)\n'
            "  placed   (Replicate(), Shard(dim=0))",
        ),
        ("blocks.0.mlp", '"blocks.0.mlp.output": activation, layout batch seq embed (rule "mlp.output")'),
        ("blocks.0.mlp.output", '"blocks.0.mlp.output": activation, layout batch seq embed (rule "mlp.output")'),
        (
            "blocks.0.mlp.down.output",
            '"blocks.0.mlp.down.output": activation, layout ... (sum over tp of a row-parallel output)',
        ),
        ("blocks.0.norm.output", '"blocks.0.norm.output": activation, unchanged (its gradient is reduced here)'),
        ("blocks.0.mlp.up.input", '"blocks.0.mlp.up.input": activation, unchanged (no rule names it)'),
        ("blocks", 'module "blocks" (ModuleList) has no tensors of its own, and no rule names its activations'),
    ],
)
def test_explain_with_a_model(name: str, said: str) -> None:
    assert RULES.explain(name, on_meta(Tiny), "dp=2,tp=2") == said


def test_explain_with_a_model_and_no_mesh() -> None:
    assert RULES.explain("mask", on_meta(Tiny)) == (
        '"mask": buffer, global shape (8, 8), float32, 256 B\n  layout   _ _\n  meaning  replicated: buffer'
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a.mlp.up.bias", '"a.mlp.up.bias"\n  rule "mlp.up": "colwise" names its module "a.mlp.up"'),
        ("a.mlp.up", '"a.mlp.up"\n  rule "mlp.up": "colwise" names it'),
        ("a.mlp.output", '"a.mlp.output"\n  rule "mlp.output": "batch seq embed" names this activation'),
        ("a.mlp.input", '"a.mlp.input"\n  no rule matches'),
    ],
)
def test_explain_a_name_alone(name: str, said: str) -> None:
    assert RULES.explain(name) == said


def test_explain_an_unknown_name() -> None:
    with pytest.raises(RuleError) as caught:
        RULES.explain("blocks.0.attn.qvk", on_meta(Tiny))
    assert str(caught.value) == (
        '"blocks.0.attn.qvk" is not a parameter, buffer or module of Tiny, which has 23 tensors in 22 modules. Give a '
        'full name. Did you mean "blocks.0.attn.qkv"?'
    )


def test_coverage_counts_every_byte_once() -> None:
    model = on_meta(Tiny)
    coverage = RULES.coverage(model)
    tensors = [*model.parameters(), *model.buffers()]
    assert coverage.bytes == sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert coverage.split_bytes + coverage.replicated_bytes == coverage.bytes
    assert coverage.unmatched_bytes == 8 * 8 * 4
    assert str(coverage) == (
        "rule       layout                 tensors     bytes   sharded  replicated\n"
        'embed      "rowwise"                    1   2.0 KiB   2.0 KiB         0 B\n'
        'attn.qkv   "(qkv heads@tp head)"        4   6.4 KiB   6.4 KiB         0 B\n'
        'attn.proj  "rowwise"                    4   2.1 KiB   2.0 KiB       128 B\n'
        'mlp.up     "colwise"                    4   8.5 KiB   8.5 KiB         0 B\n'
        'mlp.down   "rowwise"                    4   8.1 KiB   8.0 KiB       128 B\n'
        'norm       "replicate"                  4     256 B       0 B       256 B\n'
        'head       "vocab@tp"                0 +1       0 B       0 B         0 B\n'
        "(no rule)  replicated                   1     256 B       0 B       256 B\n"
        "total                                  22  27.6 KiB  26.9 KiB       768 B"
    )


def test_bytes_of_a_large_table_are_readable() -> None:
    table = nn.ModuleDict({"table": on_meta(nn.Embedding, 2**28, 1024)})
    total = str(Rules({"table": "replicate"}).coverage(table)).splitlines()[-1]
    assert total.split() == ["total", "1", "1.0", "TiB", "0", "B", "1.0", "TiB"]


def test_coverage_shows_what_resolving_would_refuse() -> None:
    rules = Rules({"mlp.up": "colwise", "nothing": "rowwise"})
    rows = {row.rule: (row.tensors, row.bytes) for row in rules.coverage(on_meta(Tiny)).rows}
    assert rows["nothing"] == (0, 0)
    assert rows[None][0] == 18


def test_coverage_on_a_mesh_counts_what_is_split_there() -> None:
    assert RULES.coverage(on_meta(Tiny), "dp=2").split_bytes == 0
    assert RULES.coverage(on_meta(Tiny), "tp=2").split_bytes == RULES.coverage(on_meta(Tiny)).split_bytes


def test_placements_per_mesh_axis_need_a_mesh() -> None:
    rules = Rules({"0": (Replicate(), Shard(0))})
    with pytest.raises(RuleError) as caught:
        rules.coverage(nn.Sequential(nn.Linear(4, 4)))
    assert str(caught.value) == ('These rules give one placement per mesh axis; pass mesh=..., as in "dp=2,tp=4".')
    assert rules.coverage(nn.Sequential(nn.Linear(4, 4)), "dp=2,tp=2").split_bytes == 80

"""Whatever layouts are drawn for a model's tensors, a sharded model trains the numbers of one device.

Loss, outputs, every gradient, the gradient norm, the optimizer's state, and every parameter and buffer after AdamW
steps, within the limits that `shardlib/testing/equivalence/measure.py` derives; ranks that hold the same elements hold
the same bits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardlib import MeshShape, Rules, zero
from shardlib.testing import strategies
from shardlib.testing.equivalence import assert_equivalent
from shardlib.testing.models import MLP, ConvNet, Numbers, Tokens, Transformer
from shardlib.testing.strategies import Case, ModelFactory

_ALL = settings.default.max_examples
_FOUR = strategies.mesh_shapes(4, model_axes=("tp", "sp"))
# Three axes of two ranks each, in any order, in one of eight.
_EIGHT = st.permutations(("tp", "sp", "dp")).map(lambda names: MeshShape(dict.fromkeys(names, 2)))
_MESHES = st.integers(0, 7).flatmap(lambda n: _EIGHT if n == 7 else _FOUR)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    """A gradient that is zero in exact arithmetic is noise, which AdamW divides by itself plus eps."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)


def _train(case: Case, **options: Any) -> None:
    assert_equivalent(**case, steps=2, optimizer=_adamw, **options)


def _transformer(rules: dict[str, str], activations: dict[str, str] | None = None, **changes: Any) -> Case:
    sizes = {"vocab": 5, "heads": 3, "head": 3, "tied": True, **changes}
    known = Rules(rules, activations=activations or {}, unmatched="replicate")
    return Case(ModelFactory(Transformer, tuple(sizes.items())), Tokens(6, 5, 5), MeshShape("tp=2"), known)


# What failed once: a list of blocks that became a region, though nobody calls it; a gradient that is a slice of
# something larger, read by a fused optimizer as if it were not, and by a view; a bias that lies apart from its weight.
_ACROSS_BLOCKS = _transformer({"blocks.*.attn.qkv": "out in@tp", "blocks.*.mlp.down": "out@tp in"}, layers=2)
_SLICED_GRADIENT = _transformer({"attn.proj": "out@tp in", "mlp.up": "out in@tp"})
_SLICED_ACTIVATION = _transformer(
    {"attn.qkv": "(qkv=3 heads=3 head=3) in@tp", "attn.proj": "colwise"}, {"attn.proj.output": "batch seq@tp embed"}
)
_BIAS_APART = _transformer({"mlp.down.bias": "out@tp"}, heads=1, head=4)
# One feature of each half of a head on each rank, so that `cat` took its operands for channels-last images.
_HALVES_OF_ONE = Case(
    ModelFactory(Transformer, (("vocab", 6), ("heads", 2), ("head", 4), ("dropout", 0.3), ("position", "rotary"))),
    Tokens(5, 4, 6),
    MeshShape("tp=2"),
    Rules(
        {"^position.sin": "_ _@tp", "^head": "colwise"},
        activations={"^blocks.0.dropout1.output": "_ _ _@tp"},
        unmatched="replicate",
    ),
)


@settings(max_examples=_ALL // 5)
@given(case=strategies.cases(strategies.transformers(dropout=True), meshes=_MESHES))
@example(case=_ACROSS_BLOCKS)
@example(case=_SLICED_GRADIENT)
@example(case=_SLICED_ACTIVATION)
@example(case=_BIAS_APART)
@example(case=_HALVES_OF_ONE)
def test_a_transformer(case: Case):
    _train(case)


@pytest.mark.compiled
@pytest.mark.deep
@settings(max_examples=max(2, _ALL // 12))
@given(case=strategies.cases(strategies.transformers(dropout=True, min_layers=2), meshes=_FOUR))
def test_a_transformer_of_compiled_blocks(case: Case):
    _train(case, compile="auto")


def _mlp(width: int, rules: dict[str, str]) -> Case:
    sizes = (("ins", 6), ("width", width), ("outs", 5), ("bias", False), ("buffers", True))
    known = Rules(rules, unmatched="replicate")
    return Case(ModelFactory(MLP, sizes), Numbers((6, 6)), MeshShape("tp=2,sp=2"), known)


# A dim that two axes split unevenly, on a mesh that has a flattened form; one that each axis divides, but not both.
_SPLIT_TWICE = _mlp(9, {"scale": "width@(tp,sp)"})
_TOO_FEW_FOR_BOTH = _mlp(2, {"up": "out@(tp,sp) in"})
# Local shapes differ, and with them what a bucket's size takes: ranks made other buckets, and gathered other gradients.
_BUCKETS_OF_UNEVEN_SHAPES = Case(
    ModelFactory(MLP, (("ins", 5), ("width", 3), ("outs", 5), ("shared", "weight"), ("buffers", True))),
    Numbers((6, 5)),
    MeshShape("sp=2,tp=2,dp=2"),
    Rules(
        {
            "^scale": "_@sp",
            "^shift": "_@(sp,tp)",
            "^up": "out@sp in",
            "^down.weight": "out@tp in",
            "^down.bias": "out@tp",
        },
        activations={"^again.output": "_@(sp,tp) _", "^dropout.output": "_ _@tp"},
        unmatched="replicate",
    ),
    transforms=(zero(1),),
)


@settings(max_examples=_ALL // 5)
@given(case=strategies.cases(strategies.mlps(dropout=True), meshes=_MESHES))
@example(case=_SPLIT_TWICE)
@example(case=_TOO_FEW_FOR_BOTH)
@example(case=_BUCKETS_OF_UNEVEN_SHAPES)
def test_an_mlp_of_uneven_widths(case: Case):
    _train(case)


def _conv_net(mesh: str, rules: dict[str, str], activations: dict[str, str] | None = None, **more: Any) -> Case:
    known = Rules(rules, activations=activations or {}, unmatched="replicate")
    return Case(ModelFactory(ConvNet, tuple(more.items())), Numbers((6, 3, 6, 6)), MeshShape(mesh), known)


# Statistics of split channels, over other ranks' examples but not over their channels; a gradient that is split and
# summed elsewhere than its parameter, one of whose dims is split inside.
_SPLIT_STATISTICS = _conv_net(
    "dp=2,tp=2", {"first": "out@tp in _ _", "norm": "channel@tp", "second": "out in@tp _ _"}, channels=6, outs=2
)
_GRADIENT_ELSEWHERE = _conv_net(
    "tp=2,sp=2",
    {"second.weight": "out (more=2 in=2@sp) _@tp _"},
    {"norm.output": "_ _ _@tp _@sp"},
    outs=3,
    norm="group",
)


@settings(max_examples=_ALL // 6)
@given(case=strategies.cases(strategies.convnets(dropout=True), meshes=_MESHES))
@example(case=_SPLIT_STATISTICS)
@example(case=_GRADIENT_ELSEWHERE)
def test_a_convolutional_net(case: Case):
    _train(case)

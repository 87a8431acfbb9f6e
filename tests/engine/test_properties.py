"""Whatever layouts are drawn for a model's tensors, a sharded model trains the numbers of one device.

Loss, every gradient, the gradient norm, and every parameter and buffer after AdamW steps, within the tolerance that
`same_numbers.py` derives; ranks that hold the same elements hold the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import example, given, settings

from tests.engine import cases, models
from tests.engine.cases import Case
from tests.engine.same_numbers import assert_same_numbers

_ALL = settings.default.max_examples


def _adamw(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """A gradient that is zero in exact arithmetic is noise, which AdamW divides by itself plus eps."""
    return torch.optim.AdamW(parameters, lr=lr, eps=1e-4)


def _train(case: Case, compile: str | None = None) -> None:
    assert_same_numbers(
        case.make_model,
        case.make_batch,
        models.spread,
        case.mesh,
        case.make_rules(),
        steps=2,
        accumulate=case.accumulate,
        optimizer=_adamw,
        same_random=dict(case.sizes).get("dropout", 0.0) > 0,
        no_sync=case.no_sync,
        before_step=case.before_step,
        clip=case.clip,
        compile=compile,
    )


def _gpt(rules: dict[str, str], **changes: Any) -> Case:
    sizes = {"n_layer": 1, "n_head": 3, "d_model": 9, "vocab_size": 5, "tied": True, "dropout": 0.0, **changes}
    fused = (("qkv", 3), ("heads", 3), ("head", 3)) if any("heads" in layout for layout in rules.values()) else ()
    return Case("tp=2", "transformer", tuple(sizes.items()), tuple(rules.items()), fused=fused)


# What failed once: a list of blocks that became a region, though nobody calls it; a gradient that is a slice of
# something larger, read by a fused optimizer as if it were not, and by a view.
_ACROSS_BLOCKS = _gpt({"blocks.*.attn.qkv": "out in@tp", "blocks.*.mlp.down": "out@tp in"}, n_layer=2)
_SLICED_GRADIENT = _gpt({"attn.proj": "out@tp in", "mlp.up": "out in@tp"})
_SLICED_ACTIVATION = _gpt(
    {"attn.qkv": "(qkv heads head) in@tp", "attn.proj": "colwise", "attn.proj.output": "batch seq@tp embed"}
)
# A dim that two axes split unevenly, on a mesh that has a flattened form.
_SPLIT_TWICE = Case(
    "tp=2,sp=2",
    "mlp",
    (("ins", 6), ("width", 9), ("outs", 5), ("bias", False), ("shared", ""), ("dropout", 0.0)),
    (("scale", "width@(tp,sp)"),),
)


@settings(max_examples=_ALL // 4)
@given(case=cases.transformers())
@example(case=_ACROSS_BLOCKS)
@example(case=_SLICED_GRADIENT)
@example(case=_SLICED_ACTIVATION)
def test_a_transformer(ranks, case: Case):
    ranks(case.world_size).run(_train, case)


@settings(max_examples=max(2, _ALL // 25))
@given(case=cases.transformers(n_layer=2))
def test_a_transformer_of_compiled_blocks(ranks, case: Case):
    ranks(case.world_size).run(_train, case, "auto")


@settings(max_examples=_ALL // 4)
@given(case=cases.mlps())
@example(case=_SPLIT_TWICE)
def test_an_mlp_of_uneven_widths(ranks, case: Case):
    ranks(case.world_size).run(_train, case)


# Statistics of split channels, over other ranks' examples but not over their channels.
_SPLIT_STATISTICS = Case(
    "dp=2,tp=2",
    "conv",
    (("channels", 6), ("outs", 2), ("kernel", 3), ("norm", "batch"), ("dropout", 0.0)),
    (("first", "out@tp in height width"), ("norm", "channel@tp"), ("second", "out in@tp height width")),
)


@settings(max_examples=_ALL // 5)
@given(case=cases.conv_nets())
@example(case=_SPLIT_STATISTICS)
def test_a_convolutional_net(ranks, case: Case):
    ranks(case.world_size).run(_train, case)

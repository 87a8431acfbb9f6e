"""Plans, and transforms for them, that several tests share."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from shardlib._plan import LossScale, Plan, make_plan
from shardlib.rules import Rules
from shardlib.transforms import (
    Transform,
    accumulate,
    checkpoint_activations,
    fsdp,
    hsdp,
    offload,
    precision,
    replicate,
    zero,
)

__all__ = ["RULES", "Small", "laid_out", "one_transform", "small"]

RULES = {
    "embed.weight": "vocab@tp embed",
    "blocks.*.qkv": "(qkv heads@tp head)",
    "blocks.*.proj": "rowwise",
    "frozen": "replicate",
    "norm": "replicate",
    "count": "replicate",
}


class Small(nn.Module):
    """Blocks with a fused, a row-parallel and an uneven tensor; tied, frozen, tiny ones; a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.blocks = nn.ModuleList([_block() for _ in range(2)])
        self.frozen = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.norm = nn.BatchNorm1d(16)
        self.count = nn.Parameter(torch.zeros(()))
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.embed.weight


def _block() -> nn.ModuleDict:
    return nn.ModuleDict({"qkv": nn.Linear(16, 48), "proj": nn.Linear(16, 16)})


def small() -> nn.Module:
    with torch.device("meta"):
        return Small()


def laid_out(mesh: str = "dp=2,fsdp=2,tp=2", **changes: Any) -> Plan:
    """The plan of `Small`; on a mesh without "tp" nothing is split."""
    if "tp" not in mesh:
        return make_plan(small(), mesh, dict.fromkeys(RULES, "replicate"), **changes)
    return make_plan(small(), mesh, Rules(RULES, sizes={"qkv": 3, "heads": 4}), **changes)


_ONLY = st.sampled_from([None, None, "blocks.*", ("embed", "proj.bias"), "^frozen"])
_AXES = st.sampled_from([None, "dp", "fsdp", ("dp", "fsdp"), ("fsdp", "dp")])
_SCALES = st.sampled_from([None, LossScale(), LossScale(init_scale=8.0, growth_interval=3)])
_FRACTIONS = st.sampled_from([1.0, 0.0, 0.25, 0.5])


def one_transform() -> st.SearchStrategy[Transform]:
    """Any transform that `laid_out()` takes. Shrinks towards `replicate()`."""
    return st.one_of(
        st.builds(replicate, st.sampled_from([None, "norm", "blocks.*"])),
        st.builds(zero, st.integers(1, 3), axis=_AXES, only=_ONLY),
        st.builds(fsdp, _AXES, reshard_after_forward=st.sampled_from([None, True, False]), only=_ONLY),
        st.sampled_from([hsdp(shard="fsdp", replicate="dp"), hsdp(shard=("dp",), replicate="fsdp", only="blocks.1")]),
        st.builds(offload, st.sampled_from(["state", "all", ("params", "grads")]), fraction=_FRACTIONS, only=_ONLY),
        st.builds(
            precision,
            st.sampled_from(["bf16", "fp16_naive", "fp8"]),
            master=st.booleans(),
            reduce=st.sampled_from([None, torch.float32, "bfloat16"]),
            keep=st.sampled_from([(), "norm", ("norm", "embed")]),
            scaler=_SCALES,
        ),
        st.sampled_from([precision("fp32"), precision("fp16"), precision("bf16", autocast=True)]),
        st.builds(checkpoint_activations, st.sampled_from(["units", "blocks.0", ("qkv", "units")])),
        st.builds(accumulate, st.integers(1, 4)),
    )

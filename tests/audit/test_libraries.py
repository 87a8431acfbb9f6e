"""What an audit changes in libraries, for scripts that were written for accelerators."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn

from shardlib.testing import audit
from shardlib.testing.auditing.advice import advice_on


def _build() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def _batch(step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def _by_fsdp(model: nn.Module) -> tuple[Any, ...]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False)
    accelerator = Accelerator(mixed_precision="fp16", fsdp_plugin=plugin)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_accelerate_shards_by_fsdp_on_cpu_ranks_as_on_accelerators():
    report = audit(_build, _by_fsdp, "fsdp=2", _batch)
    assert report, str(report)
    assert "fully_shard" in report.used
    assert 'Accelerator(mixed_precision="fp16"): everything is computed in float64' in report.changed


def test_logits_that_a_tp_plan_does_not_gather_are_named():
    said = "ValueError: Expected input batch_size (8) to match target batch_size (16)."
    first, *_ = advice_on(("transformers", "torch"), (), "one backward pass", None, said)
    assert "colwise_gather_output" in first.line

"""DeepSpeed's ZeRO on CPU ranks over gloo: what an audit relies on to read it, beside one device.

ZeRO keeps its parameters, gradients and state in float32, whatever the model is in: eight digits agree, not sixteen.
"""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardlib.testing import shared_pool

# float32 has 24 bits; each value is a sum of eight terms at most, rounded once each.
ROUNDING = 8 * 2**-24


def reset() -> None:
    """Forget the process groups that DeepSpeed keeps in a process: those of a call before this one are gone."""
    import deepspeed.comm.comm
    from deepspeed.utils import groups

    importlib.reload(groups)
    deepspeed.comm.comm.cdb = None


def _engine(stage: int) -> tuple[Any, nn.Module]:
    """Return an engine, and the model on one device."""
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
        False  # else it is compiled at the first start, on each rank
    )
    reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    single = copy.deepcopy(model).double()
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=_adamw(model), config=settings)
    return engine, single


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)


def _trained(stage: int, folder: Path) -> dict[str, float]:
    """Return by how much a step of ZeRO differs from one device, of gradients, parameters and state."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state

    engine, single = _engine(stage)
    rows = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    engine.backward(engine(rows.chunk(2)[dist.get_rank()]).square().mean())
    single(rows.double()).square().mean().backward()
    off = {"gradient": _worst(single, engine.module, lambda p: p.grad, safe_get_full_grad)}
    optimizer = _adamw(single)
    optimizer.step()
    engine.step()
    if stage:
        off["parameter"] = _worst(single, engine.module, lambda p: p, safe_get_full_fp32_param)
        off["state"] = _worst(
            single, engine.module, lambda p: optimizer.state[p]["exp_avg"],
            lambda p: safe_get_full_optimizer_state(p, "exp_avg"),
        )  # fmt: skip
        off["saved"] = _saved(engine, single, folder)
    engine.destroy()
    return off


def _worst(single: nn.Module, model: nn.Module, want: Any, got: Any) -> float:
    pairs = [(want(single.get_parameter(name)), got(p)) for name, p in model.named_parameters()]
    return max((a - b.double()).abs().max().item() for a, b in pairs)


def _saved(engine: Any, single: nn.Module, folder: Path) -> float:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    engine.save_checkpoint(str(folder), tag="last")
    dist.barrier()
    loaded = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag="last")
    return max((value.double() - single.get_parameter(name)).abs().max().item() for name, value in loaded.items())


@pytest.mark.parametrize("stage", range(4))
def test_a_step_of_zero_is_that_of_one_device(stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    for off in shared_pool(2).run(_trained, stage, tmp_path):
        assert off
        assert max(off.values()) < ROUNDING, off

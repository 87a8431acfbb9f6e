"""What every plugin does, tried, as the table of the documents has it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardlib as sl
from shardlib.booster import (
    Booster,
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    MoeHybridParallelPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from tests.booster.training import EXPERTS, Run, Trained, gpt, mixture, plainly, rules
from tests.families.transformer_models import build, text
from tests.house.source import ROOT

PRECISIONS = ["fp16", "bf16", "fp16_naive", "fp8"]
PLUGINS = {
    "none": None,
    "TorchDDPPlugin": TorchDDPPlugin,
    "LowLevelZeroPlugin": LowLevelZeroPlugin,
    "TorchFSDPPlugin": TorchFSDPPlugin,
    "GeminiPlugin": GeminiPlugin,
    "HybridParallelPlugin": HybridParallelPlugin,
    "MoeHybridParallelPlugin": MoeHybridParallelPlugin,
}
OWN = ["LowLevelZeroPlugin", "GeminiPlugin", "HybridParallelPlugin", "MoeHybridParallelPlugin"]  # precisions


def _run(name: str, precision: str | None = None, dtype: torch.dtype = torch.float32, seed: int = 0) -> Run:
    """A run by a plugin, in its own precision or in the one that a Booster is given."""
    kind = PLUGINS[name]
    options: dict[str, Any] = {"tp_size": 2, "custom_policy": rules()} if name == "HybridParallelPlugin" else {}
    # Losses of the mixture are larger, and so is what overflows.
    mixed = {"ep_size": 2, "custom_policy": EXPERTS, "initial_scale": 2**13}
    options |= mixed if name == "MoeHybridParallelPlugin" else {}
    options |= {"precision": precision or "fp32"} if name in OWN else {}
    options |= {"mixed_precision": precision} if name == "TorchFSDPPlugin" else {}
    of_booster = precision if name in ("none", "TorchDDPPlugin") else None
    return Run(None if kind is None else kind(**options), dtype, seed, _maker(name), mixed_precision=of_booster)


def _maker(name: str) -> Any:
    return mixture if name == "MoeHybridParallelPlugin" else gpt


def _same(got: Trained, want: Trained) -> None:
    assert got.losses and max(abs(a - b) for a, b in zip(got.losses, want.losses, strict=True)) < 1e-10


# One step or two a cell: tests/booster/test_plugins.py has the numbers of longer runs.
def _as_plainly(name: str, **options: Any) -> None:
    got = _run(name, dtype=torch.float64).train(steps=1, **options)
    _same(got, plainly(torch.float64, steps=1, make=_maker(name), **options))


def _accumulates(name: str, _folder: str) -> None:
    _as_plainly(name, accumulate=2)


def _clips(name: str, _folder: str) -> None:
    _as_plainly(name, clip=0.5)


def _trains_in(precision: str) -> Callable[[str, str], None]:
    def trains(name: str, _folder: str) -> None:
        # How near to float64 is held in test_plugins.py. A scale of 2**16 is too large for the first steps.
        got, exact = _run(name, precision).train(), plainly(torch.float64, make=_maker(name))
        assert abs(got.losses[0] / exact.losses[0] - 1) < 0.08 and got.losses[-1] < got.losses[0]
        assert sum(got.skipped) <= 2

    return trains


def _saves(*, later: bool) -> Callable[[str, str], None]:
    """And another plugin goes on from there: data parallel on all ranks, in the place of what there was."""

    def saves(name: str, folder: str) -> None:
        run, folder = _run(name, dtype=torch.float64), f"{folder}/{name}-{later}"
        run.train(steps=1)
        begun = [
            run.booster.save_model(run.model, f"{folder}-model", shard=True, size_per_shard=1, use_async=later),
            run.booster.save_optimizer(run.optimizer, f"{folder}-optimizer", shard=True, use_async=later),
        ]
        for one in begun:
            one.wait()
        run.booster.save_lr_scheduler(run.scheduler, f"{folder}-scheduler")
        other = Run(None if name == "none" else TorchDDPPlugin(), torch.float64, 1, _maker(name))
        other.booster.load_model(other.model, f"{folder}-model")
        other.booster.load_optimizer(other.optimizer, f"{folder}-optimizer")
        other.booster.load_lr_scheduler(other.scheduler, f"{folder}-scheduler")
        got, want = sl.full_state_dict(other.model), sl.full_state_dict(run.model)
        assert all(torch.equal(got[key], want[key]) for key in want)
        _same(other.train(first=1, steps=1), run.train(first=1, steps=1))

    return saves


def _adapts(name: str, _folder: str) -> None:
    import peft  # after transformers, which needs torchvision to have been imported in its way

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    options = {} if PLUGINS[name] is not HybridParallelPlugin else {"tp_size": 2}
    options |= {"ep_size": 2} if name == "MoeHybridParallelPlugin" else {}
    options |= {"precision": "fp32"} if name in OWN else {}
    plugin = None if PLUGINS[name] is None else PLUGINS[name](**options)
    torch.manual_seed(0)
    kind = "MixtralForCausalLM" if name == "MoeHybridParallelPlugin" else "LlamaForCausalLM"
    booster = Booster(plugin=plugin)
    model = booster.enable_lora(build(kind), lora_config=config)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, optimizer, *_ = booster.boost(model, optimizer)
    booster.backward(model(**text(0, labels="tokens")[1]).loss, optimizer)
    optimizer.step()
    after = sl.full_state_dict(model)
    changed = {key for key in before if not torch.equal(after[key], before[key])}
    assert changed and all("lora_" in key for key in changed)


CAN: dict[str, Callable[[str, str], None]] = {
    "`no_sync`, accumulation": _accumulates,
    "clipping": _clips,
    **{f"`{name}`": _trains_in(name) for name in PRECISIONS},
    "LoRA": _adapts,
    "sharded checkpoints, resumed on another mesh": _saves(later=False),
    "asynchronous ones": _saves(later=True),
}


def _try_all(name: str, folder: str) -> dict[str, str]:
    found = {}
    for what, attempt in CAN.items():
        try:
            attempt(name, folder)
            found[what] = "yes"
        except Exception as error:
            found[what] = f"no: {type(error).__name__}: {str(error)[:200]}"
    return found


@functools.cache
def _told() -> list[str]:
    """The lines of the table in docs/boosters.md."""
    page = (ROOT / "docs" / "boosters.md").read_text()
    told = re.search(r"## What every plugin does\n\n.*?\n\n(\|.*?)\n\n", page, re.DOTALL)
    assert told is not None
    return told[1].splitlines()


def test_the_table_has_a_line_for_every_plugin():
    assert _told()[:2] == [f"| plugin | {' | '.join(CAN)} |", "|---" * (len(CAN) + 1) + "|"]
    assert len(_told()) == 2 + len(PLUGINS)


@pytest.mark.parametrize("name", PLUGINS)
def test_a_plugin_does_what_the_table_says(ranks, tmp_path: Path, name: str):
    answers = ranks(1 if name == "none" else 2).run(_try_all, name, str(tmp_path))
    assert all(each == answers[0] for each in answers)
    line = f"| {name if name == 'none' else f'`{name}`'} | {' | '.join(answers[0].values())} |"
    assert _told()[2 + list(PLUGINS).index(name)] == line
    assert not dist.is_initialized()

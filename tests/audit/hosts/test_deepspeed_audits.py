"""Audits of DeepSpeed: each stage of ZeRO is right in float64; faults are found, and the line that decides is named."""

from __future__ import annotations

import functools
import runpy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from shardlib.errors import InputError
from shardlib.testing import AuditReport, audit
from tests.house.source import ROOT

STAGES = range(4)
CHECKS = (
    "values after sharding", "loss", "outputs", "gradients", "bits of replicas", "gradient norm", "activations",
    "two passes in a step", "ragged labels", "optimizer steps", "evaluation", "save for one device", "save and go on",
)  # fmt: skip


class Model(nn.Module):
    def __init__(self, *, frozen: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.up, self.norm = nn.Embedding(32, 16), nn.Linear(16, 24), nn.LayerNorm(24)
        self.down, self.head = nn.Linear(24, 16), nn.Linear(16, 32)
        self.up.weight.requires_grad_(not frozen)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(ids)
        logits = self.head(x + self.down(self.norm(F.gelu(self.up(x)))))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def _batch(step: int) -> dict[str, torch.Tensor]:
    ids, labels = torch.randint(32, (2, 4, 8), generator=torch.Generator().manual_seed(step))
    return {"ids": ids, "labels": labels}


def _engine(model: nn.Module, stage: int, optimizer: Any = None, zero: Any = None, **config: Any) -> Any:
    import deepspeed

    deepspeed.init_distributed("nccl")
    config |= {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **(zero or {})},
    }
    if optimizer is None:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5}}
    return deepspeed.initialize(
        model=model, model_parameters=model.parameters(), optimizer=optimizer, config=config
    )  # fmt: skip


def _by_zero(model: nn.Module, stage: int, **config: Any) -> Any:
    return _engine(model, stage, **config)


def _audit(stage: int, build: Callable[[], nn.Module] = Model, accumulate: Any = None, **config: Any) -> AuditReport:
    return audit(build, functools.partial(_by_zero, stage=stage, **config), "dp=2", _batch, accumulate=accumulate)


@pytest.mark.parametrize("stage", STAGES)
def test_zero_is_right_in_float64(stage: int):
    half = {"bf16": {"enabled": True}, "gradient_clipping": 0.1, "scheduler": {"type": "WarmupLR", "params": {}}}
    report = _audit(stage, **half, gradient_accumulation_steps=2)
    assert report, str(report)
    assert report.used == (f"ZeRO {stage}",)
    assert [report[name].verdict for name in CHECKS] == ["right"] * len(CHECKS)
    assert report["unequal tokens"].verdict == "weighted"
    changed = "; ".join(report.changed)
    for said in ("nccl: ranks meet over gloo", '"bf16" in DeepSpeed', '"AdamW" in DeepSpeed', '"scheduler" in'):
        assert said in changed


@pytest.mark.parametrize("stage", STAGES)
def test_tied_weights_are_right(stage: int):
    report = _audit(stage, functools.partial(Model, tied=True))
    assert report, str(report)


def _by_groups(model: nn.Module, stage: int) -> Any:
    matrices = {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1}
    vectors = {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0, "lr": 1e-3}
    optimizer = torch.optim.AdamW([matrices, vectors], lr=1e-2, eps=1e-5)
    return _engine(model, stage, optimizer, {"sub_group_size": 600})


@pytest.mark.parametrize("stage", STAGES)
def test_groups_of_parameters_are_those_of_one_device(stage: int):
    report = audit(Model, functools.partial(_by_groups, stage=stage), "dp=2", _batch)
    assert report, str(report)
    assert report["optimizer steps"].verdict == "right"


def _loop(made: Any, batches: list[Any], divide: int = 1) -> None:
    for each in batches:
        made[0].backward(made[0](**each)["loss"] / divide)
        made[0].step()


@pytest.mark.parametrize("stage", STAGES)
def test_the_users_loop_counts_passes_and_takes_no_step(stage: int):
    report = _audit(stage, accumulate=_loop, gradient_accumulation_steps=2)
    assert report, str(report)
    assert report["two passes in a step"].verdict == "right"


@pytest.mark.parametrize("stage", STAGES)
def test_a_loss_that_is_divided_twice_is_placed(stage: int):
    """A plant: https://github.com/deepspeedai/DeepSpeed/issues/7439 asks who divides."""
    report = _audit(stage, accumulate=functools.partial(_loop, divide=2), gradient_accumulation_steps=2)
    assert [check.name for check in report.failures] == ["two passes in a step"]
    assert report.failures[0].advice[0].line.startswith("engine.backward(loss): it divides")


def _by_torch(made: Any, batches: list[Any]) -> None:
    for each in batches:
        made[0](**each)["loss"].backward()
        made[0].step()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_backward_of_torch_divides_twice_where_logits_are_returned(stage: int):
    """DeepSpeed's own, in 0.19.8, at stages 1 and 2; no report was found."""
    report = _audit(stage, accumulate=_by_torch, gradient_accumulation_steps=2)
    assert [check.name for check in report.failures] == (["two passes in a step"] if stage < 3 else [])
    if stage < 3:
        assert "loss.backward()" in report.failures[0].advice[0].why


def _drops_all_but_the_last(model: nn.Module) -> Any:
    made = _engine(model, 1)
    engine, backward = made[0], made[0].backward
    engine.backward = lambda loss: backward(loss if engine.is_gradient_accumulation_boundary() else 0 * loss)
    return made


def test_passes_before_the_last_are_no_boundary():
    report = audit(Model, _drops_all_but_the_last, "dp=2", _batch)
    assert [check.name for check in report.failures] == ["two passes in a step"]


def test_a_loop_of_more_passes_is_not_offered():
    check = _audit(1, accumulate=_loop, gradient_accumulation_steps=4)["two passes in a step"]
    assert check.verdict == "not offered"
    assert "gradient_accumulation_steps is 4" in check.said


@pytest.mark.parametrize("stage", STAGES)
def test_a_frozen_parameter_is_lost_by_zero_to_fp32_at_stage_1(stage: int):
    """DeepSpeed's own, in 0.19.8: https://github.com/deepspeedai/DeepSpeed/issues/5439."""
    report = _audit(stage, functools.partial(Model, frozen=True))
    if stage != 1:
        assert report, str(report)
        return
    assert [check.name for check in report.failures] == ["save for one device"]
    assert '"up.weight"' in report.failures[0].said
    assert "zero_to_fp32 leaves frozen parameters out" in report.failures[0].advice[0].line


def _without_norm(model: nn.Module, stage: int) -> Any:
    params = [p for name, p in model.named_parameters() if "norm" not in name]
    return _engine(model, stage, torch.optim.AdamW(params, lr=1e-2, eps=1e-5))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_parameter_that_the_optimizer_lacks_is_placed(stage: int):
    report = audit(Model, functools.partial(_without_norm, stage=stage), "dp=2", _batch)
    check = report["gradients"]
    assert check.verdict == "wrong"
    assert {each.name for each in check.failures} == {"norm.weight", "norm.bias"}
    assert check.advice[0].line.startswith("deepspeed.initialize(model_parameters=")


def test_what_cannot_be_read_is_refused():
    with pytest.raises(InputError, match="round_robin_gradients"):
        _audit(2, zero={"round_robin_gradients": True})


def _of_all_tokens(model: Model, stage: int, times: int) -> Any:
    """Divide the sum of losses by the number of all tokens; the engine takes the mean over ranks of that."""
    forward = model.forward

    def over_all(ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = forward(ids, labels)
        return {"loss": out["loss"] / 2 * times, "logits": out["logits"]}

    model.forward = over_all  # type: ignore[method-assign]
    return _engine(model, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_a_loss_over_all_tokens_that_is_averaged_is_placed(stage: int):
    """A plant: https://github.com/huggingface/accelerate/issues/3661, with an engine."""
    report = audit(Model, functools.partial(_of_all_tokens, stage=stage, times=1), "dp=2", _batch)
    assert report["loss"].verdict == "wrong"
    assert report["loss"].advice[0].line.startswith("loss * dist.get_world_size()")
    assert audit(Model, functools.partial(_of_all_tokens, stage=stage, times=2), "dp=2", _batch)


@pytest.mark.parametrize("mended", [False, True])
def test_the_example_names_the_line(mended: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    script = str(ROOT / "examples" / "audit" / "train_deepspeed.py")
    monkeypatch.setattr(sys, "argv", [script, *["--mended"] * mended])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(script, run_name="__main__")
    printed = capsys.readouterr().out
    assert end.value.code == (0 if mended else 1)
    assert ("usually        engine.backward(loss): it divides" in printed) != mended


def _llama() -> nn.Module:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, use_cache=False)
    )


def _ids(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def _auto_tp(model: nn.Module, stage: int, summed: bool = True) -> Any:
    import deepspeed

    model = deepspeed.tp_model_init(model, tp_size=2, dtype=torch.float32)
    engine = _engine(model, stage, tensor_parallel={"autotp_size": 2})[0]
    if not summed:
        down = engine.module.model.layers[1].mlp.down_proj
        down.forward = lambda x: F.linear(x, down.weight)
    return engine


@pytest.mark.parametrize("stage", range(3))
def test_auto_tp_is_right_though_its_tensors_are_plain(stage: int):
    report = audit(_llama, functools.partial(_auto_tp, stage=stage), "tp=2", _ids)
    assert report, report
    assert "AutoTP" in report.used and report.layouts["model.layers.0.mlp.down_proj.weight"] == "_ _@tp"
    for name in ("gradients", "gradient norm", "optimizer steps", "generation", "save and go on"):
        assert report[name].verdict == "right", report


def test_a_layer_that_auto_tp_does_not_sum_is_named():
    report = audit(_llama, functools.partial(_auto_tp, stage=1, summed=False), "tp=2", _ids)
    assert "model.layers.1.mlp.down_proj" in str(report) and "a reduction over tp is missing" in str(report)

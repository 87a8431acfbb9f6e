"""Audits of torchtitan's models, which its own `parallelize_fn` shards: right ones are right, and faults are named."""

from __future__ import annotations

import functools
import runpy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import train_torchtitan as example
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torchtitan.config import ParallelismConfig
from torchtitan.distributed import fsdp
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.gpt_oss.config_registry import gpt_oss_debugmodel_flex
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.models.qwen3.config_registry import qwen3_moe_debug

from shardlib.testing import AuditReport, audit, shared_pool
from shardlib.testing.auditing.libraries import libraries_redirected
from shardlib.testing.auditing.redirect import redirected

TP = {"tensor_parallel_degree": 2}
FSDP = {"data_parallel_shard_degree": 2}
HSDP = {**FSDP, "data_parallel_replicate_degree": 2}


def _use(job: Any, degrees: dict[str, Any]) -> None:
    """Give the example another job, on a rank that may have had others."""
    settings = {"data_parallel_shard_degree": 1, "spmd_backend": "partial_dtensor", **degrees}
    job.training.seq_len, job.parallelism = example.LENGTH, ParallelismConfig(**settings)
    example.job = job


def _built(degrees: dict[str, Any], tied: bool) -> nn.Module:
    _use(llama3_debugmodel(), degrees)
    example.job.model_spec.model.enable_weight_tying = tied
    return example.build()


def _audited(degrees: dict[str, Any], mesh: str, *, tied: bool = False, **functions: Any) -> AuditReport:
    build = functools.partial(_built, degrees, tied)
    given = {"shard": example.shard, "loss": example.loss_mended, **functions}
    return audit(build, given.pop("shard"), mesh, example.batch, **given)


@pytest.mark.parametrize(
    ("degrees", "mesh"),
    [
        (TP, "tp=2"),
        ({**TP, "enable_sequence_parallel": False}, "tp=2"),
        (FSDP, "dp=2"),
        ({**FSDP, **TP}, "dp=2,tp=2"),
        (HSDP, "dp_replicate=2,fsdp=2"),
    ],
    ids=["tp", "tp without sequence", "fsdp", "fsdp and tp", "hsdp"],
)
def test_what_it_shards_is_right(degrees: dict[str, Any], mesh: str):
    report = _audited(degrees, mesh)
    assert report, report
    verdicts = {check.name: check.verdict for check in report.checks}
    assert {name for name, verdict in verdicts.items() if verdict != "right"} <= {
        "unequal tokens", "an empty expert", "generation",
    }, report  # fmt: skip
    assert verdicts["unequal tokens"] == ("not offered" if mesh == "tp=2" else "right")
    assert {"FlexAttention", "cuda", "MixedPrecisionPolicy"} <= {text.split(":")[0] for text in report.changed}


def _experts(job: Callable[[], Any], degrees: dict[str, Any]) -> nn.Module:
    """Return a mixture of 16 experts in place of 64, of which each token takes eight or fewer."""
    _use(job(), degrees)
    for layer in example.job.model_spec.model.layers:
        moe, routed = layer.moe, layer.moe.routed_experts
        for each in (moe, moe.router, routed.inner_experts, routed.token_dispatcher):
            each.num_experts = 16
        moe.router.gate.out_features, routed.inner_experts.hidden_dim = 16, 32
    return example.build()


def test_experts_on_several_ranks_are_right():
    report = audit(
        functools.partial(_experts, qwen3_moe_debug, {**FSDP, "expert_parallel_degree": 2}),
        example.shard, "dp=2", example.batch, loss=example.loss_mended,
    )  # fmt: skip
    assert report, report
    verdicts = {check.name: check.verdict for check in report.checks}
    assert {name for name, verdict in verdicts.items() if verdict != "right"} == {"generation"}, report


def _with_its_optimizer(model: nn.Module) -> tuple[nn.Module, Any]:
    sharded = example.shard(model)
    return sharded, example.job.optimizer.build(model_parts=[sharded])


def test_its_optimizer_is_taken_out_of_its_container():
    report = _audited(FSDP, "dp=2", shard=_with_its_optimizer)
    assert report and report["optimizer steps"].verdict == report["save and go on"].verdict == "right", report


def test_nothing_of_it_stays_on_the_ranks():
    _audited(TP, "tp=2")
    assert shared_pool(2).run(get_spmd_backend) == ["spmd_types"] * 2


@pytest.mark.parametrize(("flags", "code"), [([], 1), (["--mended"], 0)], ids=["forgotten", "mended"])
def test_the_example_ends_as_it_says(flags: list[str], code: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", [example.__file__, *flags])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(example.__file__), run_name="__main__")
    assert end.value.code == code


def test_the_default_way_to_shard_says_what_to_write():
    report = _audited({**TP, "spmd_backend": "spmd_types"}, "tp=2")
    assert [check.name for check in report.checks] == ["sharding"]
    assert 'spmd_backend="partial_dtensor"' in report["sharding"].advice[0].line


def test_attention_is_that_of_flex_attention():
    q, k, v = (torch.randn(2, heads, 32, 8, dtype=torch.float64) for heads in (4, 2, 2))
    document = torch.arange(32) // torch.tensor([[10], [32]])
    mask = create_block_mask(
        lambda b, h, i, j: (i >= j) & (document[b, i] == document[b, j]), 2, None, 32, 32, device="cpu"
    )
    options = {"score_mod": None, "block_mask": mask, "scale": None, "enable_gqa": True, "kernel_options": {}}
    want, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True), **options)
    with redirected() as mode, libraries_redirected(mode):
        got, made = FlexAttention.compiled_flex_attn(q, k, v, return_aux=None, **options)
    # Sums of at most 32 terms, in another order.
    assert torch.allclose(got, want, 32 * 2**-52, 32 * 2**-52)
    assert torch.allclose(made.lse, aux.lse, 32 * 2**-52, 32 * 2**-52)


# --- faults ---------------------------------------------------------------------------------------------------------


def _norm_of_local_shards(model: nn.Module) -> torch.Tensor:
    grads = [p.grad.to_local() for p in model.parameters() if isinstance(p.grad, DTensor)]
    return nn.utils.get_total_norm(grads)


def _with_a_norm_of_its_own(model: nn.Module) -> nn.Module:
    sharded = example.shard(model)
    for block in sharded.layers.values():  # type: ignore[operator, union-attr]
        block.ffn_norm.forward = functools.partial(_local_norm, block.ffn_norm)
    return sharded


def _local_norm(norm: nn.Module, x: DTensor) -> DTensor:
    weight: Any = norm.weight
    out = F.rms_norm(x.to_local(), weight.shape, weight.to_local(), norm.eps)  # type: ignore[arg-type]
    return DTensor.from_local(out, x.device_mesh, x.placements, run_check=False)


def _without_replicas(model: nn.Module) -> nn.Module:
    """Shard over the axis "fsdp" alone, where "dp_replicate" has ranks, too."""
    example.utils.set_spmd_backend("partial_dtensor")
    dims = example.ParallelDims.from_config(example.job.parallelism, dist.get_world_size())
    dims.build_mesh()
    fsdp.apply_fsdp_to_decoder(
        model, dims.get_mesh(["fsdp"]), param_dtype=torch.bfloat16, reduce_dtype=torch.float32, pp_enabled=False
    )
    return model


def _averaged(model: nn.Module) -> nn.Module:
    sharded = example.shard(model)
    for module in sharded.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(2.0)
    return sharded


FAULTS: dict[str, tuple[dict[str, Any], str, dict[str, Any], str, str]] = {
    "a mean of own tokens": (FSDP, "dp=2", {"loss": example.loss}, "gradients", "/ global_valid_tokens"),
    "gradients that are averaged": (FSDP, "dp=2", {"shard": _averaged}, "gradients", "disable_fsdp_gradient_division"),
    "a tie that is lost": (TP, "tp=2", {"tied": True}, "values after sharding", "init_states()"),
    "a norm of one rank": (
        TP, "tp=2", {"clip": _norm_of_local_shards}, "gradient norm", "torchtitan.distributed.utils.clip_grad_norm_",
    ),
    "a norm's gradient": (TP, "tp=2", {"shard": _with_a_norm_of_its_own}, "gradients", "layers.*.ffn_norm"),
    "a mesh without replicas": (
        HSDP, "dp_replicate=2,fsdp=2", {"shard": _without_replicas}, "gradients", '["dp_replicate", "fsdp"]',
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_placed(name: str):
    degrees, mesh, changed, check, line = FAULTS[name]
    report = _audited(degrees, mesh, **changed)
    first = next(each for each in report.checks if each.verdict == "wrong")
    assert first.name == check, report
    assert line in first.advice[0].line, report


def _initialized_after(model: nn.Module) -> nn.Module:
    """Shard as its trainer does: on the meta device, and with values afterwards; those are the model's."""
    values = dict(model.named_parameters())
    with torch.device("meta"):
        sharded = example.shard(example.job.model_spec.model.build())
    sharded.to_empty(device="cpu")
    sharded.init_states(buffer_device=None)  # type: ignore[operator]
    with torch.no_grad():
        for name, p in sharded.named_parameters():
            assert isinstance(p, DTensor)
            value = values[name.replace("_checkpoint_wrapped_module.", "")]
            p.copy_(distribute_tensor(value, p.device_mesh, p.placements))
    return sharded


def test_a_tie_is_kept_as_the_advice_says():
    report = _audited({**FSDP, **TP}, "dp=2,tp=2", tied=True, shard=_initialized_after)
    assert report and report["optimizer steps"].verdict == "right", report


def test_a_fault_of_its_own_is_found_and_placed():
    """https://github.com/pytorch/torchtitan/pull/4332: each rank adds a share of the bias."""
    build = functools.partial(_experts, gpt_oss_debugmodel_flex, TP)
    report = audit(build, example.shard, "tp=2", example.batch, loss=example.loss_mended)
    check = report["gradients"]
    assert check.verdict == "wrong" and check.origin is not None and check.origin.module == "layers.0.attention.wo"
    assert {failure.name for failure in check.failures} == {f"layers.{i}.attention.wo.bias" for i in range(2)}
    assert check.advice[0].line.startswith('the bias of "layers.*.attention.wo"'), report

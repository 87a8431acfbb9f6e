"""Audits: public faults that they find and place, models that are right, and code that shards nothing."""

from __future__ import annotations

import functools
import json
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import shardlib as sl
from benchmarks import audit as runner
from shardlib.errors import InputError, MeshError
from shardlib.testing import AuditError, AuditReport, Check, assert_audit, audit
from shardlib.testing.auditing import advice, batches
from shardlib.testing.auditing.foreign import wants
from shardlib.testing.auditing.redirect import redirected
from tests.audit import faults
from tests.house.source import ROOT

# One of each kind; the others are deep.
USUAL = [
    "data_axis_forgotten", "expert_gradients_doubled", "fsdp_optimizer_before", "hf_sampled_apart",
    "norm_counts_replicas", "rowwise_bias_every_rank", "tied_head_parallelized",
]  # fmt: skip


def _marked() -> list[Any]:
    return [pytest.param(name, marks=[] if name in USUAL else [pytest.mark.deep]) for name in faults.cases()]


@pytest.mark.parametrize("name", _marked())
def test_a_public_fault_is_found_and_its_mended_case_is_not(name: str):
    known = runner.read()[name]
    now = runner.outcome(name)
    assert (now.found, now.placed, now.right) == (known.found, known.placed, known.right)


def test_most_faults_are_found_and_placed_as_the_page_says():
    known = runner.read()
    assert sorted(known) == faults.cases()
    assert sum(each.found for each in known.values()) >= 27
    assert sum(each.placed for each in known.values()) >= 24


def test_the_page_has_the_results():
    page = (ROOT / "docs" / "audit.md").read_text(encoding="utf-8")
    known = runner.read()
    assert runner.table([known[name] for name in faults.cases()]) in page


# --- the report -----------------------------------------------------------------------------------------------------


def _build() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 4))


def _batch(step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def _unsharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return model


def _audited(shard: Any, mesh: str = "dp=2", **options: Any) -> AuditReport:
    return audit(_build, shard, mesh, _batch, **options)


def test_a_report_tells_what_differs_and_which_line_decides_it():
    shown: list[Check] = []
    report = _audited(_unsharded, show=shown.append)
    assert not report and report["gradients"].verdict == "wrong" and report["values after sharding"].verdict == "right"
    assert [check.name for check in shown] == [check.name for check in report.checks]
    assert "DistributedDataParallel" in report["gradients"].advice[0].line
    text = str(report)
    assert "does NOT compute what one device computes" in text and "a reduction over dp is missing" in text
    values = json.loads(report.to_json())
    assert values["ok"] is False and values["mesh"] == "dp=2"


def _half_parallel(model: nn.Module, mesh: DeviceMesh) -> Any:
    parallelize_module(model, mesh, {"0": ColwiseParallel(output_layouts=Replicate())})
    return model, torch.optim.AdamW(model[0].parameters())


def test_a_report_names_what_ranks_hold_alike_and_what_its_optimizer_leaves_out():
    report = _audited(_half_parallel, "tp=2")
    assert report and "Each rank of tp holds 3.weight, 3.bias, which tp could split: 56% of its parameters" in str(
        report
    )
    assert report.plan is not None and str(report.plan["0.weight"].stored) == "out@tp in"
    same = sl.plan(_build(), "tp=2", sl.Rules({"0": "colwise"}, unmatched="replicate"))
    assert "float" not in report.plan.diff(same)  # no dtype, no layout: the rules that the one lacks
    assert {row["name"] for row in json.loads(report.to_json())["plan"]["rows"]} == {
        "0.weight",
        "0.bias",
        "3.weight",
        "3.bias",
    }
    assert report["optimizer steps"].said.endswith("the optimizer leaves out 3.weight, 3.bias")


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn, self.out = nn.Parameter(torch.randn(6, 6, dtype=torch.complex64)), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out((x.to(self.turn.dtype) @ self.turn).abs())


def _forgetful(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        model.turn.imag.zero_()
    return DistributedDataParallel(model)


def test_imaginary_parts_are_compared():
    assert audit(_Complex, DistributedDataParallel, "dp=2", _batch)
    report = audit(_Complex, _forgetful, "dp=2", _batch)
    assert "parameter turn" in report["values after sharding"].said
    report = audit(_Complex, _unsharded, "dp=2", _batch)
    assert "a reduction over dp is missing" in str(report) and not report.warnings


def _frozen(model: nn.Module) -> nn.Module:
    model[0].weight.requires_grad_(False)
    return DistributedDataParallel(model)


def test_a_parameter_that_is_trained_no_more_is_a_finding():
    check = _audited(_frozen)["values after sharding"]
    assert check.verdict == "wrong" and check.said == "1 are not trained any more (requires_grad): 0.weight"
    assert "requires_grad_" in check.advice[0].line


def _contrast(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    made = F.normalize(model(x), dim=-1)
    return F.cross_entropy(made @ made.T, torch.arange(len(made)))


class _Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 18)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(x)[:, None].chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _in_context(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    alone = model.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
            return alone(x)

    model.forward = forward  # type: ignore[method-assign]
    return model


def _sequences(step: int) -> torch.Tensor:
    return torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(step))


def test_what_cpus_have_no_kernel_for_is_said():
    with pytest.raises(InputError, match="context_parallel has no attention for CPUs"):
        audit(_Attending, _in_context, "cp=2", _sequences)


# --- models that code of one's own has cut ------------------------------------------------------------------------


class _Summed(torch.autograd.Function):
    """Sum over ranks in forward; in backward the gradient as it is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=_GROUPS[0])
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class _Copied(torch.autograd.Function):
    """The input as it is; in backward the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        dist.all_reduce(grad, group=_GROUPS[0])
        return grad


_GROUPS: list[Any] = []


class _Tall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 12, bias=False), nn.Linear(12, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(self.first(x))))


def _cut(model: nn.Module, mesh: DeviceMesh, copied: bool = True) -> nn.Module:
    """Cut two layers as Megatron does, into plain tensors over tp; DDP averages over dp."""
    _GROUPS[:] = [mesh.get_group("tp")]
    rank = mesh.get_local_rank("tp")
    model.up.weight = nn.Parameter(model.up.weight.chunk(2)[rank].clone())
    model.down.weight = nn.Parameter(model.down.weight.chunk(2, 1)[rank].clone())
    model.down.register_forward_hook(lambda *call: _Summed.apply(call[-1]))
    if copied:
        model.up.register_forward_pre_hook(lambda _, args: (_Copied.apply(args[0]),))
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def test_plain_tensors_that_were_cut_by_hand_are_known_by_their_values():
    report = audit(_Tall, _cut, "dp=2,tp=2", _batch)
    assert report, report
    assert report.layouts["up.weight"] == "_@tp _" and report.layouts["down.weight"] == "_ _@tp"
    assert report["optimizer steps"].verdict == "right" and "Give --clip" in report["gradient norm"].said
    wrong = audit(_Tall, functools.partial(_cut, copied=False), "dp=2,tp=2", _batch)
    assert wrong["gradients"].verdict == "wrong" and wrong["gradients"].origin.module == "up"  # type: ignore[union-attr]
    assert "a reduction over tp is missing" in str(wrong)


def _patched(model: nn.Module) -> nn.Module:
    _Tall.forward = lambda self, x: self.down(F.relu(self.up(self.first(x))))  # type: ignore[method-assign]
    return DistributedDataParallel(model)


def test_code_that_one_device_runs_too_cannot_be_replaced():
    with pytest.raises(InputError, match=r"replaced a function, or a method of a class.* in the instances"):
        audit(_Tall, _patched, "dp=2", _batch)
    assert audit(_Tall, DistributedDataParallel, "dp=2", _batch)["gradients"].verdict == "right"
    with pytest.raises(InputError, match="replaced a function"):  # in ranks of their own, again
        audit(_Tall, _patched, "dp=2", _batch)


class _Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x))


def _slower(model: nn.Module, momentum: float = 0.5) -> nn.Module:
    model.norm.momentum = momentum
    return DistributedDataParallel(model)


def test_statistics_of_each_rank_s_rows_are_compared_on_the_first():
    assert (
        audit(_Statistics, functools.partial(_slower, momentum=0.1), "dp=2", _batch)["optimizer steps"].verdict
        == "right"
    )
    check = audit(_Statistics, _slower, "dp=2", _batch)["optimizer steps"]
    assert check.verdict == "wrong" and "buffer norm.running_" in check.said


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True)
        self.recurrent = nn.LSTM(6, 6, num_layers=2, dropout=0.5, batch_first=True)
        self.attention.in_proj_weight.mark = "kept"  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, None].expand(-1, 3, -1)
        return self.recurrent(self.attention(x, x, x)[0])[0]


def _marked_still(model: nn.Module) -> nn.Module:
    assert model.attention.in_proj_weight.mark == "kept"
    return DistributedDataParallel(model)


def test_dropout_of_kernels_is_off_and_marks_of_parameters_stay():
    report = audit(_Attention, _marked_still, "dp=2", _batch)
    assert report and any("dropout is off" in text for text in report.changed), report


def _clipped(model: nn.Module) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def test_own_clipping_is_compared_by_its_norm():
    report = _audited(DistributedDataParallel, clip=_clipped)
    assert report and report["gradient norm"].verdict == "right" == report["optimizer steps"].verdict


def test_a_mean_of_means_stays_one_in_later_checks():
    report = _audited(DistributedDataParallel, loss=_contrast)
    of_means = {check.name for check in report.checks if check.verdict == "weighted"}
    assert of_means == {"loss", "gradients", "two passes in a step"} and "all_gather" in str(report)


def test_an_assertion_has_the_report():
    with pytest.raises(AuditError, match="a reduction over dp is missing"):
        assert_audit(_build, _unsharded, "dp=2", _batch)


def test_a_mean_of_means_is_a_remark_unless_it_is_asked_for():
    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.randint(4, (4,), generator=torch.Generator().manual_seed(step))
        return _batch(step), labels.index_fill(0, torch.tensor([3]), -100)

    def loss(model: nn.Module, given: Any) -> torch.Tensor:
        return F.cross_entropy(model(given[0]), given[1])

    def shard(model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model)

    report = audit(_build, shard, "dp=2", batch, loss=loss)
    assert report and report["gradients"].verdict == "weighted" and report["optimizer steps"].verdict == "right"
    strict = audit(_build, shard, "dp=2", batch, loss=loss, strict=True)
    assert (
        not strict
        and "unequal tokens: it is the mean" in str(strict)
        and "number of tokens of all ranks" in str(strict)
    )


def _summed(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the part of some rows in a mean over the four rows of all data ranks."""
    return model(batch).square().sum() / 4 * getattr(model, "factor", 1)


def _undivided(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    fully_shard(model, mesh=mesh)
    model.set_gradient_divide_factor(1.0)  # type: ignore[attr-defined]
    return model


def _averaged(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    fully_shard(model, mesh=mesh)
    return model


def test_losses_that_add_up_are_compared_by_their_sum():
    assert (report := _audited(_undivided, loss=_summed)), report
    report = _audited(_averaged, loss=_summed)
    assert report["loss"].verdict == "right" and report["gradients"].verdict == "wrong"
    assert "1/2 of a single device's (dp=2)" in str(report)


def _wrong_on_a_rank(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    if mesh.get_rank() == 1:
        model.factor = 3  # type: ignore[assignment]
    return _undivided(model, mesh)


def test_a_wrong_loss_among_those_that_add_up_is_placed():
    report = _audited(_wrong_on_a_rank, loss=_summed)
    assert report["loss"].verdict == "wrong" and "only rank 1" in str(report)


# --- code that was written for accelerators -------------------------------------------------------------------------


def _as_on_accelerators(model: nn.Module) -> Any:
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("nccl")
    torch.cuda.set_device(rank)
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = model.to(f"cuda:{rank}").bfloat16()
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_code_for_accelerators_runs_on_the_cpu_and_the_report_says_so():
    report = _audited(_as_on_accelerators, "dp_replicate=2,dp_shard=2")
    assert report, report
    assert {text.split(":")[0] for text in report.changed} == {
        "nccl", "cuda", "bfloat16", "MixedPrecisionPolicy", "dropout is off",
    }  # fmt: skip


def test_nothing_stays_redirected():
    before = dist.init_process_group, DeviceMesh.__init__, torch.autocast.__init__, torch.get_default_dtype()
    with redirected() as mode:
        assert torch.ones(2, device="cuda:1", dtype=torch.float16).dtype == torch.float64
        assert F.dropout(torch.ones(9), 0.5).eq(1).all()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float64
    assert before == (dist.init_process_group, DeviceMesh.__init__, torch.autocast.__init__, torch.get_default_dtype())
    assert torch.ones(2).dtype == torch.float32 and len(mode.notes) == 4


def test_what_checkpointing_computes_again_is_redirected():
    with redirected():
        x = torch.randn(3, requires_grad=True)
        checkpoint(lambda x: x.float().sin(), x, use_reentrant=False).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, x.detach().cos())


# --- code that is no sharding ---------------------------------------------------------------------------------------


def _raises(model: nn.Module) -> nn.Module:
    raise NotImplementedError("no kernel for this")


def _raises_on_one_rank(model: nn.Module) -> nn.Module:
    if dist.get_rank() == 1:
        raise ValueError("here alone")
    dist.barrier()
    return model


def _hangs(model: nn.Module) -> nn.Module:
    if dist.get_rank() == 1:
        dist.barrier()
    time.sleep(60)
    return model


def _draws(model: nn.Module) -> nn.Module:
    torch.manual_seed(dist.get_rank())
    for p in model.parameters():
        nn.init.normal_(p)
    return model


def _on_meta(model: nn.Module) -> nn.Module:
    return model.to("meta")


@pytest.mark.parametrize(
    ("shard", "check", "said"),
    [
        (_raises, "sharding", "NotImplementedError: no kernel for this (test_audit.py, line"),
        (_raises_on_one_rank, "sharding", "on rank 1 alone: ValueError: here alone"),
        (_hangs, "sharding", "rank 1 waits in barrier over world: rank 0 has not entered it"),
        (_draws, "values after sharding", "ranks differ between each other"),
        (_on_meta, "values after sharding", "4 tensors have no values, on the meta device"),
    ],
)
def test_what_goes_wrong_in_foreign_code_is_a_finding(shard: Any, check: str, said: str):
    report = _audited(shard, timeout=15 if shard is _hangs else 60)
    assert not report and said in report[check].said
    assert _audited(lambda model: DistributedDataParallel(model))  # the ranks go on


def _nothing(model: nn.Module) -> None:
    fully_shard(model)


def _another(model: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Identity(), nn.Linear(6, 4))


def _other_order(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "dp_replicate")))


@pytest.mark.parametrize(
    ("shard", "mesh", "error", "said"),
    [
        (_nothing, "dp=2", InputError, "returned nothing"),
        (_another, "dp=2", InputError, "returned another model"),
        (_other_order, "dp_replicate=2,dp_shard=2", InputError, "in the order of the mesh that shard= makes"),
        (lambda: None, "dp=2", InputError, "takes neither a model nor the folder"),
        (lambda model, layers: None, "dp=2", InputError, 'takes "layers", of which an audit knows nothing'),
        (nn.Linear(2, 2), "dp=2", InputError, "give a function"),
        (_unsharded, "dp=-1", MeshError, "give every size"),
    ],
)
def test_what_cannot_be_audited_is_refused(shard: Any, mesh: str, error: type[Exception], said: str):
    with pytest.raises(error, match=said):
        _audited(shard, mesh)


def _counted(model: nn.Module, batch: Any) -> torch.Tensor:
    count = torch.tensor(float(len(batch)))
    dist.all_reduce(count)
    return model(batch).square().sum() / count


@pytest.mark.parametrize(
    ("batch", "loss", "said"),
    [
        (_batch, _counted, "communicates between ranks"),
        (lambda step: torch.ones(4, 5), None, "fails on one device, before anything is sharded: RuntimeError"),
        (lambda: torch.ones(4, 6), None, r"audit\(\) was given batch="),
        (lambda step: torch.ones(3, 6), None, "3 rows"),
    ],
)
def test_what_one_device_does_not_compute_is_refused(batch: Any, loss: Any, said: str):
    with pytest.raises(InputError, match=said):
        audit(_build, _unsharded, "dp=2", batch, loss=loss)


# --- batches, parameters, advice ------------------------------------------------------------------------------------


def test_ragged_labels_leave_as_many_out_on_each_rank_and_unequal_ones_do_not():
    labels = torch.arange(40).view(4, 10)
    counts = lambda change: [int((part != -100).sum()) for part in change({"labels": labels}, 2)["labels"].chunk(2)]  # noqa: E731
    assert len(set(counts(batches.ragged))) == 1 and counts(batches.ragged)[0] < 20
    assert counts(batches.unequal) == [20, 10]
    one = batches.one_token({"ids": labels, "x": torch.ones(2)}, 1, index=7)
    assert one["ids"].unique().tolist() == [7] and one["x"].tolist() == [1, 1]


def test_parameters_of_shard_are_known_by_name():
    def shard(net: nn.Module, device_mesh: Any, lr: float = 0.1) -> None: ...

    assert wants(shard) == {"net": "model", "device_mesh": "mesh"}
    assert wants(lambda checkpoint, mesh: None) == {"checkpoint": "folder", "mesh": "mesh"}


@pytest.mark.parametrize("name", ["torch", "transformers", "accelerate", "lightning", "torchtitan"])
def test_a_table_of_advice_is_whole(name: str):
    entries = advice.table(name)
    assert entries
    for entry in entries:
        assert entry.patterns and entry.advice.line and entry.advice.why
        assert entry.advice.link == "" or entry.advice.link.startswith("https://")

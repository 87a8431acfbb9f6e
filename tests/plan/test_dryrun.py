"""What a dry run predicts is what a run measures."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpt import GPT
from torch import nn

from shardlib import layouts
from shardlib._mesh import mesh
from shardlib._plan import DryRun
from shardlib.engine import ops
from shardlib.engine._torch import fake_tensors
from shardlib.engine.apply import shard_model
from shardlib.engine.dryrun import plan
from shardlib.engine.fakes import run_step
from shardlib.engine.feature.recording import record_collectives
from shardlib.errors import PlanError
from shardlib.transforms import Transform, fsdp, zero
from tests.plan.cases import MLP_RULES, TINY, mlp, tiny

IDS = torch.arange(2 * TINY.context).view(2, TINY.context) % TINY.vocab_size


def _gpt_case() -> tuple[nn.Module, Any, tuple[torch.Tensor, ...]]:
    return tiny(), layouts.load("example_gpt"), (IDS,)


def _many_words_case() -> tuple[nn.Module, Any, tuple[torch.Tensor, ...]]:
    """Most memory is of logits, which are gathered over "tp"."""
    torch.manual_seed(0)
    return GPT(dataclasses.replace(TINY, vocab_size=2048)), layouts.load("example_gpt"), (IDS,)


def _uneven_case() -> tuple[nn.Module, Any, tuple[torch.Tensor, ...]]:
    return mlp(33), MLP_RULES, (torch.ones(3, 16),)


def _llama_case() -> tuple[nn.Module, Any, tuple[torch.Tensor, ...]]:
    from tests.families.transformer_models import build  # transformers takes seconds to import

    return build("LlamaForCausalLM", num_hidden_layers=1, use_cache=False), layouts.load("llama"), (IDS,)


CASES = {"gpt": _gpt_case, "many words": _many_words_case, "uneven mlp": _uneven_case, "llama": _llama_case}


def _measured(case: str, shape: str, transforms: tuple[Transform, ...] = ()) -> DryRun:
    """The second step of a real run, as one rank records it."""
    model, rules, args = CASES[case]()
    sharded = shard_model(model, mesh(shape), rules, transforms=transforms, compile=None)
    run_step(sharded, args, {})
    with record_collectives(sharded, mesh=mesh(shape)) as log:
        run_step(sharded, args, {})
    return log.report()


@pytest.mark.covering
@pytest.mark.parametrize("shape", ["tp=2", "dp=2", "dp=2,tp=2"])
@pytest.mark.parametrize("case", CASES)
def test_collectives_gathered_ops_and_memory_are_predicted(ranks, case: str, shape: str):
    model, rules, args = CASES[case]()
    predicted = plan(model, shape, rules, example=args).report
    assert predicted is not None
    measured = ranks(2 if shape.count("=") == 1 else 4).run(_measured, case, shape)
    assert predicted.collectives == measured[0].collectives
    assert predicted.gathered == measured[0].gathered
    assert predicted.start_bytes == measured[0].start_bytes
    # gloo's own threads may hold the tensors of a finished collective for a moment longer.
    assert 0 <= measured[0].peak_bytes - predicted.peak_bytes <= 2 * predicted.bytes()


@pytest.mark.covering
@pytest.mark.parametrize("shape", ["dp=2", "dp=2,tp=2"])
@pytest.mark.parametrize(
    "transform", [zero(1), pytest.param(zero(2), marks=pytest.mark.deep), zero(3), fsdp()], ids=repr
)
def test_what_parts_send_is_predicted(ranks, transform: Transform, shape: str):
    """Over gloo parts travel by sends; a dry run on CPU predicts those."""
    model, rules, args = CASES["gpt"]()
    predicted = plan(model, shape, rules, transforms=(transform,), example=args).report
    assert predicted is not None
    measured = ranks(2 if shape.count("=") == 1 else 4).run(_measured, "gpt", shape, (transform,))
    assert predicted.collectives == measured[0].collectives
    assert predicted.start_bytes == measured[0].start_bytes
    assert 0 <= measured[0].peak_bytes - predicted.peak_bytes <= 2 * predicted.bytes()


def test_a_transformer_block_costs_megatrons_four_collectives():
    report = plan(tiny(), "tp=2", layouts.load("example_gpt"), example=IDS).report
    assert report is not None
    payload = IDS.numel() * TINY.d_model * 4
    for block in range(TINY.n_layer):
        mine = [c for c in report.collectives if c.module.startswith(f"blocks.{block}")]
        assert [(c.kind, c.axes, c.bytes) for c in mine] == [("all_reduce", ("tp",), payload)] * 4
        assert [c.phase for c in mine] == ["forward", "forward", "backward", "backward"]
    assert report.gathered == ()


def test_data_parallel_gradients_are_reduced_once_in_buckets():
    model = mlp()
    report = plan(model, "dp=4", {"0": "replicate", "2": "replicate"}, example=torch.ones(2, 16)).report
    assert report is not None
    assert {(c.kind, c.axes, c.phase) for c in report.collectives} == {("all_reduce", ("dp",), "backward")}
    size = sum(p.numel() * 4 for p in model.parameters())
    assert size <= report.bytes() < 1.1 * size


def test_a_dry_run_needs_no_values_and_any_number_of_ranks():
    with torch.device("meta"):
        model = GPT(TINY)
    report = plan(model, "dp=2048,tp=4", layouts.load("example_gpt"), example={"ids": IDS.to("meta")}).report
    assert report is not None
    assert {c.size for c in report.collectives} == {4, 2048}
    assert all(p.is_meta for p in model.parameters())


def _world_before_and_after() -> tuple[Any, ...]:
    group = dist.group.WORLD
    before = plan(tiny(), "dp=2,tp=2", layouts.load("example_gpt"), example=IDS)
    total = torch.ones(2)
    dist.all_reduce(total)
    sharded = shard_model(tiny(), mesh("tp=2"), layouts.load("example_gpt"), compile=None)
    loss = sharded(IDS).square().mean()
    loss.backward()
    after = plan(tiny(), "dp=2,tp=2", layouts.load("example_gpt"), example=IDS)
    return dist.group.WORLD is group, total.tolist(), loss.item(), before == after


def test_a_dry_run_leaves_running_processes_as_they_are(ranks):
    expected = tiny()(IDS).square().mean().item()
    for same_group, total, loss, same_plan in ranks(2).run(_world_before_and_after):
        assert same_group
        assert total == [2.0, 2.0]
        assert loss == pytest.approx(expected, rel=1e-5)
        assert same_plan


def _enabled_after_a_dry_run() -> bool:
    rules = {"0": "out@(cp,sp)", "2": "replicate"}
    plan(mlp(), "cp=2,sp=2", rules, example=torch.ones(2, 16))
    return ops.enabled(mesh("cp=2,sp=2")["cp", "sp"])


def test_a_dry_run_leaves_ops_on_other_dtensors_as_they_are(ranks):
    assert ranks(4).run(_enabled_after_a_dry_run) == [False] * 4


class _ReadsValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if x.sum().item() > 0 else x


def test_a_forward_that_reads_values_is_named():
    with pytest.raises(PlanError) as raised:
        plan(_ReadsValues(), "dp=2", {"linear": "replicate"}, example=torch.ones(2, 4))
    assert str(raised.value).startswith(
        "The dry run on dp=2 stopped: the model's forward depends on values of tensors, which a dry run does not have "
        "(DataDependentOutputException: aten._local_scalar_dense.default). Plan without example=, or record a real "
        "step with shardlib.engine.record_collectives."
    )
    assert not dist.is_initialized()


def test_other_errors_say_that_they_happened_in_a_dry_run():
    with pytest.raises(RuntimeError) as raised:
        plan(mlp(), "dp=2", {"0": "replicate", "2": "replicate"}, example=torch.ones(2, 5))
    assert raised.value.__notes__ == ["Raised in a dry run on dp=2, which runs rank 0 with fake tensors."]
    assert not dist.is_initialized()


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # torch copies so (2.13.0)
def test_a_copied_tensor_belongs_to_the_same_mode():
    """A copy of the mode would free its references to storages once more, and the process would crash later."""
    with fake_tensors():
        x = torch.ones(3)
        x.note = "kept"
        copied = copy.deepcopy(x)
        assert copied.fake_mode is x.fake_mode and copied.note == "kept"

"""The time and the peak of a step, where they are known by hand."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib._plan import Link, Rate
from shardlib._plan.activations import _pool
from shardlib._plan.parts import Reduced
from shardlib._plan.schedules import Action, order, timeline
from shardlib._plan.timing import Span, _run, _Times
from shardlib.errors import PlanError

CLUSTER = sl.Cluster(
    "by hand",
    devices=4,
    memory=2**34,
    memory_bandwidth=Rate(1e9),
    host_bandwidth=Rate(1e8),
    products=(("float32", Rate(1e9)),),
    launch=0.0,
    links=(Link("wire", 0, 0.0, Rate(1e8)),),
)


class Net(nn.Module):
    def __init__(self, layers: int = 4, width: int = 1024) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _time(mesh: str, transforms: object = (), *, layers: int = 4, rows: int = 2048, cluster: sl.Cluster = CLUSTER):
    plan = sl.plan(Net(layers), mesh, {"**": None}, transforms=transforms)  # type: ignore[arg-type]
    return plan.time(cluster, example=torch.empty(rows, 1024, device="meta"))


def _part(name: str, **times: float) -> _Times:
    given = {"forward": 1.0, "backward": 2.0, "gather": 0.0, "again": 0.0, "reduce": 0.0} | times
    return _Times(name=name, sent=(0.0, 0.0), **given)


def test_the_compute_of_products_is_their_operations_over_the_rate():
    """Forward of each Linear is one product, backward two."""
    flops = 2 * 2048 * 1024 * 1024
    assert _time("dp=1").compute == pytest.approx(3 * 4 * flops / 1e9, rel=0.01)  # and ones, of the loss


def test_a_deeper_model_takes_as_much_longer_as_it_is_deeper():
    few, many = (_time("dp=1", layers=layers).compute for layers in (4, 8))
    block = 3 * 2 * 2048 * 1024 * 1024 / 1e9
    assert many - few == pytest.approx(4 * block, rel=1e-6)


def test_gradients_of_data_ranks_hide_behind_backward_but_for_the_last():
    time = _time("dp=2")
    reduce_one = 2 * (1 / 2) * 1024 * 1024 * 4 / 1e8  # a ring of two sends the payload once
    assert dict(time.exposed)["parameters and gradients"] == pytest.approx(reduce_one, rel=0.01)
    assert time.hidden == pytest.approx(3 * reduce_one, rel=0.01)


def test_nothing_hides_where_devices_cannot_do_both_at_once():
    time = _time("dp=2", cluster=CLUSTER.replace(overlap=0.0))
    assert time.communication == pytest.approx(4 * 1024 * 1024 * 4 / 1e8, rel=0.01)
    assert time.hidden == pytest.approx(0, abs=1e-6)


def test_stage_3_gathers_the_next_block_while_one_computes():
    gathered = [_part(str(i), gather=0.5) for i in range(4)]
    ran = _run(gathered, backward=False, reduces=False)
    assert ran.seconds == 4.5  # the first one waits
    slow = [_part(str(i), gather=3.0) for i in range(4)]
    assert _run(slow, backward=False, reduces=False).seconds == 4 * 3.0 + 1.0
    assert [span.name for span in ran.spans[:2]] == ["gather 0", "forward 0"]
    assert ran.spans[2] == Span("communication", "gather 1", 0.5, 1.0)


def test_reductions_follow_their_backward_and_the_last_ones_stand_out():
    ran = _run([_part(str(i), reduce=1.5) for i in range(3)], backward=True, reduces=True)
    assert (ran.seconds, ran.tail) == (6.0, 1.5)


def test_stages_wait_for_messages():
    timed = timeline(order("1f1b", 2, 2, 1), {"F": 1, "B": 2}, sending=0.25)
    assert [[each.start for each in rank] for rank in timed] == [[0, 4.5], [1.25, 2.25]]


def test_stages_have_costs_of_their_own():
    def cost(action: Action) -> float:
        return 1.0 if action.stage == 0 else 3.0

    timed = timeline(order("gpipe", 2, 2, 2), cost)
    assert timed[1][-1].end == 1 + 4 * 3


def test_a_pipeline_of_many_microbatches_is_that_of_few_and_its_steady_state():
    def seconds(count: int) -> float:
        rules = sl.Rules({"**": None}, stages=sl.rules.Balanced([2, 2]))
        plan = sl.plan(Net(), "pp=2", rules, transforms=sl.pipeline("1f1b", count))
        return plan.time(CLUSTER, example=torch.empty(64 * count, 1024, device="meta")).seconds

    at = {count: seconds(count) for count in (8, 16, 24)}
    assert at[24] - at[16] == pytest.approx(at[16] - at[8], rel=1e-6)


def test_recomputation_costs_a_forward_and_saves_what_it_kept():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(x).relu())

    model = Stack([Block() for _ in range(4)])
    batch = torch.empty(16384, 256, device="meta")
    kept, again = (
        sl.plan(model, "dp=1", {"**": None}, transforms=transforms).time(CLUSTER, example=batch)
        for transforms in ((), sl.checkpoint_activations())
    )
    assert again.compute > 1.1 * kept.compute  # recomputation ends before the last product
    assert again.memory.activations < kept.memory.activations
    assert again.flops == kept.flops  # of the model: what is computed again does not count


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize("transforms", [(), sl.zero(1), sl.zero(2), sl.zero(3)])
def test_the_peak_has_what_the_plan_keeps(transforms):
    plan = sl.plan(Net(), "dp=4", {"**": None}, transforms=transforms)
    peak, memory = plan.time(CLUSTER, example=torch.empty(8, 1024, device="meta")).memory, plan.memory()
    assert (peak.parameters, peak.state) == (memory.parameters, memory.state)
    assert peak.total >= memory.total


def test_the_peak_of_one_device_is_that_of_its_dry_run():
    """Parameters, activations, gradients: the dry run executes the whole model, the replay one block of it.

    The last block differs: its output, of 4 MiB, stays until the end.
    """
    model = Stack([nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(6)])
    batch = torch.empty(4096, 256, device="meta")
    for transforms in ((), sl.checkpoint_activations()):
        plan = sl.plan(model, "dp=1", {"**": None}, transforms=transforms, example=batch)
        assert plan.report is not None
        peak = plan.time(CLUSTER, example=batch).memory
        assert peak.total - peak.state == pytest.approx(plan.report.peak_bytes, abs=4096 * 256 * 4)


def test_blocks_of_several_kinds_are_recorded_each():
    wide, narrow = [nn.Linear(512, 512)], [nn.Sequential(nn.Linear(512, 64), nn.Linear(64, 512))]
    batch = torch.empty(1024, 512, device="meta")

    def compute(blocks: list[nn.Module]) -> float:
        return sl.plan(Stack(blocks), "dp=1", {"**": None}).time(CLUSTER, example=batch).compute

    mixed = [wide[0], narrow[0], *(nn.Linear(512, 512) for _ in range(3))]
    more = [*mixed, nn.Linear(512, 512), nn.Sequential(nn.Linear(512, 64), nn.Linear(64, 512))]
    flops = 6 * 1024 * (512 * 512 + 2 * 64 * 512)
    assert compute(more) - compute(mixed) == pytest.approx(flops / 1e9, rel=0.05)


def test_the_pool_of_workspaces_keeps_its_buffers():
    def pool(*sizes: int, limit: int) -> int:
        buckets = tuple(Reduced(None, size, size, size, (size,), torch.float32, True) for size in sizes)
        return _pool((((), buckets, ()),), limit)

    assert pool(100, 10, limit=50) == 100  # one at a time
    assert pool(10, 10, 10, limit=20) == 20  # two at a time
    assert pool(limit=50) == 0


def test_offloaded_state_is_copied_and_is_not_on_the_device():
    away, here = (_time("dp=2", transforms) for transforms in (sl.zero(1) | sl.offload("state"), sl.zero(1)))
    assert away.copies > 0 == here.copies
    assert away.memory.host > 0 and away.memory.state == 0 < here.memory.state


def test_a_table_says_each_part():
    shown = str(_time("dp=2"))
    assert "compute" in shown and "exposed: parameters and gradients" in shown and "MFU" in shown
    assert "memory at the peak" in shown


def test_what_cannot_be_timed_is_an_error_that_says_what_to_do():
    plan = sl.plan(Net(), "dp=2", {"**": None})
    with pytest.raises(PlanError, match="give example="):
        plan.time(CLUSTER)
    with pytest.raises(PlanError, match=r"read from JSON.*sl\.plan"):
        sl.Plan.from_json(plan.to_json()).time(CLUSTER, example=torch.empty(4, 1024))
    with pytest.raises(PlanError, match='No cluster is called "h10"'):
        plan.time("h10", example=torch.empty(4, 1024))
    with pytest.raises(PlanError, match="no rate of products in float64"):
        wide = sl.plan(Net().double(), "dp=2", {"**": None})
        wide.time(CLUSTER, example=torch.empty(4, 1024, dtype=torch.float64))
    with pytest.raises(PlanError, match="has no links"):
        plan.time(CLUSTER.replace(links=()), example=torch.empty(4, 1024))
    with pytest.raises(PlanError, match="copy without its model"):
        copy.deepcopy(plan).time(CLUSTER, example=torch.empty(4, 1024))


def test_a_plan_of_many_ranks_takes_no_longer_to_time():
    plan = sl.plan(model := Net(), "dp=4096", {"**": None}, transforms=sl.zero(2))
    big = plan.time("h100", example=torch.empty(8, 1024, device="meta"))
    assert big.seconds > 0 and dataclasses.replace(big).memory == big.memory
    assert model is not None

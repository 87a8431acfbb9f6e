"""The recorder itself: what it counts, held against arithmetic and against PyTorch's own allocator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from shardlib._mesh import mesh
from shardlib._plan import Recorded
from shardlib._plan.report import ring_bytes
from shardlib.engine.dryrun import run_step
from shardlib.engine.feature.recording import record_collectives
from tests.plan.cases import TINY, tiny


def test_the_peak_of_a_linear_layer_is_what_arithmetic_says():
    layer = nn.Linear(64, 128, bias=False)
    with record_collectives(layer) as log:
        run_step(layer, (torch.ones(32, 64),), {})
    weight, inputs, output = 64 * 128 * 4, 32 * 64 * 4, 32 * 128 * 4
    assert log.start_bytes == weight
    # Weight and its gradient; the inputs, of which backward takes a view; the output, and the ones that it starts from.
    assert log.peak_bytes == 2 * weight + inputs + 2 * output


def _allocated(model: nn.Module, ids: torch.Tensor) -> int:
    """The most that the allocator had handed out at a time, beyond what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        run_step(model, (ids,), {})
    now = peak = 0
    events: list[Any] = [e for e in measured.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def test_the_peak_of_a_transformer_is_what_the_allocator_says():
    model, ids = tiny(), torch.zeros(2, TINY.context, dtype=torch.int64)
    with record_collectives(model) as log:
        run_step(model, (ids,), {})
    for parameter in model.parameters():
        parameter.grad = None
    assert log.peak_bytes - log.start_bytes == pytest.approx(_allocated(model, ids), rel=0.01)


class _Talks(nn.Module):
    """Issues one of each kind of collective, some in forward and one in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _Inner()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(torch.ones(3))
        return self.inner(x * self.scale)


class _Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dist.broadcast(torch.ones(5, dtype=torch.float64), 0)
        return _SumsGradients.apply(x)


class _SumsGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        pieces = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, grad.contiguous())
        return torch.stack(pieces).sum(0)


def _recorded() -> list[Recorded]:
    model, shape = _Talks(), mesh("dp=2,tp=2")
    with record_collectives(model, mesh=shape) as log:
        dist.all_to_all_single(torch.empty(8), torch.ones(8), group=shape["tp"].get_group())
        model(torch.ones(2, 4)).sum().backward()
    return log.collectives


def test_each_collective_is_put_down_to_its_module_phase_and_axes(ranks):
    first = [
        Recorded("all_to_all", ("tp",), 32, 2, "", "outside"),
        Recorded("all_reduce", ("dp", "tp"), 12, 4, "", "forward"),
        Recorded("broadcast", ("dp", "tp"), 40, 4, "inner", "forward"),
        Recorded("all_gather", ("dp", "tp"), 32, 4, "inner", "backward"),
    ]
    for collectives in ranks(4).run(_recorded):
        assert collectives == first


def _on_a_diagonal() -> list[Recorded]:
    shape, group = mesh("dp=2,tp=2"), dist.new_group([0, 3])
    with record_collectives(nn.Identity(), mesh=shape) as log:
        if dist.get_rank() in (0, 3):
            dist.all_reduce(torch.ones(1), group=group)
    return log.collectives


def test_a_group_that_is_no_axis_of_the_mesh_has_none(ranks):
    recorded = ranks(4).run(_on_a_diagonal)
    assert recorded[0] == recorded[3] == [Recorded("all_reduce", (), 4, 2, "", "outside")]
    assert recorded[1] == recorded[2] == []


def test_hooks_are_gone_after_recording():
    model = tiny()
    with record_collectives(model):
        pass
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_an_error_inside_is_passed_on_and_leaves_no_hooks():
    model = tiny()
    with pytest.raises(IndexError), record_collectives(model):
        model(torch.full((1, 2), TINY.vocab_size))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(
    ("kind", "sent"),
    [("all_reduce", 150), ("all_gather", 300), ("reduce_scatter", 75), ("all_to_all", 75), ("send", 100)],
)
def test_bytes_sent_in_a_ring_of_four(kind: str, sent: int):
    assert ring_bytes(kind, 100, 4) == sent

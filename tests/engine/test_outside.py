"""Weights that a loss reads outside of forward, where stage 3 stores shards: its gradients, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import shardlib as sl
from shardlib.errors import ShardingError


class Tasks(nn.Module):
    """Losses of four tasks, weighted by their uncertainty (Kendall et al. 2018) outside of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.logvar = nn.Linear(6, 4), nn.Parameter(torch.randn(4))
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def _full(param: torch.Tensor) -> torch.Tensor:
    return param.full_tensor() if isinstance(param, DTensor) else param


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of the weights and the losses of the tasks
READ: dict[str, Loss] = {
    "full": lambda v, losses: (torch.exp(-_full(v)) * losses + _full(v)).sum(),
    "complex": lambda z, losses: (_full(z).abs() * losses).sum(),
    "index": lambda v, losses: sum(torch.exp(-v[i]) * losses[i] + v[i] for i in range(4)),  # type: ignore[return-value]
    "slice": lambda v, losses: losses.sum() + v[1:].exp().sum() + v[0],
    "unbind": lambda v, losses: sum(torch.exp(-one) * loss for one, loss in zip(v.unbind(), losses, strict=True)),  # type: ignore[return-value,misc]
    "penalty": lambda v, losses: losses.sum() + v.square().sum(),
    "constant": lambda v, losses: losses.sum() + (v - torch.ones(4, dtype=v.dtype)).square().sum(),
}
REFUSED: dict[str, Loss] = {
    "shards times losses": lambda v, losses: (torch.exp(-v) * losses).sum(),
    "shards over losses": lambda v, losses: (losses / v.exp()).sum(),
    "a loss times a penalty": lambda v, losses: losses.sum() * v.square().sum(),
}
STORED = [sl.zero(3), sl.fsdp()]


def _loss(model: nn.Module, x: torch.Tensor, read: Loss) -> torch.Tensor:
    y = model(x)
    losses = torch.stack([y[:, i].square().mean() for i in range(4)])
    return read(model.phase if read is READ["complex"] else model.logvar, losses)


def _differs(mesh: str, transforms: Any, how: str, passes: int) -> float:
    """The largest difference of a gradient from that of one device."""
    torch.manual_seed(0)
    plain, batches = Tasks().double(), torch.randn(passes, 8, 6, dtype=torch.float64)
    model = sl.shard_model(copy.deepcopy(plain), mesh, {"**": None}, transforms=[transforms, sl.accumulate(passes)])
    data = sl.mesh(mesh)
    for x in batches:
        (_loss(plain, x, READ[how]) / passes).backward()
        _loss(model, x.chunk(data.size())[data.get_rank()], READ[how]).backward()
    want = dict(plain.named_parameters())
    pairs = [(p.grad, want[name].grad) for name, p in model.named_parameters() if p.grad is not None]
    return max((_full(grad) - one).abs().max().item() for grad, one in pairs)  # type: ignore[operator]


@pytest.mark.covering
@pytest.mark.filterwarnings("ignore::shardlib.engine.ops.ShardlibGatherWarning")
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("how", READ)
@pytest.mark.parametrize("transform", STORED, ids=repr)
def test_gradients_are_those_of_all_data_ranks(ranks, transform: Any, how: str, passes: int):
    for found in ranks(2).run(_differs, "dp=2", transform, how, passes):
        assert found < 1e-12


@pytest.mark.filterwarnings("ignore::shardlib.engine.ops.ShardlibGatherWarning")
def test_gradients_are_those_of_replicas_too(ranks):
    for how in ("full", "index"):
        transform = sl.hsdp(shard="fsdp", replicate="dp")
        for found in ranks(4).run(_differs, "dp=2,fsdp=2", transform, how, 1):
            assert found < 1e-12


def _refused(transform: Any, how: str) -> str:
    torch.manual_seed(0)
    model = sl.shard_model(Tasks(), "dp=2", {"**": None}, transforms=transform)
    with pytest.raises(ShardingError) as raised:
        _loss(model, torch.randn(4, 6) + torch.distributed.get_rank(), REFUSED[how])
    return str(raised.value)


@pytest.mark.parametrize("how", REFUSED)
@pytest.mark.parametrize("transform", STORED, ids=repr)
def test_shards_beside_what_each_data_rank_has_of_its_own_are_refused(ranks, transform: Any, how: str):
    for message in ranks(2).run(_refused, transform, how):
        assert "of which data ranks have different ones" in message
        assert "weight.full_tensor(), whose gradient is the mean over data ranks" in message


def _through_a_hook() -> float:
    """With a hook of the user, autograd is given gradients that are reduced at once."""
    torch.manual_seed(0)
    plain, batches = Tasks().double(), torch.randn(2, 8, 6, dtype=torch.float64)
    model = sl.shard_model(copy.deepcopy(plain), "dp=2", {"**": None}, transforms=[sl.zero(3), sl.accumulate(2)])
    for each in (plain, model):
        each.net.weight.register_hook(lambda grad: grad * 3)
    for x in batches:
        ((plain(x).square().mean() + plain.net.weight.square().sum()) / 2).backward()
        mine = x.chunk(2)[torch.distributed.get_rank()]
        (model(mine).square().mean() + model.net.weight.square().sum()).backward()
    assert plain.net.weight.grad is not None and model.net.weight.grad is not None
    return (_full(model.net.weight.grad) - plain.net.weight.grad).abs().max().item()


def test_hooks_see_what_forward_and_a_penalty_add_up_to(ranks):
    for found in ranks(2).run(_through_a_hook):
        assert found < 1e-12


class Odd(nn.Module):
    """Parameters of all kinds that the model reads itself, also in parts, and weights of layers that do not run."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(3, 7, 7).transpose(1, 2))
        self.number, self.one = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.zeros(0, 7))
        self.columns = nn.Parameter(torch.randn(7, 11))
        self.pair = nn.ParameterDict({"x": nn.Parameter(torch.randn(7, 1)), "y": nn.Parameter(torch.randn(1, 7))})
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(7)) for _ in range(3)])
        self.layers = nn.ModuleList([nn.Linear(7, 7) for _ in range(3)])
        self.waves = nn.Parameter(torch.randn(7, dtype=torch.complex64))

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        mean = torch.stack([layer.weight for layer in self.layers]).mean(0)  # type: ignore[misc]
        x = torch.einsum("bd,kde->bke", x, self.turned).sum(1) * self.number / self.one + x @ mean.T
        x = x + (x @ self.columns[:, :4]) @ self.columns[:, 4:8].T + (self.pair["x"] @ self.pair["y"] @ x.T).T
        x = (self.layers[chosen](x) * self.listed[chosen]).tanh() + torch.cat([self.empty, x]).tanh()
        return x + torch.fft.ifft(torch.fft.fft(x) * self.waves).real


def _odd(transform: Any) -> float:
    torch.manual_seed(0)
    plain, batches = Odd().double(), torch.randn(2, 8, 7, dtype=torch.float64)
    plain.waves.data = plain.waves.data.to(torch.complex128)
    rules = sl.Rules(
        {"turned": sl.Shard(1), "columns": sl.Shard(1), "layers.*": "colwise", "listed.*": sl.Shard(0)},
        unmatched="replicate",
    )
    model = sl.shard_model(copy.deepcopy(plain), "dp=2,tp=2", rules, transforms=transform, compile=None)
    place = sl.mesh("dp=2,tp=2")["dp"].get_local_rank()
    for i, x in enumerate(batches):
        plain(x, i).square().mean().backward()
        model(x.chunk(2)[place], i).square().mean().backward()
    want = dict(plain.named_parameters())
    pairs = [(_full(p.grad), want[name].grad) for name, p in model.named_parameters() if p.grad is not None]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs if b is not None and b.numel())


@pytest.mark.filterwarnings("ignore::shardlib.engine.ops.ShardlibGatherWarning")
def test_parameters_of_all_kinds_that_a_model_reads_in_parts(ranks):
    """Their views, which the policy of ops keeps, count as references to them."""
    for transform in (sl.zero(3), sl.zero(2)):
        for found in ranks(4).run(_odd, transform):
            assert found < 1e-10


class Keeps(nn.Module):
    """Keeps a weight by reference, whose transpose backward is the first to take."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.columns = nn.Linear(5, 7), nn.Parameter(torch.randn(7, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [self.columns]
        return self.first(x) @ self.columns


def _kept() -> float:
    torch.manual_seed(0)
    plain, x = Keeps().double(), torch.randn(8, 5, dtype=torch.float64)
    rules = sl.Rules({"columns": sl.Shard(1)}, unmatched="replicate")
    model = sl.shard_model(copy.deepcopy(plain), "dp=2,tp=2", rules, transforms=sl.zero(3), compile=None)
    plain(x).square().mean().backward()
    model(x.chunk(2)[sl.mesh("dp=2,tp=2")["dp"].get_local_rank()]).square().mean().backward()
    want = dict(plain.named_parameters())
    return max((_full(p.grad) - want[name].grad).abs().max().item() for name, p in model.named_parameters())  # type: ignore[arg-type,operator]


def test_backward_takes_views_of_a_weight_that_is_kept(ranks):
    for found in ranks(4).run(_kept):
        assert found < 1e-12

"""`Pipe` in one process computes what its sequential does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from shardlib.booster import Pipe, balance_by_size, balance_by_time
from shardlib.errors import InputError, PlanError, ShardlibError

TOLERANCE = 1e-12  # of float64; sums over chunks are made in another order


def sequential() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 8), nn.Linear(8, 3)).double()


@pytest.mark.covering
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize(("balance", "chunks"), [([2, 3], 3), ([1, 3, 1], 4), ([5], 2), ([3, 2], 20)])
def test_outputs_and_gradients_are_those_of_the_sequential(balance: list[int], chunks: int, checkpoint: str):
    plain, x = sequential(), torch.randn(7, 4, dtype=torch.float64)
    model = Pipe(copy.deepcopy(plain), balance, chunks=chunks, checkpoint=checkpoint)
    assert [len(partition) for partition in model.partitions] == balance and len(list(model)) == len(model) == 5
    outputs = []
    for net in (plain, model):
        given = x.clone().requires_grad_()
        output = net(given)
        output.square().sum().backward()
        outputs.append((output, given.grad, *(param.grad for param in net.parameters())))
    for want, got in zip(*outputs, strict=True):
        assert want is not None and got is not None
        assert torch.allclose(got, want, rtol=TOLERANCE, atol=TOLERANCE)


def test_every_partition_computes_each_chunk_once_and_again_where_asked():
    seen: list[int] = []
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in net:
        layer.register_forward_pre_hook(lambda _module, args: seen.append(len(args[0])))
    Pipe(net, [1, 1], chunks=3)(torch.ones(8, 4)).sum().backward()
    assert sorted(seen) == sorted([3, 3, 2] * 2 + [3, 3] * 2)  # the last chunk is kept


@pytest.mark.parametrize("balance", [[1, 3], [2, 2], [4]])
def test_a_layer_may_stand_in_it_twice(balance: list[int]):
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 4).double(), torch.randn(6, 4, dtype=torch.float64)
    plain = nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh())
    want = torch.autograd.grad(plain(x).square().sum(), list(plain.parameters()))
    model = Pipe(plain, balance, chunks=2)
    assert [*model] == [*plain] and len({id(param) for param in model.parameters()}) == 2
    got = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    assert all(torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE) for a, b in zip(got, want, strict=True))


def tied() -> nn.Sequential:
    net = sequential()
    net[4].bias = net[0].bias
    return net


@pytest.mark.parametrize(
    ("call", "kinds", "said"),
    [
        (lambda: Pipe(nn.Linear(2, 2), [1]), (InputError, TypeError), "given a Linear; give an nn.Sequential."),  # type: ignore[arg-type]
        (lambda: Pipe(sequential()), (PlanError, ValueError), "no balance; balance_by_time"),
        (lambda: Pipe(sequential(), [2, 2]), (PlanError, ValueError), "balance=[2, 2] for a sequential of 5 layers"),
        (lambda: Pipe(sequential(), [3, 2], devices=["cpu"]), (PlanError, IndexError), "2 partitions and 1 device."),
        (lambda: Pipe(sequential(), [3, 2], chunks=0), (PlanError, ValueError), "chunks=0; give a number from 1 up"),
        (lambda: Pipe(sequential(), [3, 2], checkpoint="nevr"), (PlanError, ValueError), 'Did you mean "never"?'),
        (lambda: Pipe(nn.Sequential(), [])(42), (InputError, TypeError), "called with a int; give a tensor"),
        (lambda: Pipe(sequential(), [5]).cpu(), (InputError, TypeError), "are on cpu. Give devices="),
        (lambda: Pipe(sequential(), [5]).to(0), (InputError, TypeError), "was to be moved to 0"),
        (lambda: Pipe(sequential(), [5]).to(tensor=torch.ones(1)), (InputError, TypeError), "moved to cpu"),
        (lambda: balance_by_time(6, sequential(), torch.ones(1, 4)), (InputError, ValueError), "from 1 to 5"),
        (lambda: balance_by_size(1, nn.ReLU(), torch.ones(1)), (InputError, TypeError), "given a ReLU"),  # type: ignore[arg-type]
        (
            lambda: Pipe(tied(), [3, 2], devices=["cpu", "meta"]),
            (PlanError, ValueError),
            'Pipe: "4.bias" on meta is the same tensor as "0.bias" on cpu, and a tensor is on one device. Give both '
            "layers to partitions of one device, or copy one: copy.deepcopy(layer).",
        ),
    ],
)
def test_what_is_refused(call, kinds, said):
    with pytest.raises(ShardlibError) as caught:
        call()
    assert all(isinstance(caught.value, kind) for kind in kinds) and said in str(caught.value)


def test_partitions_on_one_device_may_share_a_tensor():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    assert Pipe(net, [1, 1], devices=["cpu", "cpu"])(torch.ones(3, 2)).shape == (3, 2)


def test_what_fairscale_takes_is_taken():
    net = sequential()
    pipe = Pipe(net, (2, 3), chunks=2.0)  # type: ignore[arg-type]
    assert pipe.chunks == 2 and type(pipe.chunks) is int
    assert pipe.float().to(torch.double).to(dtype=torch.float)[0].weight.dtype == torch.float32
    x = torch.ones(3)
    assert Pipe(nn.Sequential(), [])(x) is x


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_deferred_statistics_of_batchnorm_are_those_of_the_whole_batch(checkpoint: str, momentum: float | None):
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(3, momentum=momentum).double()
    pipe = Pipe(nn.Sequential(copy.deepcopy(norm)), [1], chunks=3, checkpoint=checkpoint, deferred_batch_norm=True)
    copied = copy.deepcopy(pipe)
    for step in range(2):
        x = torch.randn(5, 3, 4, 4, dtype=torch.float64) + 10 * torch.arange(5.0).view(5, 1, 1, 1) + step
        norm(x)
        for each in (pipe, copied):
            output = each(x)
            output.square().sum().backward()
            by_chunk = [nn.functional.batch_norm(part, None, None, training=True) for part in x.split([2, 2, 1])]
            assert torch.allclose(output, torch.cat(by_chunk), rtol=TOLERANCE, atol=TOLERANCE)
    for each in (pipe, copied):
        for name, want in norm.named_buffers():
            assert torch.allclose(getattr(each[0], name), want, rtol=TOLERANCE, atol=TOLERANCE), name
        assert each[0].track_running_stats
        assert torch.allclose(each.eval()(x), norm.eval()(x), rtol=TOLERANCE, atol=TOLERANCE)


CLOCK = [0.0]


class Works(nn.Module):
    """A layer that takes its time, by `CLOCK`, in forward; one of a second takes longer after 20 seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.calls = seconds, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.training
        self.calls += 1
        CLOCK[0] += 30 if self.seconds == 1 and CLOCK[0] > 20 else self.seconds
        return x + torch.rand_like(x)


def test_a_balance_by_time_makes_the_slowest_partition_fast(monkeypatch):
    CLOCK[0] = 0.0
    monkeypatch.setattr("shardlib._measure.time.perf_counter", lambda: CLOCK[0])
    net = nn.Sequential(*map(Works, (1, 2, 3, 4, 5, 6))).eval()
    drawn = torch.random.get_rng_state()
    assert balance_by_time(2, net, torch.ones(2)) == [4, 2]  # of two runs the faster one
    assert not any(layer.calls or layer.training for layer in net)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    begun = CLOCK[0]
    assert balance_by_time(6, net, torch.ones(2), timeout=100) == [1] * 6 and CLOCK[0] - begun >= 100


class Keeps(nn.Module):
    """A layer whose forward leaves tensors for backward."""

    def __init__(self, tensors: int, params: int = 0) -> None:
        super().__init__()
        self.tensors = tensors
        self.weight = nn.Parameter(torch.ones(params))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.tensors):
            x = x + torch.rand_like(x, requires_grad=True)
        return x


@pytest.mark.parametrize(
    ("tensors", "params", "scale", "balance"),
    [
        ([1, 2, 3, 4, 5, 6], [0] * 6, 2.0, [4, 2]),
        ([6, 5, 4, 3, 2, 1], [0] * 6, 2.0, [2, 4]),
        ([6, 5, 4, 3, 2, 1], [100, 200, 300, 400, 500, 600], 0.0, [2, 4]),
        ([6, 5, 4, 3, 2, 1], [100, 200, 300, 400, 500, 600], 100.0, [4, 2]),
    ],
)
def test_a_balance_by_size_counts_what_forward_keeps_and_parameters(tensors, params, scale, balance):
    net = nn.Sequential(*map(Keeps, tensors, params))
    sample = torch.ones(8, 25, requires_grad=True)
    assert balance_by_size(2, net, sample, chunks=4, param_scale=scale) == balance


def test_a_balance_by_size_counts_a_parameter_that_forward_views_once():
    """`nn.Linear` transposes its weight, which forward does not allocate."""
    net = nn.Sequential(nn.Linear(1000, 1), nn.ReLU(), nn.ReLU(), nn.ReLU())
    assert balance_by_size(2, net, torch.ones(8, 1000), param_scale=0.0) == [2, 2]


def test_layers_that_pass_tuples_are_measured():
    class Twin(nn.Module):
        def forward(self, x):
            return x, x.detach()

    class Add(nn.Module):
        def forward(self, pair):
            return pair[0] + pair[1]

    net = nn.Sequential(nn.BatchNorm1d(4), Twin(), Add())
    before = {name: value.clone() for name, value in net.state_dict().items()}
    assert sum(balance_by_time(2, net, torch.ones(3, 4), timeout=0)) == 3
    assert sum(balance_by_size(3, net, torch.ones(3, 4))) == 3
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())

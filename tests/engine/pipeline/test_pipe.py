"""`Pipe` in one process computes what its sequential does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib.errors import PlanError

TOLERANCE = 1e-12  # of float64; sums over chunks are made in another order


def sequential() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 8), nn.Linear(8, 3)).double()


@pytest.mark.covering
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize(("balance", "chunks"), [([2, 3], 3), ([1, 3, 1], 4), ([5], 2), ([3, 2], 20)])
def test_outputs_and_gradients_are_those_of_the_sequential(balance: list[int], chunks: int, checkpoint: str):
    plain, x = sequential(), torch.randn(7, 4, dtype=torch.float64)
    model = sl.Pipe(copy.deepcopy(plain), balance, chunks=chunks, checkpoint=checkpoint)
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
    sl.Pipe(net, [1, 1], chunks=3)(torch.ones(8, 4)).sum().backward()
    assert sorted(seen) == sorted([3, 3, 2] * 2 + [3, 3] * 2)  # the last chunk is kept


@pytest.mark.parametrize("balance", [[1, 3], [2, 2], [4]])
def test_a_layer_may_stand_in_it_twice(balance: list[int]):
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 4).double(), torch.randn(6, 4, dtype=torch.float64)
    plain = nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh())
    want = torch.autograd.grad(plain(x).square().sum(), list(plain.parameters()))
    model = sl.Pipe(plain, balance, chunks=2)
    assert [*model] == [*plain] and len({id(param) for param in model.parameters()}) == 2
    got = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    assert all(torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE) for a, b in zip(got, want, strict=True))


def tied() -> nn.Sequential:
    net = sequential()
    net[4].bias = net[0].bias
    return net


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: sl.Pipe(nn.Linear(2, 2), [1]), "Pipe was given a Linear; give an nn.Sequential."),  # type: ignore[arg-type]
        (lambda: sl.Pipe(sequential(), [2, 2]), "balance=[2, 2] for a sequential of 5 layers"),
        (lambda: sl.Pipe(sequential(), [3, 2], devices=["cpu"]), "Pipe has 2 partitions and 1 device."),
        (
            lambda: sl.Pipe(tied(), [3, 2], devices=["cpu", "meta"]),
            'Pipe: "4.bias" on meta is the same tensor as "0.bias" on cpu, and a tensor is on one device. Give both '
            "layers to partitions of one device, or copy one: copy.deepcopy(layer).",
        ),
        (lambda: sl.Pipe(sequential(), [3, 2], chunks=0), "chunks=0; give a number from 1 up"),
        (lambda: sl.Pipe(sequential(), [3, 2], checkpoint="nevr"), 'Did you mean "never"?'),
    ],
)
def test_what_is_refused(call, said):
    with pytest.raises(PlanError) as caught:
        call()
    assert said in str(caught.value)

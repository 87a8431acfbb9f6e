"""`check="always"`: what ranks compare in every step, and that it changes no numbers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardlib as sl
from shardlib.errors import InputError, ShardingError
from tests.engine.whole import whole


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.register_buffer("average", torch.zeros(8))
        self.keeps_average = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        if self.keeps_average:
            self.average.copy_(x.detach().mean(0))
        return self.last(x)


RULES = {"first": "colwise", "last": "rowwise"}


def _sharded(mesh: str, transforms: tuple[Any, ...] = (), check: Any = "always") -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    rules = RULES if "tp" in mesh else {"**": None}
    model = sl.shard_model(Net(), mesh, rules, transforms=transforms, check=check, compile=None)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _step(model: nn.Module, optimizer: Any, seed: int) -> None:
    optimizer.zero_grad()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()
    optimizer.step()


def _weights(mesh: str, transforms: tuple[Any, ...], check: Any) -> dict[str, torch.Tensor]:
    model, optimizer = _sharded(mesh, transforms, check)
    for seed in range(3):
        _step(model, optimizer, seed)
        with torch.no_grad():
            model(torch.ones(2, 6))
    return {name: whole(p.detach()).clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("mesh", "transforms"),
    [
        ("dp=2", ()),
        ("dp=2", (sl.zero(1, overlap=True),)),
        ("dp=2", (sl.zero(3),)),
        ("tp=2", ()),
        ("dp=2,tp=2", (sl.zero(2),)),
        ("dp=2,tp=2", (sl.fsdp(), sl.accumulate(1))),
    ],
)
def test_comparing_changes_no_number(ranks, mesh: str, transforms: tuple[Any, ...]):
    pool = ranks(sl.MeshShape(mesh).world_size)
    for found, expected in zip(
        pool.run(_weights, mesh, transforms, "always"), pool.run(_weights, mesh, transforms, True), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def _goes_wrong(how: str, mesh: str, transforms: tuple[Any, ...]) -> str:
    """What is said where the last rank does something by itself after a first step."""
    model, optimizer = _sharded(mesh, transforms)
    mine = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    model.keeps_average = how == "buffer"
    try:
        _step(model, optimizer, torch.distributed.get_rank() if how == "buffer" else 0)
        if how == "written" and mine:
            with torch.no_grad():
                model.last.bias.add_(1.0)
        if how == "gradient":
            model(torch.ones(2, 6)).sum().backward()
            if mine:
                model.last.bias.grad = None
            optimizer.step()
        _step(model, optimizer, 1)
    except ShardingError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("how", "mesh", "transforms", "said"),
    [
        ("written", "dp=2", (), '1 of 5 differ, the first is "last.bias":\n  rank 0: float32 [4] '),
        ("written", "tp=2", (), '1 of 2 differ, the first is "last.bias":\n  rank 0: float32 [4] '),
        ("written", "dp=2,tp=2", (), 'differ, the first is "last.bias":\n'),
        ("buffer", "dp=2", (sl.zero(3),), '1 of 1 differ, the first is "average":\n  rank 0: float32 [8] '),
        ("gradient", "dp=2", (sl.zero(3),), "  rank 1: before an optimizer step, without gradients of last.bias\n"),
        ("gradient", "dp=2", (), "  rank 0: before an optimizer step, without gradients of no parameter\n"),
        ("nothing", "dp=2,tp=2", (sl.zero(1),), "nothing"),
    ],
)
def test_what_one_rank_does_alone_is_refused_on_all(ranks, how: str, mesh: str, transforms: Any, said: str):
    for found in ranks(sl.MeshShape(mesh).world_size).run(_goes_wrong, how, mesh, transforms):
        assert said in found


def test_another_word_is_refused():
    with pytest.raises(InputError) as raised:
        sl.shard_model(Net(), "dp=1", {"**": None}, check="often")  # type: ignore[arg-type]
    assert str(raised.value) == "check='often' was given; give True, False or \"always\"."
    with pytest.raises(InputError, match=r"global_batch_norm=.no.* give True or False"):
        sl.shard_model(Net(), "dp=1", {"**": None}, global_batch_norm="no")  # type: ignore[arg-type]


def _unequal() -> list[str]:
    model, optimizer = _sharded("dp=2", (sl.zero(2),))
    _step(model, optimizer, 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.ones(2 + 2 * dist.get_rank(), 6)).sum().backward()
        with torch.no_grad():
            model(torch.ones(2 + 2 * dist.get_rank(), 6))
    return [f"{each.filename == __file__} {each.message}" for each in caught]


def test_data_ranks_with_different_numbers_of_examples(ranks):
    """A warning on all of them, in training alone; equal numbers are not warned of."""
    first, second = ranks(2).run(_unequal)
    assert (
        first
        == second
        == [
            'True Ranks of the data axis "dp" were given batches of different sizes in this step:\n'
            "  rank 0: 2\n"
            "  rank 1: 4\n"
            "The gradient is the mean of the ranks' means, and not the mean over all examples. Give each rank as many "
            "examples (drop_last=True), or call OptimizerWrapper.backward((sum, count)), which counts them. "
            'rng="exact" needs equal sizes.'
        ]
    )


def _warned(mesh: str, seeds: str, check: Any) -> list[str]:
    """`seeds` draws the batch of a step on a data rank."""
    model, optimizer = _sharded(mesh, (sl.zero(2),), check)
    data = sl.mesh(mesh)["dp"].get_local_rank()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            _step(model, optimizer, eval(seeds, {"step": step, "data": data}))
        if mesh == "dp=2" and dist.get_rank() == 0:
            model(torch.ones(2, 6))  # alone it may run forward, and not wait for the others
    return [f"{each.filename == __file__} {each.message}" for each in caught if "same batches" in str(each.message)]


@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,tp=2"])
def test_data_ranks_that_train_on_the_same_batches(ranks, mesh: str):
    """A warning on rank 0, once; not of other batches, nor of one batch that is fitted again and again."""
    size = sl.MeshShape(mesh).world_size
    first, *others = ranks(size).run(_warned, mesh, "step", True)
    assert first == [
        'True All ranks of the data axis "dp" train on the same batches: the first 2 were equal. Give each data rank '
        'its own examples, for example with DistributedSampler(dataset, num_replicas=mesh["dp"].size(), '
        'rank=mesh["dp"].get_local_rank()) and sampler.set_epoch(epoch), or with '
        'batch.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]. check=False compares no batches.'
    ]
    assert others == [[]] * (size - 1)
    for seeds, check in (("10 * step + data", True), ("0", True), ("data", True), ("step", False)):
        assert ranks(size).run(_warned, mesh, seeds, check) == [[]] * size

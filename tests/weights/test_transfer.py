"""Weights of one model in another: other plans, other ranks, other libraries, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardlib as sl
from shardlib.errors import InputError, ShardlibError
from shardlib.testing import shared_pool
from shardlib.weights import _transfer, transfer
from tests.weights.cases import COLUMNS, RULES, STAGED, Shard, fsdp, made, megatron, ours, part


def _transferred(first: Shard, second: Shard, width: int = 16, **options: Any) -> dict[str, Any]:
    want = made(0, width=width)
    full = {name: tensor.clone() for name, tensor in want.state_dict().items()}
    source, target = first(want), second(made(1, width=width))
    moves = transfer(source, target, **options)
    got = {} if target is None else _local(target)
    again = transfer(source, target, **options)
    assert again.links == moves.links
    return {
        "right": all(_is_part(full[name], tensor) for name, tensor in got.items()),
        "bytes": moves.bytes,
        "has": bool(got),
    }


def _local(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.state_dict(keep_vars=True))


def _is_part(full: torch.Tensor, got: torch.Tensor) -> bool:
    from shardlib.testing.equivalence.parts import layout_of, local

    if not hasattr(got, "device_mesh"):
        return torch.equal(got, full)
    layout, mesh, at = layout_of(got)
    return torch.equal(local(got), layout.take(full, mesh, at))


def test_buckets_bound_what_is_sent_at_a_time():
    """Tensors of 1 MiB through buckets of 64 KiB."""
    options = {"bucket_mb": 1 / 16, "width": 256}
    for found in shared_pool(4).run(
        _transferred, ours("dp=2,tp=2", RULES, sl.zero(3)), ours("tp=4", COLUMNS), **options
    ):
        assert found["right"] and found["bytes"] > 2**20


@pytest.mark.parametrize(
    ("first", "second", "least"),
    [
        pytest.param(ours("dp=2,tp=2", RULES, sl.zero(3)), ours("tp=4", COLUMNS), 1, id="zero 3 and tp to other tp"),
        pytest.param(ours("dp=4", RULES), ours("dp=2,tp=2", RULES), 0, id="replicated to tp"),
        pytest.param(fsdp, ours("dp=2,tp=2"), 1, id="fully_shard to ours"),
        pytest.param(ours("tp=4", COLUMNS), megatron, 1, id="ours to parallelize_module"),
        pytest.param(ours("pp=2,dp=2", STAGED), ours("tp=4"), 1, id="stages to tp"),
        pytest.param(ours("tp=4"), ours("pp=2,dp=2", STAGED), 1, id="tp to stages"),
        pytest.param(part([0, 1], RULES), part([2, 3], COLUMNS), 1, id="other ranks"),
        pytest.param(part([1, 2], RULES), ours("dp=4"), 1, id="some of the ranks"),
    ],
)
def test_every_tensor_has_the_source_s_elements(first: Shard, second: Shard, least: int):
    for found in shared_pool(4).run(_transferred, first, second):
        assert found["right"] and bool(found["bytes"]) == bool(least)


def _trained_on(steps: int) -> list[float]:
    """Train a bfloat16 model with wide copies, put other weights into it, and go on: from these, not the old copies."""
    model = sl.shard_model(made(0), "dp=2", RULES, transforms=[sl.zero(2), sl.precision("bf16")])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ids = torch.arange(12)
    for _ in range(steps):
        model(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    other = made(1)
    transfer(other, model)
    for _ in range(steps):
        model(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    rounded = other.blocks[0].up.weight.to(torch.bfloat16)
    return [float((sl.full_state_dict(model)["blocks.0.up.weight"] - rounded).abs().max())]


def test_wide_copies_of_the_target_follow():
    assert shared_pool(2).run(_trained_on, 2) == [[0.0], [0.0]]


class Broken(Exception):
    """What a rank raises in the middle of a transfer."""


def _interrupted(_: str) -> list[str]:
    source = sl.shard_model(made(0).double(), "tp=2", RULES)
    target = sl.shard_model(made(1).double(), "tp=2", COLUMNS)
    given = _transfer.local_of
    calls = list[str]()

    def fails(items: Any, name: str) -> torch.Tensor:
        calls.append(name)
        if dist.get_rank() == 1 and len(calls) == 9:
            raise Broken("no memory")
        return given(items, name)

    _transfer.local_of = fails
    said = list[str]()
    for work in (lambda: transfer(source, target, bucket_mb=1e-3), lambda: target(torch.arange(4))):
        with pytest.raises(ShardlibError) as caught:
            work()
        said.append(str(caught.value))
    _transfer.local_of = given
    transfer(source, target)
    ids = torch.arange(4)
    assert (target.eval()(ids) - source.eval()(ids)).abs().max() < 1e-12
    return said


def test_a_target_that_has_a_part_refuses_until_it_has_all():
    for failed, refused in shared_pool(2).run(_interrupted, "", timeout=30):
        assert failed.startswith("Transferring weights failed (on rank 1): Broken: no memory")
        assert "has a part of the weights" in refused


def _in_backward(_: str) -> str:
    source, target = sl.shard_model(made(0), "tp=2", RULES), made(1)
    said = list[str]()

    def hook(_: torch.Tensor) -> None:
        with pytest.raises(ShardlibError) as caught:
            transfer(source, target)
        said.append(str(caught.value))

    out = source(torch.arange(4))
    out.register_hook(hook)
    out.sum().backward()
    return said[0]


def _refused(kind: str) -> str:
    first, second = made(0), made(1)
    sl.shard_model(first, "tp=2", RULES)
    options: dict[str, Any] = {}
    if kind == "names":
        second.more = nn.Linear(2, 2)
    if kind == "shapes":
        second.embed = nn.Embedding(40, 16)
    if kind == "one rank":
        options["bucket_mb"] = 1.0 + dist.get_rank()
    if kind == "none":
        second = None  # type: ignore[assignment]
    if kind == "module":
        second = "model"  # type: ignore[assignment]
    if kind == "bucket":
        options["bucket_mb"] = 0
    before = None if not isinstance(second, nn.Module) else second.blocks[0].up.weight.clone()
    try:
        transfer(first, second, **options)
    except ShardlibError as error:
        assert before is None or torch.equal(before, second.blocks[0].up.weight)
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_transfer_in_backward_is_refused():
    for told in shared_pool(2).run(_in_backward, ""):
        assert "transfer() was called during backward of the source" in told


class _Pair(nn.Module):
    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(a), nn.Parameter(b)


def _sharing(kind: str) -> str:
    memory = torch.arange(8.0)
    source = _Pair(memory[:4], memory[4:])
    if kind == "itself":
        transfer(source, source)
        return str(memory.tolist() == [*range(8)])
    target, names = (_Pair(memory[4:], torch.zeros(4)), None) if kind == "view" else (source, {"a": "b", "b": "a"})
    with pytest.raises(InputError) as caught:
        transfer(source, target, names=names)
    assert memory.tolist() == [*range(8)]
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("itself", "True"),
        ("swap", '"a" of the target has memory of "a"'),
        ("view", '"a" of the target has memory of "b"'),
    ],
)
def test_a_target_that_shares_memory_is_itself_or_is_refused(kind: str, said: str):
    for told in shared_pool(2).run(_sharing, kind):
        assert said in told


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("names", 'only the target has "more.weight", "more.bias"'),
        ("shapes", '"embed.weight" has global shape (33, 16) in the source and (40, 16) in the target'),
        ("one rank", "ranks gave different values of bucket_mb"),
        ("none", "transfer(target=None) was given on every rank"),
        ("module", "transfer(target=...) was given a str"),
        ("bucket", "bucket_mb=0"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_changed(kind: str, said: str):
    for told in shared_pool(2).run(_refused, kind):
        assert said in told

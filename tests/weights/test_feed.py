"""Weights into engines: ranks of another job, each with a loader that fuses, narrows, pads and stacks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardlib as sl
from shardlib.checkpoint._peers import Peers, joined_peers
from shardlib.errors import CheckpointError
from shardlib.testing import shared_pool
from shardlib.weights._feed import Feed
from shardlib.weights._views import Read, reads_of

WIDTH, HEAD, ROWS, EXPERTS, INNER = 32, 8, 33, 4, 12
TRAINERS, ENGINES = (0, 1), (2, 3)


class Policy(nn.Module):
    """Query heads that share one key head, a vocabulary that two does not divide, stacked experts, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.q, self.k = nn.Linear(WIDTH, 4 * HEAD, bias=False), nn.Linear(WIDTH, HEAD, bias=False)
        self.out = nn.Linear(4 * HEAD, WIDTH)
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH))
        self.register_buffer("scale", torch.randn(WIDTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids) * self.scale
        return self.out(self.q(x) + self.k(x).repeat(1, 4)) + (x @ self.gate_up.mean(0).mT).mean(-1, keepdim=True)


RULES = {
    "tp": sl.Rules({"q": "colwise", "out": "rowwise", "table": "vocab@tp embed"}, unmatched="replicate"),
    "experts": sl.Rules({"gate_up": "experts@tp inner in"}, unmatched="replicate"),
    "dp": sl.Rules({"**": None}),
}


def _convert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Name the tensors as a checkpoint does, and take experts apart."""
    found = {f"model.{name}": tensor for name, tensor in tensors.items() if name != "gate_up"}
    for expert, each in enumerate(tensors["gate_up"]):
        gate, up = each.chunk(2)
        found |= {f"model.experts.{expert}.gate": gate.contiguous(), f"model.experts.{expert}.up": up}
    return found


class Engine(nn.Module):
    """One of two workers: half of the heads, of the rows of a padded vocabulary, of the columns, of the experts."""

    device = torch.device("cpu")

    def __init__(self, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.index = index
        self.fails_at, self.partly = "", list[str]()
        with torch.no_grad():
            self.qk = nn.Parameter(torch.full((2 * HEAD + HEAD, WIDTH), -1.0, dtype=dtype))
            self.table = nn.Parameter(torch.full((18, WIDTH), -1.0, dtype=dtype))
            self.out = nn.Parameter(torch.full((WIDTH, 2 * HEAD), -1.0, dtype=dtype))
            self.bias = nn.Parameter(torch.full((WIDTH,), -1.0, dtype=dtype))
            self.experts = nn.Parameter(torch.full((2, 2 * INNER, WIDTH), -1.0, dtype=dtype))

    def _copy(self, weights: Iterable[tuple[str, torch.Tensor]], into: Any) -> None:
        for name, tensor in weights:
            if name == self.fails_at:
                raise ValueError(f"no room for {name}")
            match name.split("."):
                case ["model", "q", "weight"]:
                    into["qk"][: 2 * HEAD].copy_(tensor.narrow(0, 2 * HEAD * self.index, 2 * HEAD))
                case ["model", "k", "weight"]:
                    into["qk"][2 * HEAD :].copy_(tensor)
                case ["model", "table", "weight"]:
                    rows = tensor[18 * self.index : 18 * (self.index + 1)]
                    into["table"][: len(rows)].copy_(rows)
                case ["model", "out", "weight"]:
                    into["out"].copy_(tensor.chunk(2, dim=1)[self.index])
                case ["model", "out", "bias"]:
                    into["bias"].copy_(tensor)
                case ["model", "experts", number, part] if int(number) // 2 == self.index:
                    at = INNER * (part == "up")
                    into["experts"][int(number) % 2, at : at + INNER].copy_(tensor)

    def reads(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, Read]:
        into = {name: param.to("meta") for name, param in self.named_parameters()}
        found, self.partly = reads_of(lambda weights: self._copy(weights, into), tensors, into)
        return found

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        with torch.no_grad():
            self._copy(weights, dict(self.named_parameters()))

    def right(self, full: Mapping[str, torch.Tensor]) -> bool:
        """Return whether the parameters are those of a full model."""
        wanted = {name: torch.full_like(param, -1.0) for name, param in self.named_parameters()}
        self._copy(_convert(dict(full)).items(), wanted)
        return all(torch.equal(wanted[name], param) for name, param in self.named_parameters())


def _joined() -> Peers:
    """Meet in a store of one's own, as ranks of different jobs do. The engine's have other numbers there."""
    size = dist.get_world_size()
    rank = {2: 3, 3: 2}.get(dist.get_rank(), dist.get_rank()) if size == 4 else dist.get_rank()
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    told = [store.port if store is not None else 0]
    dist.broadcast_object_list(told)
    if store is None:
        store = dist.TCPStore("localhost", told[0], is_master=False)
    return joined_peers("sending", store, rank, size, 60.0)


def _policy(kind: str, transforms: tuple[Any, ...]) -> tuple[nn.Module | None, dict[str, torch.Tensor]]:
    """Return this rank's part of the policy, and the full tensors."""
    torch.manual_seed(0)
    policy = Policy()
    full = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    mesh = DeviceMesh("cpu", [*TRAINERS], mesh_dim_names=("dp" if kind == "dp" else "tp",))
    shard = dist.get_rank() in TRAINERS
    return sl.shard_model(policy, mesh, RULES[kind], transforms=transforms) if shard else None, full


def _fed(kind: str, transforms: tuple[Any, ...], dtype: torch.dtype) -> tuple[bool, int, int, list[str]]:
    model, full = _policy(kind, transforms)
    everyone = _joined()
    engine = Engine(everyone.rank - 2, dtype) if everyone.rank in ENGINES else None
    feed = Feed(
        everyone, trainers=2, model=model, convert=model and _convert, loader=engine, group_bytes=4096
    )  # fmt: skip
    feed.send()
    right = engine is None or engine.right(full)
    with torch.no_grad():
        for param in () if model is None else model.parameters():
            param.mul_(2)
    feed.send()
    doubled = {name: tensor if name == "scale" else 2 * tensor for name, tensor in full.items()}
    right &= engine is None or engine.right(doubled)
    everyone.close()
    assert feed.partly == ["table"]  # its second half has rows of padding, which nothing writes
    return right, sum(moves.bytes for moves in feed.moves), len(feed.moves), feed.unread


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "transforms"), [("tp", ()), ("experts", ()), ("dp", (sl.zero(3),)), ("dp", (sl.fsdp(),))]
)
def test_an_engine_gets_what_its_loader_reads(kind: str, transforms: tuple[Any, ...], dtype: torch.dtype):
    elements = 2 * HEAD * WIDTH * 3 + ROWS * WIDTH + WIDTH * 4 * HEAD + 2 * WIDTH + EXPERTS * 2 * INNER * WIDTH
    for right, sent, groups, unread in shared_pool(4).run(_fed, kind, transforms, dtype):
        assert right and unread == ["scale"]
        assert sent == elements * dtype.itemsize  # engines hold nothing before: no byte less would do
        assert groups > 4


def _failing() -> tuple[str, str, bool]:
    model, full = _policy("tp", ())
    everyone = _joined()
    engine = Engine(everyone.rank - 2, torch.float32) if everyone.rank in ENGINES else None
    feed = Feed(everyone, trainers=2, model=model, convert=model and _convert, loader=engine, group_bytes=2048)
    said = []
    for name in ("model.out.weight", "model.experts.3.up"):  # in the middle, and behind the last group of rank 2
        if everyone.rank == 3:
            engine.fails_at = name
        with pytest.raises(CheckpointError) as caught:
            feed.send()
        said.append(str(caught.value))
    if everyone.rank == 3:
        engine.fails_at = ""
    feed.send()
    return *said, engine is None or engine.right(full)


def test_a_loader_that_raises_is_named_on_all_ranks_and_can_be_fed_again():
    for first, last, right in shared_pool(4).run(_failing):
        assert "on rank 3" in first and "no room for model.out.weight" in first
        assert "on rank 3" in last and "no room for model.experts.3.up" in last
        assert right


def _resharded() -> bool:
    torch.manual_seed(0)
    policy = Policy()
    full = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    model = sl.shard_model(policy, "tp=2", RULES["tp"])
    everyone = _joined()
    engine = Engine(dist.get_rank(), torch.float32)
    feed = Feed(everyone, trainers=2, model=model, convert=_convert, loader=engine)  # engines on the ranks that train
    feed.send()
    sl.reshard(model, "dp=2")
    with torch.no_grad():
        model.out.bias.add_(1)
    feed.send()
    return engine.right({**full, "out.bias": full["out.bias"] + 1})


def test_the_model_may_change_its_mesh():
    assert all(shared_pool(2).run(_resharded))

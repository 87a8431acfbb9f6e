"""Tensors that reach a stage in another way than as arguments of its first module, and parameters between modules."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardlib as sl
from tests.engine.whole import whole

TOLERANCE = 1e-12  # of float64, relative; sums in another order differ by some 1e-15
KINDS: list[type[Blocks]] = []


class Blocks(nn.Module):
    """Four blocks; subclasses say how they are joined."""

    def __init_subclass__(cls) -> None:
        KINDS.append(cls)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))


class Skip(Blocks):
    """What the first block makes is added to what the third one makes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.blocks[0](x)
        return self.blocks[3](self.blocks[2](self.blocks[1](first)) + first)


class Residual(Blocks):
    """A sum around each block, outside of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = (x + block(x)).tanh()
        return x


class InPlace(Blocks):
    """Sums that are written into what blocks return."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.blocks[0](x)
        y = self.blocks[1](first)
        y += first
        z = self.blocks[2](y)
        z += y
        return self.blocks[3](z.tanh() * first)


@dataclass
class State:
    """The tensors that a block of `Objects` passes to the next one."""

    hidden: torch.Tensor
    penalty: torch.Tensor


torch.export.register_dataclass(State)


class Passing(nn.Linear):
    def forward(self, state: State) -> State:  # type: ignore[override]
        return State(super().forward(state.hidden), state.penalty + state.hidden.square().mean(1, keepdim=True))


class Objects(Blocks):
    """Blocks that are given an object, and return one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Passing(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = State(x, torch.zeros_like(x[:, :1]))
        for block in self.blocks:
            state = block(state)
        return state.hidden * state.penalty


class Mask(Blocks):
    """The first block makes a mask and an index; a later block of the next stage uses them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.blocks[0](x)
        mask, index = y > 0, y.argsort(1)
        y = self.blocks[2](self.blocks[1](y))
        return self.blocks[3](y.masked_fill(mask, 0.5).gather(1, index))


class Maker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.inner(x)
        return {"y": y, "mask": y > 0, "indices": [y.argmax(1), torch.complex(y, -y)], "name": "maker"}


class Made(Blocks):
    """A module returns a mask, an index and a complex tensor beside its result; other modules are given them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0], self.blocks[3] = Maker(), Using()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.blocks[0](x)
        y = self.blocks[2](self.blocks[1](made["y"]))
        return self.blocks[3](y, made["mask"], *made["indices"])


class Using(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: torch.Tensor, mask: Any, index: Any, factor: Any) -> torch.Tensor:
        return super().forward((x.masked_fill(mask, 0.1) * factor).abs()) * F.one_hot(index, 4)


class Twice(Blocks):
    """A module is called twice, and both results are used later."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.blocks[0](x), self.blocks[0](x + 1)
        return self.blocks[3](self.blocks[2](self.blocks[1](first)) * second + first)


class Sum(Blocks):
    """Numbers of all blocks are added up, as losses of routers are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(x), dtype=x.dtype)
        for block in self.blocks:
            x = block(x)
            total = total + x.square().mean(1)
        return x + total[:, None]


class Writing(Blocks):
    """Each block begins with a module that writes into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        for block in self.blocks:
            x = block(x)
        return x


def _wrong(kind: type[nn.Module], mesh: str, stages: str, *transforms: Any) -> list[str]:
    torch.manual_seed(0)
    single = kind().double()
    model = sl.shard_model(
        copy.deepcopy(single), mesh, sl.Rules({"**": None}, stages=stages), transforms=transforms, compile=None
    )
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wrong, want = [], dict(single.named_parameters())
    for size in (2, 3):
        single.zero_grad(), model.zero_grad()
        loss = single(x).square().mean()
        loss.backward()
        done = sl.pipeline_step(model, x, lambda y, _: y.square().mean(), microbatch_size=size)
        wrong += [f"loss {done.loss} {loss}"] * (not torch.isclose(done.loss, loss, rtol=TOLERANCE))
        for name, param in model.named_parameters():
            if not torch.allclose(whole(param.grad), want[name].grad, rtol=TOLERANCE, atol=TOLERANCE):
                wrong.append(name)
    return wrong


class Tokens(nn.Module):
    """Its forward reads its own parameters, and a weight of a module, as models of images do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.token, self.place = nn.Parameter(torch.randn(1, 4)), nn.Parameter(torch.randn(2, 4))
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embed(x)
        y = torch.stack([self.token.expand(len(y), -1), y], 1) + self.place.reshape(2, 4)
        for block in self.blocks:
            y = block(y).tanh()
        return y[:, 0]


def _of_parameters(*transforms: Any) -> list[str]:
    return _wrong(Tokens, "pp=2,dp=2", "embed, token, place, blocks.0 | blocks.1", *transforms)


@pytest.mark.parametrize("transform", [sl.zero(1), sl.zero(3), sl.fsdp()], ids=str)
def test_forward_reads_parameters_between_modules(ranks, transform: Any):
    assert not any(ranks(4).run(_of_parameters, transform))


def _all_wrong(mesh: str, stages: str, *transforms: Any) -> list[str]:
    return [f"{kind.__name__}: {name}" for kind in KINDS for name in _wrong(kind, mesh, stages, *transforms)]


HALVES, THREE = "blocks.0-1 | blocks.2-3", "blocks.0 | blocks.1-2 | blocks.3"


@pytest.mark.parametrize(
    ("mesh", "stages", "schedule"),
    [
        ("pp=2", HALVES, "1f1b"),
        ("pp=2", "blocks.0 | blocks.1 | blocks.2 | blocks.3", "zbv"),
        ("pp=2", "blocks.0 | blocks.1 | blocks.2 | blocks.3", "interleaved"),
        ("pp=3", THREE, "gpipe"),
        ("pp=3", THREE, "interleaved-zb"),
    ],
)
def test_tensors_cross_stages(ranks, mesh: str, stages: str, schedule: str):
    for wrong in ranks(sl.MeshShape(mesh).world_size).run(_all_wrong, mesh, stages, sl.pipeline(schedule)):
        assert not wrong

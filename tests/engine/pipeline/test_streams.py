"""What is drawn in a pipeline: the same on all stages between steps and around modules, by stage inside of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shardlib as sl
from shardlib.errors import InputError

TOLERANCE = 1e-12  # of float64, relative; sums in another order differ by some 1e-15
HALVES = "blocks.0-1 | blocks.2-3"


class Net(nn.Module):
    """Blocks; with `p` they drop out, with `noise` forward adds noise and has it back from what the blocks return."""

    def __init__(self, p: float = 0.0, noise: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(p)) for _ in range(4))
        self.noise = noise

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(x) if self.noise else torch.zeros_like(x)
        y = x + noise
        for block in self.blocks:
            y = block(y)
        return (y - noise - target).square().mean((1,))


def made(**given: Any) -> nn.Module:
    torch.manual_seed(0)
    return Net(**given).double()


def cut(mesh: str = "pp=2", schedule: str = "1f1b", stages: str = HALVES, **given: Any) -> nn.Module:
    rules = sl.Rules({"**": None}, stages=stages)
    return sl.shard_model(made(**given), mesh, rules, transforms=sl.pipeline(schedule, 4), compile=None)


def data(rows: int = 16) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(*torch.randn(2, rows, 4, generator=draw, dtype=torch.float64))


def mean(output: torch.Tensor, _batch: Any) -> torch.Tensor:
    return output.mean()


def _epochs(pipeline: bool) -> list[float]:
    model = cut() if pipeline else made()
    torch.manual_seed(2)
    opt, losses = torch.optim.SGD(model.parameters(), lr=0.1), []

    def run(batch: Any, **given: Any) -> Any:
        if pipeline:
            return sl.pipeline_step(model, tuple(batch), mean, **given).loss
        loss = model(*batch).mean()
        if not given:
            loss.backward()
        return loss

    for _ in range(2):
        model.eval()
        with torch.no_grad():
            losses += [run(batch, forward_only=True).item() for batch in DataLoader(data(), 8)]
        model.train()
        for batch in DataLoader(data(), 4, shuffle=True):
            opt.zero_grad()
            losses.append(run(batch).item())
            opt.step()
    return losses


def test_a_loader_shuffles_alike_on_all_stages_and_as_on_one_device(ranks):
    want = ranks(1).run(_epochs, False)[0]
    for found in ranks(2).run(_epochs, True):
        assert found == pytest.approx(want, rel=TOLERANCE)


def _other_batches(spent_by: str) -> list[str]:
    """Batches that differ between stages from a later step on, and the one after."""
    model, said = cut(), []
    x, target = data().tensors
    if spent_by == "evaluation":
        sl.pipeline_step(model, (x, target), mean, forward_only=True)
    elif spent_by == "training":
        sl.pipeline_step(model, (x, target), mean)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(dist.get_rank()))
    for batch in ((x[order], target[order]), (x, target[order]), (x, target)):
        try:
            sl.pipeline_step(model, batch, mean)
            said.append("")
        except InputError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("spent_by", ["nothing", "evaluation", "training"])
def test_other_batches_are_refused_in_any_step(ranks, spent_by: str):
    for both, labels, same in ranks(2).run(_other_batches, spent_by):
        assert both == labels and both.startswith("Ranks 0 and 1 work on the same examples, and were given different")
        assert same == ""


def _noise() -> float:
    """The blocks are identities, so that the loss is that of the batch without noise, if noise is one on all stages."""
    model = cut(noise=True)
    for block in model.blocks:
        if not isinstance(weight := block[0].weight, nn.Parameter):
            continue
        nn.init.eye_(weight)
        nn.init.zeros_(block[0].bias)
    x, _ = data().tensors
    return max(sl.pipeline_step(model, (x, x), mean).loss.item() for _ in range(2))


def test_what_forward_draws_between_modules_is_the_same_on_all_stages(ranks):
    assert max(ranks(2).run(_noise)) < TOLERANCE


def _losses(mesh: str, schedule: str, stages: str, given: dict[str, Any]) -> list[float]:
    model = cut(mesh, schedule, stages, **given)
    torch.manual_seed(3)
    losses = [sl.pipeline_step(model, data().tensors, mean).loss.item() for _ in range(3)]
    return [*losses, float(torch.rand(()))]


EACH = "blocks.0 | blocks.1 | blocks.2 | blocks.3"


def test_masks_depend_on_the_seed_and_not_on_the_cut(ranks):
    found = [
        ranks(2).run(_losses, "pp=2", schedule, stages, {"p": 0.5, "noise": True})
        for schedule, stages in (("gpipe", HALVES), ("1f1b", HALVES), ("interleaved", EACH))
    ]
    for losses in (each for run in found for each in run):
        assert losses == pytest.approx(found[0][0], rel=TOLERANCE)
    assert len({*found[0][0]}) == 4  # no step draws the masks of another
    assert found[0][0][-1] == found[0][1][-1]


def _masks() -> list[list[bool]]:
    """What each block drops of the microbatches of two steps, on this rank."""
    model, masks = cut(p=0.5), list[list[bool]]()
    for block in model.blocks:
        block.register_forward_hook(lambda _m, _i, y: masks.append((y == 0).flatten().tolist()))
    for _ in range(2):
        sl.pipeline_step(model, data(64).tensors, mean)
    return masks


def test_no_two_masks_are_equal(ranks):
    masks = [tuple(mask) for found in ranks(2).run(_masks) for mask in found]
    assert len(masks) == 4 * 4 * 2 and len({*masks}) == len(masks)


def _data_ranks() -> tuple[list[float], list[float]]:
    model = cut("dp=2,pp=2", p=0.5)
    sl.pipeline_step(model, data().tensors, mean)
    return torch.rand(2).tolist(), [random.random()]


def test_each_data_rank_draws_its_own(ranks):
    drawn = [torch_ for torch_, _ in ranks(4).run(_data_ranks)]  # ranks 0 and 1 are the stages of one data rank
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4).double(), nn.Linear(4, 2).double()
        self.head.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.body(x)))


def _loss_bits(freeze: bool) -> tuple[torch.dtype, float]:
    torch.manual_seed(0)
    model = Frozen()
    model.body.requires_grad_(not freeze)
    model.head.requires_grad_(freeze)
    model = sl.shard_model(model, "pp=2", sl.Rules({"**": None}, stages="body | head"))
    loss = sl.pipeline_step(model, data(8).tensors[:1], lambda y, _: y.square().mean(), microbatches=2).loss
    return loss.dtype, loss.item()


@pytest.mark.parametrize("freeze", [False, True])
def test_the_loss_is_the_same_where_a_stage_trains_nothing(ranks, freeze: bool):
    first, second = ranks(2).run(_loss_bits, freeze)
    assert first == second and first[0] is torch.float64

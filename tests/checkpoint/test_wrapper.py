"""What an `OptimizerWrapper` has besides a plain optimizer is saved too: the loss scale, and copies in more bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardlib as sl
from shardlib import checkpoint
from shardlib.testing import shared_pool
from shardlib.testing.models import Tokens, Transformer, perturb, rules_for
from shardlib.transforms import LossScale, Transform
from tests.checkpoint.training import whole

RECIPES = {
    "fp16": sl.precision("fp16", scaler=LossScale(init_scale=2.0**10, growth_interval=2)),
    "fp16_naive": sl.precision("fp16_naive", scaler=LossScale(init_scale=2.0**10, growth_interval=2)),
    "bf16": sl.precision("bf16"),
}
STAGES = {"replicate": sl.replicate(), **{f"zero({n})": sl.zero(n) for n in (1, 2, 3)}}
COPY = "master_parameter"
Whole = dict[str, torch.Tensor]


def _gpt(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return perturb(Transformer(vocab=16, heads=4, head=4, tied=True), seed)


class Run:
    """A training on this rank."""

    def __init__(self, mesh: str, *transforms: Transform, seed: int = 0) -> None:
        self.mesh = sl.MeshShape(mesh)
        model = _gpt(seed)
        self.model = sl.shard_model(model, mesh, rules_for(model), transforms=transforms, compile=None)
        self.optimizer = sl.OptimizerWrapper(torch.optim.AdamW, self.model, lr=1e-3)

    def train(self, steps: Sequence[int], *, overflow: int | None = None) -> list[float]:
        """Mean losses over ranks; where asked for, gradients of one step are too large on one rank."""
        place, count = self.mesh.data_place(self.mesh.coordinate(dist.get_rank()))
        losses = []
        for step in steps:
            self.optimizer.zero_grad()
            ids = Tokens(8, 5, 16)(step).chunk(count)[place]
            loss = F.cross_entropy(self.model(ids).float().flatten(0, 1), ids.flatten())
            self.optimizer.backward(loss * float("inf") if step == overflow and not place else loss)
            self.optimizer.clip_grad_norm_(5.0)
            self.optimizer.step()
            total = loss.detach().double()
            dist.all_reduce(total)
            losses.append(total.item() / dist.get_world_size())
        return losses

    def save(self, path: str, **options: Any) -> None:
        checkpoint.save(path, self.model, self.optimizer, **options)

    def load(self, path: str, **options: Any) -> None:
        checkpoint.load(path, self.model, self.optimizer, **options)

    def whole(self) -> Whole:
        """Parameters and the optimizer's state, and the loss scale with its count of good steps."""
        found = dict(sl.full_state_dict(self.model))
        for name, param in self.model.named_parameters():
            for key, value in self.optimizer.state.get(param, {}).items():
                found[f"{name} {key}"] = whole(param, value.detach())
        for key, value in (self.optimizer.scaler.state_dict() if self.optimizer.scaler else {}).items():
            found[f"scaler {key}"] = torch.tensor(value)
        return {name: value.detach().cpu().clone() for name, value in found.items()}

    def copies(self) -> Whole:
        """What is stepped on, from a step that moves nothing."""
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        self.train([9])
        return {name.removesuffix(f" {COPY}"): value for name, value in self.whole().items() if name.endswith(COPY)}


def _unlike(got: Whole, want: Whole) -> set[str]:
    assert got.keys() == want.keys(), sorted(got.keys() ^ want.keys())
    return {name for name in want if got[name].dtype != want[name].dtype or not torch.equal(got[name], want[name])}


def _stops(path: str, mesh: str, recipe: str, stage: str) -> tuple[Whole, list[float], Whole]:
    run = Run(mesh, RECIPES[recipe], STAGES[stage])
    run.train([0, 1, 2], overflow=1 if run.optimizer.scaler else None)
    run.save(path)
    at_save = run.whole()
    return at_save, run.train([3, 4]), run.whole()


def _goes_on(path: str, mesh: str, recipe: str, stage: str) -> tuple[Whole, list[float], Whole]:
    run = Run(mesh, RECIPES[recipe], STAGES[stage], seed=7)
    run.load(path)
    at_load = run.whole()
    return at_load, run.train([3, 4]), run.whole()


@pytest.mark.covering
@pytest.mark.parametrize(("mesh", "other"), [("dp=2", "zero(3)"), ("dp=4,tp=1", "zero(1)")])
@pytest.mark.parametrize("stage", ["replicate", "zero(2)", "zero(3)"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_in_few_bits_goes_on(tmp_path: Path, recipe: str, stage: str, mesh: str, other: str):
    """On the same mesh with the same bits; on another one all that was saved is there, and losses differ by rounding:
    by less than one unit in the last place of what they are computed from."""
    path = str(tmp_path / "saved")
    at_save, losses, at_end = shared_pool(4).run(_stops, path, "dp=2,tp=2", recipe, stage)[0]
    assert any(name.endswith(COPY) for name in at_save) == (recipe != "fp16")
    if recipe != "bf16":
        # Halved at the overflow, and one good step since: neither is what a new scale begins with.
        assert (at_save["scaler scale"], at_save["scaler good_steps"]) == (2.0**9, 1)
    at_load, again, at_its_end = shared_pool(4).run(_goes_on, path, "dp=2,tp=2", recipe, stage)[0]
    assert _unlike(at_load, at_save) == set()
    assert again == losses
    assert _unlike(at_its_end, at_end) == set()
    unit = torch.finfo(torch.bfloat16 if recipe == "bf16" else torch.float16).eps
    at_load, elsewhere, _ = shared_pool(sl.MeshShape(mesh).world_size).run(_goes_on, path, mesh, recipe, other)[0]
    assert _unlike(at_load, at_save) == set()
    assert elsewhere == pytest.approx(losses, rel=unit)


def _float32(path: str, mesh: str, stage: str) -> Whole:
    run = Run(mesh, STAGES[stage])
    run.train([0, 1])
    run.save(path)
    return sl.full_state_dict(run.model)


def _loads_fewer_bits(path: str, mesh: str, stage: str, *, with_optimizer: bool, stepped: bool) -> tuple[Whole, Whole]:
    run = Run(mesh, RECIPES["bf16"], STAGES[stage], seed=7)
    if stepped:
        run.train([0])
    checkpoint.load(path, run.model, run.optimizer if with_optimizer else None, cast=True)
    loaded = sl.full_state_dict(run.model)
    return loaded, run.copies()


@pytest.mark.covering
@pytest.mark.parametrize("how", ["the model alone", "with an optimizer", "with one that stepped"])
@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,tp=2"])
@pytest.mark.parametrize("stage", STAGES)
def test_copies_start_from_all_bits_of_a_checkpoint(tmp_path: Path, mesh: str, stage: str, how: str):
    path = str(tmp_path / "saved")
    pool = shared_pool(sl.MeshShape(mesh).world_size)
    wide = pool.run(_float32, path, mesh, stage)[0]
    options = {"with_optimizer": how != "the model alone", "stepped": how == "with one that stepped"}
    loaded, copies = pool.run(_loads_fewer_bits, path, mesh, stage, **options)[0]
    assert _unlike(loaded, {name: value.bfloat16() for name, value in wide.items()}) == set()
    assert len(copies) > 10
    assert _unlike(copies, {name: wide[name] for name in copies}) == set()


def _bfloat16(path: str, mesh: str, stage: str, steps: int) -> Whole:
    run = Run(mesh, RECIPES["bf16"], STAGES[stage])
    run.train(range(steps))
    run.save(path)
    return run.copies()


def _loads_more_bits(path: str, mesh: str, stage: str) -> Whole:
    run = Run(mesh, STAGES[stage], seed=7)
    run.load(path, cast=True)
    loaded = {name: value.clone() for name, value in sl.full_state_dict(run.model).items()}
    run.train([0])  # with moments alone in the state
    return loaded


@pytest.mark.covering
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("stage", ["replicate", "zero(1)", "zero(3)"])
def test_copies_become_the_parameters_of_a_model_with_as_many_bits(tmp_path: Path, stage: str, steps: int):
    path = str(tmp_path / "saved")
    copies = shared_pool(4).run(_bfloat16, path, "dp=2,tp=2", stage, steps)[0]
    for mesh, other in (("dp=2,tp=2", stage), ("dp=2", "zero(2)")):
        loaded = shared_pool(sl.MeshShape(mesh).world_size).run(_loads_more_bits, path, mesh, other)[0]
        assert _unlike({name: loaded[name] for name in copies}, copies) == set(), mesh


def _starts(path: str, stage: str, *, load: bool) -> Whole:
    run = Run("dp=2", RECIPES["bf16"], STAGES[stage], seed=7 if load else 0)
    run.load(path) if load else run.save(path)
    return run.copies()


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_before_the_first_step_holds_the_copies(tmp_path: Path, stage: str):
    path = str(tmp_path / "saved")
    copies = shared_pool(2).run(_starts, path, stage, load=False)[0]
    assert _unlike(shared_pool(2).run(_starts, path, stage, load=True)[0], copies) == set()
    exact = dict(_gpt().named_parameters())
    assert _unlike(copies, {name: exact[name].detach() for name in copies}) == set()


def test_a_save_between_the_passes_of_a_step_says_that_its_gradients_are_left_out(tmp_path: Path):
    model = sl.shard_model(nn.Linear(2, 2), "dp=1", {"*": None}, transforms=sl.accumulate(2))
    optimizer = sl.OptimizerWrapper(torch.optim.SGD, model, lr=0.1)
    optimizer.backward(model(torch.ones(1, 2)).sum())
    sl.save(tmp_path / "weights", model)
    with pytest.warns(UserWarning, match="between the 2 backward passes of a step .* begins the step anew"):
        sl.save(tmp_path / "both", model, optimizer)
    optimizer.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    sl.save(tmp_path / "step", model, optimizer)

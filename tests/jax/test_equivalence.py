"""`equivalent(engine="jax")`: what is right agrees, mistakes are found at modules, what JAX has not is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from examples.gpt import GPT, GPTConfig
from shardlib import Rules, fsdp, layouts, zero
from shardlib.errors import InputError, ShardlibError
from shardlib.testing import NotEquivalentError, assert_equivalent, equivalent, models
from tests.jax.refusals import raised


def rows(step: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-2, weight_decay=0.1)


class Awkward(models.MLP):
    """Tied, uneven, with buffers that change, a parameter that is frozen, one that nobody uses and one without dims."""

    def __init__(self) -> None:
        super().__init__(width=7, shared="weight", buffers=True, unused=True)
        self.up.bias.requires_grad_(False)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gain * super().forward(x)


CASES: dict[str, dict[str, Any]] = {
    "AdamW, clipped, in two passes": {"transforms": [zero(2)], "accumulate": 2, "clip": 0.1},
    "SGD": {"optimizer": sgd, "transforms": [fsdp()]},
    "Adam": {"optimizer": adam, "dtype": torch.bfloat16},
}


@pytest.mark.parametrize("case", CASES)
def test_what_the_engine_trains_is_what_torch_trains(case: str):
    report = assert_equivalent(Awkward, rows, "dp=2,tp=4", models.rules_for(Awkward()), engine="jax", **CASES[case])
    assert str(report).startswith("equivalent to a single device: mesh dp=2,tp=4 on JAX, 2 steps, ")
    compared = {difference.kind for difference in report.differences}
    assert compared == {"parameter", "buffer", "output", "loss", "gradient", "norm", "state"}
    assert all(difference.limit < 1 for difference in report.differences)


def _gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=16, context=8, n_layer=1, n_head=4, d_model=16))


def test_a_gpt_on_a_cube_of_devices_trains_as_on_one():
    rules = layouts.load("example_gpt", "3d")
    ids = models.Tokens(8, 8, 16)
    assert_equivalent(_gpt, ids, "depth=2,row=2,col=2", rules, engine="jax", steps=1)


class Otherwise(nn.Module):
    """What JAX is given of it is not what torch runs."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_exporting() or not self.what:
            return x
        return x * 1.001 if self.what == "value" else x + 0.001 * (x - x.detach())


class Model(nn.Module):
    def __init__(self, what: str = "") -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(6, 16), Otherwise(what), nn.Linear(16, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class WrongValue(Model):
    def __init__(self) -> None:
        super().__init__("value")


class WrongGradient(Model):
    def __init__(self) -> None:
        super().__init__("gradient")


RULES = {"up": "colwise", "down": "rowwise"}


def test_a_mistake_is_found_at_its_module():
    report = equivalent(WrongValue, rows, "dp=2,tp=2", RULES, engine="jax", steps=1)
    assert not report
    assert report.origin is not None
    assert (report.origin.module, report.origin.what) == ("act", "the output of act")
    with pytest.raises(NotEquivalentError, match="First difference, step 0: the gradient that act passes on"):
        assert_equivalent(WrongGradient, rows, "dp=2,tp=2", RULES, engine="jax", steps=1, accumulate=2)


class Dropping(Model):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Dropout(0.5)  # type: ignore[assignment]


def adagrad(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params)


def amsgrad(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, amsgrad=True)


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "engine": ({"engine": "tpu"}, ('engine=\'tpu\'; give "torch" or "jax"',)),
    "rng": ({"rng": "exact"}, ("rng='exact'", "Leave it out")),
    "shard": ({"rules": None, "shard": lambda model, mesh: model}, ("shard=", "torch engine alone")),
    "options": ({"compile": None, "no_sync": True}, ("no_sync=, compile=", "torch engine alone")),
    "clip": ({"clip": lambda model: torch.ones(())}, ("a function as clip=",)),
    "optimizer": ({"optimizer": adagrad}, ("torch.optim.adagrad.Adagrad", "AdamW, Adam and SGD")),
    "amsgrad": ({"optimizer": amsgrad}, ("Adam with amsgrad=True",)),
    "dropout": ({"model": Dropping}, ("draws random numbers", "dropout at zero", ".eval()")),
    "pipeline": ({"mesh": "pp=2,tp=2"}, ("pipeline axis",)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_jax_has_not_is_refused(case: str):
    given, words = REFUSED[case]
    arguments = {"model": Model, "batch": rows, "mesh": "dp=2,tp=2", "rules": RULES, "engine": "jax", **given}
    text = raised(lambda: equivalent(**arguments))
    assert text.startswith(("InputError", "PlanError")), text
    assert all(word in text for word in words), text
    assert issubclass(InputError, ShardlibError)


def test_what_the_model_returns_is_laid_out_and_the_loss_that_is_computed_of_it_is_not():
    rules = Rules({}, activations={"^output": "_ features@tp"}, unmatched="replicate")
    assert equivalent(lambda: models.MLP(outs=4), rows, "tp=2", rules, engine="jax", steps=1)


def test_new_values_of_buffers_are_not_what_a_module_returns():
    rules = Rules({}, activations={"^output": "_ _", "norm.output": "_ channels@tp _ _"}, unmatched="replicate")
    images = models.Numbers((4, 3, 6, 6))
    assert equivalent(models.ConvNet, images, "tp=2", rules, engine="jax", steps=1)

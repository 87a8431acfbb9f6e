"""Small models with one awkward feature each, on eight devices. Runs on the devices; failures are plain assertions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

import shardlib as sl
import shardlib.jax as sj
from shardlib.testing import models
from tests.jax.refusals import raised

__all__ = ["CHECKS", "drawn", "line_of_branch", "refused"]

CHECKS: dict[str, Callable[[], None]] = {}


def _check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__.removeprefix("_").replace("_", " ")] = function
    return function


def _same(model: nn.Module, mesh: str, rules: Any, x: torch.Tensor, **options: Any) -> tuple[Any, Any]:
    """Output, buffers and all gradients are those of torch; returns the function and its parameters."""
    model = model.double()
    fn, params = sj.compile_model(model, sj.make_mesh(mesh), rules, **options)

    def loss_of(params: Any) -> Any:
        y, buffers = fn.apply(params, fn.buffers, x)
        return (y * jnp.cos(jnp.arange(y.size, dtype=y.dtype).reshape(y.shape))).sum(), (y, buffers)

    (_, (got, buffers)), grads = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(params)
    wanted = model(x)
    (wanted * torch.arange(wanted.numel(), dtype=wanted.dtype).reshape(wanted.shape).cos()).sum().backward()
    _close(got, wanted)
    for name, grad in fn.to_torch(grads).items():
        expected = model.get_parameter(name).grad
        _close(grad, torch.zeros_like(grad) if expected is None else expected, name)
    for name, value in fn.to_torch(buffers).items():
        _close(value, (dict(model.named_buffers()) | dict(model.named_parameters()))[name], name)
    return fn, params


def _close(got: Any, wanted: torch.Tensor, name: str = "") -> None:
    got, wanted = np.asarray(got), wanted.detach().numpy()
    assert got.shape == wanted.shape, name
    # Rounding of 1.1e-16, over sums of a hundred terms; a mistake is of order one.
    assert np.allclose(got, wanted, rtol=1e-12, atol=1e-12), (name, np.abs(got - wanted).max())


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Stopped(nn.Module):
    """Gradients stop at no_grad and at detach, inside of which a buffer is changed and read again."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.register_buffer("seen", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        with torch.no_grad():
            scale = (self.down.weight * 2).sum() + h.mean()
            self.seen.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return self.down(h * scale + h.detach() ** 2 + self.seen)


_LINEAR = {"up": "colwise", "down": "rowwise"}


@_check
def _gradients_stop_where_torch_stops_them() -> None:
    _same(Stopped(), "dp=2,tp=4", sl.Rules({**_LINEAR, "seen": "replicate"}), _x(4, 4))


class InPlace(nn.Module):
    """Writes through views of views, before and after others read."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        view = y.view(-1, 3).t()
        before = view * 1
        view[1].mul_(2)
        y[:, 2:5] += x[:, :3]
        flat = y.flatten()
        flat[::2] = 0.5
        return y + before.t().reshape(y.shape) + view.sum()


@_check
def _writes_through_views_reach_what_they_are_views_of() -> None:
    _same(InPlace(), "dp=4,tp=2", {"up": "colwise"}, _x(4, 4))


@_check
def _tied_uneven_and_changing_buffers() -> None:
    for shared in ("weight", "module"):
        model = models.MLP(width=7, shared=shared, buffers=True, unused=True)  # type: ignore[arg-type]
        rules = models.rules_for(model)
        params = _same(model, "dp=2,tp=4", rules, _x(4, 6))[1]
        assert params["up.weight"].shape == (8, 6), "7 rows on 4 devices are padded"
        assert "again.weight" not in params


@_check
def _transformers_with_fused_and_grouped_heads() -> None:
    ids = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(0))
    grouped = {"kv_heads": 2, "norm": "rms", "position": "rotary"}
    for sequence, options in ((True, {"fused": True, "tied": True}), (False, grouped)):
        model = models.Transformer(vocab=11, heads=4, head=4, layers=1, **options)  # type: ignore[arg-type]
        _same(model, "dp=2,tp=4", models.rules_for(model, sequence=sequence), ids)


@_check
def _batch_norm_has_the_statistics_of_the_global_batch() -> None:
    model = models.ConvNet()
    fn, params = _same(model, "dp=2,tp=4", models.rules_for(model), _x(4, 3, 6, 6))
    with_none = raised(lambda: fn(params, _x(4, 3, 6, 6)))
    assert "norm.running_mean" in with_none and "fn.apply" in with_none
    model.zero_grad()
    evaluated, params = _same(model.eval(), "dp=2,tp=4", models.rules_for(model), _x(4, 3, 6, 6))
    evaluated(params, _x(4, 3, 6, 6))


@_check
def _borders_of_the_plan_are_sharding_constraints() -> None:
    x, mesh = jnp.ones((4, 8)), sj.make_mesh("dp=2,tp=4")
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    plain: dict[str, Any] = {"0": "colwise", "2": "rowwise"}
    found = {}
    for name, border in {
        "none": {},
        "split output": {"2.output": "batch out@tp"},
        "whole output": {"2.output": "batch out"},
        "whole input": {"2.input": "batch in"},
    }.items():
        fn, params = sj.compile_model(model, mesh, plain | border)
        program = jax.jit(fn).lower(params, x).compile()
        gathers = program.as_text().count(" all-gather(")
        found[name] = (program.output_shardings.spec, gathers)
        _close(program(params, x), model(torch.ones(4, 8).double()))
    rows = jax.P("dp")
    assert found["whole output"] == found["none"] == (rows, 0), found
    assert found["split output"] == (jax.P("dp", "tp"), 0), found
    assert found["whole input"][1] > 0, found


@_check
def _frozen_parameters_are_no_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    model[0].requires_grad_(False)
    fn, params = _same(model, "dp=2,tp=4", {"0": "colwise", "2": "rowwise"}, _x(4, 4))
    assert sorted(params) == ["2.bias", "2.weight"] and sorted(fn.buffers) == ["0.bias", "0.weight"]


@_check
def _parameters_go_to_torch_and_back() -> None:
    model = models.Transformer(vocab=11, heads=4, head=4, layers=1, fused=True).double()
    rules = models.rules_for(model)
    fn, params = sj.compile_model(model, sj.make_mesh("dp=2,tp=4"), rules, transforms=[sl.zero(3)])
    back = fn.to_torch(params)
    assert all(torch.equal(back[name], p) for name, p in model.named_parameters())
    again = fn.from_torch(back)
    for name, array in again.items():
        assert array.sharding == params[name].sharding and np.array_equal(array, params[name])
    assert params["blocks.0.attn.qkv.weight"].shape == (3, 16, 16)
    spec = params["blocks.0.attn.qkv.weight"].sharding.spec
    assert spec[1] == "tp" and "dp" in spec


@_check
def _stages_of_zero_divide_what_the_plan_says() -> None:
    model, rules = nn.Linear(8, 8, bias=False), {"weight": "out@tp in"}
    split, whole = jax.P(("tp", "dp"), None), jax.P("tp", None)
    for stage, phases in {1: "state", 2: "grad state", 3: "stored grad state"}.items():
        fn, params = sj.compile_model(model, sj.make_mesh("dp=2,tp=4"), rules, transforms=[sl.zero(stage)])
        optimizer = {"mu": params, "count": jnp.zeros((), jnp.int32)}
        for phase in ("stored", "grad", "state"):
            found = fn.shardings(optimizer, phase)  # type: ignore[arg-type]
            assert found["mu"]["weight"].spec == (split if phase in phases.split() else whole), (stage, phase)
            assert found["count"].spec == jax.P()


@_check
def _low_precision_is_a_phase() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    rules = {"0": "colwise", "2": "rowwise"}
    made = sj.make_mesh("dp=2,tp=4")
    fn, params = sj.compile_model(model, made, rules, transforms=[sl.precision("bf16")])
    y = fn(params, jnp.ones((4, 4), jnp.bfloat16))
    grads = jax.grad(lambda p: fn(p, jnp.ones((4, 4), jnp.bfloat16)).astype(jnp.float32).sum())(params)
    assert (y.dtype, params["0.weight"].dtype, grads["0.weight"].dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)


# --- drawing --------------------------------------------------------------------------------------------------------


def drawn() -> dict[str, Any]:
    """What dropout does with keys."""
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.25))
    for parameter in model.parameters():
        parameter.data.abs_()  # sums of terms of one sign: where they cancel, roundings are no small part of the result
    fn, params = sj.compile_model(model, sj.make_mesh("dp=2,tp=4"), {"0": "colwise"})
    x = jnp.ones((8, 16))
    one, same, other = (fn(params, x, rng=jax.random.key(seed)) for seed in (1, 1, 2))
    alone, alone_params = sj.compile_model(model, sj.make_mesh("dp=1", devices=jax.devices()[:1]), {"0": None})
    single = alone(alone_params, x, rng=jax.random.key(1))
    plain = model.eval()(torch.ones(8, 16)).detach().numpy()
    kept = np.asarray(one) != 0
    return {
        "the same key": bool((one == same).all()),
        "another key": bool((one == other).all()),
        "one device": bool((np.asarray(single != 0) == kept).all()),
        "kept": float(kept.mean()),
        "scaled": bool(np.allclose(np.asarray(one)[kept], plain[kept] / 0.75, rtol=1e-5)),
        "no key": raised(lambda: fn(params, x)),
    }


# --- refusals -------------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:  # on purpose
            return self.up(x)
        return x


class Listed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(x[0].tolist())


class ManyOps(nn.Module):
    """Ops that stay whole beside ops that torch decomposes, with and without gradients, in a layer that is split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.lstm = nn.Linear(4, 8), nn.LSTM(4, 8, 2, batch_first=True, bidirectional=True, proj_size=2)
        self.bag = nn.EmbeddingBag(6, 4, mode="max")
        self.gru = nn.GRU(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x).view(4, 2, 4)
        y, (state, _) = self.lstm(h)
        ids = torch.tensor([[0, 2], [1, 1], [5, 0], [2, 3]])
        with torch.no_grad():
            scale = torch.cdist(y[:, 0], self.bag(ids))
        near = torch.cdist(y[:, 0], self.bag(ids)) * scale
        y = y.scatter_reduce(1, ids[:, :1, None].expand(-1, -1, 4) % 2, h[:, 1:], "amax")
        image = nn.functional.pixel_shuffle(self.gru(y)[0].reshape(1, 4, 4, 2), 2)
        first, second = torch.broadcast_tensors(near, x[:1])
        product = torch.vdot(state.flatten(), image.flatten()[:32]) * nn.functional.mse_loss(first, second)
        return torch.stack([first, second.type_as(first)]) * product


@_check
def _ops_that_torch_decomposes_stand_beside_ops_that_stay_whole() -> None:
    _same(ManyOps(), "dp=2,tp=4", {"up": "colwise", "lstm": None, "bag": None, "gru": None}, _x(4, 4))


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.PixelShuffle(2)  # which torch decomposes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.airy_ai(self.first(x)) + torch.special.bessel_y0(x.sum())


class Masked(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].sum()


def refused(x64: bool) -> dict[str, str]:
    """What is raised for each wrong thing."""
    mesh = sj.make_mesh("dp=2,tp=4")
    linear, rules = nn.Linear(4, 8), {"weight": "out@tp in", "bias": "out@tp"}
    explicit = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    one = torch.ones(4, 4)
    found = {
        "branch": lambda: sj.compile_model(Branches(), mesh, {"up": None}, example=one),
        "number": lambda: sj.compile_model(Listed(), mesh, {}, example=one),
        "mask": lambda: sj.compile_model(Masked(), mesh, {}, example=one),
        "unknown": lambda: sj.compile_model(Unknown(), mesh, {}, example=torch.ones(2, 4, 2, 2)),
        "devices": lambda: sj.make_mesh("dp=2,tp=2"),
        "open devices": lambda: sj.make_mesh("dp=-1,tp=3"),
        "more devices": lambda: sj.make_mesh("dp=16", devices=jax.devices()),
        "explicit": lambda: sj.compile_model(linear, explicit, rules),
        "pipeline": lambda: sj.compile_model(linear, sj.make_mesh("pp=8"), rules),
        "offload": lambda: sj.compile_model(linear, mesh, rules, transforms=[sl.offload("state")]),
        "accumulate": lambda: sj.compile_model(linear, mesh, rules, transforms=[sl.accumulate(4)]),
        "missing": lambda: sj.compile_model(linear, mesh, rules)[0]({}, one),
        "unnamed": lambda: sj.compile_model(linear, mesh, rules)[0].to_torch({"wieght": one}),
    }
    if not x64:
        found["x64"] = lambda: sj.compile_model(nn.Linear(4, 8).double(), mesh, rules)
    return {name: raised(call) for name, call in found.items()}


def line_of_branch() -> int:
    """Where the condition stands in this file."""
    lines, first = inspect.getsourcelines(Branches)
    return first + next(i for i, line in enumerate(lines) if re.search("# on purpose", line))

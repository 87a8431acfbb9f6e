"""Models whose blocks are scanned beside the same models unrolled. Failures are plain assertions."""

from __future__ import annotations

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

__all__ = ["CHECKS", "refused"]

CHECKS: dict[str, Callable[[], None]] = {}


def _check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__.removeprefix("_").replace("_", " ")] = function
    return function


def _same(model: nn.Module, rules: Any, x: Any, rng: Any = None, **options: Any) -> list[int]:
    """Outputs, buffers and gradients are those of the unrolled model; return the number of loops in both programs."""
    found, loops = [], []
    for scan in (False, True):
        fn, params = sj.compile_model(model.double(), sj.make_mesh("dp=2,tp=4"), rules, scan=scan, **options)

        def loss_of(params: Any, fn: Any = fn) -> Any:
            y, buffers = fn.apply(params, fn.buffers, x, rng=rng)
            squares = [jnp.square(leaf).sum() for leaf in jax.tree.leaves(y)]
            return sum(squares) / 64, (y, buffers)

        program = jax.jit(jax.value_and_grad(loss_of, has_aux=True)).lower(params)
        (_, (y, buffers)), grads = program.compile()(params)
        assert {*grads} == {name for name, _ in model.named_parameters()}
        assert all(leaf.any() for leaf in jax.tree.leaves(grads)), "a gradient is lost"
        found.append((y, buffers, grads))
        loops.append(program.as_text().count("stablehlo.while"))
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        # Rounding of 1.1e-16, over sums of a hundred terms; a mistake is of order one.
        assert np.allclose(one, other, rtol=1e-12, atol=1e-12), np.abs(np.asarray(one) - np.asarray(other)).max()
    return loops


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Stack(nn.Module):
    """Blocks with dropout and a buffer that changes, after a first one of another form; all results are returned."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(relative=at == 0) for at in range(depth)])

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        scale, seen = x.square().mean(), []
        for block in self.blocks:
            x = block(x, scale)
            seen.append(x)
        return seen


class Block(nn.Module):
    count: torch.Tensor

    def __init__(self, relative: bool) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.5)
        self.relative = nn.Parameter(torch.ones(8)) if relative else None
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x = x if self.relative is None else x * self.relative
        self.count.add_(x.detach().mean())
        return x + self.down(self.drop(torch.tanh(self.up(x * scale))))


@_check
def _dropout_buffers_and_results_of_every_block() -> None:
    rules = sl.Rules({"up": "colwise", "down": "rowwise"}, unmatched="replicate")
    unrolled, scanned = _same(Stack(4), rules, _x(4, 8), jax.random.key(0))
    assert scanned == unrolled + 2, "a forward and a backward"


@_check
def _a_transformer_with_fused_heads_at_zero_3() -> None:
    model = models.Transformer(vocab=11, heads=4, head=4, layers=3, fused=True, tied=True)
    ids = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(0))
    unrolled, scanned = _same(model, models.rules_for(model), ids, transforms=[sl.zero(3)])
    assert (unrolled, scanned) == (0, 2), "a forward and a backward"


class Mixed(nn.Module):
    """Of which no two consecutive blocks are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(8, 8, bias=False)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def refused() -> dict[str, str]:
    """What is raised for each wrong thing."""
    mesh, x = sj.make_mesh("dp=2,tp=4"), torch.ones(4, 4)
    other_layouts = {"blocks.0": "colwise", "blocks.1": "rowwise"}
    alike = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])})
    alike.forward = lambda x: alike["blocks"][1](alike["blocks"][0](x))  # type: ignore[index]
    return {
        "mixed": raised(lambda: _called(Mixed(), mesh, {"**": None}, x)),
        "layouts": raised(lambda: _called(alike, mesh, other_layouts, x)),
        "none": raised(lambda: _called(nn.Linear(4, 4), mesh, {"**": None}, x)),
        "flag": raised(lambda: sj.compile_model(Mixed(), mesh, {"**": None}, scan="auto")),  # type: ignore[arg-type]
    }


def _called(model: nn.Module, mesh: Any, rules: Any, x: torch.Tensor) -> Any:
    fn, params = sj.compile_model(model, mesh, rules, scan=True)
    return fn(params, x)

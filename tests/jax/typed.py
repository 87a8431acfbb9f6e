"""Layouts typed on meshes of thousands of devices, of which there are none. Runs where JAX is."""

from __future__ import annotations

import itertools
from typing import Any

import gpt
import jax
import jax.numpy as jnp
import torch
from torch import nn

import shardlib as sl
import shardlib.jax as sj
from shardlib import layouts
from shardlib._mesh_shape import MeshShape
from shardlib.jax._sharding_rules import Conflict, Operand, ruled
from shardlib.jax._typer import Typer
from shardlib.rules import Rules
from tests.jax.families import FAMILIES

__all__ = ["Blocks", "Heads", "Nested", "family", "gathered", "large_gpt", "small", "unlike_jax"]


def large_gpt(mesh: str, mode: str | None = None) -> sj.LayoutReport:
    """A GPT of 2.4 billion parameters, on meta."""
    with torch.device("meta"):
        model = gpt.GPT(gpt.GPTConfig(vocab_size=50304, context=1024, n_layer=2, n_head=64, d_model=8192))
    ids = torch.empty(256, 1024, dtype=torch.int64, device="meta")
    return sj.check_layouts(model, mesh, layouts.for_model(model, mode), example=ids)


def family(name: str, mesh: str) -> sj.LayoutReport:
    build, batch = FAMILIES[name]
    return sj.check_layouts(build(), mesh, example=batch(0))


class Blocks(nn.Module):
    """Two blocks of an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(64, 256), "down": nn.Linear(256, 64)}) for _ in "ab")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block["down"](block["up"](x).relu())  # type: ignore[index]
        return x


class Heads(nn.Module):
    """Queries and keys that are contracted over what both split; a table that is looked up; two streams that meet."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.out = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = self.q(x), self.k(x)
        scores = q @ k.transpose(-1, -2)
        return self.out(scores.softmax(-1) @ x) + q


class Nested(nn.Module):
    """A value that leaves two modules at once."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.after = nn.Sequential(nn.Linear(64, 64)), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.inner(x))


def small(kind: type[nn.Module], mesh: str, rules: dict[str, Any]) -> sj.LayoutReport:
    x = torch.empty(4096, 64, 64, device="meta")
    return sj.check_layouts(kind(), mesh, Rules(rules, unmatched="replicate"), example=x)


# --- beside JAX's own types ------------------------------------------------------------------------------------------

_SHAPE = MeshShape("dp=2,tp=4")
_AXES: tuple[tuple[str, ...], ...] = ((), ("dp",), ("tp",))
_RESHAPES = [
    ((8, 16), (128,)),
    ((8, 16), (8, 4, 4)),
    ((8, 16), (2, 4, 16)),
    ((8, 1, 16), (8, 16)),
    ((8, 16), (8, 16, 1)),
]


def unlike_jax() -> tuple[list[str], int]:
    """Where explicit sharding has an answer and ours is neither the same nor a refusal; how many it had."""
    products = [
        (lambda a, b: a @ b, (8, 16), (16, 8)),
        (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (8, 8, 16), (8, 16, 8)),
    ]
    # Of batch dims split in one operand JAX takes the left one's layout, and ours is the cheaper one.
    cases = [
        (f, (a, b), specs)
        for f, a, b in products
        for specs in itertools.product(_specs(len(a)), _specs(len(b)))
        if len(a) == 2 or specs[0][0] == specs[1][0]
    ]
    cases += [((lambda x, n=new: x.reshape(n)), (old,), (spec,)) for old, new in _RESHAPES for spec in _specs(len(old))]
    wrong, answers = [], 0
    typer = Typer(_SHAPE)
    for function, shapes, specs in cases:
        program = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
        (eqn,) = program.jaxpr.eqns
        operands = [Operand(v.aval, s, parameter="w") for v, s in zip(eqn.invars, specs, strict=True)]
        asked, _ = typer._asked(eqn, operands)
        if asked is None:
            continue
        answers += 1
        try:
            ours = ruled(eqn, operands, None, _SHAPE)
        except Conflict:
            continue
        assert ours is not None
        if ours.outs != asked and not ours.reshards:
            wrong.append(f"{eqn.primitive} of {[o.text for o in operands]}: JAX {asked}, ours {ours.outs}")
    return wrong, answers


def _specs(ndim: int) -> list[Any]:
    found = itertools.product(_AXES, repeat=ndim)
    return [spec for spec in found if len({a for e in spec for a in e}) == sum(map(len, spec))]


def gathered() -> dict[str, dict[str, int]]:
    """What is moved for each transform."""
    mlp = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    rules, batch = {"0": "colwise", "2": "rowwise"}, torch.empty(256, 64, device="meta")
    transforms: dict[str, Any] = {"nothing": (), "zero(2)": sl.zero(2), "zero(3)": sl.zero(3)}
    return {
        name: dict(sj.check_layouts(mlp, "dp=4,tp=8", rules, example=batch, transforms=each).moved)
        for name, each in transforms.items()
    }

"""Typing of a model of torch: its graph as a program of JAX, on a mesh without devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import torch
from torch import nn

from shardlib import _plan
from shardlib._plan import Plan, RulesLike
from shardlib.engine import _torch
from shardlib.engine._torch import pytree
from shardlib.jax._compile import Compiled, as_call, structure_of
from shardlib.jax._dtypes import as_dtype
from shardlib.jax._export import module_path
from shardlib.jax._sharding_rules import Operand
from shardlib.jax._storage import Storage, storage_of
from shardlib.jax._typer import Typer, abstract_mesh
from shardlib.jax.rules import refuse_settings

__all__ = ["type_model"]


def type_model(
    typer: Typer, model: nn.Module, rules: RulesLike | None, transforms: Any, example: Any
) -> tuple[tuple[str, ...], int]:
    """Type the program of a batch; return the uneven tensors and the number of modules that it runs through."""
    plan = _plan.make_plan(model, typer.shape, rules, transforms=transforms)
    refuse_settings(plan, served=("capacity_factor",))
    fn, stored = _without_values(model, plan)
    modules = _typed(typer, fn, stored, example)
    return tuple(name for name, storage in stored.items() if storage.uneven), modules


def _without_values(model: nn.Module, plan: Plan) -> tuple[Compiled, dict[str, Storage]]:
    """Compile a model as `compile_model` does, on a mesh without devices and with tensors without memory."""
    mesh = abstract_mesh(plan.mesh)
    stored = {row.name: storage_of(row, mesh, plan.mesh) for row in plan.rows}
    with _torch.fake_tensors():
        return Compiled(structure_of(model, plan), plan, mesh, stored, {}, None), stored


def _typed(typer: Typer, fn: Compiled, stored: Mapping[str, Storage], example: Any) -> int:
    args, kwargs = as_call(example)
    leaves, structure = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    with _torch.fake_tensors():
        graph = fn.prepare(pytree.tree_map_only(torch.Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype), example))

    def forward(arrays: list[Any], batch: list[Any]) -> Any:
        given = iter(batch)
        args, kwargs = pytree.tree_unflatten([next(given) if torch.is_tensor(x) else x for x in leaves], structure)
        return fn.apply(dict(zip(stored, arrays, strict=True)), {}, *args, rng=jax.random.key(0), **kwargs)

    arrays = [jax.ShapeDtypeStruct(s.array_shape, as_dtype(s.dtype)) for s in stored.values()]
    batch = [jax.ShapeDtypeStruct(tuple(t.shape), as_dtype(t.dtype)) for t in tensors]
    program = jax.make_jaxpr(forward)(arrays, batch)
    inputs = [
        Operand(var.aval, typer.split(storage.specs["stored"], len(var.aval.shape)), parameter=name)
        for var, (name, storage) in zip(program.jaxpr.invars, stored.items(), strict=False)
    ]
    inputs += [Operand.unsharded(var.aval) for var in program.jaxpr.invars[len(inputs) :]]
    typer.run(program.jaxpr, [Operand.unsharded(var.aval) for var in program.jaxpr.constvars], inputs)
    return len({module_path(node)[-1:] for node in graph.nodes})

"""Check of a layout by JAX's sharding types: the model's graph is typed on a mesh that has no devices."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch
from jax.sharding import Mesh
from torch import nn

from shardlib import _plan
from shardlib._mesh_shape import MeshLike, MeshShape
from shardlib._plan import Plan, RulesLike, Transform
from shardlib.engine import _torch
from shardlib.engine._torch import pytree
from shardlib.errors import MeshError
from shardlib.jax._compile import Compiled, as_call, structure_of
from shardlib.jax._dtypes import as_dtype
from shardlib.jax._export import module_path
from shardlib.jax._mesh import shape_of
from shardlib.jax._sharding_rules import Operand
from shardlib.jax._storage import Storage, storage_of
from shardlib.jax._typer import Finding, Typer, abstract_mesh, spec_of
from shardlib.jax.rules import refuse_settings

__all__ = ["LayoutReport", "check_layouts"]


@dataclass(frozen=True)
class LayoutReport:
    """The result of typing a model's graph. True where nothing is ambiguous; prints as text.

    Attributes:
        mesh: its axes and sizes.
        findings: operands whose layouts contradict each other, or leave the result's layout open.
        reshards: values that XLA redistributes although neither a parameter's layout nor a rule for an activation says
            so: correct, but slow.
        moved: number of communications of the declared layouts in a forward, by kind: "sum" (a contracted or looked-up
            dim is sharded), "gather" and "exchange" (at a module's input or output, or of a stored shard).
        uneven: tensors that their axes do not divide, typed as unsharded there: JAX types even shards only.
        ops: the number of JAX primitives that were typed.
        modules: the number of their modules.
    """

    mesh: MeshShape
    findings: tuple[Finding, ...]
    reshards: tuple[Finding, ...]
    moved: Mapping[str, int]
    uneven: tuple[str, ...]
    ops: int
    modules: int

    @property
    def ok(self) -> bool:
        return not self.findings

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        verdict = f"{len(self.findings)} ambiguous or contradictory" if self.findings else "nothing ambiguous"
        costs = ", ".join(f"{n} {kind}{'s' * (n > 1)}" for kind, n in sorted(self.moved.items()) if n)
        lines = [
            f"{verdict}: {self.ops} ops in {self.modules} modules on {self.mesh.world_size:,} devices ({self.mesh})",
            f"forward: {costs or 'nothing is moved'}",
        ]
        lines += ["", *_folded(self.findings)] if self.findings else []
        if self.reshards:
            lines += ["", "moved without a word (right, and slow):", *_folded(self.reshards)]
        if self.uneven:
            lines += ["", f"uneven, typed as replicated: {', '.join(self.uneven)}"]
        return "\n".join(lines)


def check_layouts(
    model: nn.Module,
    mesh: MeshLike | Mesh,
    rules: RulesLike | None = None,
    *,
    transforms: Transform | Sequence[Transform] = (),
    example: Any,
) -> LayoutReport:
    """Type the forward of a model, with the layouts of rules, on a mesh of any size; only the host device is needed.

    Each op gets the layouts of its operands, under JAX's explicit sharding. A finding is a contracted dim that is
    sharded in one operand only or over two axes, an axis that would shard two dims of a result, or two operands with
    different layouts. A case with one answer is not a finding: a row-parallel product is summed, an unsharded operand
    is sliced. All findings are reported, not only the first.

    Args:
        model: a single-device module; it is not changed, and may be on `meta`.
        mesh: "dp=128,tp=64", a `MeshShape`, or a mesh of JAX or torch.
        rules: as for `compile_model`.
        transforms: as for `compile_model`.
        example: a global batch, as for `compile_model`; tensors on `meta` will do.

    Raises:
        PlanError, InputError, RuleError, LayoutError, MeshError: as `compile_model`.

    >>> model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    >>> x = torch.empty(256, 64, device="meta")
    >>> bool(check_layouts(model, "dp=128,tp=64", {"0": "colwise", "2": "rowwise"}, example=x))
    True
    >>> report = check_layouts(model, "dp=128,tp=64", {"*": "colwise"}, example=x)
    >>> report.findings[0].module
    '2'
    """
    shape = shape_of(mesh) if isinstance(mesh, Mesh) else MeshShape.of(mesh)
    if -1 in shape.sizes:
        raise MeshError(f'check_layouts() was given mesh "{shape}"; give every size: no devices are counted.')
    plan = _plan.make_plan(model, shape, rules, transforms=transforms)
    refuse_settings(plan)
    fn, stored = _without_values(model, plan)
    typer = Typer(shape)
    modules = _typed(typer, fn, stored, example)
    uneven = tuple(name for name, storage in stored.items() if storage.uneven)
    typed = typer.typed
    return LayoutReport(
        shape, tuple(typed.findings), tuple(typed.reshards), dict(typed.moved), uneven, typed.ops, modules
    )


def _without_values(model: nn.Module, plan: Plan) -> tuple[Compiled, dict[str, Storage]]:
    """Compile a model as `compile_model` does, on a mesh without devices and with tensors without memory."""
    mesh = abstract_mesh(plan.mesh)
    stored = {row.name: storage_of(row, mesh, plan.mesh) for row in plan.rows}
    with _torch.fake_tensors():
        return Compiled(structure_of(model, plan), plan, mesh, stored, {}, None), stored


def _typed(typer: Typer, fn: Compiled, stored: Mapping[str, Storage], example: Any) -> int:
    """Type the program of a batch; return the number of modules that it runs through."""
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
        Operand(var.aval, spec_of(storage.specs["stored"], len(var.aval.shape)), parameter=name)
        for var, (name, storage) in zip(program.jaxpr.invars, stored.items(), strict=False)
    ]
    inputs += [Operand.unsharded(var.aval) for var in program.jaxpr.invars[len(inputs) :]]
    typer.run(program.jaxpr, [Operand.unsharded(var.aval) for var in program.jaxpr.constvars], inputs)
    return len({module_path(node)[-1:] for node in graph.nodes})


_MORE = re.compile(r"\d+")


def _folded(findings: Sequence[Finding]) -> list[str]:
    """Fold the findings of repeated blocks into one each, with a count."""
    folded_findings: dict[str, list[Finding]] = {}
    for finding in findings:
        folded_findings.setdefault(
            _MORE.sub("*", finding.module) + str(finding).partition('"')[0] + finding.conflict, []
        ).append(finding)
    more = (
        f"\n    and in {len(group) - 1} more like it" if len(group) > 1 else "" for group in folded_findings.values()
    )
    return [f"{group[0]}{rest}" for group, rest in zip(folded_findings.values(), more, strict=True)]

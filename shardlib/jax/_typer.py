"""Typing of a JAX program: the mesh axes that split each of its values, and where this is not declared.

JAX's explicit sharding types one primitive after another, on a mesh without devices. It stops at the first ambiguous
one, supports some not at all, and lets others communicate silently. For these we have rules: where Megatron and XLA's
partitioner agree, we take their answer (a contracted dim with the same split in both operands is summed, an unsharded
operand is sliced like the other one). A case without an answer is a *finding*, and typing continues with a default, so
that all findings are reported at once. Communication that no border declares is a *reshard*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend.core import Literal
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from shardlib._mesh_shape import MeshShape
from shardlib.jax import _sharding_rules as rules
from shardlib.jax._context import REDISTRIBUTED
from shardlib.jax._sharding_rules import Conflict, Operand, Ruling, Spec

__all__ = ["Finding", "Typed", "Typer", "abstract_mesh", "spec_of"]


@dataclass(frozen=True)
class Finding:
    """An op whose operands have contradictory or ambiguous layouts.

    Attributes:
        module: its dotted name; "" is the model itself.
        op: the op of torch.
        operands: the operands, as each dim's global size with the axes that shard it.
        conflict: the contradiction, ambiguity, or silent communication.
        advice: a remedy.
    """

    module: str
    op: str
    operands: tuple[str, ...]
    conflict: str
    advice: str = ""

    def __str__(self) -> str:
        text = f'{self.op} in "{self.module or "(root)"}": {self.conflict}\n    of {" and ".join(self.operands)}'
        return f"{text}\n    {self.advice}" if self.advice else text


@dataclass
class Typed:
    """The types of a program.

    Attributes:
        findings: contradictions and ambiguities.
        reshards: values that are redistributed although no border says so.
        moved: number of communications of the declared layouts, by kind: "sum", "gather", "exchange".
        ops: the number of typed primitives.
    """

    findings: list[Finding]
    reshards: list[Finding]
    moved: Counter[str]
    ops: int = 0


def abstract_mesh(shape: MeshShape, kind: AxisType = AxisType.Auto) -> Any:
    """Return a mesh without devices, which can replace a `Mesh`."""
    return AbstractMesh(shape.sizes, shape.names, axis_types=(kind,) * len(shape))


def spec_of(spec: PartitionSpec | Sequence[Any], ndim: int) -> Spec:
    """Return the axes of each dim in one normal form."""
    entries = [*spec, *[None] * (ndim - len(tuple(spec)))]
    return tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)


class Typer:
    """Types programs on one mesh, and keeps what it finds."""

    def __init__(self, shape: MeshShape) -> None:
        self.shape = shape
        self.mesh = abstract_mesh(shape, AxisType.Explicit)
        self.typed = Typed([], [], Counter())

    def run(
        self, jaxpr: Any, constants: Sequence[Operand], inputs: Sequence[Operand], scope: str = ""
    ) -> list[Operand]:
        """Return the types of a program's results, for types of its inputs."""
        known: dict[Any, Operand] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *inputs), strict=True))

        def read(var: Any) -> Operand:
            return Operand.unsharded(var.aval, literal=var) if isinstance(var, Literal) else known[var]

        for eqn in jaxpr.eqns:
            operands = [read(var) for var in eqn.invars]
            inside = str(eqn.source_info.name_stack)
            results = self._typed(eqn, operands, f"{scope}/{inside}" if scope and inside else scope or inside)
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def _typed(self, eqn: Any, operands: list[Operand], scope: str) -> list[Operand]:
        name = eqn.primitive.name
        if (inner := _inner(eqn)) is not None and len(inner.jaxpr.invars) == len(operands):
            constants = [Operand.unsharded(var.aval) for var in inner.jaxpr.constvars]
            return self.run(inner.jaxpr, constants, operands, scope)
        self.typed.ops += 1
        if name in ("sharding_constraint", REDISTRIBUTED):
            return [self._constrained(eqn, operands[0])]
        ruling = self._ruled(eqn, operands, scope)
        outs = [Operand(var.aval, spec) for var, spec in zip(eqn.outvars, ruling.outs, strict=True)]
        self.typed.moved.update(ruling.moved)
        if name in rules.KEEPS_A_PARAMETER and operands and operands[0].parameter:
            outs = [replace(out, parameter=operands[0].parameter) for out in outs]
        return outs

    def _ruled(self, eqn: Any, operands: list[Operand], scope: str) -> Ruling:
        """Apply the ruling of a primitive, and note conflicts."""
        unsharded = Ruling(tuple(((),) * len(getattr(var.aval, "shape", ())) for var in eqn.outvars))
        if not any(any(o.spec) for o in operands):
            return unsharded
        asked, refusal = (None, "") if rules.has_rule(eqn) else self._asked(eqn, operands)
        try:
            ruling = rules.ruled(eqn, operands, asked, self.shape)
        except Conflict as conflict:
            self._note(self.typed.findings, eqn, operands, scope, conflict.text, conflict.advice)
            return Ruling(conflict.outs) if conflict.outs else unsharded
        if ruling is None:
            advice = f"JAX says: {refusal.splitlines()[0]}" if refusal else ""
            self._note(self.typed.reshards, eqn, operands, scope, "computes with unsharded operands", advice)
            return unsharded
        for text in ruling.reshards:
            self._note(self.typed.reshards, eqn, operands, scope, text, "")
        return ruling

    def _asked(self, eqn: Any, operands: list[Operand]) -> tuple[tuple[Spec, ...] | None, str]:
        """Return the decision of JAX's explicit sharding, or why there is none."""
        given = [o for o in operands if o.literal is None]
        structs = [
            jax.ShapeDtypeStruct(
                o.aval.shape, o.aval.dtype, sharding=NamedSharding(self.mesh, PartitionSpec(*map(_entry, o.spec)))
            )
            for o in given
        ]

        # What a program was traced with is of its own mesh, whose layouts are the partitioner's.
        own = dict.fromkeys(eqn.params.keys() & {"sharding", "out_sharding"})

        def bound(*arrays: Any) -> Any:
            left = iter(arrays)
            values = [next(left) if o.literal is None else o.literal.val for o in operands]
            return eqn.primitive.bind(*values, **(eqn.params | own))

        try:
            with jax.sharding.use_abstract_mesh(self.mesh):
                results = jax.eval_shape(bound, *structs)
        except Exception as error:  # ShardingTypeError has no public name, and a primitive without rules raises others
            return None, str(error)
        leaves = results if isinstance(results, list | tuple) else [results]
        return tuple(spec_of(r.sharding.spec if r.sharding is not None else (), len(r.shape)) for r in leaves), ""

    def _constrained(self, eqn: Any, operand: Operand) -> Operand:
        """Apply a constraint: a border of the plan, or a parameter's layout."""
        wanted = eqn.params["there" if eqn.primitive.name == REDISTRIBUTED else "sharding"]
        entries = [*wanted.spec, *[None] * len(operand.spec)][: len(operand.spec)]
        given = {d: spec_of((e,), 1)[0] for d, e in enumerate(entries) if e is not PartitionSpec.UNCONSTRAINED}
        taken = {axis for axes in given.values() for axis in axes}
        left = (tuple(a for a in axes if a not in taken) for axes in operand.spec)
        spec = tuple(given.get(d, axes) for d, axes in enumerate(left))
        self.typed.moved.update(rules.moves(operand.spec, spec))
        return replace(operand, spec=spec)

    def _note(
        self, to: list[Finding], eqn: Any, operands: Sequence[Operand], scope: str, text: str, advice: str
    ) -> None:
        module, bar, op = scope.split("/")[0].partition("|")
        if not bar:
            return  # before the first op: a parameter's padding comes off
        shown = tuple(o.text for o in operands if o.aval.ndim)
        finding = Finding("" if module == "(root)" else module, op, shown, text, advice)
        if finding not in to:
            to.append(finding)


def _entry(axes: tuple[str, ...]) -> Any:
    return axes if len(axes) > 1 else axes[0] if axes else None


def _inner(eqn: Any) -> Any:
    """Return the inner program of a call; None for primitives and for loops."""
    if eqn.primitive.name in ("scan", "while", "cond"):
        return None
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        found = eqn.params.get(key)
        if found is not None and (hasattr(found, "eqns") or hasattr(found, "jaxpr")):
            return found if hasattr(found, "jaxpr") and hasattr(found, "consts") else _Closed(found)
    return None


@dataclass
class _Closed:
    jaxpr: Any

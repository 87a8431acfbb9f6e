"""Typing of a JAX program: the mesh axes that split each of its values, and where this is not declared.

JAX's explicit sharding types one primitive after another, on a mesh without devices. It stops at the first ambiguous
one, supports some not at all, and lets others communicate silently. For these we have rules: where Megatron and XLA's
partitioner agree, we take their answer (a contracted dim with the same split in both operands is summed, an unsharded
operand is sliced like the other one). A case without an answer is a *finding*, and typing continues with a default, so
that all findings are reported at once. Communication that no border declares is a *reshard*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.extend.core import Literal
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from shardlib._mesh_shape import MeshShape
from shardlib.jax import _programs
from shardlib.jax import _sharding_rules as rules
from shardlib.jax._context import REDISTRIBUTED
from shardlib.jax._places import NOWHERE, Locate, Place, folded, in_module
from shardlib.jax._sharding_rules import Conflict, Move, Operand, Ruling, Spec

__all__ = ["Finding", "Typed", "TypedLine", "Typer", "abstract_mesh", "spec_of"]


@dataclass(frozen=True)
class Finding:
    """An op whose operands have contradictory or ambiguous layouts.

    Attributes:
        module: its dotted name; "" is the model itself. In a function of JAX, the names that `jax.named_scope` gives.
        op: the op of torch, or the primitive of JAX.
        operands: the operands, as each dim's global size with the axes that shard it.
        conflict: the contradiction, ambiguity, or silent communication.
        advice: a remedy.
        line: the source line in a function of JAX, as in "gpt.py:57 in Block.__call__"; "" in a module of torch.
        code: the text of that line.
    """

    module: str
    op: str
    operands: tuple[str, ...]
    conflict: str
    advice: str = ""
    line: str = ""
    code: str = ""

    def __str__(self) -> str:
        scope = f', "{self.module}"' if self.module else ""
        where = f"at {self.line}{scope}" if self.line else f'in "{self.module or "(root)"}"'
        lines = [f"{self.op} {where}: {self.conflict}", f"of {' and '.join(self.operands)}", self.code, self.advice]
        return "\n    ".join(line for line in lines if line)


@dataclass(frozen=True)
class TypedLine:
    """The layouts on a line of a function, or of an op in a module of torch; those of repeated blocks are one.

    Attributes:
        line: the source line, as of a `Finding`; "parameters" for what a transform does to them, "" in a module.
        code: its text.
        module: as of a `Finding`, with "*" for numbers.
        op: the op of torch; "" in a function of JAX, whose lines have several primitives.
        parameter: the tensor of the model that is computed with, or "", with "*" for numbers.
        backward: whether it computes a gradient.
        values: the sharded values, as each dim's global size with its axes.
        moved: number of communications, as in {"sum over tp": 2}.
    """

    line: str
    code: str
    module: str
    op: str
    parameter: str
    backward: bool
    values: tuple[str, ...]
    moved: Mapping[str, int]


@dataclass
class _Kept:
    """A line, as far as it is typed."""

    at: Place
    parameter: str
    values: dict[str, None] = field(default_factory=dict)  # an ordered set
    moved: Counter[Move] = field(default_factory=Counter)

    def typed(self) -> TypedLine:
        moved = {f"{kind} over {','.join(axes)}": count for (kind, axes), count in sorted(self.moved.items())}
        at, op = self.at, "" if self.at.line else self.at.op
        return TypedLine(
            at.line, at.code, folded(at.module), op, self.parameter, at.backward, tuple(self.values), moved
        )


@dataclass
class Typed:
    """The types of a program.

    Attributes:
        findings: contradictions and ambiguities.
        reshards: values that are redistributed although no border says so.
        moved: number of communications of the declared layouts; those of a loop count once for each round.
        lines: the layouts on each line, in the order of the program.
        ops: the number of typed primitives.
    """

    findings: list[Finding] = field(default_factory=list)
    reshards: list[Finding] = field(default_factory=list)
    moved: Counter[Move] = field(default_factory=Counter)
    lines: dict[Any, _Kept] = field(default_factory=dict)
    ops: int = 0


def abstract_mesh(shape: MeshShape, kind: AxisType = AxisType.Auto) -> Any:
    """Return a mesh without devices, which can replace a `Mesh`."""
    return AbstractMesh(shape.sizes, shape.names, axis_types=(kind,) * len(shape))


def spec_of(spec: PartitionSpec | Sequence[Any], ndim: int) -> Spec:
    """Return the axes of each dim in one normal form."""
    entries = [*spec, *[None] * (ndim - len(tuple(spec)))]
    return tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)


class Typer:
    """Types programs on one mesh, and keeps what it finds.

    Args:
        shape: the mesh.
        locate: from an equation, and the place of the one whose program it is in, to its place.
        means: how the user tells this program a layout, for advice.
    """

    def __init__(
        self,
        shape: MeshShape,
        locate: Locate = in_module,
        means: str = "by a rule for a module's input or output",
    ) -> None:
        self.shape = shape
        self.mesh = abstract_mesh(shape, AxisType.Explicit)
        self.typed = Typed()
        self._locate, self._means, self._times = locate, means, 1

    def run(
        self, jaxpr: Any, constants: Sequence[Operand], inputs: Sequence[Operand], at: Place = NOWHERE
    ) -> list[Operand]:
        """Return the types of a program's results, for types of its inputs."""
        known: dict[Any, Operand] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *inputs), strict=True))

        def read(var: Any) -> Operand:
            return Operand.unsharded(var.aval, literal=var) if isinstance(var, Literal) else known[var]

        for eqn in jaxpr.eqns:
            results = self._typed(eqn, [read(var) for var in eqn.invars], self._locate(eqn, at))
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(var) for var in jaxpr.outvars]

    @property
    def moved(self) -> Counter[Move]:
        """The communications so far."""
        return self.typed.moved

    @moved.setter
    def moved(self, moved: Counter[Move]) -> None:
        self.typed.moved = moved

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Forget what is found inside."""
        before, self.typed = self.typed, Typed()
        try:
            yield
        finally:
            self.typed = before

    @contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """Count communications inside several times."""
        before, self._times = self._times, self._times * times
        try:
            yield
        finally:
            self._times = before

    def split(self, spec: PartitionSpec | Sequence[Any], ndim: int) -> Spec:
        """Return the axes of each dim, without those of one device.

        Raises:
            MeshError: an axis that the mesh does not have.
        """
        return tuple(tuple(axis for axis in axes if self.shape[axis] > 1) for axes in spec_of(spec, ndim))

    def constrained(self, operand: Operand, spec: PartitionSpec, at: Place) -> Operand:
        """Redistribute a value to a spec; dims that it leaves open keep their axes."""
        entries = [*spec, *[None] * (len(operand.spec) - len(spec))]
        wanted = self.split([None if e is PartitionSpec.UNCONSTRAINED else e for e in entries], len(entries))
        taken = {axis for axes in wanted for axis in axes}
        after = tuple(
            tuple(a for a in axes if a not in taken) if entry is PartitionSpec.UNCONSTRAINED else given
            for entry, given, axes in zip(entries, wanted, operand.spec, strict=True)
        )
        return self.redistributed(operand, after, at)

    def redistributed(self, operand: Operand, spec: Spec, at: Place) -> Operand:
        """Give a value another sharding, and count what that costs."""
        result = replace(operand, spec=spec, literal=None)
        self._keep(at, [operand], [result], rules.moves(operand.spec, spec))
        return result

    def joined(self, specs: Sequence[Spec], values: Sequence[Operand], eqn: Any, at: Place, what: str) -> Spec:
        """Return the one sharding that values can have; if there is none, note it and take the first one's."""
        try:
            return rules.joined(specs)
        except Conflict as conflict:
            self.note(self.typed.findings, eqn, values, at, f"{what}: {conflict.text}", conflict.advice)
            return specs[0]

    def reshard(self, eqn: Any, operands: Sequence[Operand], at: Place, text: str) -> None:
        """Note a redistribution that no layout declares."""
        self.note(self.typed.reshards, eqn, operands, at, text)

    def _typed(self, eqn: Any, operands: list[Operand], at: Place) -> list[Operand]:
        if (results := _programs.typed(self, eqn, operands, at)) is not None:
            return results
        self.typed.ops += 1
        if (specs := _constraints(eqn)) is not None:
            pairs = zip(operands, specs, strict=True)
            return [operand if spec is None else self.constrained(operand, spec, at) for operand, spec in pairs]
        ruling = self._ruled(eqn, operands, at)
        outs = [Operand(var.aval, spec) for var, spec in zip(eqn.outvars, ruling.outs, strict=True)]
        if eqn.primitive.name in rules.KEEPS_A_PARAMETER and operands and operands[0].parameter:
            outs = [replace(out, parameter=operands[0].parameter) for out in outs]
        self._keep(at, operands, outs, ruling.moved)
        return outs

    def _keep(self, at: Place, operands: Sequence[Operand], outs: Sequence[Operand], moved: Counter[Move]) -> None:
        """Count communications, and enter the layouts of a line."""
        sent = Counter({move: count * self._times for move, count in moved.items()})
        self.typed.moved.update(sent)
        if not sent and not any(any(o.spec) for o in (*operands, *outs)):
            return
        parameter = next((o.parameter for o in operands if o.parameter), "")
        key = at.key, folded(parameter)
        line = self.typed.lines.setdefault(key, _Kept(at, key[1]))
        line.values.update(dict.fromkeys(replace(o, parameter="").text for o in outs if any(o.spec)))
        line.moved.update(sent)

    def _ruled(self, eqn: Any, operands: list[Operand], at: Place) -> Ruling:
        """Apply the ruling of a primitive, and note conflicts."""
        if (collective := rules.collective(eqn, operands, self.shape)) is not None:
            return collective
        unsharded = Ruling(tuple(((),) * len(getattr(var.aval, "shape", ())) for var in eqn.outvars))
        if not any(any(o.spec) for o in operands):
            return unsharded
        asked, refusal = (None, "") if rules.has_rule(eqn) else self._asked(eqn, operands)
        try:
            ruling = rules.ruled(eqn, operands, asked, self.shape)
        except Conflict as conflict:
            self.note(self.typed.findings, eqn, operands, at, conflict.text, conflict.advice)
            return Ruling(conflict.outs) if conflict.outs else unsharded
        if ruling is None:
            advice = f"JAX says: {refusal.splitlines()[0]}" if refusal else ""
            self.note(self.typed.reshards, eqn, operands, at, rules.UNSHARDED, advice)
            return unsharded
        for text in ruling.reshards:
            self.reshard(eqn, operands, at, text)
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

    def note(
        self, to: list[Finding], eqn: Any, operands: Sequence[Operand], at: Place, text: str, advice: str = ""
    ) -> None:
        """Enter a finding, once."""
        if not at.op:
            return  # before the first op: a parameter's padding comes off
        shown = tuple(o.text for o in operands if o.aval.ndim)
        advice = advice.replace(rules.ADVISED, self._means)
        finding = Finding(at.module, at.op, shown, text, advice, at.line, at.code)
        if finding not in to:
            to.append(finding)


def _constraints(eqn: Any) -> list[PartitionSpec | None] | None:
    """Return the spec that each operand of a primitive is redistributed to, if that is what the primitive does."""
    if eqn.primitive.name == "device_put":
        return [each.spec if isinstance(each, NamedSharding) else None for each in eqn.params["devices"]]
    if eqn.primitive.name in ("sharding_constraint", REDISTRIBUTED):
        sharding = eqn.params["there" if eqn.primitive.name == REDISTRIBUTED else "sharding"]
        return [sharding.spec if isinstance(sharding, NamedSharding) else None]
    return None


def _entry(axes: tuple[str, ...]) -> Any:
    return axes if len(axes) > 1 else axes[0] if axes else None

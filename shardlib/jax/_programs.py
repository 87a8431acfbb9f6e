"""Typing of primitives that run programs: calls, loops, branches and `jax.shard_map`.

A loop's body is typed with a carry of one sharding, the least that both its beginning and its rounds have: an unsharded
value is sliced like a sharded one, which is free. The results of branches are joined alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

from jax.sharding import NamedSharding, PartitionSpec

from shardlib.jax._places import Place
from shardlib.jax._sharding_rules import Move, Operand, Spec

__all__ = ["Typer", "typed"]


class Typer(Protocol):
    """An interface of `shardlib.jax._typer.Typer`: it types programs, and keeps what it finds."""

    moved: Counter[Move]

    def run(
        self, jaxpr: Any, constants: Sequence[Operand], inputs: Sequence[Operand], at: Place = ...
    ) -> list[Operand]:
        """Return the types of a program's results, for types of its inputs."""

    def trial(self) -> AbstractContextManager[None]:
        """Forget what is found inside."""

    def repeated(self, times: int) -> AbstractContextManager[None]:
        """Count communications inside several times."""

    def split(self, spec: PartitionSpec | Sequence[Any], ndim: int) -> Spec:
        """Return the axes of each dim."""

    def constrained(self, operand: Operand, spec: PartitionSpec, at: Place) -> Operand:
        """Redistribute a value to a spec."""

    def redistributed(self, operand: Operand, spec: Spec, at: Place) -> Operand:
        """Give a value another sharding, and count what that costs."""

    def joined(self, specs: Sequence[Spec], values: Sequence[Operand], eqn: Any, at: Place, what: str) -> Spec:
        """Return the one sharding that values can have; if there is none, note it and take the first one's."""

    def reshard(self, eqn: Any, operands: Sequence[Operand], at: Place, text: str) -> None:
        """Note a redistribution that no layout declares."""


def typed(typer: Typer, eqn: Any, operands: list[Operand], at: Place) -> list[Operand] | None:
    """Return the types of a primitive's results by typing the programs that it runs; None if it runs none.

    A program that cannot be entered, such as a kernel's, computes with unsharded operands.
    """
    if (rule := _RULES.get(eqn.primitive.name)) is not None:
        return rule(typer, eqn, operands, at)
    programs = [program for value in eqn.params.values() for program in _programs_in(value)]
    if not programs or eqn.primitive.name.startswith(_OF_ELEMENTS):
        return None
    inner = next((program for program in programs if _is_call(program, eqn)), None)
    if inner is not None:
        return _called(typer, inner, operands, at)
    if any(any(o.spec) for o in operands):
        typer.reshard(eqn, operands, at, "runs a program that is not typed, with unsharded operands")
    return [Operand.unsharded(var.aval) for var in eqn.outvars]


_OF_ELEMENTS = "scatter", "reduce", "select_and", "sort"  # their programs say how two elements are combined


def _programs_in(value: Any) -> list[Any]:
    values = value if isinstance(value, tuple | list) else (value,)
    return [each for each in values if hasattr(each, "eqns") or hasattr(each, "jaxpr")]


def _open(program: Any) -> Any:
    """Return a program without its constants, whose values do not matter."""
    return getattr(program, "jaxpr", program)


def _is_call(program: Any, eqn: Any) -> bool:
    """Tell whether a program takes and returns what its equation does. A kernel has references instead."""
    jaxpr = _open(program)
    inner, outer = ([*jaxpr.invars, *jaxpr.outvars], [*eqn.invars, *eqn.outvars])
    return len(jaxpr.invars) == len(eqn.invars) and [type(v.aval) for v in inner] == [type(v.aval) for v in outer]


def _called(typer: Typer, program: Any, operands: Sequence[Operand], at: Place) -> list[Operand]:
    jaxpr = _open(program)
    return typer.run(jaxpr, [Operand.unsharded(var.aval) for var in jaxpr.constvars], operands, at)


def _jit(typer: Typer, eqn: Any, operands: list[Operand], at: Place) -> list[Operand]:
    """Type a call with the shardings that `jax.jit` was given for arguments and results."""

    def laid_out(values: Sequence[Operand], shardings: Sequence[Any]) -> list[Operand]:
        return [
            typer.constrained(value, sharding.spec, at) if isinstance(sharding, NamedSharding) else value
            for value, sharding in zip(values, shardings, strict=True)
        ]

    inside = laid_out(operands, eqn.params["in_shardings"])
    return laid_out(_called(typer, eqn.params["jaxpr"], inside, at), eqn.params["out_shardings"])


def _scan(typer: Typer, eqn: Any, operands: list[Operand], at: Place) -> list[Operand]:
    first, carried = eqn.params["num_consts"], eqn.params["num_consts"] + eqn.params["num_carry"]
    constants, init, stacked = operands[:first], operands[first:carried], operands[carried:]
    body = eqn.params["jaxpr"]
    if any(x.spec[0] for x in stacked):
        typer.reshard(eqn, stacked, at, "loops over a dim that is sharded")
    each = [
        Operand(var.aval, x.spec[1:], x.parameter) for var, x in zip(_open(body).invars[carried:], stacked, strict=True)
    ]

    def one_round(carry: Sequence[Operand]) -> list[Operand]:
        return _called(typer, body, [*constants, *carry, *each], at)

    carry = _carried(typer, one_round, init, eqn, at)
    with typer.repeated(eqn.params["length"]):
        outs = one_round(carry)
    results = _met(typer, carry, outs[: len(carry)], eqn, at)
    rows = zip(eqn.outvars[len(carry) :], outs[len(carry) :], strict=True)
    return [*results, *(Operand(var.aval, ((), *out.spec), out.parameter) for var, out in rows)]


def _while(typer: Typer, eqn: Any, operands: list[Operand], at: Place) -> list[Operand]:
    """Type a loop of unknown length; its communications count once."""
    first = eqn.params["cond_nconsts"]
    second = first + eqn.params["body_nconsts"]
    of_test, of_body, init = operands[:first], operands[first:second], operands[second:]

    def one_round(carry: Sequence[Operand]) -> list[Operand]:
        return _called(typer, eqn.params["body_jaxpr"], [*of_body, *carry], at)

    carry = _carried(typer, one_round, init, eqn, at)
    _called(typer, eqn.params["cond_jaxpr"], [*of_test, *carry], at)
    return _met(typer, carry, one_round(carry), eqn, at)


def _carried(
    typer: Typer, one_round: Callable[[Sequence[Operand]], list[Operand]], init: Sequence[Operand], eqn: Any, at: Place
) -> list[Operand]:
    """Return the carry whose sharding a round keeps. Dims only gain axes, so the search ends."""
    carry = [replace(value, literal=None) for value in init]
    while True:
        with typer.trial():
            after = _met(typer, carry, one_round(carry)[: len(carry)], eqn, at)
        if after == carry:
            return carry
        carry = after


def _met(typer: Typer, before: Sequence[Operand], after: Sequence[Operand], eqn: Any, at: Place) -> list[Operand]:
    """Join a carry with what a round makes of it; note where no sharding is that of both."""
    return [
        replace(
            one,
            spec=typer.joined([one.spec, other.spec], [one, other], eqn, at, "the carry of a loop changes"),
            parameter=one.parameter if one.parameter == other.parameter else "",
        )
        for one, other in zip(before, after, strict=True)
    ]


def _cond(typer: Typer, eqn: Any, operands: list[Operand], at: Place) -> list[Operand]:
    """Type branches; of their communications the larger number counts."""
    before, most, results = typer.moved, Counter[Move](), []
    for branch in eqn.params["branches"]:
        typer.moved = Counter()
        results.append(_called(typer, branch, operands[1:], at))
        most |= typer.moved
    typer.moved = before + most
    joined = []
    for var, each in zip(eqn.outvars, zip(*results, strict=True), strict=True):
        spec = typer.joined([one.spec for one in each], each, eqn, at, "branches return different layouts")
        same = {one.parameter for one in each}
        joined.append(Operand(var.aval, spec, same.pop() if len(same) == 1 else ""))
    return joined


def _shard_map(typer: Typer, eqn: Any, operands: list[Operand], at: Place) -> list[Operand]:
    """Type a program on local values: the mesh's other axes go through it, and its collectives are counted."""
    manual = frozenset(eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes", ())))
    jaxpr, inside = _open(eqn.params["jaxpr"]), []
    for var, operand, spec in zip(jaxpr.invars, operands, eqn.params["in_specs"], strict=True):
        free = [tuple(axis for axis in axes if axis not in manual) for axes in operand.spec]
        given = typer.split(spec, len(free))
        entered = tuple((*axes, *rest) for axes, rest in zip(given, free, strict=True))
        typer.redistributed(operand, entered, at)
        inside.append(Operand(var.aval, tuple(free)))
    outs = _called(typer, jaxpr, inside, at)
    return [
        Operand(
            var.aval,
            tuple((*axes, *rest) for axes, rest in zip(typer.split(spec, len(out.spec)), out.spec, strict=True)),
        )
        for var, out, spec in zip(eqn.outvars, outs, eqn.params["out_specs"], strict=True)
    ]


Rule = Callable[[Typer, Any, list[Operand], Place], list[Operand]]
_RULES: dict[str, Rule] = {
    "jit": _jit,
    "pjit": _jit,  # the former name
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
}

"""Typing of a function of JAX: its program, for parameters that rules lay out and a batch over the data axes."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from shardlib._plan import RulesLike
from shardlib.errors import InputError, RuleError
from shardlib.jax import rules as tree_rules
from shardlib.jax._sharding_rules import Operand, Spec
from shardlib.jax._typer import Typer
from shardlib.rules.trees import Tree

__all__ = ["type_function"]


def type_function(
    typer: Typer, function: Callable[..., Any], mesh: Any, rules: RulesLike | None, transforms: Any, example: Any
) -> tuple[str, ...]:
    """Type the program of a function on an abstract mesh, which its constraints and `shard_map`s find in the context.

    Return the arrays of the batch whose rows the data axes do not divide.
    """
    params, *batch = _checked(function, example)
    if rules is None:
        raise RuleError(
            "check_layouts was given a function of JAX and no rules; only a module of torch has a layout file of its "
            'class. Give rules for the paths of its parameters, as in {"up.kernel": "in out@tp"}.'
        )
    plan = tree_rules.plan(params, typer.shape, rules, transforms=transforms)
    stored = jax.tree.leaves(tree_rules.shardings(params, mesh, plan))

    def program(params: Any, *batch: Any) -> Any:
        return function(tree_rules.cast(params, mesh, plan), *batch)

    with jax.sharding.use_abstract_mesh(mesh):
        closed = jax.make_jaxpr(program)(params, *batch)
    variables = closed.jaxpr.invars
    inputs = [
        Operand(var.aval, typer.split(sharding.spec, len(var.aval.shape)), parameter=name or "")
        for var, sharding, name in zip(variables, stored, Tree.of(params).names, strict=False)
    ]
    uneven = []
    for var, (path, leaf) in zip(variables[len(stored) :], jax.tree_util.tree_leaves_with_path(batch), strict=True):
        inputs.append(Operand(var.aval, _rows(typer, var.aval, leaf)))
        if _is_uneven(typer, var.aval, leaf):
            uneven.append(_named(path))
    typer.run(closed.jaxpr, [Operand.unsharded(var.aval) for var in closed.jaxpr.constvars], inputs)
    return tuple(uneven)


def _checked(function: Callable[..., Any], example: Any) -> Sequence[Any]:
    """Return the arguments of a call, or refuse what cannot be one."""
    if not isinstance(example, tuple | list) or not example:
        raise InputError(
            f"check_layouts was given a function and example={type(example).__name__}; give the tuple of its "
            "arguments, of which the first is the tree of parameters: example=(params, batch)."
        )
    try:
        inspect.signature(function).bind(*example)
    except TypeError as error:
        raise InputError(
            f"check_layouts was given example= with {len(example)} arguments, and {_name(function)} cannot be called "
            f"with them: {error}. Give the tuple of its arguments, of which the first is the tree of parameters. Of a "
            "module of flax or equinox, give a function of its parameters that merges them into it."
        ) from error
    except ValueError:  # a builtin has no signature to read
        pass
    for path, leaf in jax.tree_util.tree_leaves_with_path(example[1:]):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, numbers.Number):
            raise InputError(
                f"check_layouts was given {leaf!r} as {_named(path)}, which is neither an array nor a number. Close "
                "over it: check_layouts(lambda params, x: function(params, x, option), ...)."
            )
    return example


def _named(path: tuple[Any, ...]) -> str:
    """Name a leaf of what follows the parameters."""
    return f"example[{path[0].idx + 1}]{jax.tree_util.keystr(path[1:])}"


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def _rows(typer: Typer, aval: Any, leaf: Any) -> Spec:
    """Return the axes of an argument: those that it comes with, or else the data axes for its rows.

    As in a training step, rows that the data axes do not divide are not divided.
    """
    given = getattr(leaf, "sharding", None)
    if isinstance(given, NamedSharding):
        return typer.split(given.spec, len(aval.shape))
    rest = ((),) * (len(aval.shape) - 1)
    return aval.shape and (() if _is_uneven(typer, aval, leaf) else typer.split([typer.shape.data_axes], 1)[0], *rest)


def _is_uneven(typer: Typer, aval: Any, leaf: Any) -> bool:
    named = isinstance(getattr(leaf, "sharding", None), NamedSharding)
    return bool(aval.shape and not named and aval.shape[0] % typer.shape.data_ranks)

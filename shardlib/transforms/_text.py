"""Parsing of transforms: calls of known functions with literal arguments, joined by `|`, as they print."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from shardlib._plan import LossScale
from shardlib._renamed import RENAMED
from shardlib.errors import PlanError, nearest, warn
from shardlib.transforms._accumulate import accumulate
from shardlib.transforms._capacity import expert_capacity
from shardlib.transforms._choose import quoted
from shardlib.transforms._fit import fit_memory
from shardlib.transforms._fsdp import fsdp, hsdp
from shardlib.transforms._offload import offload
from shardlib.transforms._pipeline import pipeline
from shardlib.transforms._precision import precision
from shardlib.transforms._recompute import checkpoint_activations
from shardlib.transforms._replicate import replicate
from shardlib.transforms._transform import Transform
from shardlib.transforms._zero import zero

__all__ = ["parse"]

_KNOWN: Mapping[str, Callable[..., Transform]] = {
    function.__name__: function
    for function in (
        zero,
        fsdp,
        hsdp,
        replicate,
        offload,
        fit_memory,
        precision,
        checkpoint_activations,
        accumulate,
        pipeline,
        expert_capacity,
    )
}
_INNER: Mapping[str, Callable[..., Any]] = {"LossScale": LossScale}
_MOST = 10_000  # characters; a meaningful call fits a line


def parse(text: str) -> Transform:
    """Parse the text of a transform: `parse(repr(t)) == t`. No code in the text is executed.

    Raises:
        PlanError: the text is not made of such calls, or a call's arguments are refused.

    >>> parse('zero(2, axis="dp") | offload("state", fraction=0.5)')
    zero(2, axis="dp") | offload(fraction=0.5)
    >>> parse("fsdp")
    fsdp()
    """
    try:
        if len(text) > _MOST:
            raise ValueError("too long")
        tree = ast.parse(text.strip(), mode="eval").body
        return _transform(tree, text)
    except PlanError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _unread(text, f"it is not an expression ({error})") from None


def _transform(node: ast.expr, text: str) -> Transform:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _transform(node.left, text) | _transform(node.right, text)
    made = _called(node, text, _KNOWN)
    assert isinstance(made, Transform)
    return made


def _called(node: ast.expr, text: str, known: Mapping[str, Callable[..., Any]]) -> Any:
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    name = ast.unparse(call.func)
    if (new := RENAMED.get(name)) is not None and new.name in known:
        warn(f'In the text of a transform, "{name}" is to go: write "{new.name}".', FutureWarning)
        name = new.name
    if name not in known:
        raise _unread(text, f'"{name}" is not a transform', nearest(name, known))
    if any(isinstance(each, ast.Starred) for each in call.args) or any(word.arg is None for word in call.keywords):
        raise _unread(text, "arguments are starred")
    given = [_value(each, text) for each in call.args]
    named = {word.arg: _value(word.value, text) for word in call.keywords if word.arg is not None}
    try:
        bound = inspect.signature(known[name]).bind(*given, **named)
    except TypeError as error:
        raise _unread(text, f"{name}: {error}") from None
    return known[name](*bound.args, **bound.kwargs)


def _value(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Call):
        return _called(node, text, _INNER)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        raise _unread(text, f"{ast.unparse(node)} is not a literal") from None


def _unread(text: str, fact: str, hint: str = "") -> PlanError:
    shown = text if len(text) <= 200 else f"{text[:200]}..."
    return PlanError(
        f'Transform "{shown}" cannot be read: {fact}. Write calls with plain values, joined by "|", as in '
        f'zero(2, axis="dp") | offload("state"); known are {quoted(list(_KNOWN))}.{hint}'
    )

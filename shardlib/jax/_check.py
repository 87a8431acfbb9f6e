"""Check of a layout by JAX's sharding types: a program is typed on a mesh that has no devices."""

from __future__ import annotations

import functools
import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from jax.sharding import Mesh

from shardlib._mesh_shape import MeshLike, MeshShape
from shardlib._plan import RulesLike, Transform
from shardlib.errors import InputError, MeshError
from shardlib.jax._check_function import type_function
from shardlib.jax._mesh import shape_of
from shardlib.jax._places import folded, on_line, unnumbered
from shardlib.jax._typer import Finding, TypedLine, Typer, abstract_mesh
from shardlib.rules.trees import is_tree

if TYPE_CHECKING:
    from torch import nn

__all__ = ["LayoutReport", "check_layouts"]

_VERSION = 1


@dataclass(frozen=True)
class LayoutReport:
    """The result of typing a program. True where nothing is ambiguous; prints as text.

    Attributes:
        mesh: its axes and sizes.
        findings: operands whose layouts contradict each other, or leave the result's layout open.
        reshards: values that XLA redistributes although neither a parameter's layout nor a rule for an activation says
            so: correct, but slow.
        moved: number of communications of the declared layouts in a forward, by kind: "sum" (a contracted or looked-up
            dim is sharded), "gather" and "exchange" (at a module's input or output, or of a stored shard). Those of a
            scan count once for each round, those of a while loop once.
        uneven: tensors that their axes do not divide, typed as unsharded there: JAX types even shards only.
        ops: the number of JAX primitives that were typed.
        modules: the number of their modules; 0 in a function of JAX, which has lines.
        lines: the layouts on each line of a function, or of each op in a module, in the order of the program; repeated
            blocks have one line.
    """

    mesh: MeshShape
    findings: tuple[Finding, ...]
    reshards: tuple[Finding, ...]
    moved: Mapping[str, int]
    uneven: tuple[str, ...]
    ops: int
    modules: int
    lines: tuple[TypedLine, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.findings

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        verdict = f"{len(self.findings)} ambiguous or contradictory" if self.findings else "nothing ambiguous"
        costs = ", ".join(f"{n} {kind}{'s' * (n > 1)}" for kind, n in sorted(self.moved.items()) if n)
        lines_of_code = len({each.line for each in self.lines})
        where = f"in {self.modules} modules" if self.modules else f"on {lines_of_code} line{'s' * (lines_of_code != 1)}"
        lines = [
            f"{verdict}: {self.ops} ops {where} on {self.mesh.world_size:,} devices ({self.mesh})",
            f"{'forward' if self.modules else 'a call'}: {costs or 'nothing is moved'}",
        ]
        lines += ["", *_folded(self.findings)] if self.findings else []
        if self.reshards:
            lines += ["", "moved without a word (right, and slow):", *_folded(self.reshards)]
        if self.uneven:
            lines += ["", f"uneven, typed as replicated: {', '.join(self.uneven)}"]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Serialize the report as JSON with a stable format: one record a line, for readable diffs of golden files.

        Lines of a function are written with their text and without their numbers, so only a change of a layout, or of
        a line that has one, changes the file.

        >>> import jax
        >>> w, x = {"up": jax.ShapeDtypeStruct((8, 16), "float32")}, jax.ShapeDtypeStruct((4, 8), "float32")
        >>> report = check_layouts(lambda w, x: x @ w["up"], "dp=2,tp=4", {"up": "in out@tp"}, example=(w, x))
        >>> json.loads(report.to_json())["lines"][-1]["values"]
        ['(4@dp 16@tp)']
        """
        counts = {"mesh": str(self.mesh), "moved": dict(sorted(self.moved.items()))}
        records: dict[str, Sequence[Any]] = {
            "findings": _repeated(map(_finding_data, self.findings)),
            "reshards": _repeated(map(_finding_data, self.reshards)),
            "uneven": list(self.uneven),
            "lines": [_line_data(line) for line in self.lines],
        }
        head = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in {"version": _VERSION, **counts}.items()]
        return "{\n" + ",\n".join([*head, *(_block(key, value) for key, value in records.items())]) + "\n}\n"


def check_layouts(
    model: nn.Module | Callable[..., Any],
    mesh: MeshLike | Mesh,
    rules: RulesLike | None = None,
    *,
    transforms: Transform | Sequence[Transform] = (),
    example: Any,
) -> LayoutReport:
    """Type a program with the layouts of rules, on a mesh of any size; only the host device is needed.

    The program is the forward of a module of torch, or a function of JAX, such as a loss, its gradient or a flax
    model's `apply`; torch need not be installed for a function. Each op gets the layouts of its operands, under JAX's
    explicit sharding. A finding is a contracted dim that is sharded in one operand only or over two axes, an axis that
    would shard two dims of a result, or two operands with different layouts. A case with one answer is not a finding: a
    row-parallel product is summed, an unsharded operand is sliced. All findings are reported, not only the first.

    Args:
        model: a single-device module; it is not changed, and may be on `meta`. Or a function of JAX, whose first
            argument is a tree of parameters.
        mesh: "dp=128,tp=64", a `MeshShape`, or a mesh of JAX or torch.
        rules: as for `compile_model`; for a function, rules on the paths of its parameters, as for `shard_params`.
        transforms: as for `compile_model`, or for `shardlib.jax.plan`.
        example: a global batch, as for `compile_model`; tensors on `meta` will do. For a function the tuple of its
            arguments, `(params, batch)`, of arrays or `jax.ShapeDtypeStruct`s. Rows of what follows the parameters are
            divided over the data axes, as in `train_step`, where it has no `NamedSharding` of its own.

    Raises:
        PlanError, InputError, RuleError, LayoutError, MeshError: as `compile_model`, or as `shardlib.jax.shardings`.

    >>> import jax, jax.numpy as jnp
    >>> def mlp(params, x):
    ...     return jnp.tanh(x @ params["up"]) @ params["down"]
    >>> shape = jax.ShapeDtypeStruct
    >>> params = {"up": shape((64, 256), "float32"), "down": shape((256, 64), "float32")}
    >>> x = shape((256, 64), "float32")
    >>> report = check_layouts(mlp, "dp=128,tp=64", {"up": "in out@tp", "down": "in@tp out"}, example=(params, x))
    >>> bool(report), report.moved
    (True, {'sum': 1})
    >>> report = check_layouts(mlp, "dp=128,tp=64", {"*": "in out@tp"}, example=(params, x))
    >>> report.findings[0].operands
    ('(256@dp 256@tp)', 'down (256 64@tp)')

    >>> import torch
    >>> from torch import nn
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
    if not is_tree(model):
        from shardlib.jax._check_model import type_model

        typer = Typer(shape)
        uneven, modules = type_model(typer, cast("nn.Module", model), rules, transforms, example)
    elif callable(model):
        typer = Typer(shape, on_line(_innermost(model)), "by jax.lax.with_sharding_constraint")
        context = mesh.abstract_mesh if isinstance(mesh, Mesh) else abstract_mesh(shape)
        uneven, modules = type_function(typer, model, context, rules, transforms, example), 0
    else:
        raise InputError(
            f"check_layouts was given {model!r}; give a module of torch, or a function of JAX whose "
            "first argument is the tree of parameters: check_layouts(loss_fn, mesh, rules, example=(params, batch))."
        )
    typed, moved = typer.typed, Counter[str]()
    for move, count in typed.moved.items():
        moved[move.kind] += count
    findings, reshards, lines = (
        tuple(typed.findings),
        tuple(typed.reshards),
        tuple(each.typed() for each in typed.lines.values()),
    )
    return LayoutReport(shape, findings, reshards, dict(moved), uneven, typed.ops, modules, lines)


def _innermost(function: Any) -> Any:
    """Return the function that others wrap."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.unwrap(function)


def _folded(findings: Sequence[Finding]) -> list[str]:
    """Fold the findings of repeated blocks into one each, with a count."""
    folded_findings: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        key = folded(finding.module), finding.op, finding.line, finding.conflict
        folded_findings.setdefault(key, []).append(finding)
    more = (
        f"\n    and in {len(group) - 1} more like it" if len(group) > 1 else "" for group in folded_findings.values()
    )
    return [f"{group[0]}{rest}" for group, rest in zip(folded_findings.values(), more, strict=True)]


# --- as JSON --------------------------------------------------------------------------------------------------------


def _finding_data(finding: Finding) -> dict[str, Any]:
    where = {"at": unnumbered(finding.line), "code": finding.code, "module": folded(finding.module)}
    operands = [_with_folded_name(text) for text in finding.operands]
    return _said(where) | {"op": finding.op, "operands": operands, "conflict": finding.conflict}


def _line_data(line: TypedLine) -> dict[str, Any]:
    where = {"at": unnumbered(line.line), "code": line.code, "module": line.module, "op": line.op}
    passed = {"pass": "backward" if line.backward else ""}
    return _said(where | passed | {"parameter": line.parameter, "values": list(line.values), "moved": line.moved})


def _said(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if value}


def _with_folded_name(operand: str) -> str:
    name, bracket, sizes = operand.partition("(")
    return folded(name) + bracket + sizes


def _repeated(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return records once each; those of repeated blocks with their number."""
    counts = Counter(json.dumps(record) for record in records)
    return [json.loads(text) | ({"times": count} if count > 1 else {}) for text, count in counts.items()]


def _block(key: str, records: Sequence[Any]) -> str:
    if not records:
        return f"  {json.dumps(key)}: []"
    lines = ",\n".join(f"    {json.dumps(record)}" for record in records)
    return f"  {json.dumps(key)}: [\n{lines}\n  ]"

"""`shardlib check`: whether a layout fits a model of torch, or a function of JAX, for which torch is not imported."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlib._plan import Plan
from shardlib.cli.files import loaded_layout, read_text, saved_plan
from shardlib.cli.usage import UsageError
from shardlib.errors import ShardlibError
from shardlib.rules import Coverage, Rules

if TYPE_CHECKING:
    from shardlib.jax import LayoutReport

__all__ = ["check"]


@dataclass(frozen=True)
class _Subject:
    """A model or a function with its parameters, and its rules.

    Attributes:
        model: a module, or a tree of parameters.
        rules: those that the options name, or those of its class.
        plan: makes its plan.
        typed: types its program.
    """

    model: Any
    rules: Rules
    plan: Callable[[], Plan]
    typed: Callable[[], LayoutReport]


def check(options: argparse.Namespace) -> int:
    """Check that a layout fits: print problems, remarks, and what each rule covers.

    With `-i`, say what is installed instead.
    """
    if options.installed:
        others = "model", "layout", "expect", "jax", "example", "params", "golden", "update"
        if any(getattr(options, name) for name in others):
            raise UsageError("`shardlib check -i` tells of this machine and takes nothing else but --json.")
        from shardlib.cli.commands import doctor

        return doctor(options)
    _refuse(options)
    subject = _function(options) if options.params else _model(options)
    problems, remarks = _findings(options, subject.plan)
    typed = subject.typed() if (options.jax or options.params) and not problems else None
    fits = not problems and (typed is None or typed.ok)
    if options.golden and typed is not None:
        changes = _golden(options, typed.to_json())
        fits, problems = fits and not changes, [*problems, *changes]
    covered = subject.rules.coverage(subject.model, options.mesh)
    if options.json:
        rows = [dataclasses.asdict(row) for row in covered.rows]
        result = {"ok": fits, "problems": problems, "remarks": remarks, "coverage": rows}
        print(json.dumps(result | ({} if typed is None else {"jax": _as_json(typed)}), indent=2))
    else:
        print(covered)
        for title, lines in (("note", remarks), ("problem", problems)):
            for line in lines:
                print(f"\n{title}: {line}")
        if typed is not None:
            print(f"\nOn JAX, {typed}")
        print(f"\n{'The layout fits' if fits else 'The layout does not fit'} {options.model} on {options.mesh}.")
        print(_shares(covered))
    return 0 if fits else 1


def _refuse(options: argparse.Namespace) -> None:
    """Refuse options that do not go together."""
    if options.model is None:
        raise UsageError("`shardlib check` needs a model to check; -i alone says what is installed.")
    types = options.jax or options.params
    if options.example and not types:
        raise UsageError("`shardlib check --example` gives --jax the inputs that it types a model for; add --jax.")
    if options.golden and not types:
        raise UsageError("`shardlib check --golden` compares what --jax finds; add --jax.")
    if options.update and not options.golden:
        raise UsageError("`shardlib check --update` writes the file of --golden; add --golden FILE.")


def _model(options: argparse.Namespace) -> _Subject:
    from shardlib import layouts
    from shardlib.cli import inputs, on_jax
    from shardlib.cli.models import load_model
    from shardlib.engine import dryrun

    model = load_model(options.model)
    chosen = layouts.for_model(model, options.mode) if options.layout is None else loaded_layout(options)
    return _Subject(
        model,
        chosen,
        lambda: dryrun.plan(model, options.mesh, chosen),
        lambda: on_jax.typed(model, options.mesh, chosen, inputs.read(options.example)),
    )


def _function(options: argparse.Namespace) -> _Subject:
    from shardlib.cli import on_function
    from shardlib.jax import plan

    if options.layout is None:
        raise UsageError(
            f'"{options.model}" is checked as a function of JAX, since --params is given; give its --layout too, '
            "a file with rules for the paths of the parameters."
        )
    chosen, params = loaded_layout(options), on_function.params_of(options.params)
    return _Subject(
        params,
        chosen,
        lambda: plan(params, options.mesh, chosen),
        lambda: on_function.typed(options.model, params, options.mesh, chosen, options.example or []),
    )


def _findings(options: argparse.Namespace, plan: Callable[[], Plan]) -> tuple[list[str], list[str]]:
    try:
        made = plan()
    except ShardlibError as error:
        return [str(error)], []
    problems = []
    if options.expect and (changes := saved_plan(options.expect).diff(made)):
        problems.append(f'The plan is not the one in "{options.expect}":\n{changes}')
    return problems, _remarks(made)


def _shares(covered: Coverage) -> str:
    """Say how much of a model is sharded, and which rule leaves most of the rest replicated."""
    said = f"{covered.split_bytes / max(covered.bytes, 1):.0%} of its bytes are sharded over model axes"
    rest = max(covered.rows, key=lambda row: row.bytes - row.split_bytes, default=None)
    if rest is None or rest.bytes == rest.split_bytes:
        return f"{said}."
    return f"{said}; of the others, most are in {rest.rule or 'tensors without a rule'}."


def _remarks(made: Plan) -> list[str]:
    uneven = [row.name for row in made.rows if row.stored.uneven_dims(row.global_shape, made.mesh)]
    unruled = [row for row in made.rows if row.rule is None and row.kind == "parameter"]
    remarks = list(made.notes)
    if uneven:
        remarks.append(f"sharded unevenly: {len(uneven)} of {len(made.rows)} tensors, such as {uneven[0]}.")
    if unruled:
        size = sum(row.local_bytes(made.mesh) for row in unruled)
        remarks.append(
            f"replicated, since no rule matches: {len(unruled)} of {len(made.rows)} tensors, such as "
            f"{unruled[0].name}; {size:,} bytes on each rank."
        )
    return remarks


def _golden(options: argparse.Namespace, now: str) -> list[str]:
    """Compare a report with its golden file, or write it; return what differs."""
    path = Path(options.golden)
    if options.update:
        path.write_text(now, encoding="utf-8")
        return []
    if not path.exists():
        raise UsageError(f'There is no golden file "{path}"; --update writes it.')
    before = read_text(options.golden, "golden file")
    if before == now:
        return []
    lines = difflib.unified_diff(before.splitlines(), now.splitlines(), str(path), "now", n=0, lineterm="")
    diff = "\n".join(lines)
    return [f'The layouts are not those of "{path}"; if the change is wanted, --update writes it.\n{diff}']


def _as_json(report: LayoutReport) -> dict[str, Any]:
    """Convert the report to JSON values."""
    return {
        "devices": report.mesh.world_size,
        "ops": report.ops,
        "modules": report.modules,
        "findings": [dataclasses.asdict(finding) for finding in report.findings],
        "reshards": [dataclasses.asdict(finding) for finding in report.reshards],
        "moved": dict(report.moved),
        "uneven": list(report.uneven),
    }

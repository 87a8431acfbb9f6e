"""Commands: functions from parsed options to an exit code."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import re
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from shardlib import layouts, rules
from shardlib._mesh_shape import MeshShape
from shardlib._plan import Plan
from shardlib._plan.text import plain
from shardlib.cli import environment, inputs, on_jax
from shardlib.cli.models import load_model
from shardlib.cli.usage import UsageError
from shardlib.engine import dryrun
from shardlib.errors import ShardlibError, nearest
from shardlib.rules import Coverage, Rules
from shardlib.transforms import Transform, parse

__all__ = ["check", "doctor", "explain", "init", "plan", "prove"]


def plan(options: argparse.Namespace) -> int:
    """Print a plan, or what changes from an earlier one."""
    model = load_model(options.model)
    chosen = [_transform(text) for text in options.transform or ()]
    made = dryrun.plan(
        model, options.mesh, _rules(options, model), transforms=chosen, example=inputs.read(options.example)
    )
    if options.html:
        made.html(options.html)
    if options.diff:
        return _print_diff(_saved(options.diff).diff(made), options)
    if options.json:
        print(made.to_json(), end="")
    else:
        _show(made, fold=not options.all)
    return 0


def check(options: argparse.Namespace) -> int:
    """Check that a layout fits a model: print problems, remarks, and what each rule covers.

    With `-i`, say what is installed instead.
    """
    if options.installed:
        if options.model or options.layout or options.expect or options.jax or options.example:
            raise UsageError("`shardlib check -i` tells of this machine and takes nothing else but --json.")
        return doctor(options)
    if options.model is None:
        raise UsageError("`shardlib check` needs a model to check; -i alone says what is installed.")
    model = load_model(options.model)
    chosen = _rules(options, model)
    if options.example and not options.jax:
        raise UsageError("`shardlib check --example` gives --jax the inputs that it types a model for; add --jax.")
    problems, remarks = _findings(options, model, chosen)
    typed = None
    if options.jax and not problems:
        typed = on_jax.typed(model, options.mesh, chosen, inputs.read(options.example))
    fits = not problems and (typed is None or typed.ok)
    covered = chosen.coverage(model, options.mesh)
    if options.json:
        rows = [dataclasses.asdict(row) for row in covered.rows]
        result = {"ok": fits, "problems": problems, "remarks": remarks, "coverage": rows}
        print(json.dumps(result | ({} if typed is None else {"jax": on_jax.as_json(typed)}), indent=2))
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


def explain(options: argparse.Namespace) -> int:
    """Print the rules that match a name, and their consequences."""
    model = load_model(options.model)
    result = _rules(options, model).explain(options.name, model, options.mesh)
    print(json.dumps({"name": options.name, "explanation": result.splitlines()}, indent=2) if options.json else result)
    return 0


def prove(options: argparse.Namespace) -> int:
    """Train a model sharded and on one device, on warm CPU processes, and print what differs."""
    try:
        from shardlib.testing import equivalent
    except ImportError as error:
        raise UsageError(f"`shardlib prove` needs {error.name}: pip install 'shardlib[testing]'.") from error
    shape = MeshShape.of(options.mesh)
    model = load_model(options.model)
    if type(model).forward is nn.Module.forward:
        raise UsageError(f'"{options.model}" names tensors without a forward to run; give a class or a function.')
    example = inputs.read(options.example) or inputs.of_model(model, shape)
    try:
        report = equivalent(
            functools.partial(load_model, options.model, "cpu"),
            functools.partial(
                inputs.drawn, inputs.of_all_ranks(example, shape.data_ranks), inputs.smallest_table(model)
            ),
            shape,
            _rules(options, model),
            transforms=[_transform(text) for text in options.transform or ()],
            steps=options.steps,
            dtype=getattr(torch, options.dtype),
        )
    except Exception as error:
        notes = "\n".join(getattr(error, "__notes__", ()))
        if "on the single device" not in notes:
            raise
        raise UsageError(
            f"The model fails on this example before anything is sharded{_last_line_outside(notes)}: "
            f"{type(error).__name__}: {error}. Give --example the shapes and dtypes that its forward takes."
        ) from error
    if options.json:
        worst = {kind: dataclasses.asdict(difference) for kind, difference in report.worst().items()}
        gathered = list(report.gathered)
        print(
            json.dumps({"equivalent": report.ok, "worst": worst, "gathered": gathered, "report": str(report)}, indent=2)
        )
    else:
        print(report)
    return 0 if report else 1


def _last_line_outside(traceback: str) -> str:
    """Name the last line of a traceback that is neither torch's nor shardlib's.

    >>> _last_line_outside('File "net.py", line 9, in f\\n  File "site/torch/nn/conv.py", line 1, in call')
    ' (net.py, line 9)'
    """
    lines = re.findall(r'File "(.+)", line (\d+)', traceback)
    own = [(file, line) for file, line in lines if not {"torch", "shardlib"} & {*Path(file).parts}]
    return " ({}, line {})".format(*own[-1]) if own else ""


def init(options: argparse.Namespace) -> int:
    """Write a first layout file."""
    suggested = rules.suggest(load_model(options.model))
    text = suggested.to_toml()
    if options.output:
        _write_new(Path(options.output), text, force=options.force)
    if options.json:
        print(json.dumps({"file": options.output, "toml": text, "notes": dict(suggested.notes)}, indent=2))
    elif options.output:
        print(f"Wrote {options.output}. Read the lines marked as guesses, then run:")
        print("\n".join(f"  shardlib {command}" for command in _next(options)))
    else:
        print(text, end="")
    return 0


def doctor(options: argparse.Namespace) -> int:
    """Print what is installed, and what is wrong with it."""
    facts = environment.environment()
    print(json.dumps(facts, indent=2) if options.json else environment.text(facts))
    return 0


def _findings(options: argparse.Namespace, model: nn.Module, chosen: Rules) -> tuple[list[str], list[str]]:
    try:
        made = dryrun.plan(model, options.mesh, chosen)
    except ShardlibError as error:
        return [str(error)], []
    problems = []
    if options.expect and (changes := _saved(options.expect).diff(made)):
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


def _rules(options: argparse.Namespace, model: nn.Module) -> Rules:
    if options.layout is None:
        return layouts.for_model(model, options.mode)
    if options.layout.endswith(".toml") and not Path(options.layout).is_file():
        raise UsageError(f'There is no layout file "{options.layout}".')
    if not options.layout.endswith(".toml") and options.layout not in layouts.available():
        known = list(layouts.available())
        raise UsageError(
            f'There is no layout called "{options.layout}"; there are {", ".join(known)}. Give one of them, or the '
            f"path of a file that ends in .toml.{nearest(options.layout, known)}"
        )
    return layouts.load(options.layout, options.mode)


def _transform(text: str) -> Transform:
    try:
        return parse(text)
    except ShardlibError as error:
        raise UsageError(f"--transform: {error}") from error


def _saved(path: str) -> Plan:
    try:
        return Plan.from_json(Path(path).read_text())
    except OSError as error:
        raise UsageError(f'The plan "{path}" cannot be read: {error.strerror}.') from error


def _print_diff(changes: str, options: argparse.Namespace) -> int:
    if options.json:
        print(json.dumps({"changes": changes.splitlines()}, indent=2))
    else:
        print(changes or f'Nothing changes from "{options.diff}".')
    return 0


def _show(made: Plan, *, fold: bool) -> None:
    """Print a plan: with colours and wrapped on a terminal, else one row a line."""
    console = Console()
    if console.is_terminal:
        console.print(made.table(fold=fold))
    else:
        print(plain(made, fold=fold))


def _write_new(path: Path, text: str, *, force: bool) -> None:
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UsageError(f'"{path}" is there already. Give another -o, or --force to replace it.') from error
    except OSError as error:
        raise UsageError(f'"{path}" cannot be written: {error.strerror}.') from error


def _next(options: argparse.Namespace) -> list[str]:
    given = f"{options.model} --layout {options.output}"
    return [f"check {given}", f"plan {given} --mesh dp=2,tp=2", f"prove {given} --mesh dp=2,tp=2 --example SHAPE"]

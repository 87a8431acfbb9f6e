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
from shardlib.cli import environment, inputs
from shardlib.cli.files import check_target, loaded_layout, saved_plan, write_new
from shardlib.cli.models import load_model
from shardlib.cli.usage import UsageError
from shardlib.engine import dryrun
from shardlib.errors import ShardlibError
from shardlib.planner import check_memory
from shardlib.rules import Rules
from shardlib.transforms import Transform, parse

__all__ = ["doctor", "explain", "init", "parsed_transform", "plan", "prove"]


def plan(options: argparse.Namespace) -> int:
    """Print a plan, or what changes from an earlier one; with a cluster also the time of a step, or that it does not
    fit."""
    check_target(options.html, force=True)
    model = load_model(options.model)
    chosen = [parsed_transform(text) for text in options.transform or ()]
    example = inputs.read(options.example)
    if options.cluster and example is None:
        raise UsageError("--cluster prices a step, which depends on its batch: give --example, once for each input.")
    made = dryrun.plan(model, options.mesh, _rules(options, model), transforms=chosen, example=example)
    if options.html:
        made.html(options.html)
    if options.diff:
        return _print_diff(saved_plan(options.diff).diff(made), options)
    if options.json:
        print(made.to_json(), end="")
    else:
        _show(made, fold=not options.all)
    if options.cluster:
        time = check_memory(model, made, options.cluster, example=example)
        if not options.json:
            print(f"\n{time}")
    return 0


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
            transforms=[parsed_transform(text) for text in options.transform or ()],
            steps=options.steps,
            dtype=getattr(torch, options.dtype),
        )
    except Exception as error:
        notes = "\n".join(getattr(error, "__notes__", ()))
        if "On the single device" not in notes:
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
        write_new(Path(options.output), text, force=options.force)
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


def _rules(options: argparse.Namespace, model: nn.Module) -> Rules:
    return layouts.for_model(model, options.mode) if options.layout is None else loaded_layout(options)


def parsed_transform(text: str) -> Transform:
    """Read a transform as it is typed."""
    try:
        return parse(text)
    except ShardlibError as error:
        raise UsageError(f"--transform: {error}") from error


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


def _next(options: argparse.Namespace) -> list[str]:
    given = f"{options.model} --layout {options.output}"
    return [f"check {given}", f"plan {given} --mesh dp=2,tp=2", f"prove {given} --mesh dp=2,tp=2 --example SHAPE"]

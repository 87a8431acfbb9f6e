"""`shardlib audit`: what is wrong with a model that something else shards."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from shardlib._mesh_shape import MeshShape
from shardlib.cli import inputs
from shardlib.cli.attributes import find_attribute
from shardlib.cli.models import load_model
from shardlib.cli.usage import UsageError
from shardlib.errors import InputError

__all__ = ["audit"]


def audit(options: argparse.Namespace) -> int:
    """Audit a model on warm CPU processes: print each check as it is made, then what differs and which line decides."""
    try:
        import shardlib.testing  # noqa: F401
    except ImportError as error:
        raise UsageError(f"`shardlib audit` needs {error.name}: pip install 'shardlib[testing]'.") from error
    shape = MeshShape.of(options.mesh)
    try:
        if options.dry:
            return _dry(options, shape)
        report = _audited(options, shape)
    except InputError as error:
        raise UsageError(str(error)) from error
    print(report.to_json() if options.json else report.explained())
    return 0 if report else 1


def _audited(options: argparse.Namespace, shape: MeshShape) -> Any:
    from shardlib.testing import audit

    build = functools.partial(load_model, options.model, "cpu")
    return audit(
        build,
        _function(options.sharded_by, "--sharded-by", "a function (model, mesh) -> model"),
        shape,
        _batches(options, build, shape),
        loss=_function(options.loss, "--loss", "a function (model, batch) -> scalar"),
        optimizer=_function(options.optimizer, "--optimizer", "a function (parameters) -> optimizer"),
        **{name: _function(getattr(options, name), f"--{name}", form) for name, form in options.own.items()},
        steps=options.steps,
        strict=options.strict,
        timeout=options.timeout,
        show=None if options.json else lambda check: print(check.line(), flush=True),
    )


def _dry(options: argparse.Namespace, shape: MeshShape) -> int:
    """Run one step with types in the place of numbers, as one rank of a mesh of any size."""
    from shardlib.testing import dry_audit

    given = [f"--{name}" for name in (*options.own, "batch", "optimizer") if getattr(options, name) is not None]
    if given:
        raise UsageError(f"`shardlib audit --dry` runs one step without values and takes no {', '.join(given)}.")
    model, example = load_model(options.model), _given(options)
    report = dry_audit(
        functools.partial(load_model, options.model),
        _function(options.sharded_by, "--sharded-by", "a function (model, mesh) -> model"),
        shape,
        inputs.of_model(model, shape) if example is None else example,
        loss=_function(options.loss, "--loss", "a function (model, batch) -> scalar"),
    )
    print(report.to_json() if options.json else report)
    return 0 if report else 1


def _function(spec: str | None, option: str, form: str) -> Any:
    return None if spec is None else find_attribute(spec, f"{option} names {form}, as in train.py:name.")


def _batches(options: argparse.Namespace, build: Callable[[], nn.Module], shape: MeshShape) -> Any:
    """Return the function that makes batches: the user's, or one that draws them for an example."""
    if options.batch is not None:
        if options.example:
            raise UsageError("`shardlib audit` takes --batch or --example; give one of them.")
        return _function(options.batch, "--batch", "a function (step) -> global batch")
    model = build()
    example = _given(options)
    if example is None:
        example = _labelled(model, inputs.of_model(model, shape))
    whole = inputs.of_all_ranks(example, shape.data_ranks)
    return functools.partial(inputs.drawn, whole, inputs.smallest_table(model))


def _given(options: argparse.Namespace) -> Any:
    """Return the batch that the options describe: one input a tensor, several a tuple, those with names a dict."""
    example = inputs.read(options.example)
    return example[0] if isinstance(example, tuple) and len(example) == 1 else example


def _labelled(model: nn.Module, example: dict[str, Any]) -> dict[str, Any]:
    """Add labels to what a language model takes: several rows, so that rows and labels can be left out."""
    if not type(model).__name__.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM")):
        return example
    ids = example["input_ids"]
    rows = ids.new_empty(2, max(8, ids.shape[1]))
    return dict.fromkeys((*example, "labels"), rows)

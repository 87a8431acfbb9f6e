"""`shardlib tune`: the fastest plans for a model on a cluster, and a script that uses the best one."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardlib.cli import inputs
from shardlib.cli.commands import parsed_transform
from shardlib.cli.files import check_target, write_new
from shardlib.cli.models import known_models, load_model
from shardlib.planner import best_plans

__all__ = ["tune"]


def tune(options: argparse.Namespace) -> int:
    """Search, print what was found, and write the script and the page that are asked for."""
    check_target(options.script, force=options.force)
    check_target(options.html, force=True)
    model = load_model(options.model)
    chosen = [parsed_transform(text) for text in options.transform] if options.transform else None
    example = inputs.read(options.example)
    found = best_plans(
        model,
        options.cluster,
        world=options.world,
        batch=options.batch,
        memory=options.memory,
        top=options.top,
        example=example,
        seq=options.seq,
        rules=options.layout,
        transforms=chosen,
        axes=options.axes,
        margin=options.margin,
        compiled=options.compiled,
    )
    if options.script:
        text = found[0].script(
            options.model,
            options.batch,
            seq=options.seq or 0,
            sizes=known_models().get(options.model),
            example=example,
        )
        write_new(Path(options.script), text, force=options.force)
    if options.html:
        found.html(options.html)
    print(found.to_json() if options.json else found)
    if options.script and not options.json:
        print(f"\nWrote {options.script}.")
    return 0

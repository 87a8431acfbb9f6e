"""`shardlib census`: prove an installed library's architectures, one line each."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shardlib.cli.usage import UsageError
from shardlib.errors import InputError, nearest

if TYPE_CHECKING:
    from shardlib.testing.census import Entry, Result

__all__ = ["add_options", "census"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to a parser."""
    parser.add_argument("library", nargs="?", default="transformers", help='the library (default "transformers")')
    parser.add_argument("--only", nargs="+", metavar="NAME", help='these architectures, such as "llama t5"')
    parser.add_argument("--sample", type=int, metavar="N", help="draw as many of them")
    parser.add_argument("--seed", type=int, default=0, help="the seed of --sample (default 0)")
    parser.add_argument(
        "--mesh",
        action="append",
        help='a mesh to prove on, once for each (default "tp=2" and "dp=2,tp=2"; on JAX "tp=1" too)',
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help="the longest a model may take on a mesh (default 20; on JAX, which compiles each, 120)",
    )
    parser.add_argument(
        "--engine", choices=("torch", "jax"), default="torch", help="the engine that is proved (default torch)"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="a file of JSON lines; a model that stands in it is skipped"
    )
    parser.add_argument("--json", action="store_true", help="print the JSON line of each model; errors too")


def census(options: argparse.Namespace) -> int:
    """Prove architectures, print a line for each and the totals; 1 where one was built and not proved."""
    try:
        from shardlib.testing import census
    except ImportError as error:
        raise UsageError(f"`shardlib census` needs {error.name}: pip install 'shardlib[testing]'.") from error
    from shardlib._mesh_shape import MeshShape

    meshes = [str(MeshShape.of(mesh)) for mesh in options.mesh or census.MESHES_OF[options.engine]]
    results = census.run(
        _chosen(options),
        options.output,
        meshes=meshes,
        seconds=options.seconds or {"torch": 20.0, "jax": 120.0}[options.engine],
        engine=options.engine,
        report=_printer(options.json),
    )
    if not options.json:
        counts = Counter(result.status for result in results)
        print(
            f"{len(results)} models: {', '.join(f'{n} {status}' for status, n in counts.most_common()) or 'none new'}"
        )
    return int(any(result.status in ("wrong", "refused") for result in results))


def _printer(as_json: bool) -> Callable[[Result], None]:
    return lambda result: print(json.dumps(dataclasses.asdict(result)) if as_json else result, flush=True)


def _chosen(options: argparse.Namespace) -> list[Entry]:
    from shardlib.testing import census

    try:
        chosen = census.entries(options.library)
    except InputError as error:
        raise UsageError(str(error)) from error
    names = [entry.name for entry in chosen]
    for name in options.only or ():
        if name not in names:
            raise UsageError(f'{options.library} has no architecture "{name}".{nearest(name, names)}')
    chosen = [entry for entry in chosen if not options.only or entry.name in options.only]
    return chosen if options.sample is None else census.sample(chosen, options.sample, options.seed)

"""Prove every architecture of a library on CPU ranks, and keep a line for each in `results/census.jsonl`.

    python benchmarks/census.py [--source timm] [--part 0/20] [--names llama,t5] [--again] [--engine jax]

It continues where an earlier run was stopped; --again takes up what was not proved. At the end the file is sorted and
carries the date and the versions. `python -m shardlib.testing.census`, given the files, prints docs/models.md.
--engine jax proves `shardlib.jax.compile_model`, into `results/census_jax.jsonl`. --quick proves one architecture and
keeps nothing.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import tempfile
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from _report import parser, write

from shardlib.testing import _pool, census

FILES = {
    engine: Path(__file__).parent / "results" / name
    for engine, name in (("torch", "census.jsonl"), ("jax", "census_jax.jsonl"))
}
QUICK = "gpt2"


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--source", default="transformers", help=f"the library: {', '.join(census.LIBRARIES)}")
    p.add_argument("--part", default="0/1", help="every N-th architecture from the I-th on, as I/N")
    p.add_argument("--names", help="only these, separated by commas")
    p.add_argument("--again", action="store_true", help="also those that stand in the file and are not proved")
    p.add_argument("--seconds", type=float, default=20.0, help="the longest for building, and for each mesh")
    p.add_argument("--engine", choices=tuple(FILES), default="torch", help="the engine that is proved")
    p.add_argument("--file", type=Path)
    args = p.parse_args()
    args.file = args.file or FILES[args.engine]
    if args.quick:
        args.file, args.names = Path(tempfile.mkdtemp()) / args.file.name, QUICK
    _pool.preload(["transformers.modeling_utils", "transformers.models.auto.modeling_auto"])
    start, step = map(int, args.part.split("/"))
    chosen = census.entries(args.source)[start::step]
    if args.names:
        chosen = [entry for entry in chosen if entry.name in args.names.split(",")]
    names = {entry.name for entry in chosen}
    if args.again:
        kept = [
            r for r in census.read(args.file) if r.status == "proved" or r.library != args.source or r.name not in names
        ]
        census.write(args.file, kept)
    census.run(
        chosen,
        args.file,
        seconds=args.seconds,
        engine=args.engine,
        report=lambda result: print(result, flush=True),
    )
    census.write(args.file, census.read(args.file), date=str(datetime.date.today()), versions=_versions(args.file))
    if args.json:
        write(
            args.json,
            [
                asdict(result)
                for result in census.read(args.file)
                if result.library == args.source and result.name in names
            ],
        )


def _versions(file: Path) -> dict[str, str]:
    """Return the versions of torch and of the libraries; of one that is not installed, that of the kept results."""
    head = file.read_text(encoding="utf-8").splitlines()[:1]
    found = dict(json.loads(head[0]).get("versions", {})) if head else {}
    for name in ("torch", *(("jax",) if file.name == FILES["jax"].name else ()), *census.LIBRARIES):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


if __name__ == "__main__":
    main()

"""Prove every architecture of transformers on CPU ranks, and keep a line for each in `results/census.jsonl`.

    python benchmarks/census.py [--part 0/20] [--names llama,t5] [--again]

It continues where an earlier run was stopped; --again takes up what was not proved. At the end the file is sorted and
carries the date and the versions. `python -m shardlib.testing.census --table` writes docs/models.md from it.
"""

from __future__ import annotations

import argparse
import datetime
from importlib.metadata import version
from pathlib import Path

from shardlib.testing import _pool, census

FILE = Path(__file__).parent / "results" / "census.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--part", default="0/1", help="every N-th architecture from the I-th on, as I/N")
    parser.add_argument("--names", help="only these, separated by commas")
    parser.add_argument("--again", action="store_true", help="also those that stand in the file and are not proved")
    parser.add_argument("--seconds", type=float, default=20.0, help="the longest for building, and for each mesh")
    parser.add_argument("--file", type=Path, default=FILE)
    options = parser.parse_args()
    _pool.preload(["transformers.modeling_utils", "transformers.models.auto.modeling_auto"])
    start, step = map(int, options.part.split("/"))
    chosen = census.entries("transformers")[start::step]
    if options.names:
        chosen = [entry for entry in chosen if entry.name in options.names.split(",")]
    if options.again:
        names = {entry.name for entry in chosen}
        kept = [r for r in census.read(options.file) if r.status == "proved" or r.name not in names]
        census.write(options.file, kept)
    census.run(chosen, options.file, seconds=options.seconds, report=lambda result: print(result, flush=True))
    libraries = {name: version(name) for name in ("torch", "transformers")}
    census.write(options.file, census.read(options.file), date=str(datetime.date.today()), versions=libraries)


if __name__ == "__main__":
    main()

"""The planner's predictions beside published measurements of large models: tables of docs/planner.md.

Nothing runs on devices. The numbers and their sources are in tests/planner/published. One constant is calibrated on one
table: what products reach on A100, on table 4 of arXiv 2205.05198. torchtitan's H100 have one of their own, of one row.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _report import parser, write

import shardlib as sl
from tests.planner.comparisons import (
    Compared,
    layer_memory,
    layer_times,
    stage_memory,
    step_times,
    stored_memory,
    throughput,
    titan_runs,
    tokens,
)

MODELS = ("22B", "175B", "530B", "1T")


def main() -> None:
    args = parser(__doc__).parse_args()
    a100 = sl.Cluster.preset("a100-80")
    some = MODELS[:1] if args.quick else MODELS
    titan = titan_runs()[:2] if args.quick else titan_runs()
    of_models = {"model": MODELS[0]} if args.quick else {}
    of_2021 = {"model": "174.6B"} if args.quick else {}
    found: dict[str, list[Compared]] = {}

    def table(name: str, rows: Iterable[Compared], unit: str, shown: Callable[[float], str], *, split: bool) -> None:
        found[name] = [*rows]
        print(f"\n### {name}\n")
        print("\n".join(_split(found[name], unit, shown) if split else _plain(found[name], unit, shown)))

    mib, gib = _scaled(2**20, 0), _scaled(2**30, 2)
    table("Activations of a layer", layer_memory(some), "MiB", mib, split=True)
    table("Activations of the first stage", stage_memory(some, a100), "GiB", gib, split=True)
    table("Parameters, gradients and state of the first stage", stored_memory(some), "GiB", gib, split=True)
    table("Milliseconds of a layer of 22B (calibrated on these)", layer_times(a100), "ms", _scaled(1, 1), split=False)
    drawn = layer_times(a100, own=False)
    table("The same, where each rank draws full dropout masks", drawn, "ms", _scaled(1, 1), split=False)
    table("Seconds of a step", step_times(a100, **of_models), "s", _scaled(1, 2), split=False)
    table("TFLOP/s of a GPU, ZeRO-3 and pipelines", throughput(a100, where="table 2", **of_2021), "", _scaled(1, 0),
          split=False)  # fmt: skip
    if not args.quick:
        weak = throughput(a100, where="table 1")
        table("TFLOP/s of a GPU, weak scaling", weak, "", _scaled(1, 0), split=False)
    raw = (rate for rate, _ in tokens(titan, calibrated=False) if "H100" in rate.what)
    table(
        "Tokens a second of a GPU, Llama 3, with the rate of products of the h100 preset",
        raw,
        "",
        _scaled(1, 0),
        split=False,
    )
    both = [*tokens(titan)]
    table("Tokens a second of a GPU, Llama 3", (rate for rate, _ in both), "", _scaled(1, 0), split=False)
    table("Memory, Llama 3", (memory for _, memory in both if memory), "GiB", _scaled(1, 1), split=False)
    if args.json:
        write(args.json, {name: [asdict(row) | {"error": row.error} for row in rows] for name, rows in found.items()})


def _scaled(unit: float, digits: int) -> Callable[[float], str]:
    return lambda value: f"{value / unit:,.{digits}f}"


def _plain(rows: Iterable[Compared], unit: str, shown: Callable[[float], str]) -> Iterable[str]:
    of = f", {unit}" if unit else ""
    yield f"| where | run | published{of} | predicted | error |"
    yield "|---|---|---|---|---|"
    for row in rows:
        yield f"| {row.where} | {row.what} | {shown(row.published)} | {shown(row.predicted)} | {row.error:+.1%} |"


def _split(rows: Iterable[Compared], unit: str, shown: Callable[[float], str]) -> Iterable[str]:
    yield f"| where | run | published, {unit} | predicted | error | by design | left | what differs by design |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        cells = [row.where, row.what, shown(row.published), shown(row.predicted), f"{row.error:+.1%}"]
        cells += [shown(row.derived), f"{row.unexplained + 0.0:+.1%}".replace("-0.0%", "+0.0%"), row.why]
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()

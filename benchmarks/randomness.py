"""What exact randomness costs: single calls on one core, and training steps with dropout on two tensor-parallel ranks.

    python benchmarks/randomness.py                       # both sizes, some minutes on two cores
    python benchmarks/randomness.py --size tiny --quick

Calls are alternated too: each round makes every call once with PyTorch's own numbers and once exactly. A step is that
of the GPT of `examples/`, with dropout 0.1 in attention and on the residual stream; 1.00 is `rng="fast"`, eager. The
masks of the two kinds differ, so that losses do too.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _harness import Variant, compare, console, is_rank, parser, start_ranks, write
from _models import Size
from _report import alternate, compared, written
from rich.table import Table
from torch import nn

import shardlib as sl


def model(size: Size, dropout: float) -> nn.Module:
    gpt = importlib.import_module("examples.gpt")  # at the root of the repository, where shardlib is installed from
    torch.manual_seed(0)
    return gpt.GPT(gpt.GPTConfig(size.vocab, size.seq, size.layers, size.heads, size.embed, dropout=dropout))


def sharded(size: Size, *, rng: str, compile: str | None, dropout: float) -> nn.Module:
    rules = sl.layouts.load("example_gpt")
    return sl.shard_model(model(size, dropout), sl.mesh(tp=-1), rules, compile=compile, rng=rng)


VARIANTS = [
    Variant(
        f"{rng}, {name}",
        partial(sharded, rng=rng, compile=backend, dropout=dropout),
        trains_alike=False,
        peers=(f"fast, {name}",) if rng == "exact" else (),
    )
    for name, backend, dropout in (
        ("eager", None, 0.1),
        ("aot_eager", "aot_eager", 0.1),
        ("inductor", "inductor", 0.1),
        ("eager, no dropout", None, 0.0),
    )
    for rng in ("fast", "exact")
]

LARGE, SMALL = 1 << 20, 64


def _calls() -> dict[str, Callable[[], Any]]:
    large, small, weight = torch.ones(LARGE), torch.ones(SMALL), torch.empty(1024, 1024)
    return {
        "add (nothing random), 64 elements": lambda: small + small,
        "dropout, 64 elements": lambda: F.dropout(small, 0.1),
        "dropout, 1M elements": lambda: F.dropout(large, 0.1),
        "uniform_, 1M elements": lambda: weight.uniform_(-1, 1),
        "normal_, 1M elements": lambda: weight.normal_(),
        "trunc_normal_, 1M elements": lambda: nn.init.trunc_normal_(weight),
    }


def measure_calls(rounds: int) -> list[dict[str, Any]]:
    """Median microseconds of each call, fast and exact, and the ratio of the two within rounds."""
    kinds: dict[str, Callable[[], AbstractContextManager[None]]] = {"fast": nullcontext, "exact": sl.exact_random}
    calls = _calls()
    taken: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in kinds} for name in calls}
    for order in alternate(list(kinds), rounds):
        for name, call in calls.items():
            for kind in order:
                with kinds[kind]():
                    call()
                    start = time.perf_counter()
                    repeats = 100 if str(SMALL) in name else 1
                    for _ in range(repeats):
                        call()
                    taken[name][kind].append(1e6 * (time.perf_counter() - start) / repeats)
    return [
        {
            "call": name,
            **{kind: statistics.median(each) for kind, each in kinds_.items()},
            **compared(kinds_["exact"], kinds_["fast"]),
        }
        for name, kinds_ in taken.items()
    ]


def table_of_calls(rows: list[dict[str, Any]]) -> Table:
    made = Table("", "fast us", "exact us", "ratio (middle half)", title="calls, one core", title_justify="left")
    for row in rows:
        made.add_row(row["call"], f"{row['fast']:,.1f}", f"{row['exact']:,.1f}", written(row))
    return made


def main() -> None:
    args = parser(__doc__).parse_args()
    if not is_rank():
        sys.exit(start_ranks(2, sys.argv[1:]))
    sl.mesh(tp=-1)
    calls: list[dict[str, Any]] = []
    if dist.get_rank() == 0:
        calls = measure_calls(5 if args.quick else 31)
        console().print(table_of_calls(calls))
    dist.barrier()
    write(args, {"calls": calls, **compare(args, VARIANTS, seed=args.seed)})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Measure how long setup for sharded training takes: `shard_model` beside `fully_shard` on each block.

    python benchmarks/setup.py [--quick] [--json FILE]

Both take a tiny GPT of some number of layers on one rank of a fake process group of four, which answers at once: what
is measured is Python, without waiting for other ranks. Models are alternated, a new one each round. A layer is a block
with 12 parameters; what does not grow with the layers is spread over them, and what grows faster shows in the rows.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from _models import GPT, Size
from _report import alternate, compared, parser, write, written
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardlib as sl

RANKS = 4
LAYERS = (16, 64, 128)
QUICK = (2, 8)
BASE, OURS = "fully_shard", "shardlib, fsdp()"


def by_torch(model: GPT) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def ours(model: GPT) -> nn.Module:
    return sl.shard_model(model, sl.mesh(dp=-1), {"**": None}, transforms=[sl.fsdp()])


VARIANTS: dict[str, Callable[[GPT], nn.Module]] = {BASE: by_torch, OURS: ours}


def gpt(layers: int) -> GPT:
    return GPT(Size(embed=16, layers=layers, heads=2, vocab=64, seq=16, rows=1, rounds=0))


def seconds(setup: Callable[[GPT], nn.Module], layers: int) -> tuple[float, float]:
    """Wall and processor time that it takes to set up a new model."""
    model = gpt(layers)
    gc.collect()  # of the models before it
    wall, cpu = time.perf_counter(), time.process_time()
    setup(model)
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(layers: int, rounds: int) -> list[dict[str, Any]]:
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    for order in alternate(list(VARIANTS), rounds):
        for name in order:
            taken[name].append(seconds(VARIANTS[name], layers))
    wall, cpu = ({name: [each[at] for each in series] for name, series in taken.items()} for at in (0, 1))
    return [
        {
            "variant": name,
            "layers": layers,
            "rounds": rounds,
            "ms_a_layer": 1e3 * statistics.median(wall[name]) / layers,
            "cpu_ms_a_layer": 1e3 * statistics.median(cpu[name]) / layers,
            **compared(wall[name], wall[BASE]),
            **{f"cpu_{key}": value for key, value in compared(cpu[name], cpu[BASE]).items()},
        }
        for name in VARIANTS
    ]


def main() -> None:
    args = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    measure(2, 1)  # imports, caches
    rows = [row for layers in (QUICK if args.quick else LAYERS) for row in measure(layers, 2 if args.quick else 15)]
    table = Table("", "layers", "ms a layer", "processor ms", "ratio (middle half)", "processor time")
    for row in rows:
        cpu = {key: row[f"cpu_{key}"] for key in ("ratio", "middle_half")}
        figures = f"{row['ms_a_layer']:.2f}", f"{row['cpu_ms_a_layer']:.2f}", written(row), written(cpu)
        table.add_row(row["variant"], str(row["layers"]), *figures)
    Console(width=120).print(table)
    if args.json:
        write(args.json, {"setup": rows}, ranks=RANKS)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

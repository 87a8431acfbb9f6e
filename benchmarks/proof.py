"""How many examples a second a proof takes: four ranks, a small transformer, one training step.

    python benchmarks/proof.py [--quick] [--json FILE]

Side by side, round by round: `shardlib.testing.equivalent` on its warm pool, and the same check written on PyTorch's
`MultiProcessTestCase`, which starts its processes for each test. The check by hand compares less: loss, gradients and
parameters, by `full_tensor`. Then a hypothesis run of a hundred examples, meshes, rules and model drawn.
"""

from __future__ import annotations

import io
import statistics
import time
import unittest
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from _report import alternate, compared, parser, write, written
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table
from torch.distributed.tensor import DTensor
from torch.testing._internal.common_distributed import MultiProcessTestCase

import shardlib as sl
from shardlib.testing import assert_equivalent, models, strategies

MESH = "dp=2,tp=2"
GOAL = 4.0  # examples a second


def example() -> dict[str, Any]:
    model = models.Transformer()
    return {
        "model": models.Transformer,
        "batch": models.batch_for(model),
        "mesh": MESH,
        "rules": models.rules_for(model),
        "steps": 1,
    }


def warm(count: int) -> float:
    """Seconds an example on the pool."""
    arguments = example()
    begun = time.perf_counter()
    for _ in range(count):
        assert_equivalent(**arguments)
    return (time.perf_counter() - begun) / count


class ByHand(MultiProcessTestCase):  # type: ignore[misc]
    @property
    def world_size(self) -> int:
        return 4

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def test_one_step(self) -> None:
        torch.set_num_threads(1)
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        arguments = example()
        mesh = sl.mesh(MESH)
        torch.manual_seed(0)
        single = arguments["model"]().double()
        torch.manual_seed(0)
        sharded = sl.shard_model(arguments["model"]().double(), mesh, arguments["rules"], compile=None)
        ids = arguments["batch"](0)
        losses = []
        for model, rows in ((single, ids), (sharded, ids.chunk(2)[mesh["dp"].get_local_rank()])):
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            loss = model(rows).square().mean()
            loss.backward()
            losses.append(loss.detach())
            optimizer.step()
        dist.all_reduce(losses[1])
        torch.testing.assert_close(losses[1] / 4, losses[0], rtol=1e-10, atol=1e-13)
        for p, q in zip(single.parameters(), sharded.parameters(), strict=True):
            for want, got in ((p, q), (p.grad, q.grad)):
                whole = got.full_tensor() if isinstance(got, DTensor) else got
                torch.testing.assert_close(whole, want, rtol=1e-9, atol=1e-12)
        dist.destroy_process_group()


def by_hand() -> float:
    """Seconds of one example on processes of its own."""
    begun = time.perf_counter()
    result = unittest.TextTestRunner(io.StringIO()).run(ByHand("test_one_step"))
    if not result.wasSuccessful():
        raise RuntimeError("\n".join(text for _, text in (*result.failures, *result.errors)))
    return time.perf_counter() - begun


def hundred(count: int) -> float:
    """Seconds of a hypothesis run: meshes of data and model axes, rules of any kind, small transformers."""

    @settings(
        max_examples=count, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.data())
    def run(data: st.DataObject) -> None:
        factory = data.draw(strategies.transformers(max_layers=1))
        mesh = data.draw(strategies.mesh_shapes(4, rows=8))
        model = factory()
        batch = models.batch_for(model)
        rules = data.draw(strategies.rule_sets(model, mesh, batch(0)))
        assert_equivalent(factory, batch, mesh, rules, steps=1)

    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def rounds(variants: dict[str, Callable[[], float]], count: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in variants}
    for order in alternate(list(variants), count):
        for name in order:
            found[name].append(variants[name]())
    return found


def main() -> None:
    args = parser(__doc__).parse_args()
    warm(10)
    per_example = rounds(
        {
            "MultiProcessTestCase": by_hand,
            "shardlib.testing.equivalent": lambda: warm(2 if args.quick else 20),
        },
        1 if args.quick else 5,
    )
    base = per_example["MultiProcessTestCase"]
    rows = [
        {"variant": name, "seconds": statistics.median(seconds), **compared(seconds, base)}
        for name, seconds in per_example.items()
    ]
    table = Table(title=f"four ranks ({MESH}), a small transformer, one training step")
    for column in ("", "seconds an example", "examples a second", "ratio (middle half)"):
        table.add_column(column)
    for row in rows:
        table.add_row(row["variant"], f"{row['seconds']:.3f}", f"{1 / row['seconds']:.1f}", written(row))
    count = 5 if args.quick else 100
    drawn = hundred(count)
    console = Console(width=110)
    console.print(table)
    print(f"{count} hypothesis examples, mesh, rules and model drawn: {drawn:.1f} s, {count / drawn:.1f} a second")
    if args.json:
        write(args.json, {"proofs": rows, "hypothesis": {"examples": count, "seconds": drawn}, "goal": GOAL})


if __name__ == "__main__":
    main()

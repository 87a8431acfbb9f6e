"""Four processes train the GPT on a mesh, one device trains it too, and the numbers are laid side by side.

    torchrun --nproc_per_node 4 examples/demo.py --mesh dp=2,tp=2
    torchrun --nproc_per_node 4 examples/demo.py --mesh dp=2,tp=2 --dtype float64

Same seed, same text, same global batch; rank 0 also is the one device. What rounding alone does is measured too: one
device trains once more with the rows of every batch in reverse order, which changes the order of sums and nothing
else. A sharded run may differ from one device about as much as that. In float64 both are some nine digits smaller.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from data import batch, standard_library
from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from train_gpt import (
    backward,
    build,
    console_of_rank_0,
    data_place,
    optimizer_for,
    over_ranks,
    parser,
    progress,
    shard,
)

import shardlib as sl

Named = Mapping[str, Tensor]
CURVE = 40, 10  # columns and lines of a loss curve on the terminal
MARGIN = 100  # a wrong reduction is off by whole factors, from the first step on


@dataclass
class Difference:
    """The largest relative differences between two runs over all steps, and in which tensor."""

    largest: dict[str, float] = field(default_factory=dict)
    tensor: dict[str, str] = field(default_factory=dict)

    def losses(self, got: float, want: float) -> None:
        self._keep("loss", abs(got - want) / abs(want))

    def tensors(self, what: str, got: Named, want: Named) -> None:
        """Compare as one long vector, and tensor by tensor: norm of the difference over norm of the value."""
        squares = {n: (_square(got[n] - value), _square(value)) for n, value in want.items()}
        self._keep(what, _ratio(*map(sum, zip(*squares.values(), strict=True))))
        worst = max(squares, key=lambda name: _ratio(*squares[name]))
        self._keep(f"{what}, the worst tensor", _ratio(*squares[worst]), worst)

    def _keep(self, key: str, value: float, tensor: str = "") -> None:
        if not value <= self.largest.get(key, -1.0):  # written so that NaN is kept
            self.largest[key], self.tensor[key] = value, tensor


class OneDevice:
    """The same model and optimizer with nothing of shardlib around them, on the global batch."""

    def __init__(self, args: argparse.Namespace, device: torch.device, *, reverse_rows: bool = False) -> None:
        self.model = build(args, device)
        self.optimizer = optimizer_for(self.model, args)
        self.reverse_rows = reverse_rows
        self.losses: list[float] = []

    def step(self, ids: Tensor, targets: Tensor) -> None:
        if self.reverse_rows:
            ids, targets = ids.flip(0), targets.flip(0)
        self.losses.append(backward(self.model, self.optimizer, ids, targets).item())
        self.optimizer.step()


class SideBySide:
    """A sharded run on all ranks and, on rank 0, two runs on one device: as it is, and with rows reversed."""

    def __init__(self, args: argparse.Namespace, mesh: DeviceMesh, console: Console) -> None:
        self.args, self.device = args, torch.device(mesh.device_type)
        self.model = shard(args, mesh, console)
        self.optimizer = optimizer_for(self.model, args)
        self.rank, self.ranks = data_place(mesh)
        self.losses: list[float] = []
        self.sharding, self.rounding = Difference(), Difference()
        if dist.get_rank() == 0:
            self.one = OneDevice(args, self.device)
            self.reversed = OneDevice(args, self.device, reverse_rows=True)

    def step(self, ids: Tensor, targets: Tensor) -> None:
        ids, targets = ids.to(self.device), targets.to(self.device)
        mine = slice(self.rank * len(ids) // self.ranks, (self.rank + 1) * len(ids) // self.ranks)
        self.losses.append(over_ranks(backward(self.model, self.optimizer, ids[mine], targets[mine])))
        self.optimizer.step()
        gradient, parameters = gradients_of(self.model), parameters_of(self.model)
        if dist.get_rank() == 0:
            self.one.step(ids, targets)
            self.reversed.step(ids, targets)
            self._compare(self.sharding, self.losses, gradient, parameters)
            self._compare(
                self.rounding,
                self.reversed.losses,
                gradients_of(self.reversed.model),
                parameters_of(self.reversed.model),
            )

    def _compare(self, into: Difference, losses: list[float], gradient: Named, parameters: Named) -> None:
        into.losses(losses[-1], self.one.losses[-1])
        into.tensors("gradient", gradient, gradients_of(self.one.model))
        into.tensors("parameters", parameters, parameters_of(self.one.model))


def gradients_of(model: nn.Module) -> Named:
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def parameters_of(model: nn.Module) -> Named:
    return {name: whole(p.detach()) for name, p in model.named_parameters()}


def whole(tensor: Tensor) -> Tensor:
    """The global value of a tensor that may be sharded. Every rank must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def curve(losses: list[float], *, low: float, high: float) -> str:
    """A loss curve as text, one column of blocks for each of `CURVE[0]` equal stretches of the run.

    >>> print(curve([3.0, 2.0, 1.0], low=1.0, high=3.0).splitlines()[0].rstrip())
    3.00 ┤█
    """
    width, height = min(CURVE[0], len(losses)), CURVE[1]
    means = [_mean(losses[i * len(losses) // width : (i + 1) * len(losses) // width]) for i in range(width)]
    eighths = [round((mean - low) / ((high - low) or 1.0) * (height * 8 - 1)) + 1 for mean in means]
    lines = []
    for line in reversed(range(height)):
        label = f"{low + (high - low) * line / (height - 1):4.2f} ┤"
        lines.append(label + "".join(" ▁▂▃▄▅▆▇█"[max(0, min(8, n - 8 * line))] for n in eighths))
    return "\n".join(lines)


def same_numbers(args: argparse.Namespace, run: SideBySide) -> bool:
    """Whether sharding changed no number by more than rounding does, within a margin."""
    least = torch.finfo(getattr(torch, args.dtype)).eps
    limits = {key: MARGIN * max(value, least) for key, value in run.rounding.largest.items()}
    return all(value <= limits[key] for key, value in run.sharding.largest.items())


def report(args: argparse.Namespace, mesh: DeviceMesh, run: SideBySide, console: Console) -> None:
    """Both curves, one table with the largest relative differences, and what to make of it."""
    low, high = min(run.one.losses + run.losses), max(run.one.losses + run.losses)
    runs = {"one device": run.one.losses, f"{sl.MeshShape.of(mesh)}, {dist.get_world_size()} processes": run.losses}
    console.print("\n[bold]loss, nats per byte[/bold]")
    console.print(Columns([Panel.fit(curve(x, low=low, high=high), title=title) for title, x in runs.items()]))
    console.print(losses_table(runs, every=max(1, args.steps // 8)))
    console.print(differences_table(args, run))
    if same_numbers(args, run):
        console.print("[bold]The same numbers:[/bold] the sharded run differs from one device as rounding does.")
    else:
        console.print(
            f"[bold red]Not the same numbers:[/bold red] a difference is over {MARGIN} times that of rounding."
        )


def losses_table(runs: Mapping[str, list[float]], *, every: int) -> Table:
    table = Table("step", *runs, title_justify="left")
    steps = len(next(iter(runs.values())))
    for step in [*range(0, steps - 1, every), steps - 1]:
        table.add_row(str(step), *(f"{losses[step]:.8f}" for losses in runs.values()))
    return table


def differences_table(args: argparse.Namespace, run: SideBySide) -> Table:
    table = Table(
        "largest relative difference, all steps",
        "sharded against one device",
        "one device, rows reversed",
        "worst tensor",
        title=f"{args.dtype}: what sharding changed, beside what rounding changes",
        caption="The gradient of a key bias is zero but for rounding, and Adam scales even that up to full steps: "
        "hence the fused qkv bias is the worst parameter wherever sums are taken in another order.",
    )
    for key, value in run.sharding.largest.items():
        table.add_row(key, f"{value:.1e}", f"{run.rounding.largest[key]:.1e}", run.sharding.tensor[key])
    return table


def _square(tensor: Tensor) -> float:
    return tensor.double().square().sum().item()


def _ratio(difference: float, value: float) -> float:
    return math.sqrt(difference / value) if value else math.sqrt(difference)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def main() -> None:
    args = parser(steps=80).parse_args()
    mesh = sl.mesh(args.mesh)
    console = console_of_rank_0()
    text = standard_library()
    run = SideBySide(args, mesh, console)
    with progress(console) as bar:
        for step in bar.track(range(args.steps), task_id=bar.add_task("training", total=args.steps, loss="")):
            run.step(*batch(text.train, step, rows=args.rows, context=args.context))
            bar.update(bar.task_ids[0], loss=f"loss {run.losses[-1]:.4f}")
    rank_0 = dist.get_rank() == 0
    if rank_0:
        report(args, mesh, run, console)
        if args.json:
            result: dict = {"sharded": run.losses, "one_device": run.one.losses}
            result |= {"sharding": run.sharding.largest, "rounding": run.rounding.largest}
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()
    if rank_0 and not same_numbers(args, run):
        sys.exit(1)


if __name__ == "__main__":
    main()

"""Train the byte-level GPT of `gpt.py` on any mesh; the loop is the one you would write for one device.

    python examples/train_gpt.py                                                     # one process
    torchrun --nproc_per_node 4 examples/train_gpt.py --mesh dp=2,tp=2               # four, on CPU or GPU
    torchrun --nproc_per_node 4 examples/train_gpt.py --mesh dp=2,tp=2 --compile aot_eager --json losses.json

Only three lines are shardlib's: the mesh, the rules, `shard_model`. Each data rank reads its own rows of the global
batch, so that the mesh does not change what is computed: the losses are the same on any of them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from data import Text, batch, standard_library
from gpt import GPT, GPTConfig, next_byte_loss
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shardlib as sl

VALIDATION_BATCHES = 4


def parser(*, steps: int = 200) -> argparse.ArgumentParser:
    """The options that every script of this folder shares."""
    p = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--mesh", default="dp=-1,tp=1", help="axes and sizes; one size may be -1 (as many as are left)")
    p.add_argument("--layout", default="example_gpt", help="a shipped layout's name or the path of a TOML file")
    p.add_argument("--steps", type=int, default=steps)
    p.add_argument("--rows", type=int, default=16, help="rows of the global batch, over all data ranks")
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--dtype", choices=["float32", "float64", "bfloat16"], default="float32")
    p.add_argument("--compile", choices=["auto", "aot_eager", "inductor", "none"], default="none")
    for name, default in vars(GPTConfig()).items():
        kind = {"action": argparse.BooleanOptionalAction} if isinstance(default, bool) else {"type": type(default)}
        p.add_argument(f"--{name.replace('_', '-')}", default=default, **kind)
    p.add_argument("--json", type=Path, help="write losses and speed to this file")
    return p


def build(args: argparse.Namespace, device: torch.device) -> GPT:
    """The model on one device; every rank draws the same weights from the same seed."""
    torch.manual_seed(args.seed)
    config = GPTConfig(**{name: getattr(args, name) for name in vars(GPTConfig())})
    return GPT(config).to(device, getattr(torch, args.dtype))


def shard(args: argparse.Namespace, mesh: DeviceMesh, console: Console) -> nn.Module:
    """Build the model, print its plan, and lay it out over the mesh."""
    model = build(args, torch.device(mesh.device_type))
    rules = sl.layouts.load(args.layout)
    console.print(sl.plan(model, mesh, rules).table())
    return sl.shard_model(model, mesh, rules, compile=None if args.compile == "none" else args.compile)


def optimizer_for(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)


def backward(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, targets: Tensor) -> Tensor:
    """Loss of this rank's rows, with fresh gradients behind it."""
    optimizer.zero_grad()
    loss = next_byte_loss(model(ids), targets)
    loss.backward()
    return loss.detach()


def data_place(mesh: DeviceMesh) -> tuple[int, int]:
    """Which data rank this process is, and of how many."""
    shape = sl.MeshShape.of(mesh)
    here = shape.coordinate(dist.get_rank())
    index, count = 0, 1
    for axis in shape.data_axes:
        index, count = index * shape[axis] + here[axis], count * shape[axis]
    return index, count


def over_ranks(loss: Tensor) -> float:
    """The mean over all ranks, which is the global mean: data ranks hold equally many rows."""
    total = loss.to(torch.float64, copy=True)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def progress(console: Console) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, TextColumn("{task.fields[loss]}"), console=console)


def console_of_rank_0() -> Console:
    """Rank 0 speaks; where no terminal says how long its lines are, they are long enough for a plan."""
    return Console(quiet=dist.get_rank() != 0, width=None if sys.stdout.isatty() else 120, highlight=False)


def train(args: argparse.Namespace, model: nn.Module, mesh: DeviceMesh, text: Text, console: Console) -> list[float]:
    """The training loop; returns the global loss of every step."""
    optimizer = optimizer_for(model, args)
    rank, ranks = data_place(mesh)
    losses: list[float] = []
    with progress(console) as bar:
        for step in bar.track(range(args.steps), task_id=bar.add_task("training", total=args.steps, loss="")):
            ids, targets = batch(text.train, step, rows=args.rows, context=args.context, rank=rank, ranks=ranks)
            losses.append(
                over_ranks(backward(model, optimizer, ids.to(mesh.device_type), targets.to(mesh.device_type)))
            )
            optimizer.step()
            bar.update(bar.task_ids[0], loss=f"loss {losses[-1]:.4f}")
    return losses


@torch.no_grad()
def validate(args: argparse.Namespace, model: nn.Module, mesh: DeviceMesh, text: Text) -> float:
    """Mean loss over text that was never trained on."""
    rank, ranks = data_place(mesh)
    model.eval()
    total = 0.0
    for step in range(VALIDATION_BATCHES):
        ids, targets = batch(text.validation, step, rows=args.rows, context=args.context, rank=rank, ranks=ranks)
        logits = model(ids.to(mesh.device_type))
        total += over_ranks(next_byte_loss(logits, targets.to(mesh.device_type)))
    model.train()
    return total / VALIDATION_BATCHES


def main() -> None:
    args = parser().parse_args()
    mesh = sl.mesh(args.mesh)
    console = console_of_rank_0()
    text = standard_library()
    model = shard(args, mesh, console)
    start = time.perf_counter()
    losses = train(args, model, mesh, text, console)
    seconds = time.perf_counter() - start
    validation = validate(args, model, mesh, text)
    speed = args.steps * args.rows * args.context / seconds
    console.print(
        f"loss {losses[0]:.4f} -> {losses[-1]:.4f} nats per byte, {validation:.4f} on text never trained on; "
        f"{speed:,.0f} bytes a second on {sl.MeshShape.of(mesh)}"
    )
    if args.json and dist.get_rank() == 0:
        result = {"mesh": str(sl.MeshShape.of(mesh)), "losses": losses, "validation": validation, "seconds": seconds}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

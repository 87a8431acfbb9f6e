"""The same training at every stage of ZeRO: what each rank holds and sends, beside what the plan said before.

    torchrun --nproc_per_node 2 examples/zero.py
    torchrun --nproc_per_node 4 examples/zero.py --mesh dp=2,tp=2 --steps 20
    torchrun --nproc_per_node 2 examples/zero.py --precision bf16

Measured are the bytes of the tensors that live after a step, and those of the messages that a step sends over the data
axes. Losses are the same at every stage, to rounding (in float64, `--dtype float64`, to the last digits).
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import torch
import torch.distributed as dist
from data import Text, batch, standard_library
from gpt import next_byte_loss
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from train_gpt import build, console_of_rank_0, data_place, over_ranks, parser

import shardlib as sl
from shardlib.engine import record_collectives

STAGES = {"replicate()": sl.replicate(), **{f"zero({n})": sl.zero(n) for n in (1, 2, 3)}, "fsdp()": sl.fsdp()}


def local_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the memory that this rank keeps for some tensors; what has no dims (a count of steps) left out."""
    local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors if t is not None and t.ndim)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}
    return sum(storages.values())


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    state = (value for entry in optimizer.state.values() for value in entry.values())
    return {
        "parameters": local_bytes(model.parameters()),
        "gradients": local_bytes(p.grad for p in model.parameters()),
        "state": local_bytes(value for value in state if isinstance(value, Tensor)),
    }


def train(args, transforms: list, text: Text) -> tuple[list[float], dict[str, int], sl.Plan]:
    """Losses of all steps; bytes that this rank held and sent in the last one; the plan."""
    mesh = sl.mesh(args.mesh)
    model = sl.shard_model(
        build(args, torch.device(mesh.device_type)), mesh, sl.layouts.load(args.layout), transforms=transforms,
        compile=None,
    )  # fmt: skip
    optimizer = sl.OptimizerWrapper(torch.optim.AdamW, model, lr=args.lr)
    rank, ranks = data_place(mesh)
    losses: list[float] = []
    for step in range(args.steps):
        ids, targets = batch(text.train, step, rows=args.rows, context=args.context, rank=rank, ranks=ranks)
        optimizer.zero_grad()
        with record_collectives(model, mesh=mesh) as log:
            loss = next_byte_loss(model(ids.to(mesh.device_type)), targets.to(mesh.device_type))
            optimizer.backward(loss)
            optimizer.step()
        losses.append(over_ranks(loss.detach()))
    data = set(sl.MeshShape.of(mesh).data_axes)
    sent = sum(c.sent for c in log.collectives if c.axes and set(c.axes) <= data)
    return losses, {**held(model, optimizer), "sent": sent}, sl.get_plan(model)


def planned(plan: sl.Plan) -> dict[str, int]:
    memory = plan.memory()
    return {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "state": memory.state,
        "sent": sum(each.bytes for each in plan.traffic()),
    }


def main() -> None:
    p = parser(steps=10)
    p.add_argument("--precision", choices=["bf16", "fp16", "fp16_naive"], help="train in fewer bits")
    p.set_defaults(mesh="dp=-1")
    args = p.parse_args()
    sl.mesh(args.mesh)
    text, console = standard_library(), console_of_rank_0()
    columns = "parameters", "gradients", "state", "sent"
    table = Table("", *(f"{name} kB (plan)" for name in columns), "last loss", title="one rank, one step")
    results = {}
    for name, stage in STAGES.items():
        transforms = [stage, *([sl.precision(args.precision)] if args.precision else [])]
        losses, measured, plan = train(args, transforms, text)
        said = planned(plan)
        results[name] = {"losses": losses, "measured": measured, "planned": said}
        cells = [f"{measured[key] / 1e3:,.1f} ({said[key] / 1e3:,.1f})" for key in columns]
        table.add_row(name, *cells, f"{losses[-1]:.6f}")
    console.print(table)
    if args.json and dist.get_rank() == 0:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Train on GPUs over NCCL, and compare every step with one device: losses, and weights after the last step.

    python benchmarks/gpu.py                  # one rank, and its step beside those of torch's wrappers
    python benchmarks/gpu.py --ranks 4        # proof alone where ranks share a GPU: their speed says nothing

Every case trains the GPT of the benchmarks with AdamW on a mesh. The same model on one device, without shardlib, has
the same weights at first and the same batches. The distance of a case is the largest difference of a loss or a weight,
over the largest absolute value of that tensor. In float64 it must stay under 1e-10. A case of lower precision computes
from float32 weights, and its losses are compared with those of float64. They may be ten times as far away as those of
`torch.autocast` to bfloat16 on one device; in float8, whose unit of rounding is sixteen times as large, sixteen times
that.

Where there are fewer GPUs than ranks, ranks share them. NCCL takes ranks on one GPU only from different hosts, and
`NCCL_HOSTID` gives each rank a host of its own; what they send goes over sockets.

Without a GPU all of it runs on CPU, over gloo.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _models import GPT, Batch, Size, batches, plain
from _report import alternate, compared, parser, write, written
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardlib as sl
from shardlib.transforms import parse

PROOF = Size(embed=256, layers=4, heads=4, vocab=1024, seq=64, rows=8, rounds=5)
SPEED = Size(embed=1024, layers=8, heads=16, vocab=8192, seq=512, rows=8, rounds=30)
SMALL = Size(embed=64, layers=4, heads=4, vocab=64, seq=16, rows=8, rounds=2)
EXACT, ROUNDED = 1e-10, 10.0
ADAMW: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01, "fused": True}
BASE = "DistributedDataParallel"

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Case:
    mesh: str
    transforms: str = ""
    compile: str | None = None
    rounds_to: torch.dtype | None = None

    def __str__(self) -> str:
        return ", ".join(part for part in (self.mesh, self.transforms, self.compile) if part)


def cases(ranks: int) -> list[Case]:
    """Return the cases of a number of ranks."""
    data, model = f"dp={ranks}", f"tp={ranks}"
    exact = ["replicate()", "zero(1)", "zero(2)", "zero(3)", "fsdp()"]
    exact += ["zero(1) | offload()", "zero(2) | checkpoint_activations('blocks.*')"]
    exact += ["zero(3) | offload('all')"] if ranks > 1 else []  # which one rank refuses: it shards nothing
    rounding = {
        "zero(3) | precision('bf16')": torch.bfloat16,
        "zero(2) | precision('fp16')": torch.float16,
        "zero(1) | precision('fp8')": torch.float8_e4m3fn,
    }
    found = [Case(data, text) for text in exact] + [Case(data, text, rounds_to=to) for text, to in rounding.items()]
    if ranks > 1:
        found += [Case(model, compile=mode) for mode in (None, "aot_eager", "inductor")]
        found.append(Case(f"pp={ranks}", f"pipeline('1f1b', {2 * ranks})"))
    if ranks % 2 == 0 and ranks > 2:
        found += [
            Case(f"dp=2,tp={ranks // 2}", "zero(3)"),
            Case(f"pp=2,dp={ranks // 2}", "zero(1) | pipeline('1f1b', 4)"),
        ]
    return found


class Labelled(nn.Module):
    """The model, which is given the targets beside the ids: the criterion of a pipeline reads them."""

    def __init__(self, gpt: nn.Module) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self.gpt(ids)


def criterion(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def sharded(size: Size, case: Case) -> nn.Module:
    """Build the model of a case, from the weights that one device begins with."""
    shape = sl.MeshShape(case.mesh)
    stages = shape.sizes[0] if "pp" in shape.names else 1
    per_stage = size.layers // stages
    parts = [f"gpt.blocks.{i * per_stage}-{(i + 1) * per_stage - 1}" for i in range(stages)]
    parts[0], parts[-1] = f"gpt.token, gpt.position, {parts[0]}", f"{parts[-1]}, gpt.norm, gpt.head"
    rules = sl.Rules(
        {"attn.qkv": "colwise", "attn.proj": "rowwise", "mlp.up": "colwise", "mlp.down": "rowwise"},
        unmatched="replicate",
        stages=" | ".join(parts) if stages > 1 else None,
    )
    model = plain(size) if case.rounds_to else plain(size).double()
    transforms = [parse(case.transforms)] if case.transforms else []
    return sl.shard_model(
        Labelled(model).to(DEVICE), sl.mesh(case.mesh), rules, transforms=transforms, compile=case.compile
    )


# --- proof ------------------------------------------------------------------------------------------------------------


@dataclass
class Trained:
    """Losses and last weights of a run, in float64; whether blocks that were to be compiled ran eagerly."""

    losses: Tensor
    weights: dict[str, Tensor]
    eagerly: bool = False

    def distance(self, other: Trained, *, weights: bool) -> float:
        pairs = [(self.losses, other.losses)]
        if weights:
            pairs += [(self.weights[name], value) for name, value in other.weights.items()]
        return max(((a - b).abs().max() / b.abs().max().clamp_min(1e-300)).item() for a, b in pairs)


def on_one_device(size: Size, data: list[Batch], *, autocast: bool = False) -> Trained:
    model = Labelled(plain(size) if autocast else plain(size).double()).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses = []
    for batch in data:
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            loss = criterion(model(*batch), batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().double())
    return Trained(torch.stack(losses), {name: value.double() for name, value in model.state_dict().items()})


def train(size: Size, case: Case, data: list[Batch]) -> Trained:
    """Train on this rank's rows of each batch. Losses are those of the whole batch."""
    model = sharded(size, case)
    optimizer = sl.OptimizerWrapper(torch.optim.AdamW, model, **ADAMW)
    shape = sl.MeshShape(case.mesh)
    index, count = shape.data_place(shape.coordinate(dist.get_rank()))
    losses = []
    for batch in data:
        ids, targets = (tensor.chunk(count)[index] for tensor in batch)
        optimizer.zero_grad()
        if "pp" in case.mesh:
            loss = sl.pipeline_step(model, (ids, targets), criterion).loss
            assert loss is not None
        else:
            loss = criterion(model(ids, targets), (ids, targets))
            optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.detach().double())
    total = torch.stack(losses) / dist.get_world_size()
    dist.all_reduce(total)
    weights = sl.full_state_dict(model)
    eagerly = any("runs eagerly" in note for note in sl.get_plan(model).notes)
    return Trained(total, {name: value.to(DEVICE, torch.float64) for name, value in weights.items()}, eagerly)


def limit(case: Case, rounded: float) -> float:
    """Return the allowed distance; `rounded` is that of bfloat16 on one device, and others round so much coarser."""
    if case.rounds_to is None:
        return EXACT
    return ROUNDED * rounded * max(torch.finfo(case.rounds_to).eps / torch.finfo(torch.bfloat16).eps, 1.0)


def prove(size: Size) -> list[dict[str, Any]]:
    data = [(ids.to(DEVICE), targets.to(DEVICE)) for ids, targets in batches(size, size.rounds, seed=1)]
    exact = on_one_device(size, data)
    rounded = on_one_device(size, data, autocast=True).distance(exact, weights=False)
    rows = []
    for case in cases(dist.get_world_size()):
        row: dict[str, Any] = {"case": str(case), "limit": limit(case, rounded)}
        begin = time.perf_counter()
        try:
            trained = train(size, case, data)
            row["distance"] = trained.distance(exact, weights=not case.rounds_to)
            row |= {"passed": row["distance"] <= row["limit"], "fell_back_to_eager": trained.eagerly}
        except Exception as error:  # the next case may pass
            row |= {"passed": False, "error": f"{type(error).__name__}: {error}"}
        rows.append(row | {"seconds": time.perf_counter() - begin})
        if dist.get_rank() == 0:
            print(f"{case}: {row.get('distance', row.get('error'))}", flush=True)
    return rows


# --- speed ------------------------------------------------------------------------------------------------------------


def by_torch(model: GPT) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def by_shardlib(text: str) -> Callable[[GPT], nn.Module]:
    return lambda model: sl.shard_model(model, sl.mesh(dp=-1), {"**": None}, transforms=[parse(text)])


SETUPS: dict[str, Callable[[GPT], nn.Module]] = {
    BASE: DistributedDataParallel,
    "fully_shard": by_torch,
    **{f"shardlib, {text}": by_shardlib(text) for text in ("replicate()", "zero(1)", "zero(2)", "zero(3)", "fsdp()")},
}


def measure(size: Size) -> list[dict[str, Any]]:
    """Alternate training steps in float32, with TF32, and compare each with that of the base in its round."""
    torch.set_float32_matmul_precision("high")
    data = [(ids.to(DEVICE), targets.to(DEVICE)) for ids, targets in batches(size, 3, seed=1)]
    trained = {}
    for name, setup in SETUPS.items():
        model = setup(plain(size).to(DEVICE))
        trained[name] = model, torch.optim.AdamW(model.parameters(), **ADAMW)
        for batch in data:
            step(*trained[name], batch)
    taken: dict[str, list[float]] = {name: [] for name in trained}
    for order in alternate(list(trained), size.rounds):
        for name in order:
            taken[name].append(step(*trained[name], data[0]))
    return [
        {"variant": name, "ms": 1e3 * statistics.median(taken[name]), **compared(taken[name], taken[BASE])}
        for name in trained
    ]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """Take a training step, and return its seconds."""
    _synchronize()
    begin = time.perf_counter()
    optimizer.zero_grad()
    criterion(model(batch[0]), batch).backward()
    optimizer.step()
    _synchronize()
    return time.perf_counter() - begin


def _synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--ranks", type=int, default=1, help="ranks, which share the GPUs that there are")
    args = p.parse_args()
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.ranks}"]
        sys.exit(subprocess.call([*command, sys.argv[0], *sys.argv[1:]], env={**os.environ, "OMP_NUM_THREADS": "1"}))
    shares = DEVICE == "cuda" and torch.cuda.device_count() < args.ranks
    if shares:
        os.environ |= {
            "NCCL_HOSTID": os.environ["RANK"],
            "LOCAL_RANK": str(int(os.environ["RANK"]) % torch.cuda.device_count()),
        }
    sl.mesh(dp=-1)
    found = {"proof": prove(SMALL if args.quick else PROOF)}
    if not shares:
        found["speed"] = measure(SMALL if args.quick else SPEED)
    if dist.get_rank() == 0:
        show(found)
        if args.json:
            name = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
            write(args.json, found, ranks=args.ranks, device=name, backend=dist.get_backend(), nccl_over_sockets=shares)
    passed = all(row["passed"] for row in found["proof"])
    dist.destroy_process_group()
    sys.exit(not passed)


def show(found: dict[str, list[dict[str, Any]]]) -> None:
    table = Table("case", "distance", "limit", "seconds", "")
    for row in found["proof"]:
        distance = f"{row['distance']:.1e}" if "distance" in row else row["error"]
        said = "WRONG" if not row["passed"] else "blocks ran eagerly" if row["fell_back_to_eager"] else ""
        table.add_row(row["case"], distance, f"{row['limit']:.1e}", f"{row['seconds']:.1f}", said)
    Console(width=140).print(table)
    table = Table("a training step", "ms", f"ratio to {BASE} (middle half)")
    for row in found.get("speed", ()):
        table.add_row(row["variant"], f"{row['ms']:.2f}", written(row))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()

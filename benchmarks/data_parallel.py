"""A training step (forward, backward, AdamW) on two data-parallel ranks: shardlib and its peers, at every stage.

    python benchmarks/data_parallel.py                       # both sizes, some minutes on two cores
    python benchmarks/data_parallel.py --size d512 --memory

1.00 is `DistributedDataParallel` with torch's fused AdamW, which shardlib takes on CPU where the user left the choice.
Lines under the table compare each stage with peers that do the same with the same optimizer. Peers with their default
optimizer, which is a loop on CPU, are there for the record. "alone" trains each rank by itself, with the fused AdamW,
and sends nothing: what is left between it and another variant is the price of data parallelism, which is printed under
the table, part by part. Every other variant starts from the same weights, sees the same batches, and must show the same
losses. Memory is what the allocator has given out when a step has ended, and the resident peak, over those of the bare
process, with each variant in processes of its own (`--memory`); sent bytes are those that the kernel counted on one
rank's sockets.

PyTorch's own peers always run. fairscale runs where it is installed, which `make bench` does in an environment of its
own; its FullyShardedDataParallel asks for CUDA streams and does not run on a CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from _harness import (
    OPTIONS,
    PARTS,
    Trained,
    Variant,
    compare,
    fused,
    fused_and_default,
    is_rank,
    own_optimizer,
    parser,
    start_ranks,
    write,
)
from _models import Block, Size, plain
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import shardlib as sl
from shardlib.transforms import fsdp, zero


def ddp(size: Size, *, view: bool) -> nn.Module:
    return DistributedDataParallel(plain(size), gradient_as_bucket_view=view)


def ours(
    size: Size, *, transforms: Sequence[Callable[[sl.Plan], sl.Plan]] = (), compile: str | None = None
) -> nn.Module:
    rules = sl.Rules({}, unmatched="replicate")
    return sl.shard_model(plain(size), sl.mesh(dp=-1), rules, transforms=transforms, compile=compile)


def fsdp2(size: Size, *, reshard: bool) -> nn.Module:
    model = plain(size)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    return model


def fsdp1(size: Size) -> nn.Module:
    policy = ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(plain(size), auto_wrap_policy=policy, use_orig_params=True, device_id=CPU)


def zero_redundancy(size: Size, *, fused: bool | None) -> Trained:
    model = ddp(size, view=False)
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, fused=fused, **OPTIONS)


def fairscale(size: Size, *, gradients: bool, fused: bool | None) -> Trained:
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    model = plain(size)
    wrapped = model if gradients else DistributedDataParallel(model)
    optimizer = OSS(wrapped.parameters(), torch.optim.AdamW, fused=fused, **OPTIONS)
    return (ShardedDataParallel(model, optimizer) if gradients else wrapped), optimizer


CPU = torch.device("cpu")
ZERO_1, OSS, SHARDED_DDP = "ZeroRedundancyOptimizer + DDP", "fairscale OSS + DDP", "fairscale ShardedDDP"
FAIRSCALE = [
    *own_optimizer(OSS, partial(fairscale, gradients=False)),
    *own_optimizer(SHARDED_DDP, partial(fairscale, gradients=True), set_to_none=False),
]
# Stages 1 and 2 beside DDP too: it is what one takes where memory is no reason for a stage.
PEERS = {
    "replicate()": ("DDP", "DDP, gradient_as_bucket_view"),
    "zero(1)": ("DDP", ZERO_1, OSS),
    "zero(2)": ("DDP", SHARDED_DDP),
    "zero(3)": ("FullyShardedDataParallel", "fully_shard"),
    "fsdp()": ("FullyShardedDataParallel", "fully_shard"),
    "fsdp(reshard_after_forward=False)": ("fully_shard, not resharded",),
}
TRANSFORMS = {
    "replicate()": (),
    **{f"zero({stage})": (zero(stage),) for stage in (1, 2, 3)},
    "fsdp()": (fsdp(),),
    "fsdp(reshard_after_forward=False)": (fsdp(reshard_after_forward=False),),
}
VARIANTS = [
    *fused_and_default("DDP", partial(ddp, view=False)),
    *fused_and_default("DDP, gradient_as_bucket_view", partial(ddp, view=True)),
    *own_optimizer(ZERO_1, zero_redundancy),
    *(FAIRSCALE if find_spec("fairscale") else []),
    *fused_and_default("FullyShardedDataParallel", fsdp1),
    *fused_and_default("fully_shard", partial(fsdp2, reshard=True)),
    *fused_and_default("fully_shard, not resharded", partial(fsdp2, reshard=False)),
    *(
        Variant(f"shardlib, {name}", partial(ours, transforms=transforms), peers=tuple(map(fused, PEERS[name])))
        for name, transforms in TRANSFORMS.items()
    ),
    Variant("alone", plain, trains_alike=False, fused=True),
]


def gaps(rows: list[dict[str, Any]]) -> list[str]:
    """What each variant of ours costs over a rank alone, and in which part of the step."""
    alone = next((row for row in rows if row["variant"] == "alone"), None)
    if alone is None:
        return []
    lines = ["What is left over a rank alone, in ms of a step:"]
    for row in rows:
        if row["variant"].startswith("shardlib"):
            parts = ", ".join(f"{part} {row[part] - alone[part]:+.2f}" for part in PARTS)
            sent = row["sent_bytes"] / 1e6
            lines.append(f"  {row['variant']}: {row['ms'] - alone['ms']:+.2f} ({parts}), for {sent:.2f} MB sent")
    return lines


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--memory", action="store_true", help="then run each variant by itself and measure its memory")
    args = p.parse_args()
    if is_rank():
        sl.mesh(dp=-1)
        write(args, compare(args, VARIANTS, seed=args.seed + dist.get_rank(), explain=gaps))
        dist.destroy_process_group()
        return
    failed = start_ranks(2, sys.argv[1:])
    for name in (args.only or [v.name for v in VARIANTS]) if args.memory else []:
        failed = failed or start_ranks(2, ["--size", args.size, "--rounds", "5", "--only", name])
    sys.exit(failed)


if __name__ == "__main__":
    main()

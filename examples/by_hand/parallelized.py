"""A model sharded by hand with PyTorch's `parallelize_module`, and one line of the plan forgotten.

    python examples/by_hand/parallelized.py             what `equivalent` says of it
    python examples/by_hand/parallelized.py --mended    with the line

Activations between the layers are split over the sequence, so norms have to be told (`SequenceParallel`) that each rank
sees a part of it: their weights' gradients are then summed. `norm2` is forgotten. The loss looks as it should, all
activations are right, and the ranks' copies of the weight drift apart.
"""

from __future__ import annotations

import argparse
import functools

import torch.nn as nn
from small_model import Model, batch, loss
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shardlib.testing import Report, equivalent


def shard(model: nn.Module, mesh: DeviceMesh, mended: bool = False) -> nn.Module:
    whole = functools.partial(PrepareModuleInput, input_layouts=Shard(1), desired_input_layouts=Replicate())
    plan: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.norm1": SequenceParallel(),
        "blocks.*.attn": whole(),
        "blocks.*.attn.q": ColwiseParallel(),
        "blocks.*.attn.k": ColwiseParallel(),
        "blocks.*.attn.v": ColwiseParallel(),
        "blocks.*.attn.proj": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.mlp": whole(),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    if mended:
        plan["blocks.*.norm2"] = SequenceParallel()
    return parallelize_module(model, mesh, plan)


def prove(*, mended: bool = False) -> Report:
    return equivalent(Model, batch, "tp=2", shard=functools.partial(shard, mended=mended), loss=loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mended", action="store_true", help="with the line that was forgotten")
    print(prove(mended=parser.parse_args().mended))

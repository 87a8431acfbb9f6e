"""An `Accelerator` on CPU ranks with FSDP2, which Accelerate itself chooses on accelerators only."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

__all__ = ["accelerator", "environment"]


def environment() -> None:
    """Set what `torchrun` would have set for this rank."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "NODE_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT", "29500")}


def accelerator(*blocks: str, gradient_accumulation_steps: int = 1, **plugin: Any) -> Any:
    """Return an `Accelerator` for DDP, or for FSDP2 if classes of blocks are named, with options of its plugin."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DistributedType

    environment()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    made = Accelerator(cpu=True, gradient_accumulation_steps=gradient_accumulation_steps)
    if blocks:
        made.state.distributed_type = DistributedType.FSDP
        made.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=list(blocks),
            **{"cpu_ram_efficient_loading": False, **plugin},
        )
    return made

"""What acts: a plan carried out on `torch.distributed`."""

from __future__ import annotations

from shardlib.engine.apply import apply_plan, no_sync, plan_of, shard_model
from shardlib.engine.dryrun import plan
from shardlib.engine.exact import exact_random
from shardlib.engine.optimizer import register_elementwise
from shardlib.engine.recording import record_collectives
from shardlib.engine.state import full_state_dict
from shardlib.engine.wrapper import OptimizerWrapper

__all__ = [
    "OptimizerWrapper",
    "apply_plan",
    "exact_random",
    "full_state_dict",
    "no_sync",
    "plan",
    "plan_of",
    "record_collectives",
    "register_elementwise",
    "shard_model",
]

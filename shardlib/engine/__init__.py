"""The engine: carries out a plan with `torch.distributed`."""

from __future__ import annotations

from shardlib.engine.apply import apply_plan, no_sync, plan_of, shard_model
from shardlib.engine.dryrun import plan
from shardlib.engine.exact import exact_random
from shardlib.engine.gradients import GradientBucket
from shardlib.engine.norms import clip_grad_norm_, clip_grad_value_, get_grad_norm
from shardlib.engine.optimizer import register_elementwise, register_per_tensor
from shardlib.engine.pipeline.step import PipelineStep, pipeline_step
from shardlib.engine.recording import record_collectives
from shardlib.engine.reduction import reduce_gradients_by
from shardlib.engine.state import full_state_dict
from shardlib.engine.wrapper import OptimizerWrapper

__all__ = [
    "GradientBucket",
    "OptimizerWrapper",
    "PipelineStep",
    "apply_plan",
    "clip_grad_norm_",
    "clip_grad_value_",
    "exact_random",
    "full_state_dict",
    "get_grad_norm",
    "no_sync",
    "pipeline_step",
    "plan",
    "plan_of",
    "record_collectives",
    "reduce_gradients_by",
    "register_elementwise",
    "register_per_tensor",
    "shard_model",
]

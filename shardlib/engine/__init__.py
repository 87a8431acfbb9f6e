"""The engine: carries out a plan with `torch.distributed`."""

from __future__ import annotations

from shardlib.engine.apply import apply_plan, get_plan, no_sync, shard_model
from shardlib.engine.dryrun import plan
from shardlib.engine.exact import exact_random
from shardlib.engine.gradients import GradientBucket
from shardlib.engine.norms import clip_grad_norm_, clip_grad_value_, get_grad_norm
from shardlib.engine.optimizer import register_optimizer
from shardlib.engine.pipeline.step import PipelineStep, pipeline_step
from shardlib.engine.recording import record_collectives
from shardlib.engine.reduction import register_gradient_reduction
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
    "get_plan",
    "no_sync",
    "pipeline_step",
    "plan",
    "record_collectives",
    "register_gradient_reduction",
    "register_optimizer",
    "shard_model",
]

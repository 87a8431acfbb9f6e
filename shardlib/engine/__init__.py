"""The engine: carries out a plan with `torch.distributed`.

Its packages, each of which imports only from itself and from those before it:

    _torch      names that are private to torch, by subject
    ranks       messages between ranks: collectives, comparisons of values, detection of lost ranks
    ops         every op on DTensors, by a sharding rule or on gathered operands
    data        parameters, gradients and optimizer state, as they move between the phases of the plan
    model       modules that compute on DTensors
    feature     experts, recomputation, compiled blocks, BatchNorm, exact random numbers, float8, comparison of ranks
    pipeline    stages, and the messages between them
    apply       `shard_model`: carries out a plan on a model
"""

from __future__ import annotations

from shardlib.engine.apply import apply_plan, get_plan, no_sync, shard_model
from shardlib.engine.data.gradients import GradientBucket
from shardlib.engine.data.norms import clip_grad_norm_, clip_grad_value_, get_grad_norm
from shardlib.engine.data.optimizer import register_optimizer
from shardlib.engine.data.reduction import register_gradient_reduction
from shardlib.engine.data.state import full_state_dict
from shardlib.engine.data.wrapper import OptimizerWrapper
from shardlib.engine.dryrun import plan
from shardlib.engine.feature.exact import exact_random
from shardlib.engine.feature.recording import record_collectives
from shardlib.engine.pipeline.step import PipelineStep, pipeline_step

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

"""The API that users of ColossalAI and fairscale know: boosters, their plugins, and pipelines in one process."""

from __future__ import annotations

from shardlib.booster._accelerator import Accelerator, get_accelerator, get_current_device
from shardlib.booster._booster import BoostedModule, Booster
from shardlib.booster._checkpoint_io import GeneralCheckpointIO
from shardlib.booster._coordinator import DistCoordinator
from shardlib.booster._data import DataLoader
from shardlib.booster._lazy_init import LazyInitContext
from shardlib.booster._logger import DistributedLogger, disable_existing_loggers, get_dist_logger
from shardlib.booster._moe import MoeHybridParallelPlugin
from shardlib.booster._optimizer import BoostedOptimizer
from shardlib.booster._plugins import (
    DPPluginBase,
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from shardlib.booster._precision import (
    BF16MixedPrecision,
    FP8MixedPrecision,
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
    MixedPrecision,
)
from shardlib.booster._recompute import GradientCheckpointConfig, PipelineGradientCheckpointConfig
from shardlib.booster._stages import PipelineStageManager
from shardlib.booster.config import Config
from shardlib.booster.launch import Launched, launch, launch_from_openmpi, launch_from_slurm, launch_from_torch
from shardlib.booster.pipe import Pipe, balance_by_size, balance_by_time
from shardlib.engine import OptimizerWrapper, clip_grad_value_, get_grad_norm

ModelWrapper = BoostedModule

__all__ = [
    "Accelerator",
    "BF16MixedPrecision",
    "BoostedModule",
    "BoostedOptimizer",
    "Booster",
    "Config",
    "DPPluginBase",
    "DataLoader",
    "DistCoordinator",
    "DistributedLogger",
    "FP8MixedPrecision",
    "FP16ApexMixedPrecision",
    "FP16NaiveMixedPrecision",
    "FP16TorchMixedPrecision",
    "GeminiPlugin",
    "GeneralCheckpointIO",
    "GradientCheckpointConfig",
    "HybridParallelPlugin",
    "Launched",
    "LazyInitContext",
    "LowLevelZeroPlugin",
    "MixedPrecision",
    "ModelWrapper",
    "MoeHybridParallelPlugin",
    "OptimizerWrapper",
    "Pipe",
    "PipelineGradientCheckpointConfig",
    "PipelineStageManager",
    "Plugin",
    "TorchDDPPlugin",
    "TorchFSDPPlugin",
    "balance_by_size",
    "balance_by_time",
    "clip_grad_value_",
    "disable_existing_loggers",
    "get_accelerator",
    "get_current_device",
    "get_dist_logger",
    "get_grad_norm",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
]

"""The API of boosters and engines to start and configure a job, implemented on shardlib."""

from __future__ import annotations

from shardlib.booster._booster import BoostedModule, Booster
from shardlib.booster._coordinator import DistCoordinator
from shardlib.booster._data import DataLoader
from shardlib.booster._moe import MoeHybridParallelPlugin
from shardlib.booster._optimizer import BoostedOptimizer
from shardlib.booster._plugins import (
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
from shardlib.booster.config import Config
from shardlib.booster.launch import Launched, launch, launch_from_openmpi, launch_from_slurm, launch_from_torch
from shardlib.engine import LazyInitContext

__all__ = [
    "BF16MixedPrecision",
    "BoostedModule",
    "BoostedOptimizer",
    "Booster",
    "Config",
    "DataLoader",
    "DistCoordinator",
    "FP8MixedPrecision",
    "FP16ApexMixedPrecision",
    "FP16NaiveMixedPrecision",
    "FP16TorchMixedPrecision",
    "GeminiPlugin",
    "HybridParallelPlugin",
    "Launched",
    "LazyInitContext",
    "LowLevelZeroPlugin",
    "MixedPrecision",
    "MoeHybridParallelPlugin",
    "Plugin",
    "TorchDDPPlugin",
    "TorchFSDPPlugin",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
]

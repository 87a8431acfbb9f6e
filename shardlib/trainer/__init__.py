"""The older way of training in ColossalAI: a config, an engine, a trainer and its hooks, on `shardlib.booster`."""

from __future__ import annotations

from shardlib.booster import Config, DistCoordinator
from shardlib.trainer import hooks
from shardlib.trainer._context import ParallelContext, ParallelMode, global_context
from shardlib.trainer._data import get_dataloader
from shardlib.trainer._device import get_current_device
from shardlib.trainer._engine import Engine
from shardlib.trainer._handlers import GRADIENT_HANDLER, BaseGradientHandler, register_gradient_handler
from shardlib.trainer._initialize import initialize
from shardlib.trainer._launch import launch, launch_from_openmpi, launch_from_slurm, launch_from_torch
from shardlib.trainer._logger import DistributedLogger, get_dist_logger
from shardlib.trainer._metrics import (
    Accuracy,
    AccuracyMetric,
    LearningRateMetric,
    LossMetric,
    Metric,
    ThroughputMetric,
)
from shardlib.trainer._ophooks import BaseOpHook
from shardlib.trainer._parser import get_default_parser
from shardlib.trainer._precision import AMP_TYPE
from shardlib.trainer._registry import Registry
from shardlib.trainer._schedule import (
    SCHEDULE,
    BaseSchedule,
    NonPipelineSchedule,
    PipelineSchedule,
    register_schedule,
)
from shardlib.trainer._timer import MultiTimer, Timer
from shardlib.trainer._trainer import Trainer
from shardlib.trainer._utils import (
    free_port,
    is_using_ddp,
    is_using_pp,
    load_checkpoint,
    print_rank_0,
    save_checkpoint,
)

gpc = global_context

__all__ = [
    "AMP_TYPE",
    "GRADIENT_HANDLER",
    "SCHEDULE",
    "Accuracy",
    "AccuracyMetric",
    "BaseGradientHandler",
    "BaseOpHook",
    "BaseSchedule",
    "Config",
    "DistCoordinator",
    "DistributedLogger",
    "Engine",
    "LearningRateMetric",
    "LossMetric",
    "Metric",
    "MultiTimer",
    "NonPipelineSchedule",
    "ParallelContext",
    "ParallelMode",
    "PipelineSchedule",
    "Registry",
    "ThroughputMetric",
    "Timer",
    "Trainer",
    "free_port",
    "get_current_device",
    "get_dataloader",
    "get_default_parser",
    "get_dist_logger",
    "global_context",
    "gpc",
    "hooks",
    "initialize",
    "is_using_ddp",
    "is_using_pp",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
    "load_checkpoint",
    "print_rank_0",
    "register_gradient_handler",
    "register_schedule",
    "save_checkpoint",
]

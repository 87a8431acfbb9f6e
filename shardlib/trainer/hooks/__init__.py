"""Hooks of a `Trainer`: what is done around epochs and steps, those of low priority first."""

from __future__ import annotations

from shardlib.trainer.hooks._base import BaseHook
from shardlib.trainer.hooks._logging import (
    LogMemoryByEpochHook,
    LogMetricByEpochHook,
    LogMetricByStepHook,
    LogTimingByEpochHook,
    TensorboardHook,
)
from shardlib.trainer.hooks._measuring import AccuracyHook, LossHook, LRSchedulerHook, ThroughputHook
from shardlib.trainer.hooks._saving import SaveCheckpointHook

__all__ = [
    "AccuracyHook",
    "BaseHook",
    "LRSchedulerHook",
    "LogMemoryByEpochHook",
    "LogMetricByEpochHook",
    "LogMetricByStepHook",
    "LogTimingByEpochHook",
    "LossHook",
    "SaveCheckpointHook",
    "TensorboardHook",
    "ThroughputHook",
]

"""BatchNorm under data parallelism takes the mean of each rank's own rows.

Report: https://github.com/LibreYOLO/libreyolo/pull/531, "Enable SyncBatchNorm for YOLO9 under DDP" (each rank's
BatchNorm tracks its own shard). All versions of DDP do so without `convert_sync_batchnorm`. torch's own, in 2.13, and
documented. It cannot be mended on CPUs, for which torch has no SyncBatchNorm. What it returns is off by 0.59 of its
largest value.
"""

from __future__ import annotations

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from tests.audit.faults import Fault

MESH = "dp=2"
FAULT = Fault(
    report="https://github.com/LibreYOLO/libreyolo/pull/531",
    host="torch",
    versions="all",
    kind="output",
    module="1",
    line="SyncBatchNorm",
    own=True,
)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, process_group=mesh.get_group())

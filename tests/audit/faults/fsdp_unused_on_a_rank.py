"""A parameter that one rank does not use is reduced with another parameter of the other rank.

Report: https://github.com/pytorch/pytorch/issues/196996, "[FSDP2] Gradient accumulation with fresh or unused
parameters raises a mixed-dtype assertion", which names the switch `set_reduce_scatter_unused_params`; it is off by
default. torch's own, in 2.13. The gradient of an expert is off by 0.61 of its largest value on one rank, and None on
the other.
"""

from __future__ import annotations

from typing import Any

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from tests.audit.faults import Fault
from tests.audit.faults.fsdp_expert_skipped import batch, build, right

__all__ = ["FAULT", "MESH", "batch", "build", "right", "shard"]

MESH = "fsdp=2"
FAULT = Fault(
    report="https://github.com/pytorch/pytorch/issues/196996",
    host="torch",
    versions="2.13; reported in September 2026",
    kind="gradient",
    module="experts.0",
    line="set_reduce_scatter_unused_params",
    own=True,
)


def shard(model: Any, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(model, mesh=mesh)

"""A parameter that one rank does not use has no part in its reduction, which pairs with that of another parameter elsewhere.

Report: https://github.com/pytorch/pytorch/issues/196996, "[FSDP2] Gradient accumulation with fresh or unused parameters raises
a mixed-dtype assertion", which names the switch `set_reduce_scatter_unused_params`; it is off by default.
torch's own, in 2.13. @FIGURE@
"""

from __future__ import annotations

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
    versions="2.6 - 2.13",
    kind="gradient",
    module="experts.0",
    line="set_reduce_scatter_unused_params",
    own=True,
)


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(model, mesh=mesh)  # type: ignore[return-value]

"""A model sharded by hand with PyTorch's `fully_shard`, proved against one device.

python examples/by_hand/fully_sharded.py
"""

from __future__ import annotations

import torch.nn as nn
from small_model import Model, batch, loss
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from shardlib.testing import Report, equivalent


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def prove() -> Report:
    return equivalent(Model, batch, "fsdp=4", shard=shard, loss=loss, clip=1.0)


if __name__ == "__main__":
    print(prove())

"""ResNets on a mesh: a small one of torchvision, and its batches. Importable on ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import shardlib as sl
from tests.torchvision_on_cpu import import_torchvision

__all__ = ["Case"]

_ROWS = 4


@dataclass(frozen=True)
class Case:
    """A ResNet; `block` has two convolutions (as in ResNet-18) or three (as in ResNet-50)."""

    mesh: str
    block: str = "BasicBlock"
    blocks: tuple[int, ...] = (1, 1, 1, 1)
    frozen_statistics: bool = False

    def __str__(self) -> str:
        return f"{self.mesh} {self.block} {sum(self.blocks)}" + (" frozen" if self.frozen_statistics else "")

    @property
    def world_size(self) -> int:
        return sl.MeshShape(self.mesh).world_size

    def make_model(self) -> nn.Module:
        resnet = import_torchvision().models.resnet
        model = resnet.ResNet(getattr(resnet, self.block), list(self.blocks), num_classes=5)
        for module in model.modules():
            if self.frozen_statistics and isinstance(module, nn.BatchNorm2d):
                module.eval().requires_grad_(False)
        return model

    def make_batch(self, step: int) -> Any:
        draw = torch.Generator().manual_seed(step)
        return (torch.randn(_ROWS, 3, 48, 48, generator=draw),), {}

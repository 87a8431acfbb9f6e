"""ResNets on a mesh: a small one of torchvision, and its batches. Importable on ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import shardlib as sl
from tests.torchvision_on_cpu import import_torchvision

__all__ = ["Case", "Inverted"]

_ROWS, _CHANNELS = 4, 8


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
        block = getattr(resnet, self.block)
        with torch.device("meta"):
            model = resnet.ResNet(block, list(self.blocks))
        # With an eighth of its channels.
        model.inplanes = _CHANNELS
        model.conv1 = nn.Conv2d(3, _CHANNELS, 7, stride=2, padding=3, bias=False)
        model.bn1 = nn.BatchNorm2d(_CHANNELS)
        for i, count in enumerate(self.blocks):
            made = model._make_layer(block, _CHANNELS * 2**i, count, stride=2 if i else 1)
            setattr(model, f"layer{i + 1}", made)
        model.fc = nn.Linear(model.inplanes, 5)
        for module in model.modules():
            if self.frozen_statistics and isinstance(module, nn.BatchNorm2d):
                module.eval().requires_grad_(False)
        return model

    def make_batch(self, step: int) -> Any:
        draw = torch.Generator().manual_seed(step)
        return (torch.randn(_ROWS, 3, 48, 48, generator=draw),), {}


class Inverted(nn.Module):
    """Residual blocks that widen, keep channels or groups of them apart, and narrow, as in MobileNet and RegNet."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_block(groups) for groups in (16, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def _block(groups: int) -> nn.Module:
    layers = nn.Conv2d(3, 16, 1), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3, padding=1, groups=groups), nn.BatchNorm2d(16)
    return nn.Sequential(*layers, nn.ReLU6(), nn.Conv2d(16, 3, 1), nn.BatchNorm2d(3))

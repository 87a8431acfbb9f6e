"""Lightning: what a `Fabric` has set up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from shardlib.testing.auditing.hosts._host import Host, first_of, is_of
from shardlib.testing.equivalence.train import named_tensors

__all__ = ["Lightning"]

_FABRICS = "lightning.fabric.fabric.Fabric", "lightning_fabric.fabric.Fabric"


class Lightning(Host):
    """A model that a `Fabric` has set up, with the fabric itself."""

    title: ClassVar[str] = "Lightning"
    advice: ClassVar[tuple[str, ...]] = ("lightning", "torch")
    reshards: ClassVar[bool] = False
    clips: ClassVar[str] = "fabric.clip_gradients"
    stores: ClassVar[str] = "fabric.save"

    @classmethod
    def takes(cls, made: Sequence[Any]) -> bool:
        return any(is_of(each, *_FABRICS) for each in made)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.fabric: Any = first_of(self.made, *_FABRICS)

    @property
    def module(self) -> nn.Module:
        inner: Any = getattr(self.model, "module", self.model)  # of Fabric's wrapper
        return inner.module if isinstance(inner, nn.parallel.DistributedDataParallel) else inner  # type: ignore[no-any-return]

    def tensors(self) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
        return named_tensors(self.module)

    def used(self) -> Iterator[str]:
        yield type(self.fabric.strategy).__name__

    def backward(self, loss: torch.Tensor, *, last: bool = True) -> None:
        self.fabric.backward(loss)

    def clip(self, optimizer: torch.optim.Optimizer, norm: float) -> torch.Tensor | None:
        found: torch.Tensor | None = self.fabric.clip_gradients(self.model, optimizer, max_norm=norm)
        return found

    def store(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        self.fabric.save(str(folder), {"model": self.model, "optimizer": optimizer})

    def restore(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        self.fabric.load(str(folder), {"model": self.model, "optimizer": optimizer})

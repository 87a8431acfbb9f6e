"""transformers: models that `from_pretrained` shards by `DistributedConfig` or `tp_plan`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from shardlib.testing.auditing.hosts._host import Host, is_of

__all__ = ["Transformers"]


class Transformers(Host):
    """A model of transformers, which trains as any model of torch and is saved by `save_pretrained`."""

    title: ClassVar[str] = "transformers"
    advice: ClassVar[tuple[str, ...]] = ("transformers", "torch")
    saves: ClassVar[str] = "save_pretrained"

    @classmethod
    def takes(cls, made: Sequence[Any]) -> bool:
        return any(is_of(each, "transformers.modeling_utils.PreTrainedModel") for each in made)

    def used(self) -> Iterator[str]:
        if axes := self.axes():
            yield f"DTensors over {', '.join(sorted(axes))}"
        else:
            yield from super().used()

    def save(self, folder: Path) -> None:
        self.module.save_pretrained(folder)  # type: ignore[operator]
        dist.barrier()

    def reads(self, folder: Path) -> bool:
        return (folder / "config.json").exists()

    def read(self, folder: Path, build: Callable[[], nn.Module]) -> nn.Module:
        single = build()
        return type(single).from_pretrained(folder, dtype=torch.float64)  # type: ignore[attr-defined, no-any-return]

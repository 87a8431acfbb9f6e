"""Accelerate: what `Accelerator.prepare` has prepared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from shardlib.testing.auditing.hosts._host import Host, first_of, is_of

__all__ = ["Accelerate", "begin_anew"]

_ACCELERATOR = "accelerate.accelerator.Accelerator"


class Accelerate(Host):
    """A model that an `Accelerator` has prepared, with the accelerator itself."""

    title: ClassVar[str] = "Accelerate"
    advice: ClassVar[tuple[str, ...]] = ("accelerate", "torch")
    reshards: ClassVar[bool] = False  # its state is one for the process
    clips: ClassVar[str] = "accelerator.clip_grad_norm_"
    stores: ClassVar[str] = "accelerator.save_state"

    @classmethod
    def takes(cls, made: Sequence[Any]) -> bool:
        return any(is_of(each, _ACCELERATOR) for each in made)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.accelerator: Any = first_of(self.made, _ACCELERATOR)

    def used(self) -> Iterator[str]:
        yield f"Accelerator ({self.accelerator.distributed_type.value})"
        yield from super().used()

    def backward(self, loss: torch.Tensor, *, last: bool = True) -> None:
        self.accelerator.backward(loss * self.accelerator.gradient_accumulation_steps)  # by which it divides

    def clip(self, optimizer: torch.optim.Optimizer, norm: float) -> torch.Tensor | None:
        found: torch.Tensor | None = self.accelerator.clip_grad_norm_(self.model.parameters(), norm)
        return found

    def store(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        self.accelerator.save_state(str(folder))

    def restore(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        self.accelerator.load_state(str(folder))

    def forget(self) -> None:
        begin_anew()


def begin_anew() -> None:
    """Reset what Accelerate keeps for the process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()

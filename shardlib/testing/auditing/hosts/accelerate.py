"""Accelerate: what `Accelerator.prepare` has prepared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch

from shardlib.testing.auditing.hosts._host import Host, first_of, is_of

__all__ = ["Accelerate", "as_on_accelerators"]

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

    def backward(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss * self.accelerator.gradient_accumulation_steps)  # by which it divides

    def clip(self, optimizer: torch.optim.Optimizer, norm: float) -> torch.Tensor | None:
        found: torch.Tensor | None = self.accelerator.clip_grad_norm_(self.model.parameters(), norm)
        return found

    def store(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        self.accelerator.save_state(str(folder))

    def restore(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        self.accelerator.load_state(str(folder))

    def forget(self) -> None:
        _begin_anew()


def _begin_anew() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@contextmanager
def as_on_accelerators(note: Callable[[str], None]) -> Iterator[None]:
    """Let an `Accelerator` with a plugin for FSDP, or a `ParallelismConfig`, shard on CPUs as on accelerators.

    On CPUs Accelerate wraps the model in DistributedDataParallel in place of that, without a word, or refuses.
    """
    from accelerate import Accelerator
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    original = Accelerator.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("fsdp_plugin") is not None or kwargs.get("parallelism_config") is not None:
            state = PartialState(cpu=True)
            state.distributed_type = DistributedType.MULTI_GPU
            note("Accelerate is told of accelerators, on which alone it shards by FSDP2")
        original(self, *args, **{**kwargs, "cpu": True})

    _begin_anew()
    with mock.patch.object(Accelerator, "__init__", __init__):
        yield

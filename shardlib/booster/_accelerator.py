"""`get_accelerator`: this rank's device under ColossalAI's names, which are mostly torch's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardlib._mesh import default_device_type, device_here
from shardlib.booster._options import NotThere
from shardlib.booster.launch import launched

__all__ = ["Accelerator", "get_accelerator", "get_current_device"]


@dataclass(frozen=True)
class Accelerator:
    """A kind of device. `get_accelerator` returns it.

    Other names are those of torch's module for the device: `get_accelerator().max_memory_allocated()` is
    `torch.cuda.max_memory_allocated()`, and of a CPU, of which torch counts no memory, an error.

    Attributes:
        name: "cuda", "cpu" or another type of torch's.
    """

    name: str

    @property
    def communication_backend(self) -> str:
        """The name of torch's backend for collectives."""
        return dist.get_default_backend_for_device(self.name)

    @property
    def is_synchronous(self) -> bool:
        """Whether an op has ended when its call returns: on a CPU."""
        return self.name == "cpu"

    def get_current_device(self) -> torch.device:
        """Return this rank's device."""
        return device_here(self.name)

    def get_version(self) -> str | None:
        """Return the version of CUDA that torch was built with; None of a CPU."""
        return getattr(torch.version, self.name, None)

    def set_to_device(self, models: nn.Module | Sequence[nn.Module]) -> Any:
        """Move a module, or several in a list, to this rank's device."""
        device = self.get_current_device()
        if isinstance(models, nn.Module):
            return models.to(device)
        moved = [model.to(device) for model in models]
        return moved if len(moved) > 1 else moved[0]

    def autocast(self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> Any:
        """Return torch's autocast for the device."""
        return torch.autocast(self.name, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)

    def manual_seed(self, seed: int) -> None:
        """Seed the device's generator."""
        (torch if self.name == "cpu" else torch.get_device_module(self.name)).manual_seed(seed)

    def empty_cache(self) -> None:
        """Release memory that torch's allocator keeps; of a CPU it keeps none."""
        if self.name != "cpu":
            torch.get_device_module(self.name).empty_cache()

    def __getattr__(self, name: str) -> Any:
        module = torch.get_device_module(object.__getattribute__(self, "name"))
        if name.startswith("_") or not hasattr(module, name):
            raise NotThere(
                f"get_accelerator().{name} is {module.__name__}.{name}, which torch does not have. Look at "
                "get_accelerator().name first."
            )
        return getattr(module, name)


def get_accelerator() -> Accelerator:
    """Return the kind of device that this rank trains on.

    It is that of `launch`; without one, that of `shardlib.mesh`: the accelerator that torch sees, else the CPU.

    >>> accelerator = get_accelerator()
    >>> accelerator.name == accelerator.get_current_device().type
    True
    """
    job = launched()
    return Accelerator(default_device_type() if job is None else job.device.type)


def get_current_device() -> torch.device:
    """Return this rank's device.

    >>> torch.zeros(2, device=get_current_device()).device == get_current_device()
    True
    """
    return get_accelerator().get_current_device()

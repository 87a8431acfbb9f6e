"""The dtypes that a model computes in: its inputs are cast, its forward autocasts, its outputs are float32 again."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from shardlib.engine import _torch

__all__ = ["Casting"]


@dataclass(frozen=True)
class Casting:
    """The dtypes that a model computes in, where they differ from those of its inputs.

    Attributes:
        device_type: of the mesh.
        autocast: the autocast dtype of forward; None disables autocast.
        inputs: the dtype that float32 inputs are cast to; None leaves them.
    """

    device_type: str
    autocast: torch.dtype | None = None
    inputs: torch.dtype | None = None

    @property
    def changes(self) -> bool:
        """Whether the model computes in other dtypes than it is given."""
        return self.autocast is not None or self.inputs is not None

    def cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (args, kwargs) if self.inputs is None else _cast((args, kwargs), {torch.float32}, self.inputs)

    def autocasting(self) -> AbstractContextManager[Any]:
        """Return the context of forward."""
        return nullcontext() if self.autocast is None else torch.autocast(self.device_type, self.autocast)

    def cast_output(self, output: Any) -> Any:
        low = self.inputs or self.autocast
        return output if low is None else _cast(output, {low}, torch.float32)


def _cast(values: Any, which: set[torch.dtype], dtype: torch.dtype) -> Any:
    def one(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.dtype in which else tensor

    return _torch.map_tensors(one, values)

"""Drawn cases as the JAX engine takes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardlib.errors import PlanError
from shardlib.testing import equivalent
from shardlib.testing.strategies import Case

__all__ = ["proved"]


@dataclass(frozen=True)
class WithoutDropout:
    """Makes a model that draws nothing: random bits are each engine's own."""

    model: Callable[[], nn.Module]

    def __call__(self) -> nn.Module:
        model = self.model()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            elif isinstance(getattr(module, "dropout", None), float):
                module.dropout = 0.0  # type: ignore[assignment]
        return model


_FOR_TORCH_ALONE = ("no_sync", "rng", "before_step")


def proved(case: Case) -> Any:
    """The report of a case; None where its plan asks for what only the torch engine does (accumulation, offload)."""
    arguments = {name: value for name, value in case.arguments().items() if name not in _FOR_TORCH_ALONE}
    arguments["model"] = WithoutDropout(case.model)
    try:
        return equivalent(**arguments, engine="jax", steps=2)
    except PlanError as error:
        if "the JAX engine" not in str(error):
            raise
        return None

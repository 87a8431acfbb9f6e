"""Former public names, and the names that replace them. Former names still work, and warn.

`shardlib migrate` rewrites them in scripts.
"""

from __future__ import annotations

import functools
import importlib
import sys
from dataclasses import dataclass
from typing import Any

from shardlib.errors import warn

__all__ = ["RENAMED", "Renamed", "renamed"]


@dataclass(frozen=True)
class Renamed:
    """The name that stands for one that is to go.

    Attributes:
        module: the module that has it.
        name: its name there.
        keywords: the keywords that it is called with, where it was two functions.
    """

    module: str
    name: str
    keywords: tuple[tuple[str, str], ...] = ()

    @property
    def call(self) -> str:
        """Its name, with the call that makes of it what the old name was."""
        given = ", ".join(f'{key}="{value}"' for key, value in self.keywords)
        return f"{self.name}({given})" if given else self.name

    def value(self) -> Any:
        """Import it."""
        found = getattr(importlib.import_module(self.module), self.name)
        return functools.partial(found, **dict(self.keywords)) if self.keywords else found


def renamed(module: str, name: str) -> Any:
    """Return what stands for a former name of a module, and warn.

    Raises:
        AttributeError: the module never had it.
    """
    new = RENAMED.get(name)
    if new is None or (module != "shardlib" and new.name not in vars(sys.modules[module])):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    home = module if new.module == "shardlib" else new.module
    warn(f"{module}.{name} is to go: write {home}.{new.call}.", FutureWarning)
    return new.value()


def _in(module: str, *names: str) -> dict[str, Renamed]:
    return {name: Renamed(module, name) for name in names}


RENAMED: dict[str, Renamed] = {
    **_in("shardlib.axes", "axis_groups", "register_axis"),
    **_in("shardlib.booster", "LazyInitContext", "Pipe", "balance_by_size", "balance_by_time"),
    **_in("shardlib.booster", "clip_grad_value_", "get_grad_norm"),
    **_in("shardlib.rules", "Balanced", "register_dims", "register_tensor_mode", "tensor_mode"),
    "capacity": Renamed("shardlib", "expert_capacity"),
    "fit": Renamed("shardlib", "fit_memory"),
    "plan_of": Renamed("shardlib", "get_plan"),
    "reduce_gradients_by": Renamed("shardlib", "register_gradient_reduction"),
    "register_elementwise": Renamed("shardlib", "register_optimizer", (("needs", "shard"),)),
    "register_per_tensor": Renamed("shardlib", "register_optimizer", (("needs", "tensor"),)),
}

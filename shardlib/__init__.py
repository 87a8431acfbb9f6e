"""shardlib: write the model once, for one device; lay out its tensors on a named mesh in a dozen lines.

The names that the package offers stand in `__init__.pyi`. Python imports each at its first use: DTensor alone takes as
long to import as torch, and a program that only offers shardlib as one of its options should not wait for it.
"""

from __future__ import annotations

import importlib
from typing import Any

import lazy_loader

from shardlib import _supported as _supported  # refuses an older torch before anything else is imported
from shardlib.errors import warn

__version__ = "0.1.0"
_offered, _, __all__ = lazy_loader.attach_stub(__name__, __file__)

# Names that are to go from here, each with the module that has it.
_MOVED = dict.fromkeys(("LazyInitContext", "Pipe", "balance_by_size", "balance_by_time"), "shardlib.booster")


def __getattr__(name: str) -> Any:
    if name not in _MOVED:
        return _offered(name)
    warn(f"shardlib.{name} is {_MOVED[name]}.{name}, and is to go from here. Import it from there.", FutureWarning)
    return getattr(importlib.import_module(_MOVED[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

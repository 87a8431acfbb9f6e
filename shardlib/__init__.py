"""shardlib: write the model once, for one device; lay out its tensors on a named mesh in a dozen lines.

The names that the package offers stand in `__init__.pyi`. Python imports each at its first use: DTensor alone takes as
long to import as torch, and a program that only offers shardlib as one of its options should not wait for it.
"""

from __future__ import annotations

from typing import Any

import lazy_loader

from shardlib import _supported  # refuses an older torch before anything else is imported

__version__ = "0.1.0"
_offered, _, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    from shardlib._renamed import RENAMED, renamed

    return renamed(__name__, name) if name in RENAMED else _supported.offered(__name__, name, _offered)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

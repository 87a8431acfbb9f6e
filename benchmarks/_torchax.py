"""torchax 0.0.13 beside torch 2.13, of which it names overloads of ops that are gone."""

from __future__ import annotations

from typing import Any

__all__ = ["imported"]


def imported() -> Any:
    """Import torchax; overloads by names of dims, which no model has, are stand-ins for its tables."""
    from torch._ops import OpOverloadPacket

    found = OpOverloadPacket.__getattr__

    def lenient(packet: Any, name: str) -> Any:
        try:
            return found(packet, name)
        except AttributeError:
            if "name" not in name.lower():
                raise
            return f"{packet}.{name}"

    OpOverloadPacket.__getattr__ = lenient  # type: ignore[method-assign]
    import torchax

    return torchax

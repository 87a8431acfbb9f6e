"""A host whose memory is another than the device's, on a machine with one memory. Importable on ranks of the pool."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from shardlib.engine.data import offload, optimizer

__all__ = ["elsewhere"]


@contextmanager
def elsewhere(**changes: Any) -> Iterator[None]:
    """Host memory is another than the device's, though both are a CPU's."""
    with (
        mock.patch.object(offload, "is_elsewhere", lambda _device: True),
        mock.patch.multiple(optimizer, **{"PIECE_BYTES": 2000, **changes}),
    ):
        yield

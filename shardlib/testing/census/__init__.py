"""A census of an installed library: every architecture, built tiny, sharded, and compared with one device.

`shardlib census` runs it. One line of JSON an architecture says what was built, how it was sharded, and whether a
training step in float64 computed what one device computes. Nothing is filtered: an architecture that the census cannot
build, or that fails, is a line that says why.
"""

from __future__ import annotations

from shardlib.testing.census._models import LIBRARIES, Entry, entries
from shardlib.testing.census._run import MESHES, MESHES_OF, Result, read, run, sample, write

__all__ = ["LIBRARIES", "MESHES", "MESHES_OF", "Entry", "Result", "entries", "read", "run", "sample", "write"]

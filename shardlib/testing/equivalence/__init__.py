"""Does the sharded run compute what a single device computes? If not: where does it begin to differ, and why?"""

from __future__ import annotations

from shardlib.testing.equivalence.locate import Origin
from shardlib.testing.equivalence.prove import assert_equivalent, equivalent
from shardlib.testing.equivalence.report import Difference, NotEquivalentError, Report

__all__ = ["Difference", "NotEquivalentError", "Origin", "Report", "assert_equivalent", "equivalent"]

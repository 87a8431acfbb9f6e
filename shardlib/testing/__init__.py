"""Proof for your own CI: does a sharded run compute what a single device computes?

`equivalent` and `assert_equivalent` compare the two; `audit` does so for models that something else shards; `ranks` and
`shared_pool` are the warm processes they run on.
`shardlib.testing.strategies` draws meshes, rules and models for hypothesis, `shardlib.testing.models` has small models,
`shardlib.testing.mutants` shows what is caught. A pytest plugin comes with them.
"""

from __future__ import annotations

from shardlib.testing._pool import HangError, RankDied, RankError, Ranks, ranks, shared_pool
from shardlib.testing._standing import Standing
from shardlib.testing.auditing import (
    Advice,
    AuditError,
    AuditReport,
    Check,
    DryFinding,
    DryReport,
    assert_audit,
    audit,
    dry_audit,
)
from shardlib.testing.equivalence import (
    Difference,
    NotEquivalentError,
    Origin,
    Report,
    assert_equivalent,
    equivalent,
)

__all__ = [
    "Advice",
    "AuditError",
    "AuditReport",
    "Check",
    "Difference",
    "DryFinding",
    "DryReport",
    "HangError",
    "NotEquivalentError",
    "Origin",
    "RankDied",
    "RankError",
    "Ranks",
    "Report",
    "Standing",
    "assert_audit",
    "assert_equivalent",
    "audit",
    "dry_audit",
    "equivalent",
    "ranks",
    "shared_pool",
]

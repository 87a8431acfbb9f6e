"""Audit: what is wrong with a model that something else sharded."""

from __future__ import annotations

from shardlib.testing.auditing.dry import DryFinding, DryReport, dry_audit
from shardlib.testing.auditing.report import Advice, AuditError, AuditReport, Check
from shardlib.testing.auditing.run import assert_audit, audit

__all__ = [
    "Advice",
    "AuditError",
    "AuditReport",
    "Check",
    "DryFinding",
    "DryReport",
    "assert_audit",
    "audit",
    "dry_audit",
]

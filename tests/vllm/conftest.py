"""An engine in this process has its process group for all tests of a module."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_job_is_left() -> None:
    """Leave the group: the project's fixture of this name would end it after each test."""

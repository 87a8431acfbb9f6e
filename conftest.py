"""Wherever tests are, in docstrings too: a job of one that a test joined in this process ends with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def _no_job_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()

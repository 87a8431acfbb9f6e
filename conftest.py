"""For tests wherever they are, in docstrings too: what hypothesis draws, and the end of a job that one has joined."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, settings

from tests.torchvision_on_cpu import let_torchvision_in

# What needs the libraries of `make test-hosts` is collected in its environment alone.
_HOSTS = "deepspeed", "torchtitan"
collect_ignore_glob = ["tests/audit/hosts/test_*.py", *(f"examples/audit/train_{host}.py" for host in _HOSTS)]
if all(map(importlib.util.find_spec, _HOSTS)):
    collect_ignore_glob = []
if importlib.util.find_spec("vllm") is None:  # as in the environment of `make test-vllm`
    collect_ignore_glob += ["tests/vllm/*.py", "examples/rl_vllm.py"]
    collect_ignore_glob += ["shardlib/integrations/vllm.py", "shardlib/integrations/trl.py"]

let_torchvision_in()  # torchmetrics imports it by the way, and lightning that

# No clock decides about a test (deadline, too_slow): ranks share cores with whatever else runs. The default draws the
# same examples each time, so that a change and not chance turns a test red; `make test-deep` draws new and many more.
_TIMELESS: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.differing_executors],
}
settings.register_profile("default", derandomize=True, max_examples=25, database=None, **_TIMELESS)
# One failure is enough there: it need not be small.
settings.register_profile("mutate", settings.get_profile("default"), phases=[Phase.explicit, Phase.generate])
settings.register_profile("deep", max_examples=300, print_blob=True, **_TIMELESS)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def _examples_know_torch(doctest_namespace: dict[str, Any]) -> None:
    """Offer torch to the examples of modules that do not import it themselves."""
    doctest_namespace |= {"torch": torch, "nn": torch.nn}


@pytest.fixture(autouse=True)
def _no_job_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()

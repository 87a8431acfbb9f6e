"""What every test may use besides the fixture `ranks` of our own plugin: hypothesis profiles, torchvision."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.torchvision_on_cpu import import_torchvision

# No clock decides about a test (deadline, too_slow): ranks share cores with whatever else runs. The default draws the
# same examples each time, so that a change and not chance turns a test red; `make test-deep` draws new and many more.
_TIMELESS: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.differing_executors],
}
settings.register_profile("default", derandomize=True, max_examples=25, database=None, **_TIMELESS)
settings.register_profile("deep", max_examples=1000, print_blob=True, **_TIMELESS)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(scope="session")
def torchvision() -> ModuleType:
    return import_torchvision()

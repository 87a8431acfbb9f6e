"""Tests on libraries that only the environment of `make test-hosts` has; elsewhere they are not collected."""

from __future__ import annotations

import importlib.util

_NEEDS = {
    "test_deepspeed.py": "deepspeed",
    "test_deepspeed_audits.py": "deepspeed",
    "test_torchtitan.py": "torchtitan",
}
collect_ignore = [file for file, library in _NEEDS.items() if importlib.util.find_spec(library) is None]

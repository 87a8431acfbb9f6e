"""Imports go one way, and importing changes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.house import source

# Lower rooms first; a module may import from its own room and from lower ones. `jax` stands beside the engine and
# below only what is on top; what chooses between the two engines imports it, when it is asked for.
ROOMS = [
    ("errors", "_again"),
    ("_mesh",),
    ("layout",),
    ("rules", "layouts"),
    ("_plan",),
    ("transforms",),
    ("engine",),
    ("optim",),
    ("checkpoint",),
    ("booster",),
    ("trainer",),
    ("jax",),
    ("functional",),
    ("testing", "cli"),
]
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}


def _room(dotted: str) -> str:
    return dotted.split(".")[1]


def test_a_module_imports_only_from_its_own_room_and_lower_ones():
    upward = [
        f"{module}:{line} imports {name}"
        for module in source.modules().keys() - {"shardlib"}
        for line, name in source.imports(module)
        if name == "shardlib" or (name.startswith("shardlib.") and LEVEL[_room(name)] > LEVEL[_room(module)])
    ]
    assert not upward, "\n".join(sorted(upward))


PROBE = """
import json, os, sys, threading, warnings
import numpy, torch, torch.distributed.tensor
def state():
    return {
        "environment": dict(os.environ),
        "process group": torch.distributed.is_initialized(),
        "default dtype": str(torch.get_default_dtype()),
        "threads": threading.active_count(),
        "torch threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "random": torch.random.get_rng_state().sum().item(),
        "filters": [repr(f) for f in warnings.filters],
        "accelerator": torch.cuda.is_initialized(),
        "path": sys.path,
    }
before = state()
import shardlib
after = state()
unwanted = {"jax", "optax", "transformers", "torchvision", "hypothesis", "pytest"}
unwanted |= {"shardlib.jax", "shardlib.functional", "shardlib.testing", "shardlib.cli"}
print(json.dumps([before, after, sorted(unwanted & set(sys.modules))]))
"""


def test_importing_shardlib_changes_nothing_and_brings_no_optional_package():
    # Not this process's environment: it has imported shardlib already.
    fresh = {"PATH": os.environ["PATH"]}
    command = [sys.executable, "-W", "error", "-c", PROBE]
    run = subprocess.run(command, capture_output=True, text=True, cwd=source.ROOT, env=fresh)
    assert run.returncode == 0, run.stderr
    before, after, unwanted = json.loads(run.stdout)
    assert after == before
    assert unwanted == []

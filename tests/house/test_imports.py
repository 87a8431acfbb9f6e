"""Imports go one way, and importing changes nothing."""

from __future__ import annotations

import ast
import graphlib
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib

import pytest

import shardlib
from shardlib import _supported
from shardlib._renamed import RENAMED
from tests.house import source

# Lower rooms first; a module may import from its own room and from lower ones. `jax` stands beside the engine and
# below only what is on top; what chooses between the two engines imports it, when it is asked for.
ROOMS = [
    ("errors", "_again", "_dtypes", "_log", "_measure", "_progress", "_renamed", "_store", "_supported", "_toml"),
    ("_mesh_shape",),
    ("_mesh", "_same_mesh"),
    ("layout",),
    ("rules", "layouts"),
    ("_plan",),
    ("transforms",),
    ("engine",),
    ("planner",),
    ("optim",),
    ("checkpoint",),
    ("weights",),
    ("booster",),
    ("trainer",),
    ("jax",),
    ("axes", "functional", "integrations", "monitor"),
    ("testing", "cli"),
    ("__main__",),
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


def test_modules_import_each_other_in_no_circle():
    """Imports for type checkers count too: a value does not know its printers."""
    modules = {*source.modules()}
    imported = {
        module: {
            name if name in modules else name.rpartition(".")[0]
            for node in ast.walk(source.modules()[module])
            if isinstance(node, ast.ImportFrom)
            for name in (f"{node.module}.{alias.name}" for alias in node.names)
        }
        & (modules - {module})
        for module in modules
    }
    graphlib.TopologicalSorter(imported).prepare()  # raises CycleError with the circle


# Of the engine, lower rooms first.
ENGINE = [
    ("_torch",),
    ("undo",),
    ("sharded", "ranks", "torn"),
    ("ops",),
    ("data",),
    ("model",),
    ("feature",),
    ("pipeline",),
    ("apply",),
    ("fakes",),
    ("work",),
    ("dryrun",),
]


def test_a_room_of_the_engine_imports_only_from_lower_ones():
    level = {room: i for i, rooms in enumerate(ENGINE) for room in rooms}
    upward = [
        f"{module}:{line} imports {name}"
        for module in source.modules()
        if module.startswith("shardlib.engine.")
        for line, name in source.imports(module)
        if name.startswith("shardlib.engine.") and level[name.split(".")[2]] > level[module.split(".")[2]]
    ]
    assert not upward, "\n".join(sorted(upward))


def test_the_transport_alone_asks_for_the_back_end():
    """But for the time limit of a fake group, which has none."""
    asking = {
        module
        for module, tree in source.modules().items()
        for node in ast.walk(tree)
        if module.startswith("shardlib.engine.") and isinstance(node, ast.Attribute) and node.attr == "get_backend"
    }
    assert asking == {"shardlib.engine.ranks.transport", "shardlib.engine._torch.groups"}


PROBE = """
import json, os, sys, threading, warnings
import numpy, torch, torch.distributed.tensor
from torch.torch_version import TorchVersion
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
before, tensors = state(), sys.modules["torch.distributed.tensor"]
torch.__version__ = TorchVersion("2.12.1+cpu")
sys.modules["torch.distributed.tensor"] = None  # as if it had other names: no such error comes first
try:
    import shardlib
except ImportError as error:
    refused = f"{type(error).__name__} {error}"
sys.modules["torch.distributed.tensor"] = tensors
torch.__version__ = TorchVersion("9.1.0")
said = []
warnings.showwarning = lambda message, category, file, line, *_: said.append(f"{file} {category.__name__} {message}")
import shardlib
everything = [getattr(shardlib, name) for name in shardlib.__all__]
after = state()
unwanted = {"jax", "optax", "transformers", "torchvision", "hypothesis", "pytest"}
unwanted |= {"shardlib.jax", "shardlib.functional", "shardlib.testing", "shardlib.cli"}
brought = sorted(unwanted & set(sys.modules))
import shardlib.booster, shardlib.testing, shardlib.testing.models  # strategies are imported when they are asked for
print(json.dumps([refused, said, before, after, brought, "hypothesis" in sys.modules]))
"""


def test_importing_shardlib_looks_at_torchs_version_changes_nothing_and_brings_no_optional_package():
    """An older torch is refused first, and a newer one is warned of once."""
    # Not this process's environment: it has imported shardlib already.
    fresh = {"PATH": os.environ["PATH"]}
    command = [sys.executable, "-W", "always", "-c", PROBE]
    run = subprocess.run(command, capture_output=True, text=True, cwd=source.ROOT, env=fresh)
    assert run.returncode == 0, run.stderr
    refused, said, before, after, unwanted, with_hypothesis = json.loads(run.stdout)
    assert refused == (
        "VersionError torch 2.12.1+cpu is installed, and shardlib needs torch 2.13 or newer. Install one: pip install "
        '"torch>=2.13".'
    )
    (warned,) = said
    assert warned.startswith("<string> UserWarning torch 9.1.0 is installed; shardlib was tested with torch 2.13 to ")
    assert "Report what goes wrong" in warned
    assert after == before
    assert unwanted == [] and not with_hypothesis


def test_import_shardlib_alone_waits_for_no_module_that_is_not_used_yet():
    """DTensor, with sympy behind it, takes as long to import as torch."""
    probe = "import sys, torch; before = set(sys.modules); import shardlib; print(*sorted(set(sys.modules) - before))"
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, cwd=source.ROOT)
    assert run.stdout.split() == ["lazy_loader", "shardlib", "shardlib._supported", "shardlib.errors"], run.stderr


def test_the_versions_of_torch_are_the_same_everywhere():
    oldest, newest = (".".join(map(str, version)) for version in (_supported.OLDEST, _supported.NEWEST))
    project = tomllib.loads((source.ROOT / "pyproject.toml").read_text())["project"]
    assert [needed for needed in project["dependencies"] if needed.startswith("torch")] == [f"torch>={oldest}"]
    (installed,) = re.findall(r"^torch==(\d+\.\d+)\.", (source.ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert installed in (oldest, newest)
    installs = [line for line in (source.ROOT / "Makefile").read_text().splitlines() if "PIP) torch" in line]
    assert installs and all("torch==$$(sed -n 's/^torch==//p' " in line for line in installs)


def test_the_names_that_a_shell_completes_are_the_public_ones():
    assert dir(shardlib) == sorted([*shardlib.__all__, "__version__"])


@pytest.mark.parametrize("name", RENAMED)
def test_a_former_name_warns_and_stands_for_the_present_one(name: str):
    new = RENAMED[name]
    with pytest.warns(
        FutureWarning, match=rf"shardlib\.{name} is to go: write {re.escape(f'{new.module}.{new.call}')}\."
    ):
        found = getattr(shardlib, name)
    present = getattr(importlib.import_module(new.module), new.name)
    assert (found.func if new.keywords else found) is present
    assert name not in shardlib.__all__ and name not in dir(shardlib)


def test_former_names_of_transforms_are_there_too():
    with pytest.warns(
        FutureWarning, match=r"shardlib\.transforms\.fit is to go: write shardlib\.transforms\.fit_memory\."
    ):
        assert shardlib.transforms.fit is shardlib.fit_memory
    with pytest.warns(FutureWarning, match='"capacity" is to go: write "expert_capacity"'):
        assert shardlib.transforms.parse("capacity(2)") == shardlib.expert_capacity(2)
    with pytest.raises(AttributeError, match="no attribute 'plan_of'"):
        _ = shardlib.transforms.plan_of

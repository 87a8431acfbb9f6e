"""`shardlib doctor`: what is installed and what it is good for, what torch sees, and what is wrong with it."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import socket
import sys
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardlib._store import listening_store
from shardlib._supported import NEWEST, release
from shardlib.cli.usage import MISSING, cause_of, version

__all__ = ["environment", "text"]

# What a user wants to do, the extra that it needs, and a module whose import shows that it works.
_FEATURES = {
    "proofs and tests": ("testing", "shardlib.testing.strategies"),
    "models of transformers": ("hf", "transformers.models.llama.modeling_llama"),
    "LoRA": ("lora", "peft"),
    "JAX": ("jax", "shardlib.jax"),
    "TensorBoard": ("tensorboard", "torch.utils.tensorboard"),
    "Orbax checkpoints": ("orbax", "tensorstore"),
    "shell completion": ("completion", "shtab"),
}
_PYTHON = (3, 11)  # tested
_PACKAGES = ("shardlib", "transformers", "safetensors", "jax", "peft", "numpy")
_HOSTS = ("127.0.0.1", "::1", "localhost")


def environment() -> dict[str, Any]:
    """Return the facts that a report of a problem needs, as JSON values."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": {
            "version": torch.__version__,
            "build": _build(),
            "debug": torch.version.debug,
        },
        "devices": _devices(),
        "backends": _backends(),
        "packages": {name: version(name) for name in _PACKAGES},
        "features": {feature: _feature(*needs) for feature, needs in _FEATURES.items()},
        "threads": {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "not set"),
            "torch": torch.get_num_threads(),
            "cores": os.cpu_count(),
            "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        },
        "ranks_can_meet": {host: _meeting(host) for host in _HOSTS},
        "host": {"name": socket.gethostname(), "address": _address()},
        "known": _known(),
    }


def text(facts: dict[str, Any]) -> str:
    """Format the facts, one a line.

    >>> print(text({"python": "3.11", "torch": {"version": "2.13", "build": "CPU"}, "devices": []}))
    python     3.11
    torch      version: 2.13
               build: CPU
    devices    none
    """
    width = max(map(len, facts)) + 4
    lines = []
    for name, value in facts.items():
        shown = _lines(value)
        lines += [f"{name if i == 0 else '':{width}}{line}" for i, line in enumerate(shown)]
    return "\n".join(lines)


def _lines(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [f"{name}: {_word(inner)}" for name, inner in value.items()] or ["none"]
    if isinstance(value, list):
        return [_word(inner) for inner in value] or ["none"]
    return [_word(value)]


def _word(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_word(inner)}" for name, inner in value.items())
    return {True: "yes", False: "no", None: "none"}[value] if value is None or isinstance(value, bool) else str(value)


def _build() -> str:
    """Return the accelerator runtime that torch was built for."""
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return f"ROCm {torch.version.hip}" if torch.version.hip else "CPU"


def _devices() -> list[dict[str, Any]]:
    """List the accelerators; none on a machine with a CPU only."""
    if not torch.accelerator.is_available():
        return []
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return [
        {"type": kind.type, "index": index} | _device(kind.type, index)
        for index in range(torch.accelerator.device_count())
    ]


def _device(kind: str, index: int) -> dict[str, Any]:
    """Return name and memory, where the kind of device has them."""
    ask = getattr(torch.get_device_module(kind), "get_device_properties", None)
    if ask is None:
        return {}
    properties = ask(index)
    memory = getattr(properties, "total_memory", None)
    return {"name": getattr(properties, "name", kind), "memory_gib": round(memory / 2**30, 1) if memory else None}


def _backends() -> dict[str, bool]:
    return {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
        "ucc": dist.is_ucc_available(),
    }


def _feature(extra: str, module: str) -> str:
    """Say whether what an extra of this package requires is installed and can be imported, and what to do if not."""
    try:
        required = importlib.metadata.requires("shardlib") or []
    except importlib.metadata.PackageNotFoundError:
        return "unknown: shardlib runs from a folder and is not installed"
    of_extra = [re.split(r"[^\w.-]", each)[0] for each in required if re.search(rf"extra == .{extra}\b", each)]
    missing = [name for name in of_extra if version(name) == MISSING]
    if missing:
        return f"needs {', '.join(missing)}: pip install {' '.join(missing)}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(module)
    except Exception as error:  # whatever a package raises where it does not fit the others
        return f"installed, and `import {module}` fails: {cause_of(error)}."
    return "ready"


def _known() -> list[str]:
    """List what is known to be wrong, or untested, with this combination."""
    found = []
    if release(torch.__version__) > NEWEST:
        found.append(f"torch {torch.__version__} is newer than the versions that were tested.")
    if sys.version_info[:2] != _PYTHON:
        found.append(f"Python {platform.python_version()} is not tested; {'.'.join(map(str, _PYTHON))} is.")
    if torch.accelerator.is_available():
        found.append("Accelerators: the code is tested on CPUs over gloo; nothing has been measured on this device.")
    if "OMP_NUM_THREADS" not in os.environ:
        found.append("OMP_NUM_THREADS is not set: each rank on this machine takes all cores. torchrun sets 1.")
    if platform.system() != "Linux":
        found.append(f"{platform.system()} is not tested; Linux is.")
    return found


def _meeting(host: str) -> bool | str:
    """Check that a rank can listen at a name and another rank can connect to it; return the problem, if any."""
    try:
        listens = listening_store(host, 0, timeout=timedelta(seconds=5), wait_for_workers=False)
        joins = dist.TCPStore(host, listens.port, is_master=False, timeout=timedelta(seconds=5))
        joins.set("met", "yes")
        return bool(listens.get("met") == b"yes")
    except (RuntimeError, OSError) as fault:
        return str(fault).strip().split("\n")[0]


def _address() -> str:
    """Return the address that this machine's own name resolves to, which gloo gives to other ranks."""
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0])
    except OSError as fault:
        return f"its name leads nowhere: {fault}"

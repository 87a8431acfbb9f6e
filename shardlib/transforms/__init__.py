"""Transforms: pure functions from plan to plan, as values that compose with `|`."""

from __future__ import annotations

from typing import Any

from shardlib._plan import LossScale
from shardlib._renamed import renamed
from shardlib.transforms._accumulate import accumulate
from shardlib.transforms._capacity import expert_capacity
from shardlib.transforms._fit import fit_memory
from shardlib.transforms._fsdp import fsdp, hsdp
from shardlib.transforms._offload import offload
from shardlib.transforms._pipeline import pipeline
from shardlib.transforms._precision import precision
from shardlib.transforms._recompute import checkpoint_activations
from shardlib.transforms._replicate import replicate
from shardlib.transforms._spread import spread
from shardlib.transforms._text import parse
from shardlib.transforms._transform import Pipeline, Transform
from shardlib.transforms._zero import zero

__all__ = [
    "LossScale",
    "Pipeline",
    "Transform",
    "accumulate",
    "checkpoint_activations",
    "expert_capacity",
    "fit_memory",
    "fsdp",
    "hsdp",
    "offload",
    "parse",
    "pipeline",
    "precision",
    "replicate",
    "spread",
    "zero",
]


def __getattr__(name: str) -> Any:
    return renamed(__name__, name)

"""Transforms: pure functions from plan to plan, as values that compose with `|`."""

from __future__ import annotations

from shardlib._plan import LossScale
from shardlib.transforms._accumulate import accumulate
from shardlib.transforms._capacity import capacity
from shardlib.transforms._fit import fit
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
    "capacity",
    "checkpoint_activations",
    "fit",
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

"""Transforms: pure functions from plan to plan, as values that compose with `|`."""

from __future__ import annotations

from shardlib.transforms._fsdp import fsdp, hsdp
from shardlib.transforms._replicate import replicate
from shardlib.transforms._spread import spread
from shardlib.transforms._transform import Pipeline, Transform
from shardlib.transforms._zero import zero

__all__ = ["Pipeline", "Transform", "fsdp", "hsdp", "replicate", "spread", "zero"]

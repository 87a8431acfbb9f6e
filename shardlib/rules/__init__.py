"""Rules: layouts for the tensors of a model, by patterns of names."""

from __future__ import annotations

from shardlib.rules._report import Coverage, CoverageRow
from shardlib.rules._resolution import Border, Resolution, TensorLayout
from shardlib.rules._rules import Rules
from shardlib.rules.dims import ModuleDims, register_dims
from shardlib.rules.logical import LogicalAxes
from shardlib.rules.stages import Balanced, By, Stage, Weigh
from shardlib.rules.suggest import suggest
from shardlib.rules.tensor_modes import TensorMode, register_tensor_mode, registered_tensor_modes, tensor_mode

__all__ = [
    "Balanced",
    "Border",
    "By",
    "Coverage",
    "CoverageRow",
    "LogicalAxes",
    "ModuleDims",
    "Resolution",
    "Rules",
    "Stage",
    "TensorLayout",
    "TensorMode",
    "Weigh",
    "register_dims",
    "register_tensor_mode",
    "registered_tensor_modes",
    "suggest",
    "tensor_mode",
]

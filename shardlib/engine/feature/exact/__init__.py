"""Exact random numbers: each is a function of a key and of the element's global index, whatever the mesh."""

from __future__ import annotations

from shardlib.engine.feature.exact._compile import DECOMPOSITIONS, traced
from shardlib.engine.feature.exact._data_rank import DataRank
from shardlib.engine.feature.exact._forward import batch_rows, check_mode, draw_exactly, enter_exact, leave_exact
from shardlib.engine.feature.exact._local_elements import holds_slices
from shardlib.engine.feature.exact._mode import ExactMode, exact_random, is_exact, rows

__all__ = [
    "DECOMPOSITIONS",
    "DataRank",
    "ExactMode",
    "batch_rows",
    "check_mode",
    "draw_exactly",
    "enter_exact",
    "exact_random",
    "holds_slices",
    "is_exact",
    "leave_exact",
    "rows",
    "traced",
]

"""Exact randomness: every random number is a function of a key and of the element's global index, on every mesh."""

from __future__ import annotations

from shardlib.engine.exact._compile import DECOMPOSITIONS, traced
from shardlib.engine.exact._forward import check_mode, draw_exactly
from shardlib.engine.exact._held import is_cut_so
from shardlib.engine.exact._mode import ExactMode, exact_random, is_exact, rows
from shardlib.engine.exact._place import Place

__all__ = [
    "DECOMPOSITIONS",
    "ExactMode",
    "Place",
    "check_mode",
    "draw_exactly",
    "exact_random",
    "is_cut_so",
    "is_exact",
    "rows",
    "traced",
]

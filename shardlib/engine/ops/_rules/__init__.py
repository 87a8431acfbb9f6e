"""shardlib's own rules, one file per family of ops. Importing a file registers its rules."""

from shardlib.engine.ops._rules import (
    _attention,
    _indexing,
    _losses,
    _matmul,
    _matrices,
    _norms,
    _pointwise,
    _reductions,
    _spatial,
    _views,
)

__all__ = [
    "_attention",
    "_indexing",
    "_losses",
    "_matmul",
    "_matrices",
    "_norms",
    "_pointwise",
    "_reductions",
    "_spatial",
    "_views",
]

"""Hypothesis strategies: meshes, layouts, rules, models, and whole cases that `assert_equivalent` takes.

The ten-line test of a model of your own, on every mesh of at most four ranks, under any rules at all:

    from hypothesis import given, settings
    from shardlib.testing import strategies
    from shardlib.testing.equivalence import assert_equivalent

    @given(strategies.cases(my_model, my_batch))
    @settings(max_examples=100, deadline=None)
    def test_any_layout(case):
        assert_equivalent(**case)

What is drawn need not be sensible: a bias sharded apart from its weight's rows, a norm whose features are sharded, two
axes on one dim, more ranks than a dim has indices. The numbers have to be those of one device all the same. Left out is
what shardlib refuses; and, in rules, fused dims of activations, and roles that shard a factor of a fused dim.

Everything shrinks towards one axis of two ranks, nothing sharded, the smallest model, nothing frozen: what is left in a
minimal example is needed for its failure.

Needs hypothesis (the extra `testing`); `import shardlib.testing` alone does not import it.
"""

from __future__ import annotations

from shardlib.testing.strategies._cases import Case, cases
from shardlib.testing.strategies._layouts import layouts, shapes
from shardlib.testing.strategies._meshes import mesh_shapes
from shardlib.testing.strategies._models import ModelFactory, batches, convnets, mlps, transformers
from shardlib.testing.strategies._rules import rule_sets
from shardlib.testing.strategies._transforms import register_transforms, transforms

__all__ = [
    "Case",
    "ModelFactory",
    "batches",
    "cases",
    "convnets",
    "layouts",
    "mesh_shapes",
    "mlps",
    "register_transforms",
    "rule_sets",
    "shapes",
    "transformers",
    "transforms",
]

"""A compiled model composes with the transforms of JAX, or says what to write."""

from __future__ import annotations

import pytest

from tests.jax import on_devices, transformed


@pytest.mark.parametrize("check", transformed.CHECKS)
def test_a_transform_makes_of_it_what_it_makes_of_the_model_by_hand(check: str):
    on_devices.run(transformed.CHECKS[check])


@pytest.mark.deep
@pytest.mark.parametrize("family", transformed.FAMILIES)
def test_a_model_of_transformers_is_exported_for_any_number_of_rows(family: str):
    """Norms of T5 are of float32 in any case."""
    assert on_devices.run(transformed.exported_family, family) < 1e-6


WORDS = {
    "symbolic": ("InputError", "(2*rows, 8)", "an expression", "jax.export.export(jax.jit(fn))(fn.abstract(), "),
    "branch on rows": (
        "PlanError",
        "_Branches cannot be exported",
        "guard 6 <= L['x'].size()[0]",
        "Export a program for each number of rows",
    ),
    "explicit": ("InputError", "whose axes dp, tp are Explicit", "jax.sharding.auto_axes(fn, out_sharding="),
    "explicit step": (
        "InputError",
        "A training step on axes of type Auto was called under a mesh",
        "Give this mesh to train_step",
    ),
    "mapped step": ("InputError", "inside shard_map or pmap, over dp, tp", "Call it outside"),
}


def test_what_is_refused_is_explained():
    raised = on_devices.run(transformed.refused)
    assert raised.keys() == WORDS.keys()
    for name, words in WORDS.items():
        lacking = [word for word in words if word not in raised[name]]
        assert not lacking, f"{name}: {lacking} not in: {raised[name]}"

"""Scanned blocks give the numbers of unrolled ones."""

from __future__ import annotations

import pytest

from tests.jax import on_devices, scanned


@pytest.mark.parametrize("check", scanned.CHECKS)
def test_the_numbers_are_those_of_unrolled_blocks(check: str):
    on_devices.run(scanned.CHECKS[check])


WORDS = {
    "mixed": ("InputError", "no two consecutive blocks that compute alike", "blocks.0, blocks.1, blocks.2"),
    "layouts": ("InputError", "blocks.0, blocks.1"),
    "none": ("InputError", "the repeated blocks are none"),
    "flag": ("InputError", "scan='auto'", "True or False"),
}


def test_what_is_refused_is_explained():
    raised = on_devices.run(scanned.refused, x64=False)
    assert raised.keys() == WORDS.keys()
    for name, words in WORDS.items():
        lacking = [word for word in words if word not in raised[name]]
        assert not lacking, f"{name}: {lacking} not in: {raised[name]}"

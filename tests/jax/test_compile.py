"""What a model may do, and what is refused: views and in-place writes, buffers, ties, dropout, frozen parts."""

from __future__ import annotations

import pytest

from tests.jax import on_devices, small


@pytest.mark.parametrize("check", small.CHECKS)
def test_the_numbers_are_those_of_torch(check: str):
    on_devices.run(small.CHECKS[check])


def test_dropout_is_a_function_of_its_key():
    found = on_devices.run(small.drawn, x64=False)
    assert found.pop("no key").startswith("InputError: The model draws random numbers")
    assert 0.65 < found.pop("kept") < 0.85  # 512 of probability 0.75: a standard deviation is 0.02
    assert found == {"the same key": True, "another key": False, "one device": True, "scaled": True}


WORDS = {
    "branch": ("InputError", "Branches cannot be compiled", "small.py:{line}", "if x.sum() > 0", "torch.where"),
    "mask": ("depends on values", "torch.where"),
    "number": ("InputError", "makes a Python number of a tensor", "x + sum(x[0].tolist())", "Compute with the tensor"),
    "unknown": ("PlanError", "ops have no lowering", "aten::", "(root)", "@shardlib.jax.lowering"),
    "devices": ('Mesh "dp=2,tp=2" needs 4 devices', "JAX sees 8 (cpu)", "devices=jax.devices()[:4]."),
    "open devices": ('"dp=-1,tp=3" needs a multiple of 3', "devices=jax.devices()[:6]."),
    "more devices": ("needs 16 devices; devices= has 8", "XLA_FLAGS=--xla_force_host_platform_device_count=16"),
    "explicit": ("MeshError", "dp (Explicit)", "make_mesh"),
    "pipeline": ("PlanError", "pipeline axis"),
    "offload": ("PlanError", "host", "offload()"),
    "accumulate": ("PlanError", "accumulate=4", "optax.MultiSteps"),
    "missing": ("InputError", "2 arrays are missing", "weight"),
    "unnamed": ('no tensor "wieght"', 'Did you mean "weight"?'),
    "x64": ("InputError", "float64", "jax_enable_x64", ".float()"),
}


def test_what_is_refused_is_explained():
    raised = on_devices.run(small.refused, False, x64=False)
    line = str(small.line_of_branch())
    assert raised.keys() == WORDS.keys()
    for name, words in WORDS.items():
        lacking = [word for word in words if word.replace("{line}", line) not in raised[name]]
        assert not lacking, f"{name}: {lacking} not in: {raised[name]}"

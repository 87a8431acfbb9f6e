"""The training step of JAX has the numbers of one device, and says what is wrong."""

from __future__ import annotations

import pytest

from tests.jax import on_devices, stepped


@pytest.mark.parametrize("check", stepped.CHECKS)
def test_the_numbers_are_those_of_one_device(check: str):
    on_devices.run(stepped.CHECKS[check])


WORDS = {
    "optimizer": ("InputError", "optimizer 'adam'", "optax.adamw"),
    "loss_fn": ("InputError", "loss_fn=3", "loss_fn(params, batch)"),
    "remat": ("InputError", "remat='dots'", "jax.checkpoint_policies"),
    "accumulate": ("InputError", "accumulate=0", "from 1 on"),
    "clip": ("InputError", "clip=-1.0", "a positive norm"),
    "scale": ("InputError", "loss_scale='dynamic'", "LossScale"),
    "flag": ("InputError", "has_aux='no'", "True or False"),
    "mesh": ("InputError", "rules and no mesh", "make_mesh"),
    "two meshes": ("InputError", "a mesh or transforms beside it", "give them to compile_model"),
    "setting": ("PlanError", "accumulate=2", "train_step has accumulate="),
    "integers": ("InputError", '"kernel" is an array of int', "no gradient"),
    "missing": ("InputError", "1 arrays are missing, bias"),
    "strange": ("InputError", '"wieght" was given', 'Did you mean "weight"?'),
    "shape": ("InputError", "shape (3,); it is (4, 4)", "fn.from_torch"),
    "tree": ("InputError", "given parameters as list", "compile_model returned"),
    "state": ("InputError", "a state that is a dict", "step.init(params)"),
    "vector": ("InputError", "loss_fn returned", "[8,4]", "where loss was expected"),
    "pair": ("InputError", "loss_fn returned (", "has_aux=, has_count="),
    "no pair": ("InputError", "where (sum, count) was expected"),
    "integer loss": ("InputError", "a loss of int32", "loss.mean()"),
    "rows": ("InputError", "accumulate=4", "{'x': 6, 'y': 6}", "a multiple of 4"),
    "key": ("InputError", 'in the batch, at "key"', "rng=key"),
    "buffers": ("InputError", "has_buffers=True and buffers belong together", "step.init(params, buffers)"),
    "changed buffers": ("InputError", "was given the buffers {'n': ((), 'int32')} and returned {'n': ((), 'float"),
    "shapes": ("InputError", "given shapes", "step.abstract"),
    "line search": ("InputError", "'grad' and 'value_fn'", "a loop of your own"),
}


def test_what_is_refused_is_explained():
    raised = on_devices.run(stepped.refused)
    assert raised.keys() == WORDS.keys()
    for name, words in WORDS.items():
        lacking = [word for word in words if word not in raised[name]]
        assert not lacking, f"{name}: {lacking} not in: {raised[name]}"

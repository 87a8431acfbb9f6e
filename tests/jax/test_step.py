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
    "tensors": ("InputError", 'at "x" is a tensor of torch', "Give tensor.numpy()"),
    "text": ("InputError", "at \"source\" is str 'a file'", "loss_fn may close over it"),
    "texts": ("InputError", "The batch is an array of <U1"),
    "another device": ("InputError", 'at "x" is an array on cpu:3, and the mesh "dp=2,tp=4"', "jax.device_put(array, "),
    "another order": ("InputError", "The batch is an array on cpu:0, cpu:1", "another order of them"),
    "deleted": ("InputError", "The batch is an array whose memory was deleted"),
    "shapes of a batch": ("InputError", 'at "x" is ShapeDtypeStruct', "step.lower(state, batch) takes shapes"),
    "lowered text": ("InputError", "The batch is str 'a file'"),
    "seed": ("InputError", "rng= was given 3", "or a tree of such keys", "jax.random.fold_in("),
    "keys": ("InputError", "rng= was given an array key<fry>[2]"),
    "key elsewhere": ("InputError", "rng is an array on cpu:3"),
    "no key": ("InputError", "loss_fn takes rng", "step(state, batch, rng=key)"),
    "key for none": ("InputError", "given rng=, and loss_fn takes no such argument", "loss_fn(params, batch, rng)"),
    "aux": ("InputError", "aux with str 'mse' at \"name\"", "returns arrays and numbers", "beside the step"),
    "state of sgd": (
        "InputError",
        "opt_state is (EmptyState, EmptyState) with 0 arrays, and this step has (ScaleByAdamState, ",
        "step.init(state.params)",
    ),
    "state without a scale": ("InputError", "its scale is None with 0 arrays, and this step has dict with 3"),
    "state of other shapes": ("InputError", "with 3 arrays, (4, 8) for (4, 4). Begin"),
    "tensors of a model": ("InputError", '"weight" was given as a tensor of torch', "fn.from_torch"),
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

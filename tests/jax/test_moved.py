"""A run of torch goes on in flax, with its AdamW, and comes back: the numbers are those of a run that never left."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.jax import moved, on_devices


def test_a_run_that_goes_through_flax_and_orbax_has_the_numbers_of_one_that_never_left(tmp_path: Path, ranks):
    ranks(4).run(moved.begun, tmp_path)
    on_devices.run(moved.gone_on, tmp_path)
    wanted = moved.never_left()
    for got in ranks(4).run(moved.ended, tmp_path):
        assert got.keys() == wanted.keys()
        for name, tensor in wanted.items():
            torch.testing.assert_close(got[name], tensor, rtol=1e-12, atol=1e-12)


def test_dims_are_turned_there_and_back(tmp_path: Path):
    on_devices.run(moved.turned_dims, tmp_path)


ALONE = "Load the parameters alone, sj.load(path, step.abstract(params).params)"
WORDS = {
    "no optimizer": ("CheckpointError", "holds no state of an optimizer", ALONE),
    "another optimizer": ("CheckpointError", 'keeps "momentum_buffer" of "bias"', "exp_avg, exp_avg_sq", ALONE),
    "one name": ("CheckpointError", "names= calls two tensors of", '"params.kernel", one of them "weight"'),
    "no name": ("CheckpointError", 'names= calls "bias" 3; give a name'),
    "not turned": (
        "CheckpointError",
        '"params.kernel" has shape (2, 3) in the checkpoint, and (3, 2) here',
        "transpose=",
    ),
    "unnamed": (
        "CheckpointError",
        "not in the checkpoint: params.kernel, opt_state.0.mu.kernel",
        "opt_state.mu.weight",
    ),
    "left out": ("CheckpointError", "not in the checkpoint: params.bias, opt_state.0.mu.bias, opt_state.0.nu.bias"),
    "steps": ("CheckpointError", "different numbers of steps, {'bias': 1", "'weight': 2"),
    "back unnamed": ("InputError", '"weight" is "params.weight" there, which the state does not have', "names="),
    "back not turned": ("InputError", '"weight" has shape (2, 3), and "params.kernel" (3, 2)', "transpose="),
    "back another optimizer": ("InputError", "was given SGD; give torch.optim.Adam or AdamW"),
}


def test_what_does_not_fit_is_explained(tmp_path: Path):
    raised = on_devices.run(moved.refused, tmp_path, x64=False)
    assert raised.keys() == WORDS.keys()
    for name, words in WORDS.items():
        assert [word for word in words if word not in raised[name]] == [], raised[name]

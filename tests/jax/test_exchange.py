"""Tensors and arrays hold the same values in the same places, in the same memory where both sides allow."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.jax import exchanged, on_devices

_ROOT = Path(__file__).resolve().parents[2]


def test_every_dtype_goes_there_and_back_without_a_copy():
    assert on_devices.run(exchanged.round_trips) == []


def test_which_memory_is_shared():
    shared = {"aligned": True, "unaligned": False, "transposed": False, "needs a gradient": True}
    assert on_devices.run(exchanged.sharing) == shared


WORDS = {
    "uneven": ("InputError", "(5, 3)", "uneven shards in dim 0", "pad=True"),
    "fused": ("LayoutError", "fused"),
    "narrowed": ("InputError", "torch.float64", "float32", "jax_enable_x64"),
    "unaligned": ("InputError", "copy=False", "64 bytes"),
    "no mesh": ("InputError", 'layout="rows@tp" and no mesh', "make_mesh"),
    "sparse": ("InputError", "torch.sparse_coo", "to_dense()"),
    "meta": ("InputError", "on meta", "has values"),
    "larger": ("InputError", "global_shape=(5, 4)", "shape (4, 4)"),
    "fewer dims": ("InputError", "global_shape=(4,)", "as many dims"),
    "key": ("InputError", "torch has no dtype for JAX's key<fry>"),
    "four bits": ("InputError", "torch has no dtype for JAX's int4"),
    "handed on": ("InputError", "memory was handed on"),
    "pieces": ("InputError", "copy=False", "8 shards"),
}


def test_what_is_refused_is_explained():
    raised = on_devices.run(exchanged.refused, x64=False)
    for name, words in WORDS.items():
        assert [word for word in words if word not in raised[name]] == [], raised[name]


def _free_ports(count: int) -> list[str]:
    held = [socket.socket() for _ in range(count)]
    for one in held:
        one.bind(("127.0.0.1", 0))
    ports = [str(one.getsockname()[1]) for one in held]
    for one in held:
        one.close()
    return ports


def test_two_processes_train_with_torchs_optimizer_on_gradients_of_jax():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(_ROOT)}
    ports = _free_ports(2)
    ranks = [
        subprocess.Popen(
            [sys.executable, exchanged.__file__, str(rank), *ports],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all("done" in each for each in said), "\n".join(said)

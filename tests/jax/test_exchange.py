"""Tensors and arrays hold the same values in the same places, in the same memory where both sides allow."""

from __future__ import annotations

import pytest

from tests.jax import exchanged, on_devices


def test_every_dtype_goes_there_and_back_without_a_copy():
    assert on_devices.run(exchanged.round_trips) == []


_EXACT = ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float64", "int64", "bool", "complex64", "complex128"]
_CASES = [(form, dtype) for form in exchanged.FORMS for dtype in _EXACT if form not in ("conjugated", "negated")]


@pytest.mark.parametrize(("form", "dtype"), [*_CASES, ("conjugated", "complex64"), ("negated", "float32")])
def test_a_tensor_of_any_form_has_the_same_bits_there_and_back(form: str, dtype: str):
    on_devices.run(exchanged.there_and_back, form, dtype)


FITS = ("InputError", "holds int64 numbers that int32 cannot hold", "jax_enable_x64")
WORDS_64 = {
    "load": ('"n" holds', *FITS),
    "to_jax": ("A tensor holds", *FITS),
    "shared": ("InputError", "torch.int64 becomes int32 without jax_enable_x64"),
    "from_torch": ('"kept" holds', *FITS),
    "argument": ("An argument holds", *FITS),
    "numpy": ("An argument holds", *FITS),
    "constant": ("The constant", *FITS),
    "shard_params": ('"n" holds', *FITS),
}


def test_integers_of_64_bits_are_exact_or_refused_without_x64():
    raised = on_devices.run(exchanged.integers_of_64_bits, x64=False)
    assert raised.keys() == WORDS_64.keys()
    for name, words in WORDS_64.items():
        assert [word for word in words if word not in raised[name]] == [], raised[name]


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

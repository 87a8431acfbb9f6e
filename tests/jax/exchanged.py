"""Tensors to arrays and back, on the devices of one process."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardlib.errors import InputError
from tests.jax.refusals import raised

__all__ = ["DTYPES", "FORMS", "integers_of_64_bits", "refused", "round_trips", "sharing", "there_and_back"]

DTYPES = """float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 complex64 complex128 int64 int32 int16 int8 uint8
uint16 uint32 bool""".split()  # noqa: SIM905


def _values(dtype: str, *shape: int) -> torch.Tensor:
    numbers = torch.arange(torch.Size(shape).numel()).view(shape) % 100
    made = (numbers % 2 == 0) if dtype == "bool" else numbers
    return made.to(getattr(torch, dtype))


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def round_trips() -> list[str]:
    """What does not come back as it went, or is copied for nothing, for every dtype."""
    import jax

    import shardlib.jax as sj

    mesh, wrong = sj.make_mesh("dp=2,tp=4"), []
    for dtype in DTYPES:
        whole = _values(dtype, 64, 64)
        cases = {"one device": sj.to_jax(whole)}
        cases["rows"] = sj.to_jax(whole, mesh, "rows@(dp,tp) columns", copy=False)
        cases["columns"] = sj.to_jax(whole, mesh, "rows@dp columns@tp")
        for name, array in cases.items():
            back = sj.to_torch(array)
            if _bits(back) != _bits(whole) or back.dtype != whole.dtype or array.dtype.name != dtype:
                wrong.append(f"{dtype} {name}: {array.dtype} {back.dtype}")
            if sj.shares_memory(whole, array) != (name != "columns"):
                wrong.append(f"{dtype} {name}: shares memory {sj.shares_memory(whole, array)}")
        alone = cases["one device"]
        if sj.to_torch(alone, copy=False).data_ptr() != alone.unsafe_buffer_pointer():
            wrong.append(f"{dtype}: copied on the way back")
        if sj.shares_memory(whole, sj.to_jax(whole, copy=True)):
            wrong.append(f"{dtype}: shared though a copy was asked for")
    tree = sj.to_torch(sj.to_jax({"a": [_values("float32", 3)], "b": {"c": _values("bool", 2)}}))
    if tree["a"][0].tolist() != [0, 1, 2] or tree["b"]["c"].tolist() != [True, False]:
        wrong.append(f"a tree: {tree}")
    padded = sj.to_jax(_values("float32", 5, 3), mesh, "rows@tp columns", pad=True)
    if padded.shape != (8, 3) or float(jax.numpy.abs(padded[5:]).sum()):
        wrong.append(f"padded: {padded.shape}")
    if not torch.equal(sj.to_torch(padded, global_shape=(5, 3)), _values("float32", 5, 3)):
        wrong.append("padded: does not come back")
    return wrong


FORMS: dict[str, tuple[Callable[[str], torch.Tensor], bool]] = {
    "aligned": (lambda dtype: _values(dtype, 64, 64), True),
    "unaligned": (lambda dtype: _values(dtype, 4097)[1:].view(64, 64), False),
    "transposed": (lambda dtype: _values(dtype, 64, 32).t(), False),
    "strided": (lambda dtype: _values(dtype, 64, 64)[::2, ::2], False),
    "expanded": (lambda dtype: _values(dtype, 1, 64).expand(32, 64), False),
    "without dims": (lambda dtype: _values(dtype, 2)[0], True),
    "without elements": (lambda dtype: _values(dtype, 0, 64), True),
    "conjugated": (lambda _: torch.complex(torch.arange(64.0), torch.arange(64.0) + 1).conj(), False),
    "negated": (lambda _: torch.complex(torch.arange(64.0), torch.arange(64.0) + 1).conj().imag, False),
}


def there_and_back(form: str, dtype: str) -> None:
    """A tensor through `to_jax`, `to_torch` and a compiled model's buffer: bits, dtype, and which memory is shared."""
    import jax
    import pytest
    from torch import nn

    import shardlib.jax as sj

    make, shared = FORMS[form]
    tensor = make(dtype)
    bits = _bits(tensor.resolve_conj().resolve_neg())
    array = sj.to_jax(tensor)
    assert sj.shares_memory(tensor, array) == (shared and tensor.numel() > 0)
    assert not sj.shares_memory(tensor, sj.to_jax(tensor, copy=True))
    if shared:
        sj.to_jax(tensor, copy=False)
    else:
        with pytest.raises(InputError, match="memory cannot be shared"):
            sj.to_jax(tensor, copy=False)
    back = sj.to_torch(array, copy=False)
    assert (back.dtype, back.shape, array.shape) == (tensor.dtype, tensor.shape, tuple(tensor.shape))
    assert _bits(back) == bits and back.is_contiguous()
    assert not back.numel() or back.data_ptr() == array.unsafe_buffer_pointer()

    module = nn.Module()
    module.register_buffer("kept", tensor)
    layout = "rows@dp columns@tp" if tensor.ndim == 2 else None
    fn, _ = sj.compile_model(module, sj.make_mesh("dp=2,tp=4"), {"kept": layout})
    for held in (fn.buffers["kept"], fn.from_torch({"kept": tensor})["kept"]):
        assert held.dtype.name == str(tensor.dtype).removeprefix("torch.") and not sj.shares_memory(tensor, held)
        assert held.sharding.spec == (jax.P("dp", "tp") if tensor.ndim == 2 else jax.P(*[None] * tensor.ndim))
        back = fn.to_torch({"kept": held})["kept"]
        assert (back.dtype, back.shape, _bits(back)) == (tensor.dtype, tensor.shape, bits)


def integers_of_64_bits() -> dict[str, str]:
    """With jax_enable_x64 off: those that fit are exact, by assertion; of others, what is raised."""
    import tempfile

    import jax
    import numpy as np
    from safetensors.torch import save_file
    from torch import nn

    import shardlib.jax as sj

    class Adds(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.register_buffer("kept", torch.tensor([1]))
            self.number = number

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.kept + torch.tensor(self.number)

    fits, large = torch.tensor([2**31 - 3, -(2**31)]), torch.tensor([2**31, 0])
    mesh = sj.make_mesh("dp=8")
    array = sj.to_jax(fits)
    assert array.dtype == "int32" and array.tolist() == fits.tolist()
    fn, params = sj.compile_model(Adds(1), mesh, {"kept": None})
    back = fn.to_torch(fn.from_torch({"kept": fits[:1]}))["kept"]
    assert back.dtype == torch.int64 and back.tolist() == fits[:1].tolist()
    assert fn(params, fits).tolist() == (fits + 2).tolist()
    assert fn(params, fits.numpy()).tolist() == (fits + 2).tolist()
    assert sj.shard_params({"n": fits}, mesh, {"n": None})["n"].tolist() == fits.tolist()
    constant, _ = sj.compile_model(Adds(2**31), mesh, {"kept": None})
    with tempfile.TemporaryDirectory() as folder:
        save_file({"n": large}, f"{folder}/large.safetensors")
        into = {"n": jax.ShapeDtypeStruct((2,), np.dtype("int64"))}
        found = {"load": raised(lambda: sj.load(f"{folder}/large.safetensors", into))}
    return found | {
        "to_jax": raised(lambda: sj.to_jax(large)),
        "shared": raised(lambda: sj.to_jax(fits, copy=False)),
        "from_torch": raised(lambda: fn.from_torch({"kept": large[:1]})),
        "argument": raised(lambda: fn(params, large)),
        "numpy": raised(lambda: fn(params, large.numpy())),
        "constant": raised(lambda: constant(params, fits)),
        "shard_params": raised(lambda: sj.shard_params({"n": large.numpy()}, mesh, {"n": None})),
    }


def sharing() -> dict[str, bool]:
    """Which memory can be shared."""
    import shardlib.jax as sj

    base = torch.zeros(65)
    start = base.data_ptr() % 64 // 4
    cases = {"aligned": base[:64], "unaligned": base[1:], "transposed": torch.zeros(8, 8).t(), "needs a gradient": base}
    assert start == 0
    cases["needs a gradient"] = torch.zeros(64, requires_grad=True)
    return {name: sj.shares_memory(tensor, sj.to_jax(tensor)) for name, tensor in cases.items()}


def refused() -> dict[str, str]:
    """What is raised, with jax_enable_x64 off."""
    import jax
    import jax.numpy as jnp

    import shardlib.jax as sj

    mesh, gone = sj.make_mesh("dp=2,tp=4"), jnp.zeros(3)
    gone.delete()
    return {
        "uneven": raised(lambda: sj.to_jax(torch.zeros(5, 3), mesh, "rows@tp columns")),
        "fused": raised(lambda: sj.to_jax(torch.zeros(24, 3), mesh, "(3 heads@tp) columns")),
        "narrowed": raised(lambda: sj.to_jax(torch.zeros(3, dtype=torch.float64))),
        "unaligned": raised(lambda: sj.to_jax(torch.zeros(65)[1:], copy=False)),
        "no mesh": raised(lambda: sj.to_jax(torch.zeros(8), layout="rows@tp")),
        "sparse": raised(lambda: sj.to_jax(torch.eye(3).to_sparse())),
        "meta": raised(lambda: sj.to_jax(torch.zeros(3, device="meta"))),
        "larger": raised(lambda: sj.to_torch(jnp.zeros((4, 4)), global_shape=(5, 4))),
        "fewer dims": raised(lambda: sj.to_torch(jnp.zeros((4, 4)), global_shape=(4,))),
        "key": raised(lambda: sj.to_torch(jax.random.key(0))),
        "four bits": raised(lambda: sj.to_torch(jnp.zeros(3, "int4"))),
        "handed on": raised(lambda: sj.to_torch(gone)),
        "pieces": raised(lambda: sj.to_torch(sj.to_jax(torch.zeros(8), mesh, "rows@tp"), copy=False)),
    }

"""A function of JAX inside a torch model; JAX that is missing or too old."""

from __future__ import annotations

import os
from importlib import metadata

import pytest
import torch

from shardlib.errors import ShardlibError
from shardlib.jax import _require
from tests.jax import on_devices


def _gradients_are_right() -> None:
    """By finite differences, and by torch's own; trained by torch's optimizer, with a frozen and a whole input."""
    import jax.numpy as jnp

    import shardlib.jax as sj

    torch.manual_seed(0)
    values = {"dense": {"kernel": torch.randn(3, 2).double(), "bias": torch.randn(2).double()}}

    def function(params, x, at):
        y = jnp.tanh(x @ params["dense"]["kernel"] + params["dense"]["bias"])
        return {"y": y, "picked": y[at], "at": at}

    module = sj.JaxModule(function, values)
    assert [name for name, _ in module.named_parameters()] == ["dense.bias", "dense.kernel"]
    x, at = torch.randn(4, 3).double().requires_grad_(), torch.tensor([2, 0])
    assert torch.autograd.gradcheck(lambda x: module(x, at)["picked"], (x,))
    for _ in range(2):
        twin = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        optimizer.zero_grad()
        output = module(x, at)
        assert output["at"].tolist() == [2, 0]
        (output["y"].sum() + output["picked"].square().sum()).backward()
        y = torch.tanh(x @ twin["dense.kernel"] + twin["dense.bias"])
        (y.sum() + y[at].square().sum()).backward()
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(parameter.grad, twin[name].grad, rtol=1e-12, atol=1e-12)
        optimizer.step()


def _gradients_have_gradients() -> None:
    """By finite differences, for real and complex numbers; a penalty on a gradient counts, and writes are noticed."""
    import jax.numpy as jnp

    import shardlib.jax as sj

    torch.manual_seed(0)
    module = sj.JaxModule(lambda p, x, n: {"z": jnp.tanh(x @ p["k"]) * n, "at": (n, None)}, {"k": torch.randn(3, 2)})
    module, x = module.double(), torch.randn(4, 3).double().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: module(x, 2)["z"], (x,))
    assert module(x, 2)["at"] == (torch.tensor(2), None)
    turned = sj.JaxModule(lambda p, z: jnp.sin(z) * z.conj() * p["w"], {"w": torch.tensor([1 + 1j, 2])})
    z = torch.randn(2, dtype=torch.complex128, requires_grad=True)
    assert torch.autograd.gradcheck(turned, (z,)) and torch.autograd.gradgradcheck(turned, (z,))

    cubed, x = sj.JaxModule(lambda p, x: x**3 * p["k"], {"k": torch.ones(3)}), torch.full((3,), 2.0).requires_grad_()
    value = cubed(x).sum()
    (slope,) = torch.autograd.grad(value, x, create_graph=True)
    (value + slope.square().sum()).backward()
    assert x.grad is not None and x.grad.tolist() == [12.0 + 2 * 12 * 12] * 3

    value = cubed(x).sum()
    with torch.no_grad():
        cubed.get_parameter("k").mul_(5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_torch_trains_a_function_of_jax():
    on_devices.run(_gradients_are_right)


def test_gradients_of_a_function_of_jax_have_gradients():
    on_devices.run(_gradients_have_gradients)


def test_jax_that_is_missing_or_too_old_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(metadata, "version", lambda _: "0.6.2")
    with pytest.raises(ShardlibError, match=r"needs JAX 0\.7 or newer; 0\.6\.2 is installed.*jax>=0\.7"):
        _require.require_jax()

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(ShardlibError, match=r"not installed. Run `pip install shardlib\[jax\]`"):
        _require.require_jax()


def flags_and_devices() -> tuple[list[str], int]:
    """What JAX was told, and how many devices it has."""
    import jax

    return os.environ["XLA_FLAGS"].split(), len(jax.devices())


def test_flags_of_the_caller_come_first_and_those_of_the_devices_count(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
    (theirs, *ours), devices = on_devices.run(flags_and_devices)
    assert theirs == "--xla_force_host_platform_device_count=3"
    assert "--xla_force_host_platform_device_count=8" in ours and devices == 8

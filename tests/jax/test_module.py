"""A function of JAX inside a torch model; JAX that is missing or too old."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import metadata
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib._mesh_shape import MeshShape
from shardlib.errors import ShardlibError
from shardlib.jax import _require
from tests.jax import on_devices, on_processes


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


def _complex_gradients_are_those_of_torch() -> None:
    import jax.numpy as jnp

    import shardlib.jax as sj

    torch.manual_seed(0)
    module = sj.JaxModule(lambda p, x: jnp.exp(x * p["w"]), {"w": torch.randn(3, dtype=torch.complex128)})
    x = torch.randn(3, dtype=torch.complex128, requires_grad=True)
    assert torch.autograd.gradcheck(module, (x,))
    module(x).abs().sum().backward()
    w = module.get_parameter("w")
    (wanted,) = torch.autograd.grad(torch.exp(x * w).abs().sum(), w)
    torch.testing.assert_close(w.grad, wanted, rtol=1e-12, atol=1e-12)


def _torch_keeps_what_backward_reads() -> None:
    """A write between forward and backward is noticed, and a checkpoint computes anew."""
    import jax.numpy as jnp

    import shardlib.jax as sj

    module = sj.JaxModule(lambda p, x: jnp.sin(x * p["w"]), {"w": torch.ones(64, dtype=torch.float64)})
    x = torch.ones(64, dtype=torch.float64)
    y = module(x).sum()
    with torch.no_grad():
        module.get_parameter("w").add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or len(kept) - 1, lambda at: kept[at]):
        y = module(x).sum()
    assert {t.data_ptr() for t in kept} == {x.data_ptr(), module.get_parameter("w").data_ptr()}
    y.backward()
    torch.testing.assert_close(module.get_parameter("w").grad, torch.cos(2 * x))


@pytest.mark.parametrize("check", [_complex_gradients_are_those_of_torch, _torch_keeps_what_backward_reads])
def test_its_gradients_are_those_of_a_module_of_torch(check: Callable[[], None]):
    on_devices.run(check)


SHARDED = {
    "data ranks": ("dp=4", {}, None),
    "zero 1": ("dp=4", {}, sl.zero(1)),
    "zero 3": ("dp=4", {}, sl.zero(3)),
    "fsdp": ("dp=4", {}, sl.fsdp()),
    "between whole activations": ("dp=2,tp=2", {"up": "rowwise", "down": "colwise"}, sl.zero(1)),
    "between split activations": ("dp=2,tp=2", {"up": "colwise", "down": "rowwise"}, sl.fsdp()),
    "its own weight split": ("dp=2,tp=2", {"inner.dense.kernel": "in out@tp"}, None),
}


@pytest.mark.parametrize("case", SHARDED)
def test_inside_of_a_sharded_model_it_trains_as_on_one_device(case: str):
    on_processes.run(_trained_beside_one_device, *SHARDED[case])


def _trained_beside_one_device(mesh: str, rules: dict[str, str], transform: Any) -> None:
    alone, sharded = _around(), _around()
    x = torch.randn(8, 8, dtype=torch.float64)
    sharded = sl.shard_model(sharded, mesh, sl.Rules(rules, unmatched="replicate"), transforms=transform or ())
    shape = MeshShape(mesh)
    index, ranks = shape.data_place(shape.coordinate(torch.distributed.get_rank()))
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-2) for model in (alone, sharded)]
    for _ in range(2):
        wanted, loss = alone(x).square().mean(), sharded(x.chunk(ranks)[index]).square().mean()
        for each, optimizer in zip((wanted, loss), optimizers, strict=True):
            each.backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, tensor in sl.full_state_dict(sharded).items():
        torch.testing.assert_close(tensor, alone.state_dict()[name], rtol=1e-12, atol=1e-12)


def _around() -> Any:
    """A function of JAX between two layers of torch, which takes a parameter of theirs too."""
    import jax.numpy as jnp

    import shardlib.jax as sj

    def function(params, x, scale):
        return jnp.tanh(x @ params["dense"]["kernel"] + params["dense"]["bias"]) * scale

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)
            self.scale = torch.nn.Parameter(torch.tensor(0.5))
            self.inner = sj.JaxModule(function, {"dense": {"kernel": torch.randn(16, 16), "bias": torch.randn(16)}})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.inner(self.up(x).relu(), self.scale))

    torch.manual_seed(0)
    return Model().double()


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

"""Tensors and arrays whose shards are on several processes. Runs on each of them; failures are plain assertions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.distributed as dist
from jax.experimental import multihost_utils
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardlib as sl
import shardlib.jax as sj
from shardlib._mesh_shape import MeshShape
from shardlib.layout import Layout
from tests.jax.refusals import raised

__all__ = ["CASES", "CHECKS", "DTYPES", "refused", "there_and_back"]

DTYPES = ("float64", "bfloat16", "float8_e5m2", "int64", "bool", "complex128")
# Mesh, layout, global shape.
CASES = {
    "both dims": ("dp=2,tp=2", "rows@dp columns@tp", (8, 12)),
    "one dim over both axes": ("dp=2,tp=2", "rows@(dp,tp) columns", (8, 12)),
    "the inner axis outside": ("dp=2,tp=2", "rows@(tp,dp) columns", (8, 12)),
    "replicated over an axis": ("dp=2,tp=2", "rows columns@tp", (8, 12)),
    "replicated": ("dp=2,tp=2", "rows columns", (8, 12)),
    "three axes": ("dp=2,tp=1,ep=2", "experts@ep rows columns@dp", (2, 3, 4)),
    "uneven": ("dp=2,tp=2", "rows@dp columns@tp", (5, 3)),
    "a rank without elements": ("tp=4", "rows@tp columns", (5, 3)),
    "no elements": ("dp=2,tp=2", "rows@dp columns", (0, 3)),
    "no dims": ("dp=2,tp=2", "", ()),
}
CHECKS: dict[str, Callable[[], None]] = {}


def _check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__.removeprefix("_").replace("_", " ")] = function
    return function


def _values(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    numbers = torch.arange(torch.Size(shape).numel()).view(shape) + 1
    return (numbers % 3 == 0) if dtype == "bool" else numbers.to(getattr(torch, dtype))


def _bits(values: Any) -> bytes:
    return np.ascontiguousarray(values).tobytes()


def there_and_back(case: str, dtype: str) -> None:
    """DTensor, array, DTensor: the shards' bits, the whole array, and the layout."""
    shape, text, global_shape = CASES[case]
    mesh, layout = sl.mesh(shape), Layout.parse(text)
    placements, here = layout.placements(shape), MeshShape(shape).coordinate(dist.get_rank())
    whole = _values(dtype, global_shape)
    local = layout.take(whole, shape, here).clone()
    stride = torch.empty(global_shape).stride()
    dtensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=stride)

    array = sj.to_jax(dtensor, pad=True)
    assert array.dtype.name == dtype and array.sharding.spec == layout.partition_spec()
    assert not array.is_fully_addressable
    gathered = multihost_utils.process_allgather(array, tiled=True)
    wanted = np.zeros(array.shape, gathered.dtype)
    wanted[tuple(slice(n) for n in global_shape)] = np.asarray(sj.to_jax(whole))
    assert gathered.shape == wanted.shape and _bits(gathered) == _bits(wanted)

    back = sj.to_torch(array, mesh, global_shape=global_shape)
    assert isinstance(back, DTensor) and back.dtype == whole.dtype and back.placements == tuple(placements)
    assert back.shape == whole.shape and back.stride() == stride
    assert back.to_local().shape == local.shape
    assert _bits(np.asarray(sj.to_jax(back.to_local(), copy=True))) == _bits(np.asarray(sj.to_jax(local)))


@_check
def _trains_with_torch_on_gradients_of_jax() -> None:
    """DTensor parameters, a jitted `value_and_grad` in JAX, DTensor gradients, torch's AdamW: torch's numbers."""
    mesh = sl.mesh("dp=2,tp=2")
    torch.manual_seed(0)
    # 64 columns of float64 are a multiple of 64 bytes; 7 rows are uneven.
    full = {
        "up": torch.randn(64, 16).double(),
        "down": torch.randn(16, 64).double(),
        "odd": torch.randn(7, 64).double(),
    }
    places: Any = {"up": [Replicate(), Shard(0)], "down": [Replicate(), Shard(1)], "odd": [Shard(0), Replicate()]}
    params = {name: distribute_tensor(value, mesh, places[name]).requires_grad_() for name, value in full.items()}
    x = torch.randn(8, 16).double()
    inputs = sj.to_jax(distribute_tensor(x, mesh, [Replicate(), Replicate()]))

    def loss_of(params: Any, x: Any) -> Any:
        hidden = jnp.tanh(x @ params["up"].T)
        return ((hidden @ params["down"].T) ** 2).mean() + ((hidden @ params["odd"][:7].T) ** 2).mean()

    first = sj.to_jax(params, pad=True)
    shardings = {name: array.sharding for name, array in first.items()}
    step = jax.jit(jax.value_and_grad(loss_of), out_shardings=(None, shardings))
    alone = {name: value.clone().requires_grad_() for name, value in full.items()}
    optimizers = [torch.optim.AdamW(list(group.values()), 1e-2, eps=1e-5) for group in (params, alone)]
    for _ in range(3):
        arrays = sj.to_jax(params, pad=True)
        assert all(sj.shares_memory(params[name], arrays[name]) for name in ("up", "down"))
        loss, grads = jax.block_until_ready(step(arrays, inputs))
        (shard,) = grads["odd"].addressable_shards
        assert float(abs(shard.data[4 - dist.get_rank() // 2 :]).sum()) == 0, "the pad has a gradient"
        for name, parameter in params.items():
            grad = sj.to_torch(grads[name], mesh, global_shape=tuple(parameter.shape))
            assert isinstance(grad, DTensor) and grad.shape == parameter.shape
            parameter.grad = grad
        hidden = torch.tanh(x @ alone["up"].T)
        wanted = ((hidden @ alone["down"].T) ** 2).mean() + ((hidden @ alone["odd"].T) ** 2).mean()
        wanted.backward()
        assert abs(float(loss) - float(wanted)) <= 1e-12 * float(wanted)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in params.items():
        assert torch.allclose(parameter.full_tensor(), alone[name], rtol=1e-12, atol=1e-12), name


class _Fused(nn.Module):
    """A projection that is split inside of q, k and v, and a dim of 5 that two ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.down = nn.Linear(8, 24), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.down(torch.tanh(q * k) + v)


@_check
def _a_sharded_model_goes_to_jax_trains_and_comes_back() -> None:
    """Fused and uneven layouts: full tensors of the sharded model, arrays of the compiled one, and back."""
    rules = {"qkv": "(3 heads@tp) ...", "down": "out@tp ..."}
    torch.manual_seed(0)
    alone, sharded, template = (_Fused().double() for _ in range(3))
    x = torch.randn(4, 8, dtype=torch.float64)  # drawn first: a sharded model lets data ranks draw differently
    sharded.load_state_dict(alone.state_dict())
    sharded = sl.shard_model(sharded, "dp=2,tp=2", rules)
    before = sl.full_state_dict(sharded)
    fn, _ = sj.compile_model(template, sj.make_mesh("dp=2,tp=2"), rules)
    params = fn.from_torch(before)
    assert params["qkv.weight"].shape == (3, 8, 8) and not params["qkv.weight"].is_fully_addressable
    for name, tensor in fn.to_torch(params).items():
        assert _bits(tensor) == _bits(before[name]), name

    optimizer, step = torch.optim.SGD(alone.parameters(), 0.1), optax.sgd(0.1)
    alone(x).square().mean().backward()
    optimizer.step()
    grads = jax.jit(jax.grad(lambda p: jnp.square(fn(p, x.numpy())).mean()))(params)
    params = optax.apply_updates(params, step.update(grads, step.init(params))[0])
    plain = _Fused().double()
    plain.load_state_dict(fn.to_torch(params))
    for name, tensor in sl.full_state_dict(sl.shard_model(plain, "dp=2,tp=2", rules)).items():
        torch.testing.assert_close(tensor, alone.get_parameter(name), rtol=1e-12, atol=1e-12)


@_check
def _parameters_that_are_replicated_over_dp_go_to_jax_and_back() -> None:
    """The DTensors of a sharded model are on the axes that shard them; JAX's mesh has the others too."""
    torch.manual_seed(0)
    alone, sharded = (nn.Linear(8, 16).double() for _ in range(2))
    x = torch.randn(4, 8, dtype=torch.float64)
    sharded.load_state_dict(alone.state_dict())
    sharded = sl.shard_model(sharded, "dp=2,tp=2", {"weight": "out@tp in", "bias": "out@tp"})
    mesh = sj.make_mesh("dp=2,tp=2")
    tensors = dict(sharded.named_parameters())
    assert all(MeshShape.of(p.device_mesh).names == ("tp",) for p in tensors.values())
    arrays = sj.to_jax(tensors, mesh)
    assert arrays["weight"].sharding.spec == jax.P("tp", None) and arrays["weight"].sharding.mesh == mesh

    def loss(p: Any) -> Any:
        return jnp.square(x.numpy() @ p["weight"].T + p["bias"]).mean()

    shardings = {name: array.sharding for name, array in arrays.items()}
    grads = jax.jit(jax.grad(loss), out_shardings=shardings)(arrays)
    alone(x).square().mean().backward()
    for name, parameter in tensors.items():
        grad = sj.to_torch(grads[name], parameter.device_mesh)
        assert grad.placements == parameter.placements
        wanted = alone.get_parameter(name).grad
        torch.testing.assert_close(grad.full_tensor(), wanted, rtol=1e-12, atol=1e-12)


def refused() -> dict[str, str]:
    """What is raised, on every rank alike."""
    mesh = sl.mesh("dp=2,tp=2")
    whole = torch.zeros(12, 2)
    fused = Layout.parse("(3 heads@tp) columns", sizes={"heads": 4})
    here = MeshShape("dp=2,tp=2").coordinate(dist.get_rank())
    nested = distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0), Shard(0)])
    turned = DeviceMesh("cpu", torch.tensor([[3, 2], [1, 0]]), mesh_dim_names=("dp", "tp"))
    order = sj.make_mesh("dp=2,tp=2", devices=jax.devices()[::-1])
    return {
        "uneven": raised(lambda: sj.to_jax(distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0), Replicate()]))),
        "nested": raised(lambda: sj.to_jax(nested, pad=True)),
        "nested back": raised(lambda: sj.to_torch(_laid("rows@(dp,tp) _", 8), mesh, global_shape=(5, 2))),
        "fused": raised(
            lambda: sj.to_jax(
                DTensor.from_local(fused.take(whole, "dp=2,tp=2", here), mesh, fused.placements("dp=2,tp=2"))
            )
        ),
        "partial": raised(lambda: sj.to_jax(DTensor.from_local(torch.zeros(4), mesh, [Partial(), Replicate()]))),
        "order": raised(lambda: sj.to_jax(distribute_tensor(whole, mesh, [Shard(0), Replicate()]), order)),
        "order back": raised(lambda: sj.to_torch(_laid("rows@dp _", 8), turned)),
        "plain": raised(lambda: sj.to_torch(_laid("rows@dp _", 8))),
        "other axes": raised(lambda: sj.to_torch(_laid("rows@dp _", 8), mesh["tp"])),
        "part of the processes": raised(lambda: sj.to_jax(distribute_tensor(whole, mesh["tp"], [Shard(0)]))),
    }


def _laid(layout: str, rows: int) -> Any:
    return sj.shard_params({"w": jnp.zeros((rows, 2))}, sj.make_mesh("dp=2,tp=2"), {"w": layout})["w"]

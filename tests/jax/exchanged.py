"""Tensors to arrays and back. The first part runs on the devices, the second in two processes of torch and JAX."""

from __future__ import annotations

import sys
from typing import Any

import torch

from tests.jax.refusals import raised

__all__ = ["DTYPES", "refused", "round_trips", "sharing"]

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


# --- two processes --------------------------------------------------------------------------------------------------


def train_with_torch_on_gradients_of_jax(rank: int, ports: list[int]) -> None:
    """DTensor parameters, a jitted `value_and_grad` in JAX, DTensor gradients, torch's AdamW: torch's numbers."""
    import os

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0])}
    import jax
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    import shardlib as sl
    import shardlib.jax as sj

    jax.config.update("jax_enable_x64", True)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    jax.distributed.initialize(f"127.0.0.1:{ports[1]}", num_processes=2, process_id=rank)
    mesh = sl.mesh("tp=2")
    torch.manual_seed(0)
    # 64 columns of float64 are a multiple of 64 bytes; 7 rows are uneven.
    full = {
        "up": torch.randn(64, 16).double(),
        "down": torch.randn(16, 64).double(),
        "odd": torch.randn(7, 64).double(),
    }
    places = {"up": Shard(0), "down": Shard(1), "odd": Shard(0)}
    params = {name: distribute_tensor(value, mesh, [places[name]]).requires_grad_() for name, value in full.items()}
    x = torch.randn(8, 16).double()
    inputs = sj.to_jax(distribute_tensor(x, mesh, [Replicate()]))

    def loss_of(params: Any, x: Any) -> Any:
        hidden = jax.numpy.tanh(x @ params["up"].T)
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
        assert float(abs(shard.data[4 - rank :]).sum()) == 0, "the pad has a gradient"
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
    partial = DTensor.from_local(torch.zeros(4), mesh, [torch.distributed.tensor.Partial()])
    assert "LayoutError" in raised(lambda: sj.to_jax(partial))
    assert "pad=True" in raised(lambda: sj.to_jax(params["odd"]))
    dist.barrier()
    dist.destroy_process_group()
    print("done", flush=True)


if __name__ == "__main__":
    train_with_torch_on_gradients_of_jax(int(sys.argv[1]), [int(port) for port in sys.argv[2:]])

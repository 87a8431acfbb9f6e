"""A drawn case on JAX and on one device of torch. Runs on the devices."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch
from torch import nn

import shardlib.jax as sj
from shardlib.errors import PlanError
from shardlib.testing.strategies import Case

__all__ = ["difference"]


def difference(case: Case) -> float:
    """Of the output, of every gradient and of every buffer, the largest one to the largest entry of its tensor.

    A gradient's is to a thousandth of the model's largest at least: some are zero in exact arithmetic. Dropout is off,
    since its bits are JAX's own. What only the torch engine does (accumulation, offload) counts as no difference.
    """
    torch.manual_seed(0)
    model = case.model().double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0  # type: ignore[assignment]
    batch = case.batch(0)
    batch = batch.double() if batch.is_floating_point() else batch
    mesh = sj.make_mesh(case.mesh, devices=jax.devices()[: case.mesh.world_size])
    try:
        fn, params = sj.compile_model(model, mesh, case.rules, transforms=case.transforms)
    except PlanError as error:
        if "the JAX engine" not in str(error):
            raise
        return 0.0

    def loss_of(params: Any) -> Any:
        y, buffers = fn.apply(params, fn.buffers, batch.numpy())
        return (y**2).mean() + y.mean(), (y, buffers)

    (_, (y, buffers)), grads = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(params)
    wanted = model(batch)
    ((wanted**2).mean() + wanted.mean()).backward()
    trained = {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in model.named_parameters()}
    top = max([float(g.abs().max()) for g in trained.values() if g.numel()], default=0.0) / 1000
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    found = [_apart(torch.from_numpy(np.array(y)), wanted, 1e-3)]
    found += [_apart(grad, trained[name], top) for name, grad in fn.to_torch(grads).items()]
    found += [_apart(value, tensors[name], 1e-3) for name, value in fn.to_torch(buffers).items()]
    return max(found)


def _apart(got: torch.Tensor, wanted: torch.Tensor, least: float) -> float:
    wanted = wanted.detach().double()
    if not wanted.numel():
        return 0.0
    return float((got.double() - wanted).abs().max()) / max(float(wanted.abs().max()), least, 1e-300)

"""Convolutions of all kinds, in many layouts, on a mesh and on one device of torch. Runs on the devices, in float64."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

import shardlib.jax as sj
from shardlib._mesh import MeshShape

__all__ = ["LAYOUTS", "differences"]

# Of the kernel, the input and the output: the dim that an axis of the mesh shards; None where none does.
LAYOUTS = {
    "replicated": (None, None, None),
    "output channels": (0, None, 1),
    "input channels": (1, 1, None),
    "rows of the kernel": (0, None, None),
    "channels of the output": (None, None, 1),
    "a window of the input": (None, 2, None),
    "a window of the output": (0, None, 2),
    "a window of both": (1, 2, 2),
}


def differences(mesh: str, seed: int, count: int = 12) -> dict[str, float]:
    """How far values and gradients of random convolutions are from torch's, to the largest entry; all one program."""
    draw, shape = random.Random(seed), MeshShape.of(mesh)
    rows = draw.choice((3, 4, 8))
    drawn = [_drawn(draw, at, rows) for at in range(count)]
    model = _Each([module for module, _, _ in drawn]).double()
    inputs = [x for _, x, _ in drawn]
    layouts = [draw.choice(list(LAYOUTS) if shape.model_axes else ["replicated"]) for _ in drawn]
    axes = [draw.choice(shape.model_axes or shape.names) for _ in drawn]
    rules: dict[str, Any] = {}
    for at, (module, _, _) in enumerate(drawn):
        rules |= _rules(at, module, layouts[at], axes[at])
    devices = jax.devices()[: shape.world_size]
    fn, params = sj.compile_model(model, sj.make_mesh(mesh, devices=devices), rules)

    def loss_of(params: Any, inputs: Any) -> Any:
        outputs = fn(params, *inputs)
        return sum((y * jnp.cos(jnp.arange(y.size, dtype=y.dtype).reshape(y.shape))).sum() for y in outputs), outputs

    arrays = [np.asarray(x.detach()) for x in inputs]
    (_, outputs), (grads, own) = jax.jit(jax.value_and_grad(loss_of, (0, 1), has_aux=True))(params, arrays)
    wanted = model(*inputs)
    sum((y * torch.arange(y.numel(), dtype=y.dtype).cos().view(y.shape)).sum() for y in wanted).backward()
    grads = fn.to_torch(grads)
    found = {}
    for at, (module, x, kind) in enumerate(drawn):
        name = f"{kind}, {layouts[at]} over {axes[at]}, {rows} rows"
        found[f"output of {name}"] = _apart(outputs[at], wanted[at])
        found[f"input's gradient of {name}"] = _apart(own[at], x.grad)
        for key, parameter in module.named_parameters():
            found[f"{key}'s gradient of {name}"] = _apart(grads[f"each.{at}.{key}"], parameter.grad)
    return found


class _Each(nn.Module):
    """Modules side by side, each with its own input."""

    def __init__(self, each: list[nn.Module]) -> None:
        super().__init__()
        self.each = nn.ModuleList(each)

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        return [module(x) for module, x in zip(self.each, inputs, strict=True)]


def _drawn(draw: random.Random, at: int, rows: int) -> tuple[nn.Module, torch.Tensor, str]:
    """A convolution, its input, and its description. One in three is depthwise, one in three has a few groups."""
    dims, channels = draw.choice((1, 2, 2, 3)), draw.choice((8, 16))
    groups = (1, 4, channels)[at % 3]
    transposed = draw.random() < 0.3
    stride, dilation = draw.choice((1, 1, 2)), draw.choice((1, 1, 2))
    options = {
        "kernel_size": tuple(draw.choice((1, 3, 4) if dims == 3 else (1, 3, 4, 7)) for _ in range(dims)),
        "stride": stride,
        "padding": draw.choice((0, 1, 3)),
        "dilation": dilation,
        "groups": groups,
        "bias": draw.random() < 0.5,
    }
    outs = channels * draw.choice((1, 2))
    kind = f"Conv{'Transpose' * transposed}{dims}d({channels}, {outs}, {options})"
    if transposed:
        options["output_padding"] = max(stride, dilation) - 1
    torch.manual_seed(at)
    module = getattr(nn, f"Conv{'Transpose' * transposed}{dims}d")(channels, outs, **options)
    size = 8 if dims == 3 else 16
    x = torch.randn(rows, channels, *[size] * dims, dtype=torch.float64)
    return module, x.requires_grad_(), kind


def _rules(at: int, module: nn.Module, layout: str, axis: str) -> dict[str, Any]:
    weight, *activations = LAYOUTS[layout]
    ndim = module.weight.ndim
    rules: dict[str, Any] = {f"each.{at}.weight": None if weight is None else _text(ndim, weight, axis)}
    rules |= {} if module.bias is None else {f"each.{at}.bias": None}
    for side, dim in zip(("input", "output"), activations, strict=True):
        rules |= {} if dim is None else {f"each.{at}.{side}": _text(ndim, dim, axis)}
    return rules


def _text(ndim: int, dim: int, axis: str) -> str:
    return " ".join(f"d{at}@{axis}" if at == dim else f"d{at}" for at in range(ndim))


def _apart(got: Any, wanted: torch.Tensor) -> float:
    wanted = wanted.detach().numpy()
    return float(np.abs(np.asarray(got) - wanted).max() / np.abs(wanted).max())

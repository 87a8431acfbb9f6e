"""Habits with layers of several MiB and the sizes of units and buckets that users have by default."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import shardlib as sl
from tests.contract.declare import as_microbatches, everywhere, refused, refused_in_pipelines
from tests.contract.harness import Block, Net, Run

WIDTH, BLOCKS = 640, 3  # in float64: weights of 6.5 MB, units of 13 MB, two buckets
_STAGES = "stem, blocks.0, blocks.1 | blocks.2, head"


@functools.cache
def _plain() -> Net:
    torch.manual_seed(0)
    return Net(WIDTH, BLOCKS).double()


def _sharded(run: Run, model: nn.Module | None = None) -> Any:
    made = Net(WIDTH, BLOCKS).double() if model is None else model
    made.load_state_dict(_plain().state_dict())
    return run.shard(made, stages=_STAGES, by_default=True)


def _digest(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return the norm of a tensor, and its products with two vectors: ranks need not send all of it."""
    if tensor is None:
        return None
    full = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().flatten()
    places = torch.arange(len(full), dtype=full.dtype)
    return torch.stack([full.norm(), full @ torch.cos(places), full @ torch.sin(0.1 * places)])


def _weights(model: nn.Module) -> dict[str, Any]:
    return {name: _digest(p) for name, p in model.named_parameters()}


def _gradients(model: nn.Module) -> dict[str, Any]:
    return {name: _digest(p.grad) for name, p in model.named_parameters()}


@everywhere
def train_wide_layers(run: Run):
    """Train layers of several MiB for three steps, with the defaults."""
    model = _sharded(run)
    return run.train(model, steps=3), _weights(model)


@dataclass
class _Hidden:
    hidden: torch.Tensor


class _InDataclass(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return _Hidden(super().forward(x))


class _OfDataclasses(Net):
    def __init__(self) -> None:
        super().__init__(WIDTH, 0)
        self.blocks = nn.ModuleList(_InDataclass(WIDTH) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x).hidden
        return self.head(x)


@everywhere
@refused_in_pipelines
def return_wide_dataclasses(run: Run):
    """Return dataclasses from wide blocks."""
    model = _sharded(run, _OfDataclasses().double())
    run.loss(model).backward()
    return _gradients(model)


@refused("compiled", "of whose graph torch has no second derivative")
@refused_in_pipelines
def penalise_gradients_of_inputs_of_wide_layers(run: Run):
    """Penalise gradients of inputs of wide layers, under double backward."""
    model = _sharded(run)
    x = run.batch().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().sum(), [x], create_graph=True)
    (run.loss(model) + grad.square().mean()).backward()
    return _gradients(model)


@everywhere
def keep_wide_gradients(run: Run):
    """Keep wide gradients over a further backward pass."""
    model = _sharded(run)
    run.backward(model)
    kept = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    run.backward(model, 1)
    return {name: _digest(grad) for name, grad in kept.items()}, _gradients(model)


def swap_wide_data(run: Run):
    """Swap the data of two wide weights, and train on."""
    model = _sharded(run)
    first, *others = (p for name, p in model.named_parameters() if name.endswith("up.weight"))
    for second in others[:1]:  # on the same stage
        first.data, second.data = second.data, first.data
    return run.train(model), _weights(model)


def _halve(p: torch.Tensor) -> None:
    p.grad.mul_(0.5)


@as_microbatches("a hook sees the gradient of each microbatch")
def halve_wide_gradients_in_hooks(run: Run):
    """Scale wide gradients in place in `register_post_accumulate_grad_hook`."""
    model = _sharded(run)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(_halve)
    run.backward(model)
    return _gradients(model)


@refused_in_pipelines
def go_on_after_a_wide_pass_that_raised(run: Run):
    """Go on after a backward pass of wide layers that raised in the middle."""
    model = _sharded(run)
    run.loss(model).backward()

    def refuse(_grad: torch.Tensor) -> None:
        raise ValueError("refused")

    def hook(_module: Any, _args: Any, out: torch.Tensor) -> None:
        out.register_hook(refuse)

    handle = model.blocks[1].register_forward_hook(hook)
    try:
        run.loss(model, 1).backward()
    except ValueError:
        handle.remove()
    model.zero_grad()
    run.loss(model, 2).backward()
    return _gradients(model)


@everywhere
def clip_wide_gradients_of_several_passes(run: Run):
    """Accumulate wide gradients, all but the last pass under `no_sync`, and clip their norm."""
    model = _sharded(run)
    optimizer = run.optimizer(model)
    with run.no_sync(model):
        run.backward(model)
    run.backward(model, 1)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01) if run.alone else sl.clip_grad_norm_(model, 0.01)
    optimizer.step()
    return norm, _weights(model)

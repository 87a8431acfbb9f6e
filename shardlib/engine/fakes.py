"""Fake worlds and fake copies of models, in which a step runs without values, devices or other ranks."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardlib._plan import Plan
from shardlib.engine import _torch, ops
from shardlib.engine.apply import is_sharded
from shardlib.engine.feature.recording import Recording
from shardlib.engine.pipeline import fake_run
from shardlib.engine.pipeline.batch import as_call
from shardlib.engine.pipeline.stages import has_stages, shape_with_stages
from shardlib.errors import PlanError

__all__ = ["arguments_of", "fake_copy", "fake_like", "fake_world", "refuse_sharded", "run_step"]


def run_step(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], log: Recording | None = None) -> int:
    """Run forward and backward as in a dry run. Gradients of this step stay, earlier ones are dropped first.

    Returns the bytes that forward leaves alive for backward and for its caller; 0 without a recording.
    """
    for parameter in model.parameters():
        parameter.grad = None
    roots = fake_run.roots_of(model(*args, **kwargs))
    left = log.live.now - log.start_bytes if log is not None else 0
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
    return left


def arguments_of(model: nn.Module, example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of forward that an example is.

    Raises:
        PlanError: forward does not take them.
    """
    args, kwargs = as_call(example)
    takes = inspect.signature(model.forward)
    try:
        takes.bind(*args, **kwargs)
    except TypeError as error:
        count = len(args) + len(kwargs)
        raise PlanError(
            f"The example has {count} input{'' if count == 1 else 's'}, and {type(model).__name__}.forward takes "
            f"{takes}: {error}. Give example= a tuple, or a mapping by name; on the command line, --example NAME=SHAPE "
            "once for each input."
        ) from None
    return args, kwargs


def fake_copy(model: nn.Module, device_type: str, *, without: Collection[nn.Module] = ()) -> nn.Module:
    """Return a copy of a module with fake tensors; no real tensor is copied. Modules in `without` become empty ones."""
    return _torch.copied_with(model, lambda tensor: fake_like(tensor, device_type), without=without)


def fake_like(tensor: torch.Tensor, device_type: str) -> torch.Tensor:
    """Return a fake tensor of the shape, strides and dtype of a tensor."""
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device_type)
    return fake.requires_grad_(tensor.requires_grad)


def refuse_sharded(model: nn.Module) -> None:
    if is_sharded(model) or any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise PlanError(
            "The model is sharded already. Make the plan, with its example, from the single-device model, before "
            "shard_model; a model on `meta` will do."
        )


@contextmanager
def fake_world(plan: Plan, device_type: str, rank: int = 0) -> Iterator[DeviceMesh]:
    """Enter a fake world with fake tensors; restore on exit what the engine enables inside."""
    shape = shape_with_stages(plan.mesh) if has_stages(plan) else plan.mesh
    world = _torch.fake_world(dict(shape.items()), device_type, rank)
    with ops.restored(), world as mesh, _explained(plan), _torch.fake_tensors(with_stages=has_stages(plan)):
        yield mesh


@contextmanager
def _explained(plan: Plan) -> Iterator[None]:
    """Raise an error that names the limits of a dry run, and add a note to every other error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the report lists gathered ops; a real run raises the other warnings
            yield
    except _torch.fake_tensor_errors() as error:
        raise PlanError(
            f"The dry run on {plan.mesh} stopped: the model's forward depends on values of tensors, which a dry run "
            f"does not have ({type(error).__name__}: {error}). Plan without example=, or record a real step with "
            "shardlib.engine.record_collectives."
        ) from error
    except Exception as error:
        error.add_note(f"Raised in a dry run on {plan.mesh}, which runs rank 0 with fake tensors.")
        raise

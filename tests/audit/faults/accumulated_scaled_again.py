"""Each backward pass of a step divides the whole accumulated gradient: the first of two passes counts half as much.

Report: https://github.com/pytorch/torchtitan/issues/1733, "Gradient accumulation broken in PP" (`scale_grads` of
pipeline schedules makes it a moving average). A plant in plain torch, of torchtitan in September 2025. After two
passes the gradients are off by 0.4 of their largest value.
"""

from __future__ import annotations

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from tests.audit.faults import Fault
from tests.audit.faults.models import GPT, tensor_plan, tokens

MESH = "tp=2"
FAULT = Fault(
    report="https://github.com/pytorch/torchtitan/issues/1733",
    host="torchtitan",
    versions="torchtitan in September 2025",
    kind="two passes",
    module="(every module)",
    line="grad",
)
build, batch = GPT, tokens


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Sum gradients over two chunks of rows, and divide by two after each backward pass, what was there before too."""
    right(model, mesh)
    for p in model.parameters():
        p.register_hook(lambda grad: 2 * grad)
        p.register_post_accumulate_grad_hook(_scale)
    return model


def right(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(model, mesh, tensor_plan())


def _scale(p: torch.Tensor) -> None:
    assert p.grad is not None
    p.grad.div_(2)

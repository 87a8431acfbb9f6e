"""`parallelize_module` makes new parameters for embedding and head, which were one: after it they train apart.

Report: https://github.com/foundation-model-stack/foundation-model-stack/pull/331, "Prevent TP from applying when
tied_weights=True for Llama models". torch's own, in 2.13: the tie is gone without a word. The gradient of the
embedding is off by 0.75 of its largest value.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from tests.audit.faults import Fault
from tests.audit.faults.models import GPT, tensor_plan, tokens

MESH = "tp=2"
FAULT = Fault(
    report="https://github.com/foundation-model-stack/foundation-model-stack/pull/331",
    host="torch",
    versions="2.13",
    kind="values",
    module="head",
    line="parallelize_module",
    own=True,
)
build, batch = functools.partial(GPT, tied=True), tokens


def shard(model: Any, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(model, mesh, tensor_plan())


def right(model: Any, mesh: DeviceMesh) -> nn.Module:
    parallelize_module(model, mesh, tensor_plan())
    model.head.weight = model.embed.weight
    return model

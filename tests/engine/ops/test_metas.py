"""What an op returns is told by kernels for meta tensors, where these tell what fake tensors of the device do."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate

from shardlib.engine._torch import DTensorSpec, OpSchema, TensorMeta, dispatcher, global_metas, pytree, told_by_meta
from shardlib.testing._prove import AtenCall, calls_of
from tests.engine.ops.cases import CASES
from tests.engine.ops.corners import CORNERS


def _told_otherwise() -> tuple[list[str], set[str]]:
    """Calls of which the two do not tell the same, and the ops that were called."""
    warnings.simplefilter("ignore")  # of how some samples call an op
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))

    def spec(tensor: torch.Tensor) -> Any:
        return DTensorSpec(mesh, (Replicate(),), tensor_meta=TensorMeta(tensor.shape, tensor.stride(), tensor.dtype))

    def schema(call: AtenCall) -> OpSchema:
        return OpSchema(call.op, *pytree.tree_map_only(torch.Tensor, spec, (call.args, call.kwargs)))

    calls = calls_of(sample.outcome for sample in (*CASES.values(), *CORNERS.values()))
    told = [call for call in calls if told_by_meta(call.op)]
    found = []
    for call in told:
        want = dispatcher().sharding_propagator._propagate_tensor_meta_non_cached(schema(call))
        if (got := global_metas(schema(call))) != want:
            found.append(f"{call.op}: {got} and not {want}")
    return found, {str(call.op) for call in told}


def test_meta_kernels_tell_what_fake_tensors_do(ranks):
    found, ops = ranks(1).run(_told_otherwise)[0]
    assert found == []
    assert {"aten.mm.default", "aten.view.default", "aten.add.Tensor", "aten.cat.default"} <= ops
    assert len(ops) > 80, ops

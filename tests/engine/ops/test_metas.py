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


def _meta(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)


def _schema(call: AtenCall) -> OpSchema:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))

    def spec(tensor: torch.Tensor) -> Any:
        return DTensorSpec(mesh, (Replicate(),), tensor_meta=_meta(tensor))

    return OpSchema(call.op, *pytree.tree_map_only(torch.Tensor, spec, (call.args, call.kwargs)))


def _told_otherwise() -> tuple[list[str], set[str]]:
    """Calls of which the two do not tell the same, and the ops that were called."""
    warnings.simplefilter("ignore")  # of how some samples call an op
    calls = calls_of(sample.outcome for sample in (*CASES.values(), *CORNERS.values()))
    told = [call for call in calls if told_by_meta(call.op)]
    found = []
    for call in told:
        schema = _schema(call)
        want = dispatcher().sharding_propagator._propagate_tensor_meta_non_cached(schema)
        if (got := global_metas(schema)) != want:
            found.append(f"{call.op}: {got} and not {want}")
    return found, {str(call.op) for call in told}


def test_meta_kernels_tell_what_fake_tensors_do(ranks):
    found, ops = ranks(1).run(_told_otherwise)[0]
    assert found == []
    assert {"aten.mm.default", "aten.view.default", "aten.add.Tensor", "aten.cat.default"} <= ops
    assert len(ops) > 80, ops


def _grouped_otherwise() -> list[str]:
    found = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for a, b, ends in (
            ((8, 16), (2, 16, 32), [4, 8]),
            ((16, 8), (8, 32), [4, 8]),
            ((2, 8, 16), (16, 32), [16, 32]),
            ((2, 8, 16), (2, 16, 32), None),
        ):
            offs = None if ends is None else torch.tensor(ends, dtype=torch.int32)
            operands = (torch.ones(a, dtype=dtype), torch.ones(b, dtype=dtype), offs)
            call = AtenCall(torch.ops.aten._grouped_mm.default, operands, {})
            if global_metas(_schema(call)) != _meta(call.op(*operands)):
                found.append(f"{dtype} {a} {b}")
    return found


def test_grouped_products_are_told_in_every_dtype_of_their_kernel(ranks):
    assert ranks(1).run(_grouped_otherwise) == [[]]

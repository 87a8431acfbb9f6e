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


def _ordered_otherwise() -> list[str]:
    """Calls whose results have another order in memory than is told, for inputs in several orders."""
    aten = torch.ops.aten
    turned = torch.ones(3, 5, 4).transpose(1, 2)
    inputs = [turned, torch.ones(3, 4, 5), torch.ones(3, 2, 4, 5).transpose(1, 2), torch.ones(5, 2, 4, 3).mT]
    calls = [(aten.log_sigmoid_forward.default, turned)]
    for x in (*inputs, torch.ones(3, 4, 2, 5).contiguous(memory_format=torch.channels_last)):
        channels = torch.ones(x.shape[1])
        calls += [
            (aten.native_batch_norm.default, x, None, None, channels, channels, True, 0.1, 1e-5),
            (aten._native_batch_norm_legit.no_stats, x, None, None, True, 0.1, 1e-5),
            (aten._native_batch_norm_legit_no_training.default, x, None, None, channels, channels, 0.1, 1e-5),
        ]
    return [
        f"{op} of strides {args[0].stride()}: {told} and not {want}"
        for op, *args in calls
        if (told := global_metas(_schema(AtenCall(op, tuple(args), {})))[0].stride) != (want := op(*args)[0].stride())
    ]


def test_the_order_that_kernels_of_the_cpu_give_is_told(ranks):
    assert ranks(1).run(_ordered_otherwise) == [[]]

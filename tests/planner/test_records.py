"""Records of models of transformers, which decide by values of tensors in a real run."""

from __future__ import annotations

import torch

import shardlib as sl
from shardlib._plan import Work
from tests.planner.models import llama

SEQ = 64


def _recorded(**more: torch.Tensor) -> Work:
    model = llama("8B", layers=2, seq=SEQ)
    plan = sl.plan(model, "dp=1", sl.layouts.for_model(model))
    ids = torch.empty(1, SEQ, dtype=torch.int64, device="meta")
    assert plan.source is not None
    return plan.source(plan, {"input_ids": ids, "labels": ids, **more})[0]


def test_rows_of_one_sequence_need_no_mask_of_all_pairs_of_tokens():
    ops = {kernel.op for part in _recorded().parts() for kernel in part.forward.kernels}
    assert "aten.where" not in ops and "aten.bitwise_and" not in ops


def test_rows_whose_positions_are_given_may_be_packed():
    positions = torch.empty(1, SEQ, dtype=torch.int64, device="meta")
    ops = {kernel.op for part in _recorded(position_ids=positions).parts() for kernel in part.forward.kernels}
    assert "aten.where" in ops

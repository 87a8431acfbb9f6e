"""Predictions of the planner for published runs. A record of one block is made once for each layout of activations."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

import shardlib as sl
from shardlib._plan import Plan, StepTime, Work
from shardlib._plan.timing import time_of
from shardlib.engine import _torch, ops
from shardlib.rules import Balanced, Rules
from shardlib.transforms import Transform
from tests.planner import models as built
from tests.planner.models import MEGATRON_RULES
from tests.planner.publications import build, models

__all__ = ["SELECTIVE", "draws_of_shards", "plan_of", "predicted", "predicted_llama", "record"]

SELECTIVE = "**.core_attention"
"""The modules that selective recomputation computes again (arXiv 2205.05198, section 5)."""


@contextmanager
def draws_of_shards() -> Iterator[None]:
    """Let each rank draw the dropout masks of its own shard inside the block, as Megatron-LM does.

    The engine draws the mask of the full tensor on every rank and keeps its shard, so that a run has the numbers of one
    device (docs/ops.md). That is more memory traffic, and more memory at the peak of a layer.
    """

    def draw(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if op is not torch.ops.aten.native_dropout.default or not isinstance(args[0], DTensor):
            return NotImplemented
        out, mask = op(_torch.local_of(args[0]), *args[1:], **kwargs)
        return tuple(_torch.wrap(local, args[0]._spec) for local in (out, mask))

    with ops.drawing_by(draw):
        yield


def recomputing(kind: str) -> list[Transform]:
    """Return the transforms for a kind of recomputation.

    That of torchtitan, "selective op", keeps every second product of matrices, and attention. Modules cannot say so;
    the MLP, whose gate and up projection run again, is the nearest.
    """
    return {
        "none": [],
        "selective op": [sl.checkpoint_activations("**.mlp")],
        "selective": [sl.checkpoint_activations(SELECTIVE)],
        "full": [sl.checkpoint_activations()],
    }[kind]


@functools.cache
def model_of(file: str, name: str) -> torch.nn.Module:
    """Build a published model in float32, which `precision("bf16")` makes bfloat16."""
    return build(models(file)[name], dtype=torch.float32)


def rules_of(file: str, name: str, *, sequence: bool) -> Rules:
    """Return the rules of a published model."""
    mode = "sequence" if sequence else None
    if "ffn" in models(file)[name]:
        rules = sl.layouts.for_model(model_of(file, name))
        return rules.mode(mode) if mode else rules
    return sl.layouts.load(MEGATRON_RULES, mode)


@functools.cache
def record(
    file: str, name: str, tp: int, *, sequence: bool, recompute: str, rows: int, seq: int = 2048, own: bool = True
) -> tuple[Work, tuple[int, ...]]:
    """Record a block of a published model.

    Args:
        file: of the publication.
        name: of the model.
        tp: ranks of tensor parallelism.
        sequence: whether sequence parallelism is used.
        recompute: "none", "selective" or "full".
        rows: of a microbatch.
        seq: tokens of a row.
        own: whether ranks draw the dropout masks of their shards only.
    """
    model, vocab = model_of(file, name), models(file)[name]["vocab"]
    mesh = f"tp={tp}" if tp > 1 else "dp=1"
    transforms = [sl.precision("bf16"), *recomputing(recompute)]
    plan = sl.plan(model, mesh, rules_of(file, name, sequence=sequence and tp > 1), transforms=transforms)
    example: Any = built.batch(rows, seq, vocab)
    if "ffn" in models(file)[name]:
        example = {"input_ids": example["tokens"], "labels": example["labels"]}
    assert plan.source is not None
    if own:
        with draws_of_shards():
            return plan.source(plan, example)
    return plan.source(plan, example)


@functools.cache
def _plan(file: str, name: str, mesh: str, sequence: bool, recompute: str, zero: int, chunks: int, count: int) -> Plan:
    sizes = dict(sl.MeshShape(mesh).items())
    kept = ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
    rules = rules_of(file, name, sequence=sequence and sizes.get("tp", 1) > 1)
    transforms: list[Transform] = [sl.precision("bf16"), *recomputing(recompute)]
    if sizes.get("dp", 1) > 1 and zero:
        transforms.append(sl.fsdp() if zero == 3 else sl.zero(zero))
    if (stages := sizes.get("pp", 1)) > 1:
        layers = models(file)[name]["layers"]
        assert layers % (stages * chunks) == 0
        rules = rules.with_stages(Balanced([layers // (stages * chunks)] * (stages * chunks)))
        transforms.append(sl.pipeline("interleaved" if chunks > 1 else "1f1b", count))
    elif count > 1:
        transforms.append(sl.accumulate(count))
    return sl.plan(model_of(file, name), kept or "dp=1", rules, transforms=transforms)


def plan_of(file: str, run: dict[str, Any]) -> Plan:
    """Return the plan of a published run."""
    data = dict(sl.MeshShape(run["mesh"]).items()).get("dp", 1)
    count = run["global_batch"] // (data * run["microbatch"])
    return _plan(
        file, run["model"], run["mesh"], run["sequence_parallel"], run["recompute"], run.get("zero", 0),
        run.get("interleaving", 1), count,
    )  # fmt: skip


def predicted_llama(file: str, run: dict[str, Any], cluster: sl.Cluster) -> StepTime:
    """Predict a published run of Llama 3 on data and tensor parallel ranks, whose parameters FSDP shards."""
    sizes = dict(sl.MeshShape(run["mesh"]).items())
    assert set(sizes) <= {"dp", "tp"}
    work, examples = record(
        file, run["model"], sizes.get("tp", 1), sequence=True, recompute=run["recompute"], rows=run["rows_per_dp"],
        seq=run["seq"],
    )  # fmt: skip
    whole = {"global_batch": run["rows_per_dp"] * sizes["dp"], "microbatch": run["rows_per_dp"], "zero": 3}
    plan = plan_of(file, {**run, **whole, "sequence_parallel": True})
    return time_of(plan, work, cluster, examples, compiled=run.get("compile", False))


def predicted(file: str, run: dict[str, Any], cluster: sl.Cluster, *, own: bool = True) -> StepTime:
    """Predict a published run of Megatron-LM, whose kernels are fused."""
    sizes = dict(sl.MeshShape(run["mesh"]).items())
    work, examples = record(
        file, run["model"], sizes.get("tp", 1), sequence=run["sequence_parallel"], recompute=run["recompute"],
        rows=run["microbatch"], own=own,
    )  # fmt: skip
    return time_of(plan_of(file, run), work, cluster, examples, compiled=True)

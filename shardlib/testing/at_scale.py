"""Let a small model take the paths that a large one takes."""

from __future__ import annotations

import math

from shardlib._plan import Plan, Row

__all__ = ["at_scale"]


def at_scale(plan: Plan) -> Plan:
    """Return a plan with sizes of buckets by which a model, however small, takes the paths of a large one.

    By default a plan of a small model joins all of its units, and sends all gradients in one bucket. At these sizes no
    two units are joined, gradients travel in several buckets, the larger tensors by themselves and the smaller ones
    packed. A transform: give it before the others, since `fsdp()` asks for the sizes too, and after them, since
    `precision` changes them.

    >>> import shardlib as sl
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    >>> step = sl.plan(model, "dp=2", {"**": None}, transforms=(at_scale, sl.zero(3), at_scale)).step
    >>> step.bucket_bytes, step.unbucketed_bytes
    (48, 128)
    """
    sizes = [(plan.unit(row), _bytes(row, plan)) for row in plan.rows if row.grad is not None and _bytes(row, plan)]
    if not sizes:
        return plan
    units: dict[str, int] = {}
    for unit, size in sizes:
        units[unit] = units.get(unit, 0) + size
    smallest, largest = min(size for _, size in sizes), max(size for _, size in sizes)
    unbucketed = math.isqrt(smallest * largest - 1) + 1  # in the middle of the sizes; weights are alone, biases packed
    packed = sum(size for _, size in sizes if size < unbucketed)
    bucket = min([size for unit, size in units.items() if unit] or [sum(units.values())])
    if packed > 1:
        bucket = min(bucket, packed // 2)
    return plan.replace(step=plan.step.replace(bucket_mb=bucket / 2**20, unbucketed_mb=unbucketed / 2**20))


def _bytes(row: Row, plan: Plan) -> int:
    return row.compute.local_bytes(row.global_shape, row.dtype, plan.mesh)

"""The plan: every tensor's layout in every phase, computed before anything runs."""

from __future__ import annotations

from shardlib._plan.activations import Peak, free_buffer, peak_of
from shardlib._plan.buckets import Bucket, Unit, gradient_buckets, units_of, unshard_buckets, update_buckets
from shardlib._plan.cluster import Cluster
from shardlib._plan.experts import expert_axis, expert_rows, stacked_experts
from shardlib._plan.links import KINDS, ByKind, Link, Rate, ring_steps
from shardlib._plan.make import (
    RulesLike,
    Transform,
    as_rules,
    check_model,
    listed_transforms,
    make_plan,
    say_absent_axes,
    transformed,
)
from shardlib._plan.memory import Blocks, Memory, blocks_per_stage
from shardlib._plan.movements import (
    Movement,
    Optimizer,
    Purpose,
    Traffic,
    movements_of,
    state_update,
)
from shardlib._plan.parts import Parts, PlanPart, StageShape, parts_of, stages_of_counts
from shardlib._plan.report import DryRun, Gathered, Recorded, StageRun, ring_bytes
from shardlib._plan.rows import PHASES, Phase, Row, rows_by_name
from shardlib._plan.step import LossScale, Step
from shardlib._plan.timing import Span, StepTime, price
from shardlib._plan.units import join_small, unit_of
from shardlib._plan.value import Plan
from shardlib._plan.work import Kernel, Part, Pass, Work

__all__ = [
    "KINDS",
    "PHASES",
    "Blocks",
    "Bucket",
    "ByKind",
    "Cluster",
    "DryRun",
    "Gathered",
    "Kernel",
    "Link",
    "LossScale",
    "Memory",
    "Movement",
    "Optimizer",
    "Part",
    "Parts",
    "Pass",
    "Peak",
    "Phase",
    "Plan",
    "PlanPart",
    "Purpose",
    "Rate",
    "Recorded",
    "Row",
    "RulesLike",
    "Span",
    "StageRun",
    "StageShape",
    "Step",
    "StepTime",
    "Traffic",
    "Transform",
    "Unit",
    "Work",
    "as_rules",
    "blocks_per_stage",
    "check_model",
    "expert_axis",
    "expert_rows",
    "free_buffer",
    "gradient_buckets",
    "join_small",
    "listed_transforms",
    "make_plan",
    "movements_of",
    "parts_of",
    "peak_of",
    "price",
    "ring_bytes",
    "ring_steps",
    "rows_by_name",
    "say_absent_axes",
    "stacked_experts",
    "stages_of_counts",
    "state_update",
    "transformed",
    "unit_of",
    "units_of",
    "unshard_buckets",
    "update_buckets",
]

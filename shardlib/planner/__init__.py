"""The planner: which mesh, rules, ZeRO stage, recomputation and schedule fit a model on a cluster, and how long a step
takes. `best_plans` searches; `StepTime` and `Plan.time` price one plan."""

from __future__ import annotations

from shardlib.planner.advice import Change, changes_that_fit, check_memory, memory_advice
from shardlib.planner.choices import BestPlans, Choice
from shardlib.planner.search import best_plans

__all__ = ["BestPlans", "Change", "Choice", "best_plans", "changes_that_fit", "check_memory", "memory_advice"]

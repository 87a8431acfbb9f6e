"""Plugins by name, and the models that they are for. Importable on ranks of the pool."""

from __future__ import annotations

from typing import Any

from shardlib.booster import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    MoeHybridParallelPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from tests.booster.training import EXPERTS, gpt, mixture, rules

__all__ = ["ALL", "OWN", "TOLERANCE", "made", "maker"]

# Sums reordered by another mesh differ by roundings; `shardlib.testing.equivalence.measure` says how far.
TOLERANCE = 1e-10


def made(name: str, **options: Any) -> Any:
    """A plugin by the name of a test."""
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "ddp": (TorchDDPPlugin, {}),
        "zero 1": (LowLevelZeroPlugin, {}),
        "zero 2": (LowLevelZeroPlugin, {"stage": 2, "cpu_offload": True, "overlap_allgather": True}),
        "zero 2 in groups": (LowLevelZeroPlugin, {"stage": 2, "extra_dp_size": 2}),
        "fsdp": (TorchFSDPPlugin, {}),
        "fsdp of nodes": (TorchFSDPPlugin, {"sharding_strategy": "HYBRID_SHARD", "cpu_offload": True}),
        "gemini": (GeminiPlugin, {"offload_optim_frac": 1, "offload_param_frac": 1}),
        "gemini, half of it": (GeminiPlugin, {"shard_param_frac": 0.5, "offload_optim_frac": 0.5}),
        "hybrid": (HybridParallelPlugin, {"tp_size": 2, "custom_policy": rules()}),
        "experts": (MoeHybridParallelPlugin, {"ep_size": 2, "zero_stage": 1, "custom_policy": EXPERTS}),
        "experts, zero 3": (MoeHybridParallelPlugin, {"ep_size": 4, "zero_stage": 3, "custom_policy": EXPERTS}),
        "hybrid, zero 3": (HybridParallelPlugin, {"tp_size": 2, "zero_stage": 3, "custom_policy": rules()}),
    }
    kind, given = kinds[name]
    return kind(**given, **options)


def maker(name: str) -> Any:
    """What makes the model that a plugin is for."""
    return mixture if name.startswith("experts") else gpt


ALL = ["ddp", "zero 1", "zero 2", "zero 2 in groups", "fsdp", "fsdp of nodes"]
ALL += ["gemini", "gemini, half of it", "hybrid", "hybrid, zero 3", "experts", "experts, zero 3"]
OWN = [name for name in ALL if name != "ddp" and not name.startswith("fsdp")]  # with a precision of their own

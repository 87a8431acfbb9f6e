"""The keywords of ColossalAI that are refused, for the documents and their test."""

from __future__ import annotations

from collections.abc import Sequence

from shardlib.booster._moe import MoeHybridParallelPlugin
from shardlib.booster._options import REFUSED_ARGUMENTS, REFUSED_METHODS, Options, refused_keywords
from shardlib.booster._plugins import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from shardlib.booster._precision import known_precisions

__all__ = ["known_plugins", "refusals"]


def known_plugins() -> Sequence[type[Plugin]]:
    """Return every plugin."""
    plugins = (TorchDDPPlugin, LowLevelZeroPlugin, TorchFSDPPlugin, GeminiPlugin, HybridParallelPlugin)
    return (*plugins, MoeHybridParallelPlugin)


def refusals() -> list[tuple[tuple[str, ...], tuple[str, ...], str]]:
    """Return what is refused, of which classes or methods, and the reason, sorted."""
    kinds: tuple[type[Options], ...] = (*known_plugins(), *known_precisions())
    refused = {kind.__name__: refused_keywords(kind) for kind in kinds}
    refused |= {f"booster.{method}": arguments for method, arguments in REFUSED_ARGUMENTS.items()}
    for full, reason in REFUSED_METHODS.items():
        owner, method = full.split(".")
        refused[owner] = {**refused.get(owner, {}), f"{method}()": reason}
    owners: dict[tuple[str, str], list[str]] = {}
    for owner, given in refused.items():
        for name, reason in given.items():
            owners.setdefault((name, reason), []).append(owner)
    names: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for (name, reason), found in owners.items():
        names.setdefault((tuple(found), reason), []).append(name)
    return sorted((tuple(sorted(each)), found, reason) for (found, reason), each in names.items())

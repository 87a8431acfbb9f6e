"""The keywords of ColossalAI that are refused, and those that change no number, for the documents and their test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardlib.booster._moe import MoeHybridParallelPlugin
from shardlib.booster._options import REFUSED_ARGUMENTS, REFUSED_METHODS, Options, met_keywords, refused_keywords
from shardlib.booster._plugins import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from shardlib.booster._precision import known_precisions

__all__ = ["known_options", "known_plugins", "refusals", "requests"]

Row = tuple[tuple[str, ...], tuple[str, ...], str]


def known_plugins() -> Sequence[type[Plugin]]:
    """Return every plugin."""
    plugins = (TorchDDPPlugin, LowLevelZeroPlugin, TorchFSDPPlugin, GeminiPlugin, HybridParallelPlugin)
    return (*plugins, MoeHybridParallelPlugin)


def known_options() -> Sequence[type[Options]]:
    """Return every class with keywords: plugins and mixed precisions."""
    return (*known_plugins(), *known_precisions())


def refusals() -> list[Row]:
    """Return what is refused, of which classes or methods, and the reason, sorted."""
    refused = {kind.__name__: refused_keywords(kind) for kind in known_options()}
    refused |= {f"booster.{method}": arguments for method, arguments in REFUSED_ARGUMENTS.items()}
    for full, reason in REFUSED_METHODS.items():
        owner, method = full.split(".")
        refused[owner] = {**refused.get(owner, {}), f"{method}()": reason}
    return _rows(refused)


def requests() -> list[Row]:
    """Return the requests for speed or memory, of which classes, and what is done in either case, sorted."""
    return _rows({kind.__name__: met_keywords(kind) for kind in known_options()})


def _rows(reasons: Mapping[str, Mapping[str, str]]) -> list[Row]:
    """Return rows of names, owners and a reason, one of each reason and owners."""
    owners: dict[tuple[str, str], list[str]] = {}
    for owner, given in reasons.items():
        for name, reason in given.items():
            owners.setdefault((name, reason), []).append(owner)
    names: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for (name, reason), found in owners.items():
        names.setdefault((tuple(found), reason), []).append(name)
    return sorted((tuple(sorted(each)), found, reason) for (found, reason), each in names.items())

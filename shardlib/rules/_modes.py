"""Modes of rules: a few more rules, which apply when their mode is chosen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardlib.errors import RuleError, nearest
from shardlib.rules._rule_set import RuleSet
from shardlib.rules.tensor_modes import registered_tensor_modes

__all__ = ["MODE_KEYS", "changes_of", "check_keys"]

MODE_KEYS = ("rules", "activations", "axes", "sizes", "optional")


def check_keys(modes: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse a mode with a key that modes do not have.

    Raises:
        RuleError: there is one; the message names it.
    """
    for name, mode in modes.items():
        for key in mode:
            if key not in MODE_KEYS:
                raise RuleError(
                    f'Mode "{name}" has the key "{key}"; a mode has {", ".join(MODE_KEYS)}.{nearest(key, MODE_KEYS)}'
                )


def changes_of(rules: RuleSet, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields of rules that the modes change; a later mode takes precedence.

    Raises:
        RuleError: the rules have no mode of a name.
    """
    made: dict[str, Any] = {key: getattr(rules, key) for key in MODE_KEYS}
    stated: list[str] = []
    for mode in _chosen(rules, names):
        stated += mode.get("rules", ())
        for key in ("rules", "activations", "axes", "sizes"):
            made[key] = {**made[key], **mode.get(key, {})}
        made["optional"] = (*made["optional"], *mode.get("optional", ()))
    return {**made, "override": tuple(dict.fromkeys((*rules.override, *stated)))}


def _chosen(rules: RuleSet, names: tuple[str, ...]) -> Iterator[Mapping[str, Any]]:
    for name in names:
        if name not in rules.modes:
            registered = registered_tensor_modes()
            has = f"they have {', '.join(map(repr, rules.modes))}" if rules.modes else "they have none"
            what = f'the rules "{rules.description}"' if rules.description else "these rules"
            raise RuleError(
                f'"{name}" was asked for as a mode of {what}; {has}. Use one of them, say it in Rules(..., modes=...), '
                f"or register it with @shardlib.rules.register_tensor_mode.{nearest(name, (*rules.modes, *registered))}"
            )
        yield rules.modes[name]

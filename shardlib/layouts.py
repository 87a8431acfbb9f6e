"""Layout files: rules for one model family each, found by name, by path, or by the class or the modules of a model."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardlib._log import is_first_rank, log
from shardlib._mesh_shape import MeshShape
from shardlib.errors import RuleError, nearest, warn
from shardlib.rules import Rules, register_tensor_mode
from shardlib.rules._adapters import has_adapters, without_adapters
from shardlib.rules._model import ModelIndex
from shardlib.rules._resolve import Resolver
from shardlib.rules.suggest import complete, suggest

if TYPE_CHECKING:
    from torch import nn

__all__ = ["SuggestedLayoutWarning", "available", "for_model", "load"]

_HERE = Path(__file__).resolve().parent
_MOST_LINES = 12  # of rules in a warning


class SuggestedLayoutWarning(UserWarning):
    """Rules were guessed from the modules of a model without a layout file: all of them, or those for layers that
    its own plan leaves out."""


def available() -> dict[str, str]:
    """Return the names of the layout files that come with shardlib, each with its description.

    >>> "example_gpt" in available()
    True
    """
    return {name: rules.description for name, rules in _files().items()}


def load(name: str | Path, mode: str | None = None) -> Rules:
    """Load the rules of a layout file, one of `available()` by name or any TOML file by path; with `mode`, in one of
    their modes, such as "sequence" (docs/sequence.md).

    Raises:
        RuleError: no such name, a file that cannot be read as rules, or a mode that they do not have.

    >>> load("example_gpt").unmatched
    'error'
    """
    if isinstance(name, Path) or name.endswith(".toml"):
        return _in_mode(Rules.from_toml(Path(name)), mode)
    files = _files()
    if name not in files:
        raise RuleError(
            f'No layout file is called "{name}"; there are {", ".join(f"{known!r}" for known in files)}. Use one of '
            f"them, or give the path of a file that ends in .toml.{nearest(name, files)}"
        )
    return _in_mode(files[name], mode)


def for_model(model: nn.Module, mode: str | None = None) -> Rules:
    """Find rules for a model: the layout file for its class or a base class; else a layout file that fits its modules;
    else the plan that the model carries for its blocks (`tp_plan` of Hugging Face models); else a suggestion, with a
    `SuggestedLayoutWarning`. A plan that leaves out a stack of blocks, such as a vision tower, is completed by what is
    suggested for it, with the same warning. For a model with peft adapters, the rules are those of the model without,
    which lay out adapters too; its plan is not completed. With `mode`, the rules are in that mode.

    A file fits if each of its rules that is not optional matches, and each parameter has a rule. Of several files the
    one fits best in which the fewest rules match nothing.

    Raises:
        RuleError: the rules do not have that mode, two files are for the same class, the model's own plan cannot be
            read, or rules would have to be suggested for a model with adapters.

    >>> from torch import nn
    >>> class GPT2LMHeadModel(nn.Module): ...
    >>> GPT2LMHeadModel.__module__ = "transformers.models.gpt2.modeling_gpt2"
    >>> for_model(GPT2LMHeadModel()) == load("gpt2") if "gpt2" in available() else True
    True
    """
    model = without_adapters(model)
    for cls in type(model).__mro__:
        if found := _files_for(cls):
            return load(found[0], mode)
    if (fitting := _file_that_fits(model)) is not None:
        log.info('rules of layout file "%s" for %s, whose modules they fit', fitting, type(model).__qualname__)
        return load(fitting, mode)
    from shardlib.rules.foreign import has_tp_plan  # it imports torch

    if has_tp_plan(model):
        return _in_mode(_completed_plan(model), mode)
    if has_adapters(model):
        raise RuleError(
            f"There is no layout file for {type(model).__module__}.{type(model).__qualname__}, and rules can be "
            "suggested only for a model without adapters. Get them with shardlib.layouts.for_model(model) before "
            "adapters are added, and pass them: they then shard the adapters too."
        )
    rules = _in_mode(suggest(model), mode)
    _say_suggested(
        f"There is no layout file for {type(model).__module__}.{type(model).__qualname__} and it carries no plan. "
        "These rules were suggested from its modules; `shardlib init` writes them to a file to be checked",
        rules.to_toml().splitlines(),
    )
    return rules


def _completed_plan(model: nn.Module) -> Rules:
    """Return the rules of a model's own plan, with rules suggested for the blocks that it leaves out."""
    plan = Rules.from_tp_plan(model)
    rules = plan if has_adapters(model) else complete(plan, model)
    if added := [f'"{key}": {rules.notes[key]}' for key in rules.rules if key not in plan.rules]:
        _say_suggested(
            f"The tp_plan of {type(model).__module__}.{type(model).__qualname__} leaves out some of its layers. "
            "Rules for these were suggested; `shardlib init` writes rules for the whole model to a file to be checked",
            added,
        )
    return rules


def _say_suggested(what: str, lines: Sequence[str]) -> None:
    """Warn on the first rank of suggested rules, and show the first of them."""
    if is_first_rank():
        more = len(lines) - _MOST_LINES
        rest = f"\n... and {more} more lines: print(shardlib.layouts.for_model(model).to_toml())" if more > 0 else ""
        warn(f"{what}:\n" + "\n".join(lines[:_MOST_LINES]) + rest, SuggestedLayoutWarning)


def _in_mode(rules: Rules, mode: str | None) -> Rules:
    return rules if mode is None else rules.mode(mode)


def _files_for(cls: type) -> list[str]:
    """Return the files for exactly this class. More than one is an error."""
    names = [name for name, rules in _files().items() if any(_names_class(entry, cls) for entry in rules.models)]
    if len(names) > 1:
        raise RuleError(
            f"Layout files {' and '.join(map(repr, names))} are both for {cls.__module__}.{cls.__qualname__}. Choose "
            f"one with shardlib.layouts.load({names[0]!r})."
        )
    return names


def _file_that_fits(model: nn.Module) -> str | None:
    """Return the file that fits the modules of a model best, by their names, kinds and sizes."""
    idle: dict[str, int] = {}
    index = ModelIndex(model)
    for name, rules in _files().items():
        with suppress(RuleError):
            resolver = Resolver(rules, index, MeshShape("dp=1"))
            resolver.resolution()
            idle[name] = sum(match.empty for match in resolver.matches.values())
    return min(idle, key=idle.__getitem__, default=None)


def _names_class(entry: str, cls: type) -> bool:
    """Return whether "package.Class" or a full path names a class; modules between package and class are ignored.

    >>> _names_class("torch.Linear", nn.Linear), _names_class("torch.nn.modules.linear.Linear", nn.Linear)
    (True, True)
    """
    package, _, name = entry.partition(".")
    full = f"{cls.__module__}.{cls.__qualname__}"
    return entry == full or (package == cls.__module__.partition(".")[0] and name == cls.__qualname__)


@cache
def _files() -> dict[str, Rules]:
    """Read every layout file of a family."""
    return {path.stem: Rules.from_toml(path) for path in sorted(_folder().glob("*.toml"))}


def _folder() -> Path:
    """Return the folder of layout files: in an installed package beside this file, in a source checkout one folder
    up."""
    return _HERE / "_layouts" if (_HERE / "_layouts").is_dir() else _HERE.parent / "layouts"


def _register_modes() -> None:
    """Register the files of `modes/`: a mode of a family's file, with the axes of its dims."""
    for path in sorted((_folder() / "modes").glob("*.toml")):
        given = tomllib.loads(path.read_text(encoding="utf-8"))
        change = partial(_completed, mode=given["mode"], axes=given["axes"])
        register_tensor_mode(path.stem, axes=given["mesh"], description=given["description"])(change)


def _completed(rules: Rules, *, mode: str, axes: dict[str, str | list[str]]) -> Rules:
    made = rules.mode(mode)
    used = {name: given for name, given in axes.items() if name in made.dim_names}
    return replace(made, axes={**made.axes, **used})


_register_modes()

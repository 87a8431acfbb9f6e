"""Stages of a pipeline: the modules of a model that run on each stage, by names or by balance.

    "embed, blocks.0-3 | blocks.4-7, norm, head"    stages between bars, names of modules between commas
    Balanced()                                      runs of modules with about equally many parameters
    Balanced(by="flops")                            runs of modules that compute about equally much
    Balanced([3, 5])                                so many blocks on each stage

A name is a pattern as in rules, in which `4-7` stands for the numbers from 4 to 7. It selects the outermost modules
that it matches. The name of a parameter assigns it to a stage whose code reads it outside of its module, as a model
with a tied head may do. Modules without parameters that no stage names run on every stage.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, get_args

from shardlib.errors import RuleError, nearest
from shardlib.rules._model import is_layer
from shardlib.rules.patterns import NameIndex, compile_pattern

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Balanced", "By", "Stage", "StagesLike", "Weigh", "partition", "read_stages", "resolve_stages"]

By = Literal["params", "flops", "time"]

Weigh = Callable[["nn.Module", Sequence[str], By], Sequence[float]]
"""Returns the weights of the named modules, by "flops" or "time", by running them on an example."""

_RANGE = re.compile(r"(\d+)-(\d+)")
_ON_EACH = re.compile(r"(\d+) on each rank")
_BY = re.compile(r"^by\s*=\s*")
_BALANCED = re.compile(r"balanced(?:\((.*)\))?", re.IGNORECASE)


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline, resolved on a model.

    Attributes:
        modules: names of the modules that it calls, in the model's order; none of them contains another.
        tensors: names of parameters outside of these modules that it reads itself.
    """

    modules: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()

    def holds(self, name: str) -> bool:
        """Return whether a tensor of this name belongs to the stage.

        >>> Stage(("blocks.1",), ("scale",)).holds("blocks.1.weight"), Stage(("blocks.1",)).holds("blocks.10.weight")
        (True, False)
        """
        return name in self.tensors or any(name.startswith(f"{module}.") for module in self.modules)


@dataclass(frozen=True, init=False)
class Balanced:
    """Stages of about equal weight: consecutive modules in the order in which the model registers them.

    Args:
        counts: the number of the model's repeated blocks on each stage; modules before the first block are on the first
            stage, those after the last block on the last. Without it, stages are chosen so that the heaviest is as
            light as it can be.
        by: the measure of weight: "params", the number of parameters; "flops", the operations of a forward on the
            example that `plan` or `shard_model` is given, counted without values; "time", the seconds that forward and
            backward of each module take, alone and on zeros of the example's shapes, on the device of rank 0, where
            `shard_model` measures them. An embedding has many parameters and costs next to nothing: by flops and time
            it shares a stage with others.
        per_rank: the number of stages on each rank of the pipeline, for schedules that interleave them.

    Raises:
        RuleError: malformed counts, another `by`.

    >>> Balanced([3, 5]), Balanced()
    (Balanced([3, 5]), Balanced(by="params"))
    """

    counts: tuple[int, ...] = ()
    by: By = "params"
    per_rank: int = 1

    def __init__(self, counts: Iterable[int] = (), *, by: By = "params", per_rank: int = 1) -> None:
        counts = tuple(counts)
        if wrong := [count for count in counts if type(count) is not int or count < 0]:
            raise RuleError(
                f"Balanced was given the count {wrong[0]!r}; give numbers of blocks, one for each stage, as in "
                "Balanced([3, 5])."
            )
        if by not in get_args(By) or (counts and by != "params"):
            raise RuleError(
                f'Balanced was given by={by!r}{" and counts" * bool(counts)}; give "params", "flops" or "time", or say '
                "how many blocks: Balanced([3, 5])."
            )
        if type(per_rank) is not int or per_rank < 1 or (counts and per_rank > 1):
            raise RuleError(
                f"Balanced was given per_rank={per_rank!r}; give a number from 1 up, and only where no counts say how "
                "many stages there are."
            )
        object.__setattr__(self, "counts", counts)
        object.__setattr__(self, "per_rank", per_rank)
        object.__setattr__(self, "by", by)

    def __repr__(self) -> str:
        if self.counts:
            return f"Balanced({list(self.counts)})"
        return f'Balanced(by="{self.by}"{f", per_rank={self.per_rank}" if self.per_rank > 1 else ""})'

    @property
    def text(self) -> str:
        """The form in layout files, which `read_stages` parses."""
        each = f", {self.per_rank} on each rank" if self.per_rank > 1 else ""
        return f"balanced({', '.join(map(str, self.counts)) or self.by + each})"


StagesLike = str | Sequence[str] | Balanced | None


def read_stages(given: StagesLike) -> str | Balanced | None:
    """Parse stages, from any form in which they may be given.

    Raises:
        RuleError: anything else, or a stage without a name.

    >>> read_stages(["embed, blocks.0-3", "blocks.4-7, head"])
    'embed, blocks.0-3 | blocks.4-7, head'
    >>> read_stages("balanced(3, 5)"), read_stages('balanced(by="flops")')
    (Balanced([3, 5]), Balanced(by="flops"))
    """
    if given is None or isinstance(given, Balanced):
        return given
    if isinstance(given, list | tuple) and given and all(isinstance(each, str) for each in given):
        given = " | ".join(given)
    if not isinstance(given, str):
        raise RuleError(
            f"stages was given as {given!r}; give names of modules, with bars between stages, as in "
            '"embed, blocks.0-3 | blocks.4-7, norm, head", or Balanced().'
        )
    if match := _BALANCED.fullmatch(given.strip()):
        return _read_balanced(match[1] or "")
    for number, items in enumerate(_items(given)):
        if not items:
            raise RuleError(f'stages="{given}": stage {number} names no module. Name one, or take a bar away.')
        for item in items:
            for name in _expanded(item):
                compile_pattern(name)
    return given


def _read_balanced(inside: str) -> Balanced:
    words = [_BY.sub("", word.strip()).strip("\"'") for word in inside.split(",") if word.strip()]
    if words and all(word.isdecimal() for word in words):
        return Balanced(int(word) for word in words)
    per_rank = 1
    if words and (match := _ON_EACH.fullmatch(words[-1])):
        per_rank = int(match[1])
        words.pop()
    return Balanced(by=words[0] if words else "params", per_rank=per_rank)  # type: ignore[arg-type]


def _items(text: str) -> list[list[str]]:
    return [[item.strip() for item in stage.split(",") if item.strip()] for stage in text.split("|")]


def _expanded(item: str) -> list[str]:
    """Expand the ranges of numbers in a name.

    >>> _expanded("encoder.blocks.0-2")
    ['encoder.blocks.0', 'encoder.blocks.1', 'encoder.blocks.2']
    """
    if item.startswith("re:"):
        return [item]
    names = [""]
    for segment in item.split("."):
        match = _RANGE.fullmatch(segment)
        each = [str(n) for n in range(int(match[1]), int(match[2]) + 1)] if match else [segment]
        if not each:
            raise RuleError(
                f'stages: "{item}" counts backwards from {match and match[1]}; write the smaller one first.'
            )
        names = [f"{name}.{one}".lstrip(".") for name in names for one in each]
    return names


# --- on a model -------------------------------------------------------------------------------------------------------


def resolve_stages(
    given: str | Balanced, model: nn.Module, ranks: int, weigh: Weigh | None = None
) -> tuple[Stage, ...]:
    """Assign the modules of a model to the stages of a pipeline axis with `ranks` ranks.

    Args:
        given: names of modules, or a `Balanced`.
        model: the model to divide.
        ranks: the size of the pipeline axis.
        weigh: measures modules, where they have to be run for it.

    Raises:
        RuleError: a name that matches nothing; a module in two stages; parameters in none; blocks in an order in which
            they cannot run; a stage without parameters; stages that ranks cannot share evenly.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 1))
    >>> [stage.modules for stage in resolve_stages("0-1 | 2-3", model, 2)]
    [('0', '1'), ('2', '3')]
    >>> [stage.modules for stage in resolve_stages(Balanced(), model, 2)]
    [('0',), ('2', '3')]
    """
    stages = _balanced(given, model, ranks, weigh) if isinstance(given, Balanced) else _named(given, model)
    shown = given if isinstance(given, str) else repr(given)
    _check_count(shown, len(stages), ranks)
    _check_nesting(shown, stages)
    _check_order(shown, stages, model)
    _check_parameters(shown, stages, model)
    return stages


def _named(text: str, model: nn.Module) -> tuple[Stage, ...]:
    modules = dict(model.named_modules(remove_duplicate=False))
    tensors = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    of_modules, of_tensors = NameIndex(name for name in modules if name), NameIndex(tensors)
    order = {name: index for index, name in enumerate(modules)}
    stages = []
    for items in _items(text):
        called: list[str] = []
        read: list[str] = []
        for item in (one for given in items for one in _expanded(given)):
            pattern = compile_pattern(item)
            if found := _outermost(of_modules.select(pattern)):
                called += (one for name in found for one in _called(name, modules))
            elif found := of_tensors.select(pattern):
                read += found
            else:
                raise RuleError(
                    f'stages="{text}": "{item}" matches no module and no parameter of this {type(model).__name__}.'
                    f"{nearest(item, [*of_modules.names, *tensors])}"
                )
        stages.append(Stage(tuple(sorted(dict.fromkeys(called), key=order.__getitem__)), tuple(dict.fromkeys(read))))
    return tuple(stages)


def _outermost(names: list[str]) -> list[str]:
    least = min((name.count(".") for name in names), default=0)
    return [name for name in names if name.count(".") == least]


def _called(name: str, modules: dict[str, nn.Module]) -> Iterator[str]:
    """Iterate over the module, or over the children of one that only holds others."""
    if is_layer(modules[name], "ModuleList", "ModuleDict"):
        for key, _ in modules[name].named_children():
            yield from _called(f"{name}.{key}", modules)
    else:
        yield name


# --- balance ----------------------------------------------------------------------------------------------------------


def _balanced(given: Balanced, model: nn.Module, ranks: int, weigh: Weigh | None) -> tuple[Stage, ...]:
    blocks = _repeated(model)
    every = _units(model, "", _holders(blocks))
    units = [(name, unit) for name, unit in every if any(True for _ in unit.parameters())]
    if given.counts:
        return _by_counts(given, units, blocks)
    count, ends = ranks * given.per_rank, _ends(units, blocks)
    if len(ends) < count:
        raise RuleError(
            f"stages={given!r}: this {type(model).__name__} has {len(ends)} modules with parameters that can stand "
            f"apart, and {count} stages are wanted. Use fewer ranks, or name the stages: "
            'stages="embed, blocks.0-3 | ...".'
        )
    runs = partition(_weights(given, model, [units[a:b] for a, b in pairwise((0, *ends))], weigh), count)
    return tuple(
        Stage(tuple(name for name, _ in units[a:b]), _directly(model, units, a, b))
        for a, b in pairwise((0, *(ends[run - 1] for run in runs)))
    )


def _ends(units: Sequence[tuple[str, nn.Module]], blocks: Sequence[str]) -> list[int]:
    """Return the numbers of units after which a stage may end.

    A module may be there only to name a weight that its neighbour reads, as `shared` of T5: it runs nowhere, and stays
    with the module that does. Blocks with common weights all run.
    """
    held = [{id(param) for param in unit.parameters()} for _, unit in units]
    aliases = [
        (before <= after or after <= before) and not {name, following} <= {*blocks}
        for (before, after), ((name, _), (following, _)) in zip(pairwise(held), pairwise(units), strict=True)
    ]
    return [number + 1 for number, stays in enumerate([*aliases, False]) if not stays]


def _weights(
    given: Balanced, model: nn.Module, groups: Sequence[Sequence[tuple[str, nn.Module]]], weigh: Weigh | None
) -> Sequence[float]:
    """Return the weight of each group of modules that stay together."""
    if given.by == "params":
        params = [{id(param): param for _, unit in group for param in unit.parameters()} for group in groups]
        return [sum(param.numel() for param in each.values()) for each in params]
    if weigh is None:
        raise RuleError(
            f"stages={given!r} weighs modules by running them, and no example was given. Give the batch of one data "
            'rank as example=, to plan or shard_model; or use Balanced(by="params").'
        )
    names = [name for group in groups for name, _ in group]
    found = iter(weigh(model, names, given.by))
    weights = [sum(next(found) for _ in group) for group in groups]
    if not any(weights):
        raise RuleError(
            f"stages={given!r}: none of the modules that can stand apart computes anything on the example "
            f'({", ".join(names[:3])}, ...). Use Balanced(by="params"), or name the stages.'
        )
    return weights


def _by_counts(given: Balanced, units: list[tuple[str, nn.Module]], blocks: list[str]) -> tuple[Stage, ...]:
    if sum(given.counts) != len(blocks):
        shown = f'"{blocks[0]}" to "{blocks[-1]}"' if blocks else "none"
        raise RuleError(
            f"stages={given!r} names {sum(given.counts)} blocks, and the model has {len(blocks)} ({shown}). Give "
            "counts that add up to these."
        )
    names = [name for name, _ in units]
    positions = [names.index(block) for block in blocks]
    ends, taken = [], 0
    for count in given.counts[:-1]:
        taken += count
        ends.append(positions[taken] if taken < len(positions) else len(names))
    return tuple(Stage(tuple(names[a:b])) for a, b in pairwise((0, *ends, len(names))))


def _repeated(model: nn.Module) -> list[str]:
    """Return the elements of the outermost lists that hold at least two modules with parameters."""
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{block}.") for block in found)
        if is_layer(module, "ModuleList", "Sequential") and not inside:
            filled = [key for key, child in module.named_children() if any(True for _ in child.parameters())]
            found += [f"{name}.{key}".lstrip(".") for key in filled] if len(filled) > 1 else []
    return found


def _holders(blocks: Iterable[str]) -> set[str]:
    """Return every module that contains a block."""
    found: set[str] = set()
    for name in blocks:
        while name:
            name = name.rpartition(".")[0]
            found.add(name)
    return found


def _units(module: nn.Module, name: str, holders: set[str]) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over the modules that are not divided, in the order in which they are registered."""
    if name not in holders:
        yield name, module
        return
    for key, child in module.named_children():
        yield from _units(child, f"{name}.{key}".lstrip("."), holders)


def _directly(model: nn.Module, units: list[tuple[str, nn.Module]], start: int, end: int) -> tuple[str, ...]:
    """Return parameters of divided modules: they go with the first unit that is registered in the same module."""
    owners = [name.rpartition(".")[0] for name, _ in units]
    found = []
    for name, _ in model.named_parameters(remove_duplicate=False):
        if any(name.startswith(f"{unit}.") for unit, _ in units):
            continue
        owner = name.rpartition(".")[0]
        first = next((i for i, each in enumerate(owners) if each == owner or each.startswith(f"{owner}.")), 0)
        found += [name] if start <= first < end else []
    return tuple(found)


def partition(weights: Sequence[float], count: int) -> list[int]:
    """Return the ends of runs such that the heaviest run is as light as possible.

    best[k][i] is the least that the heaviest of k runs of the first i weights can be: the minimum over j < i of
    max(best[k-1][j], weights[j] + ... + weights[i-1]).

    >>> partition([5, 1, 1, 5], 2)
    [2, 4]
    """
    n = len(weights)
    until = [0.0]
    for weight in weights:
        until.append(until[-1] + weight)
    worst = float("inf")
    best = [[0.0, *[worst] * n]]
    cuts: list[list[int]] = []
    for _ in range(count):
        row, cut = [worst] * (n + 1), [0] * (n + 1)
        for i in range(1, n + 1):
            for j in range(i):
                run = until[i] - until[j]
                if max(best[-1][j], run) < row[i]:
                    row[i], cut[i] = max(best[-1][j], run), j
        best.append(row)
        cuts.append(cut)
    ends = [n]
    for cut in reversed(cuts[1:]):
        ends.append(cut[ends[-1]])
    return ends[::-1]


# --- checks --------------------------------------------------------------------------------------------------


def _check_count(shown: str, count: int, ranks: int) -> None:
    if count % ranks:
        raise RuleError(
            f"stages={_quoted(shown)} names {count} stage{'s' * (count != 1)}, and the pipeline axis has {ranks} "
            f"ranks, which cannot share them evenly. Name {ranks}, or a multiple of it for a schedule with several on "
            "each."
        )


def _check_nesting(shown: str, stages: Sequence[Stage]) -> None:
    assigned = [(name, number) for number, stage in enumerate(stages) for name in stage.modules]
    for name, number in assigned:
        for other, at in assigned:
            if (other == name and at != number) or other.startswith(f"{name}."):
                where = f"stages {number} and {at}" if at != number else f"stage {number} twice"
                raise RuleError(
                    f'stages={_quoted(shown)}: "{other}" is in {where}'
                    + (f', since it is in "{name}"' if other != name else "")
                    + ". Name each module once."
                )


def _check_order(shown: str, stages: Sequence[Stage], model: nn.Module) -> None:
    """Check that the elements of one list, which run one after another, are on stages in that order."""
    of_list: dict[str, list[tuple[int, int, str]]] = {}
    for number, stage in enumerate(stages):
        for name in stage.modules:
            holder, _, key = name.rpartition(".")
            if key.isdecimal() and is_layer(model.get_submodule(holder), "ModuleList", "Sequential"):
                of_list.setdefault(holder, []).append((int(key), number, name))
    for elements in of_list.values():
        for (_, before, first), (_, after, second) in pairwise(sorted(elements)):
            if after < before:
                raise RuleError(
                    f'stages={_quoted(shown)}: "{second}" runs after "{first}", and is on stage {after}, before stage '
                    f"{before}. Name the stages in the order in which their modules run."
                )


def _check_parameters(shown: str, stages: Sequence[Stage], model: nn.Module) -> None:
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    outside = [group[0] for group in names.values() if not any(s.holds(name) for s in stages for name in group)]
    if outside:
        more = f" and {len(outside) - 1} more" if len(outside) > 1 else ""
        raise RuleError(
            f'stages={_quoted(shown)}: the parameter "{outside[0]}"{more} is on no stage. Name its module, or the '
            "parameter itself, on the stage that reads it."
        )
    for number, stage in enumerate(stages):
        if not any(stage.holds(name) for group in names.values() for name in group):
            raise RuleError(
                f"stages={_quoted(shown)}: stage {number} has no parameters, and its ranks would have nothing to "
                "train. Join it with a neighbour."
            )


def _quoted(shown: str) -> str:
    return shown if shown.startswith("Balanced(") else f'"{shown}"'

"""Say beside a habit where it does something else than on one device; without a word it does the same everywhere."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.contract import habits
from tests.contract.harness import KINDS

__all__ = [
    "CUT_GRAPH",
    "ONE_STAGE",
    "OTHER_STAGE",
    "OWN_STATE",
    "Habit",
    "as_ddp",
    "as_microbatches",
    "broken",
    "everywhere",
    "habits_of",
    "modules",
    "noticed",
    "own_part",
    "refused",
    "refused_in_pipelines",
    "refused_on_some_ranks",
]

# Reasons of `own_part`.
ONE_STAGE = (
    "torch's functions see the parameters of this rank's stages, as under torch.distributed.pipelining; "
    "sl.clip_grad_norm_ sees those of all"
)
OTHER_STAGE = "a module of another stage has no parameters on this rank, as under torch.distributed.pipelining"
CUT_GRAPH = (
    "a stage does not see that the graph ends in a later one: its gradients are zeros, where "
    "torch.distributed.pipelining raises"
)
OWN_STATE = (
    "state_dict() has this rank's shards and stages, as under FSDP2; sl.full_state_dict(model), on all ranks, has what "
    "a plain model loads"
)

_DECLARED, _EVERYWHERE = "_declared", "_everywhere"
# Kinds on which one habit of so many runs at every commit, and with which number in its module; the others are deep,
# where they do the same as on one device. Each habit runs on one of the first three, on zero(3), and on tp or pp.
_ONE_OF = {
    "replicate": (3, 0),
    "zero(1)": (3, 1),
    "zero(2)": (3, 2),
    "tp": (2, 0),
    "pp": (2, 1),
    "fsdp x tp": (3, 1),
    "compiled": (6, 0),
}


@dataclass(frozen=True)
class Verdict:
    """What is declared of a cell, and how, or why.

    "same", "refused", "noticed", "as DDP", "microbatches", "own part" or "broken".
    """

    what: str
    how: str = ""
    apart: bool = False  # it is run by itself: some ranks raise, and others do not
    alone: bool = False  # it is run on ranks of its own: it ends ranks, or they wait for each other


_NO_CALL = Verdict("refused", "Call shardlib.pipeline_step")  # of a pipeline, whatever the habit then does


@dataclass(frozen=True)
class Habit:
    """A habit with its name, its sentence and what is declared of it, by kind."""

    name: str
    sentence: str
    declared: dict[str, Verdict] = field(default_factory=dict)
    everywhere: bool = False
    number: int = 0  # in its module

    @property
    def kinds(self) -> list[str]:
        """The kinds on which it runs."""
        return [name for name, kind in KINDS.items() if self.everywhere or not kind.costly]

    def verdict(self, kind: str) -> Verdict:
        return self.declared.get(kind, Verdict("same"))

    def is_deep(self, kind: str) -> bool:
        """Does only `make test-deep` run it on this kind?"""
        verdict = self.verdict(kind)
        if verdict == _NO_CALL:
            several, which = 4, 0
        else:
            several, which = _ONE_OF.get(kind, (1, 0)) if verdict.what == "same" else (1, 0)
        return self.number % several != which


def refused(kinds: str, message: str) -> Callable[[Any], Any]:
    """Declare that shardlib refuses the habit on these kinds, with a part of the message."""
    return _declare(kinds, Verdict("refused", message))


def refused_on_some_ranks(kinds: str, message: str, *, alone: bool = False) -> Callable[[Any], Any]:
    """Declare that shardlib refuses the habit on some ranks; others raise another error, or go on.

    `alone`: others wait for them.
    """
    return _declare(kinds, Verdict("refused", message, apart=not alone, alone=alone))


def noticed(kinds: str, message: str) -> Callable[[Any], Any]:
    """Declare that ranks differ without a word, and that `check="always"` refuses it, with a part of the message."""
    return _declare(kinds, Verdict("noticed", message))


def as_ddp(kinds: str, why: str) -> Callable[[Any], Any]:
    """Declare that these kinds do as torch's DDP does, and not as one device does, with the reason."""
    return _declare(kinds, Verdict("as DDP", why))


def as_microbatches(why: str) -> Callable[[Any], Any]:
    """Declare that a pipeline does as one device does on microbatches one after the other, with the reason."""
    return _declare("pp", Verdict("microbatches", why))


def own_part(kinds: str, why: str, *, apart: bool = False, alone: bool = False) -> Callable[[Any], Any]:
    """Declare that each rank acts on the part of the model that it holds, and not on the model, with the reason.

    `apart`: some ranks raise, and others do not. `alone`: others wait for them.
    """
    return _declare(kinds, Verdict("own part", why, apart, alone))


def broken(kinds: str, what: str, *, alone: bool = False) -> Callable[[Any], Any]:
    """Declare a mistake that is known; once it is mended, the test fails until this declaration is gone.

    `alone`: ranks end, wait for each other, or do different things, so that no other habit can be run beside this one.
    """
    return _declare(kinds, Verdict("broken", what, alone=alone))


def everywhere(habit: Any) -> Any:
    """Run the habit on the kinds that cost much, too."""
    setattr(habit, _EVERYWHERE, True)
    return habit


def refused_in_pipelines(habit: Any) -> Any:
    """Declare that the habit calls the model, which a pipeline refuses."""
    return _declare("pp", _NO_CALL)(habit)


def _declare(kinds: str, verdict: Verdict) -> Callable[[Any], Any]:
    names = list(KINDS) if kinds == "all" else kinds.split(", ")
    assert set(names) <= KINDS.keys(), f"{kinds}: there are {', '.join(KINDS)}"

    def decorate(habit: Any) -> Any:
        declared = vars(habit).setdefault(_DECLARED, {})
        assert not declared.keys() & set(names), f"{habit.__name__} has two declarations for one kind"
        declared |= dict.fromkeys(names, verdict)
        return habit

    return decorate


def modules() -> list[str]:
    return [f"{habits.__name__}.{module.name}" for module in pkgutil.iter_modules(habits.__path__)]


def habits_of(module: str) -> list[Habit]:
    """Return the habits of a module: its functions whose first argument is `run`."""
    found = importlib.import_module(module)
    functions = {
        name: f
        for name, f in vars(found).items()
        if inspect.isfunction(f)
        and f.__module__ == module
        and not name.startswith("_")
        and next(iter(inspect.signature(f).parameters), "") == "run"
    }
    return [
        Habit(name, _sentence(f), dict(vars(f).get(_DECLARED, {})), hasattr(f, _EVERYWHERE), number)
        for number, (name, f) in enumerate(functions.items())
    ]


def _sentence(function: Any) -> str:
    text = inspect.getdoc(function)
    assert text, f"{function.__name__} has no sentence"
    return text.split("\n\n")[0].replace("\n", " ")

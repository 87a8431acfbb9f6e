"""The table of private names of torch. Each file of this package declares at its top those that it uses."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shardlib.errors import VersionError

__all__ = ["SEEN", "TABLE", "Private", "private", "private_when_used"]

SEEN = ("2.13.0", "2.14.1", "2.15.0")  # the versions of torch on which the tests have run


@dataclass(frozen=True)
class Private:
    """A private name of torch.

    Attributes:
        name: the dotted path from `torch`; an attribute of instances stands under their class.
        why: completes "shardlib needs it ...".
        without: completes "Without it, ...".
        optional: whether shardlib runs on a torch that lacks the name.
        marks: attributes that the name gives to objects of ours, and that are given without calling it.
    """

    name: str
    why: str
    without: str
    optional: bool = False
    marks: tuple[str, ...] = ()

    def require(self) -> None:
        """Look for the name in the torch that is installed.

        Raises:
            VersionError: torch lacks the name.
        """
        if not self.optional and not _exists(self.name):
            seen = f"{', '.join(SEEN[:-1])} and {SEEN[-1]}"
            raise VersionError(
                f"torch {torch.__version__} is installed and has no {self.name}, a private name that shardlib needs "
                f"{self.why}. Without it, {self.without}. Seen in torch {seen}. Install one that "
                f'has it: pip install "torch=={SEEN[-1]}".'
            )


TABLE: list[Private] = []  # two files may need one name


def private(*names: str, **row: Any) -> None:
    """Declare private names of torch, before the imports that need them; `row` has the other fields of `Private`.

    Raises:
        VersionError: torch lacks one that is not optional.
    """
    for each in _declared(names, row):
        each.require()


def private_when_used(*names: str, **row: Any) -> Callable[[], None]:
    """Declare private names of modules that are imported when they are used. Call the result before their import.

    The result raises a VersionError where torch lacks one of the names.
    """
    declared = _declared(names, row)

    def require() -> None:
        for each in declared:
            each.require()

    return require


def _declared(names: tuple[str, ...], row: dict[str, Any]) -> list[Private]:
    declared = [Private(name, **row) for name in names]
    TABLE.extend(declared)
    return declared


def _exists(name: str) -> bool:
    """Tell whether a dotted path leads somewhere. Modules on the path are imported.

    >>> _exists("torch.nn.Module._call_impl"), _exists("torch.nn.Module._parameters"), _exists("torch.nn.Modul")
    (True, True, False)
    """
    parts = name.split(".")
    owner: Any = torch
    for i, part in enumerate(parts[1:], 2):
        if hasattr(owner, part):
            owner = getattr(owner, part)
        elif i == len(parts) and any(part in inspect.get_annotations(each) for each in getattr(owner, "__mro__", ())):
            return True  # an attribute of instances
        else:
            try:
                owner = importlib.import_module(".".join(parts[:i]))
            except ImportError:
                return False
    return True

"""Options, rounds, ratios and the output file of all benchmarks, those without torch too."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any


def parser(doc: str) -> argparse.ArgumentParser:
    """The options that every benchmark takes. `doc` is its module's docstring."""
    p = argparse.ArgumentParser(description=doc.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--quick", action="store_true", help="little work and few rounds: whether it runs, not how fast")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    return p


def alternate(names: Sequence[str], rounds: int) -> Iterator[list[str]]:
    """Yield the order of each round.

    It runs backwards in every second round, and turns after each two, so that no variant always follows the same other.

    >>> list(alternate(["a", "b", "c"], 4))
    [['a', 'b', 'c'], ['c', 'b', 'a'], ['b', 'c', 'a'], ['a', 'c', 'b']]
    """
    for i in range(rounds):
        first = i // 2 % len(names)
        turned = [*names[first:], *names[:first]]
        yield turned[::-1] if i % 2 else turned


def compared(taken: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    """Compare two series round by round: the median of the ratios within rounds, and their middle half.

    >>> compared([2.0, 3.0, 8.0], [1.0, 1.0, 2.0])
    {'ratio': 3.0, 'middle_half': (2.5, 3.5)}
    """
    ratios = [a / b for a, b in zip(taken, base, strict=True)]
    low, ratio, high = statistics.quantiles(ratios * 2 if len(ratios) == 1 else ratios, n=4, method="inclusive")
    return {"ratio": ratio, "middle_half": (low, high)}


def written(found: dict[str, Any]) -> str:
    """Return what `compared` found as text.

    >>> written({"ratio": 3.0, "middle_half": (2.5, 3.5)})
    '3.000 (2.500 to 3.500)'
    """
    low, high = found["middle_half"]
    return f"{found['ratio']:.3f} ({low:.3f} to {high:.3f})"


def write(file: Path, results: Any, **facts: Any) -> None:
    """Write results with the machine they were measured on. `facts` say more about it."""
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    machine |= {"python": platform.python_version(), "torch": version("torch"), **facts}
    file.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")

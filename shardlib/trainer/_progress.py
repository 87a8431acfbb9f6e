"""A progress bar on rank 0, on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shardlib.booster._plugins import _of_job

__all__ = ["progress"]


@contextmanager
def progress(title: str, total: int, *, begin: int = 0, shown: bool) -> Iterator[Callable[[Mapping[str, str]], None]]:
    """Show a bar that advances at each call of the yielded function, which also takes numbers to show.

    Nothing is shown on other ranks, nor where stderr is not a terminal.
    """
    console = Console(stderr=True)
    if not shown or _of_job("RANK", 0) != 0 or not console.is_terminal:
        yield lambda numbers: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[numbers]}"), console=console) as bar:
        task = bar.add_task(title, total=total, completed=begin, numbers="")

        def advance(numbers: Mapping[str, str]) -> None:
            bar.update(task, advance=1, numbers=", ".join(f"{name} = {value}" for name, value in numbers.items()))

        yield advance

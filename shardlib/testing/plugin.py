"""The pytest plugin: `@pytest.mark.shardlib(world_size=4)` and the fixture `ranks`.

pytest loads `pytest_shardlib`, which loads this once a test asks for ranks.

    @pytest.mark.shardlib(world_size=2)
    def test_from_outside(ranks):
        assert ranks.run(torch.distributed.get_rank) == [0, 1]

    @pytest.mark.shardlib(world_size=2, on_ranks=True)
    def test_from_inside():
        assert torch.distributed.get_world_size() == 2

All tests of a process share one warm pool. A test that runs on the ranks gets its fixtures and parameters by pickle.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from shardlib.testing import _carry
from shardlib.testing._pool import Ranks, Spent, preload, shared_pool, spent

__all__ = ["Mark", "check", "pool"]


@dataclass(frozen=True)
class Mark:
    """The combined marks of a test; the mark nearest to the test takes precedence."""

    world_size: int
    timeout: float
    on_ranks: bool

    @classmethod
    def of(cls, item: pytest.Item) -> Mark:
        """Read them, and the command line for what they leave out.

        Raises:
            pytest.UsageError: an argument that the mark does not have, or that makes no sense.
        """
        arguments: dict[str, Any] = {
            "world_size": item.config.getoption("--shardlib-world-size"),
            "timeout": item.config.getoption("--shardlib-timeout"),
            "on_ranks": False,
        }
        for mark in reversed(list(item.iter_markers("shardlib"))):
            try:
                arguments |= inspect.signature(_arguments).bind(*mark.args, **mark.kwargs).arguments
            except TypeError as error:
                raise _refused(item, f"{error}; it takes world_size, timeout and on_ranks") from None
        wrong = [
            f"{name}={arguments[name]!r} is not {what}"
            for name, (what, good) in _GOOD.items()
            if not good(arguments[name])
        ]
        if wrong:
            raise _refused(item, " and ".join(wrong))
        return cls(**arguments)


def _arguments(world_size: int = ..., *, timeout: float = ..., on_ranks: bool = ...) -> None:  # type: ignore[assignment]
    """Declare the arguments of the mark."""


def _number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and value > 0


_GOOD: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "world_size": ("a positive integer", lambda value: _number(value, int)),
    "timeout": ("a positive number of seconds", lambda value: _number(value, int | float)),
    "on_ranks": ("True or False", lambda value: isinstance(value, bool)),
}


def _refused(item: pytest.Item, what: str) -> pytest.UsageError:
    return pytest.UsageError(f"{item.nodeid}: @pytest.mark.shardlib: {what}")


def check(items: Sequence[pytest.Item]) -> None:
    """Refuse wrong marks while tests are collected.

    Raises:
        pytest.UsageError: see `Mark.of`; or a test that cannot run on ranks.
    """
    for item in items:
        if Mark.of(item).on_ranks:
            function = getattr(item, "obj", None)
            kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
            if function is None or any(kind(function) for kind in kinds):
                raise _refused(
                    item, "on_ranks=True takes a plain test function, not an async one; use asyncio.run in it"
                )


_POOL = pytest.StashKey[Ranks]()
_BEFORE = pytest.StashKey[Spent]()


def pool(config: pytest.Config) -> Ranks:
    """Return the pool of this run, of the running test's size."""
    if _POOL not in config.stash:
        preload(config.getini("shardlib_preload"))
        config.stash[_POOL] = shared_pool(
            config.getoption("--shardlib-world-size"), timeout=config.getoption("--shardlib-timeout")
        )
    return config.stash[_POOL]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    mark, ranks = Mark.of(item), pool(item.config)
    ranks.world_size, ranks.timeout = mark.world_size, mark.timeout
    item.stash[_BEFORE] = spent()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    try:
        if isinstance(item, pytest.Function) and Mark.of(item).on_ranks:
            with _moved_to_ranks(item):
                return (yield)
        return (yield)
    finally:
        _report(item)


def pytest_unconfigure(config: pytest.Config) -> None:
    if _POOL in config.stash:
        config.stash[_POOL].close()


# --- tests that run on ranks --------------------------------------------------------------------------------------


class _moved_to_ranks:
    """While it lasts, calling the test calls it on every rank; of a hypothesis test, each example does."""

    def __init__(self, item: pytest.Function) -> None:
        self.item, self.function = item, item.obj
        self.handle = getattr(item.obj, "hypothesis", None)

    def __enter__(self) -> None:
        ranks = pool(self.item.config)
        if self.handle is not None:
            self.inner = self.handle.inner_test
            self.handle.inner_test = _on_every_rank(self.inner, ranks)
        else:
            self.item.obj = _on_every_rank(self.function, ranks)

    def __exit__(self, *exc: object) -> None:
        if self.handle is not None:
            self.handle.inner_test = self.inner
        else:
            self.item.obj = self.function


def _on_every_rank(function: Callable[..., Any], ranks: Ranks) -> Callable[..., None]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        try:
            ended = ranks.run(_Test(function, args, kwargs))
        except Exception as error:
            raise error.with_traceback(None)  # noqa: B904  what matters is the rank's traceback, in a note
        _agree(ended)

    return call


class _Test:
    """A test function and its arguments, packed by value: so the rank runs the function that pytest rewrote."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.__qualname__ = _carry.name_of(function)
        self.packed = _carry.dump_call(function, args, kwargs, by_value=True)

    def __call__(self) -> tuple[str, str]:
        """Run it on a rank; what is not an error but an end of pytest's own is returned."""
        function, args, kwargs = _carry.load(self.packed)
        try:
            function(*args, **kwargs)
        except (pytest.skip.Exception, pytest.xfail.Exception) as end:
            return ("skip" if isinstance(end, pytest.skip.Exception) else "xfail"), str(end)
        except pytest.fail.Exception as end:
            raise AssertionError(str(end)) from None
        return "", ""


def _agree(ended: list[tuple[str, str]]) -> None:
    __tracebackhide__ = True
    ends = [end for end, _ in ended]
    if len(set(ends)) > 1:
        outcomes = ", ".join(f"rank {rank} {end or 'ran on'}" for rank, end in enumerate(ends))
        pytest.fail(f"Ranks must skip or run a test together: {outcomes}.", pytrace=False)
    if ends[0] == "skip":
        pytest.skip(ended[0][1])
    if ends[0] == "xfail":
        pytest.xfail(ended[0][1])


# --- what it took -------------------------------------------------------------------------------------------------


def _report(item: pytest.Item) -> None:
    """Add the test's time on ranks to its report, which passes through xdist and into junit files."""
    before, now = item.stash[_BEFORE], spent()
    calls = now.calls - before.calls
    if calls:
        item.user_properties += [
            ("shardlib_world_size", max(calls)),
            ("shardlib_calls", calls.total()),
            ("shardlib_seconds", round(now.seconds - before.seconds, 4)),
            ("shardlib_starts", now.starts - before.starts),
            ("shardlib_seconds_starting", round(now.seconds_starting - before.seconds_starting, 4)),
        ]

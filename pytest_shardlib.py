"""What pytest loads at its start where shardlib is installed: options, the mark, the fixture.

It stands outside of the package, and imports it only once a test asks for ranks: `import shardlib` imports torch,
which a suite that does not use it should not wait for.
"""

from __future__ import annotations

from typing import Any

import pytest

_MARK = (
    "shardlib(world_size=4, timeout=60, on_ranks=False): how many ranks the fixture `ranks` has in this test, and how "
    "many seconds a call on them may take; on_ranks=True runs the test itself on every rank"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("shardlib", "tests on several ranks")
    group.addoption(
        "--shardlib-world-size", type=int, default=4, metavar="N", help="ranks of tests whose mark names none (4)"
    )
    parser.addini(
        "shardlib_preload", "modules that are imported once for all ranks, before these are forked", type="args"
    )
    group.addoption(
        "--shardlib-timeout", type=float, default=120.0, metavar="SECONDS", help="how long a call on ranks may take"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARK)
    for option, least in (("--shardlib-world-size", 1), ("--shardlib-timeout", 0.001)):
        if config.getoption(option) < least:
            raise pytest.UsageError(f"{option} {config.getoption(option)}: give a positive number")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    using = [i for i in items if i.get_closest_marker("shardlib") or "ranks" in getattr(i, "fixturenames", ())]
    if using:
        _on(config).check(using)


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config) -> Any:
    """A pool of as many ranks as the test's mark says, `ranks.run(fn, ...)`; `ranks(2)` is one of two."""
    return _on(pytestconfig).pool(pytestconfig)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Where tests run in processes of xdist's, this one only hears of them."""
    if report.when == "call":
        spent = {name: value for name, value in report.user_properties if str(name).startswith("shardlib_")}
        if spent:
            _REPORTED.append(spent)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _REPORTED:
        terminalreporter.write_line(_summary(_REPORTED))


_REPORTED: list[dict[str, Any]] = []


def _summary(reported: list[dict[str, Any]]) -> str:
    def total(name: str) -> float:
        return sum(float(spent[f"shardlib_{name}"]) for spent in reported)

    sizes = sorted(int(spent["shardlib_world_size"]) for spent in reported)
    tests = ", ".join(f"{sizes.count(size)} on {size}" for size in dict.fromkeys(sizes))
    return (
        f"shardlib: {len(sizes)} test{'s' * (len(sizes) != 1)} on ranks ({tests}), {total('calls'):.0f} calls in "
        f"{total('seconds'):.1f} s, {total('starts'):.0f} processes started in {total('seconds_starting'):.1f} s"
    )


def _on(config: pytest.Config) -> Any:
    """The rest of the plugin, which needs torch."""
    from shardlib.testing import plugin

    if not config.pluginmanager.is_registered(plugin):
        config.pluginmanager.register(plugin, "shardlib-ranks")
    return plugin

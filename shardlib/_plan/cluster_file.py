"""The file form of a cluster.

name = "mine"                         and description, source: texts
devices = 8                           devices of a node
memory = "80GB"                       of a device
launch = "5us"                        the floor of a kernel launch
memory_bandwidth = RATE               between a device and its memory
host_bandwidth = RATE                 between a device and the memory of its host, in each direction
overlap = 0.5                         the part of communication that can hide behind computation; left out: all
[products]
bfloat16 = RATE                       matrix products of a dtype, without sparsity
[[links]]                             one for each level, innermost first
name = "NVLink"
ranks = 8                             consecutive ranks that it joins; left out: all
latency = "3us"                       of a step
bandwidth = RATE                      of one rank, in each direction
pairwise = true                       each pair of ranks has its own link; the bandwidth is that of a rank's links
source = "..."                        where the latency is from
[links.kinds.all_reduce]              latency and bandwidth of one kind of collective, where they differ

A RATE is a text, "3.35TB/s", or { peak = "3.35TB/s", reached = 0.9, source = "..." }.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from shardlib._dtypes import name_of
from shardlib._mesh_shape import listed
from shardlib._plan.links import ByKind, Link, Rate
from shardlib._plan.quantities import Unit, parse_quantity, spell_quantity
from shardlib._toml import is_path, parsed, read_file, toml_key, toml_text
from shardlib.errors import PlanError, ShardlibError, nearest

__all__ = ["read", "write"]

_ADVICE = 'Quantities stand in double quotes, as in memory = "80GB".'
_NEEDED = "name", "devices", "memory", "memory_bandwidth", "host_bandwidth", "products", "launch"
_KEYS = *_NEEDED, "links", "overlap", "description", "source"
_LINK_KEYS = "name", "latency", "bandwidth", "ranks", "kinds", "pairwise", "source"


def read(source: str | Path) -> dict[str, Any]:
    """Read a cluster file, or its text; return the arguments of `Cluster` in it.

    Raises:
        PlanError: no such file, invalid TOML, a key that is missing or unknown, a value of the wrong kind.
    """
    path = is_path(source)
    where = str(source) if path else "cluster given as text"
    text = read_file(Path(source), "A cluster", PlanError) if path else str(source)
    given = parsed(where, text, _ADVICE, PlanError)
    try:
        return _arguments(given)
    except ShardlibError as error:
        raise PlanError(f"{where}: {error}") from None


def write(cluster: Any) -> str:
    """Write a cluster as a file; reading it gives an equal cluster."""
    head = [
        f"name = {toml_text(cluster.name)}",
        *_texts(cluster, "description", "source"),
        f"devices = {cluster.devices}",
        f'memory = "{spell_quantity(cluster.memory, "B")}"',
        f'launch = "{spell_quantity(cluster.launch, "s")}"',
        *([f"overlap = {cluster.overlap!r}"] if cluster.overlap != 1 else []),
        f"memory_bandwidth = {_rate_text(cluster.memory_bandwidth, 'B/s')}",
        f"host_bandwidth = {_rate_text(cluster.host_bandwidth, 'B/s')}",
    ]
    products = [f"{toml_key(dtype)} = {_rate_text(rate, 'FLOP/s')}" for dtype, rate in cluster.products]
    blocks = [head, ["[products]", *products], *map(_link_lines, cluster.links)]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    _check_keys("a cluster", given, _NEEDED, _KEYS)
    links = given.get("links", [])
    if not isinstance(links, list):
        raise PlanError(f'"links" is {links!r}; write a section [[links]] for each level, innermost first.')
    return {
        "name": _typed("name", given["name"], str, "a text"),
        "devices": _typed("devices", given["devices"], int, "a number of devices"),
        "memory": int(_under("memory", parse_quantity, given["memory"], "B")),
        "launch": _under("launch", parse_quantity, given["launch"], "s"),
        "memory_bandwidth": _under("memory_bandwidth", _rate, given["memory_bandwidth"], "B/s"),
        "host_bandwidth": _under("host_bandwidth", _rate, given["host_bandwidth"], "B/s"),
        "products": tuple(
            (_under("products", name_of, dtype), _under(f"products.{dtype}", _rate, rate, "FLOP/s"))
            for dtype, rate in _section("products", given["products"]).items()
        ),
        "links": tuple(_under(f"links {i}", _link, _section("links", link)) for i, link in enumerate(links, 1)),
        "overlap": float(_typed("overlap", given.get("overlap", 1.0), (int, float), "a part, from 0 to 1")),
        "description": _typed("description", given.get("description", ""), str, "a text"),
        "source": _typed("source", given.get("source", ""), str, "a text"),
    }


def _link(given: Mapping[str, Any]) -> Link:
    _check_keys("a link", given, _LINK_KEYS[:3], _LINK_KEYS)
    kinds = _section("kinds", given.get("kinds", {}))
    return Link(
        name=_typed("name", given["name"], str, "a text"),
        ranks=_typed("ranks", given.get("ranks", 0), int, "a number of ranks"),
        latency=_under("latency", parse_quantity, given["latency"], "s"),
        bandwidth=_under("bandwidth", _rate, given["bandwidth"], "B/s"),
        kinds=tuple(_under(f"kinds.{kind}", _by_kind, kind, _section(kind, each)) for kind, each in kinds.items()),
        pairwise=_typed("pairwise", given.get("pairwise", False), bool, "true or false"),
        source=_typed("source", given.get("source", ""), str, "a text"),
    )


def _by_kind(kind: str, given: Mapping[str, Any]) -> ByKind:
    _check_keys("a kind of collective", given, (), ("latency", "bandwidth"))
    latency, bandwidth = given.get("latency"), given.get("bandwidth")
    return ByKind(
        kind,
        None if latency is None else _under("latency", parse_quantity, latency, "s"),
        None if bandwidth is None else _under("bandwidth", _rate, bandwidth, "B/s"),
    )


def _rate(given: Any, unit: Unit) -> Rate:
    if not isinstance(given, dict):
        return Rate(parse_quantity(given, unit))
    _check_keys("a rate", given, ("peak",), ("peak", "reached", "source"))
    reached = _typed("reached", given.get("reached", 1.0), (int, float), "a part of the peak, as in 0.8")
    source = _typed("source", given.get("source", ""), str, "a text")
    return Rate(_under("peak", parse_quantity, given["peak"], unit), float(reached), source)


def _under(key: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function; an error of its names the key."""
    try:
        return function(*arguments)
    except ShardlibError as error:
        raise PlanError(f"{key}: {error}") from None


def _check_keys(what: str, given: Mapping[str, Any], needed: Iterable[str], known: Iterable[str]) -> None:
    for key in given:
        if key not in known:
            raise PlanError(f'"{key}" is not a key of {what}, which may have {listed(known)}.{nearest(key, known)}')
    if missing := [key for key in needed if key not in given]:
        raise PlanError(f"{what} needs {listed(missing)}, which it does not have.")


def _section(key: str, given: Any) -> Mapping[str, Any]:
    found: Mapping[str, Any] = _typed(key, given, dict, "a section")
    return found


def _typed(key: str, given: Any, wanted: type | tuple[type, ...], described: str) -> Any:
    if not isinstance(given, wanted) or (isinstance(given, bool) and wanted is not bool):
        raise PlanError(f'"{key}" is {given!r}; write {described}.')
    return given


def _link_lines(link: Link) -> list[str]:
    lines = ["[[links]]", f"name = {toml_text(link.name)}", f"ranks = {link.ranks}"]
    lines += [f'latency = "{spell_quantity(link.latency, "s")}"', *_texts(link, "source")]
    lines += ["pairwise = true"] if link.pairwise else []
    lines += [f"bandwidth = {_rate_text(link.bandwidth, 'B/s')}"]
    for each in link.kinds:
        lines += ["", f"[links.kinds.{each.kind}]"]
        lines += [] if each.latency is None else [f'latency = "{spell_quantity(each.latency, "s")}"']
        lines += [] if each.bandwidth is None else [f"bandwidth = {_rate_text(each.bandwidth, 'B/s')}"]
    return lines


def _texts(value: Any, *keys: str) -> list[str]:
    return [f"{key} = {toml_text(getattr(value, key))}" for key in keys if getattr(value, key)]


def _rate_text(rate: Rate, unit: Unit) -> str:
    peak = f'"{spell_quantity(rate.peak, unit)}"'
    more = [f"reached = {rate.reached!r}"] if rate.reached != 1 else []
    more += [f"source = {toml_text(rate.source)}"] if rate.source else []
    return f"{{ {', '.join([f'peak = {peak}', *more])} }}" if more else peak

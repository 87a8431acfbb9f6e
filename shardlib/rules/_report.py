"""Reports on rules: the explanation of one name, and a table of the bytes that each rule covers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardlib._dtypes import name_of
from shardlib._mesh_shape import MeshShape
from shardlib.errors import RuleError, nearest, printable
from shardlib.rules._claims import axes_named
from shardlib.rules._match import Entry, border_key
from shardlib.rules._model import called, readable_bytes
from shardlib.rules._resolution import Border, Resolution, Side, TensorLayout
from shardlib.rules._resolve import Resolver
from shardlib.rules._rule_set import RuleSet
from shardlib.rules._tree_node import TreeNode
from shardlib.rules._values import PerAxis, spelled
from shardlib.rules.patterns import compile_pattern

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Coverage", "CoverageRow", "coverage", "explain"]


@dataclass(frozen=True)
class CoverageRow:
    """One rule: the number of tensors that it decides, their bytes, and how many of these bytes are sharded.

    `agreeing` counts tensors that it matches too but that another rule decides: tied ones, or overridden. `rule` is
    None in the row of parameters and buffers that no rule matches.
    """

    rule: str | None
    value: str
    tensors: int
    bytes: int
    split_bytes: int
    agreeing: int = 0


@dataclass(frozen=True)
class Coverage:
    """The bytes of a model by rule; tied tensors count once. `str()` is a table, in which "1 +2" tensors are one that
    the rule decides and two on which it agrees with the rule that does."""

    rows: tuple[CoverageRow, ...]

    @property
    def bytes(self) -> int:
        """All bytes of parameters and buffers."""
        return sum(row.bytes for row in self.rows)

    @property
    def split_bytes(self) -> int:
        """Bytes of tensors that are sharded over at least one axis."""
        return sum(row.split_bytes for row in self.rows)

    @property
    def replicated_bytes(self) -> int:
        """Bytes of replicated tensors, by a rule or for lack of one."""
        return self.bytes - self.split_bytes

    @property
    def unmatched_bytes(self) -> int:
        """Bytes of parameters and buffers that no rule matches."""
        return sum(row.bytes for row in self.rows if row.rule is None)

    def __str__(self) -> str:
        header = ("rule", "layout", "tensors", "bytes", "sharded", "replicated")
        lines = [header, *map(_line, self.rows), self._total()]
        widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
        return "\n".join(_aligned(line, widths) for line in lines)

    def _total(self) -> tuple[str, ...]:
        count = sum(row.tensors for row in self.rows)
        sizes = (self.bytes, self.split_bytes, self.replicated_bytes)
        return ("total", "", str(count), *map(readable_bytes, sizes))


def coverage(rules: RuleSet, model: nn.Module, mesh: MeshShape | None) -> Coverage:
    """Count tensors and bytes by rule. Without a mesh every axis that the rules name counts as sharding."""
    resolver = Resolver(rules, model, mesh or _widest_mesh(rules), strict=False)
    tensors = list(resolver.resolution().tensors.values())
    keys = dict.fromkeys(each.rule for each in tensors)
    by_rule = {key: [each for each in tensors if each.rule == key] for key in keys}
    rows = [
        _row(entry.key, spelled(entry.value), by_rule.get(entry.key, []), _matched(resolver, entry))
        for entry in rules.entries
        if entry.key in by_rule or not resolver.matches[entry].borders
    ]
    unmatched = [_row(None, "replicated", by_rule[None], len(by_rule[None]))] if None in by_rule else []
    return Coverage((*rows, *unmatched))


def explain(rules: RuleSet, name: str, model: nn.Module | None, mesh: MeshShape | None) -> str:
    """List the rules that match a name and, with a model, the layout that they give."""
    if model is None:
        lines = list(_by_name(rules, name)) or ["  no rule matches"]
        return printable("\n".join([f'"{name}"', *lines]))
    resolver = Resolver(rules, model, mesh or _widest_mesh(rules), strict=False)
    resolution = resolver.resolution()
    return printable("\n".join(_about(resolver, resolution, name, mesh)))


def _about(resolver: Resolver, resolution: Resolution, name: str, mesh: MeshShape | None) -> Iterator[str]:
    index = resolver.index
    if name in index.leaf:
        yield from _about_tensor(resolver, resolution.tensors[index.leaf[name].name], mesh)
    elif name in index.modules:
        for full in index.own[name].values():
            yield from _about_tensor(resolver, resolution.tensors[index.leaf[full].name], mesh)
        canonical = index.module_name(index.modules[name])
        borders = [border for (module, _), border in resolution.borders.items() if module == canonical]
        yield from map(_about_border, borders)
        if not index.own[name] and not borders:
            kind = called(index.modules[name])
            yield f'module "{name}" ({kind}) has no tensors of its own, and no rule names its activations'
    elif (key := _border_named(name)) and key[0] in index.modules:
        border = resolution.borders.get(key)
        yield _about_border(border) if border else f'"{name}": activation, unchanged (no rule names it)'
    else:
        known = (*index.leaf, *index.modules)
        raise RuleError(
            f'"{name}" is not a parameter, buffer or module of {called(index.model)}, which has '
            f"{len(index.leaf)} tensors in {len(index.modules)} modules. Give a full name.{nearest(name, known)}"
        )


def _border_named(name: str) -> tuple[str, Side] | None:
    split = border_key(f"^{name}")
    return (split[0].removeprefix("^"), split[1]) if split and isinstance(split[0], str) else None


def _about_tensor(resolver: Resolver, tensor: TensorLayout, mesh: MeshShape | None) -> Iterator[str]:
    dtype, size = name_of(tensor.dtype), readable_bytes(tensor.global_bytes)
    yield f'"{tensor.name}": {tensor.kind}, global shape {tensor.global_shape}, {dtype}, {size}'
    for other in tensor.tied[1:]:
        yield f'  tied to  "{other}"'
    for entry in dict.fromkeys(claim.entry for claim in resolver.claims[tensor.name]):
        yield f"  rule     {entry}" + ("" if entry.key == tensor.rule else " (overridden, or the same)")
    yield f"  layout   {tensor.layout}"
    yield f"  meaning  {tensor.note}"
    if mesh is not None:
        local = tensor.layout.local_shape(tensor.global_shape, mesh, mesh.coordinate(0))
        yield f'  on mesh  "{mesh}": rank 0 holds local shape {tuple(local)}'
        if isinstance(resolver.index.model, TreeNode):
            yield f"  spec     {tensor.layout.partition_spec()}"
        else:
            yield f"  placed   {tensor.layout.placements(mesh)}"


def _about_border(border: Border) -> str:
    name = f"{border.module}.{border.side}" if border.module else border.side
    rule = f'rule "{border.rule}"' if border.rule else border.reason
    return f'"{name}": activation, {f"layout {border.layout}" if border.layout else "unchanged"} ({rule})'


def _by_name(rules: RuleSet, name: str) -> Iterator[str]:
    module = name.rpartition(".")[0]
    for entry in rules.entries:
        if _matches_border(entry, name):
            yield f"  rule {entry} names this activation"
        elif entry.section == "params" and compile_pattern(entry.key).matches(name):
            yield f"  rule {entry} names it"
        elif entry.section == "params" and _names_module(entry.key, module):
            yield f'  rule {entry} names its module "{module}"'


def _names_module(key: str, module: str) -> bool:
    pattern = compile_pattern(key)
    return not pattern.tensors_only and pattern.matches(module)


def _matches_border(entry: Entry, name: str) -> bool:
    key, border = border_key(entry.key), _border_named(name)
    if key is None or border is None or key[1] != border[1]:
        return False
    return compile_pattern(key[0]).matches(border[0]) if isinstance(key[0], str) else key[0].matches(name)


def _widest_mesh(rules: RuleSet) -> MeshShape:
    """Return a mesh with every axis that the rules name, each of size one, so that no dim fails to divide."""
    if any(isinstance(entry.value, PerAxis) for entry in rules.entries):
        raise RuleError('These rules give one placement per mesh axis; pass mesh=..., as in "dp=2,tp=4".')
    axes: Iterable[str] = (axis for entry in rules.entries for axis in axes_named(entry, rules.axis_uses, rules.axis))
    return MeshShape(dict.fromkeys((*axes, rules.axis), 1))


def _matched(resolver: Resolver, entry: Entry) -> int:
    return sum(any(claim.entry == entry for claim in claims) for claims in resolver.claims.values())


def _row(rule: str | None, value: str, tensors: list[TensorLayout], matched: int) -> CoverageRow:
    split = sum(each.global_bytes for each in tensors if each.layout.axes)
    count = len(tensors)
    return CoverageRow(rule, value, count, sum(each.global_bytes for each in tensors), split, matched - count)


def _line(row: CoverageRow) -> tuple[str, ...]:
    sizes = (row.bytes, row.split_bytes, row.bytes - row.split_bytes)
    count = f"{row.tensors} +{row.agreeing}" if row.agreeing else str(row.tensors)
    return (printable(row.rule or "(no rule)"), row.value, count, *map(readable_bytes, sizes))


def _aligned(line: tuple[str, ...], widths: list[int]) -> str:
    left, right = zip(line[:2], widths[:2], strict=True), zip(line[2:], widths[2:], strict=True)
    return "  ".join([*(cell.ljust(width) for cell, width in left), *(cell.rjust(width) for cell, width in right)])

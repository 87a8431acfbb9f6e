"""Sharding rules: rows, each of which is valid by itself on one mesh axis.

A row states: "if the operands have these placements on a mesh axis, the op on local tensors gives outputs with those
placements". A rule is a function from one call of an op to its valid rows. Rules do not depend on meshes, costs or
other axes: `_choose` applies them to one mesh axis after the other, which keeps propagation linear in the number of
axes and lets `shardlib.testing.ops` prove every row by brute force on one axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from shardlib.engine._torch import Op, TensorMeta, _StridedShard

__all__ = [
    "ANY",
    "RING_AXIS",
    "Call",
    "Compute",
    "Here",
    "Local",
    "Meta",
    "P",
    "R",
    "Row",
    "Rule",
    "S",
    "is_split",
    "row",
    "rule",
    "rule_of",
    "ruled_ops",
]

# Over a mesh axis of this name attention passes sharded keys and values round a ring; over other axes it gathers them
# or exchanges them for heads.
RING_AXIS = "cp"

R = Replicate()
P = Partial("sum")


def S(dim: int) -> Shard:
    return Shard(dim)


def is_split(placement: Any) -> TypeGuard[Shard | _StridedShard]:
    return isinstance(placement, Shard | _StridedShard)


class _Any:
    """A row's input whose values are not read: it may have any placement."""

    def __repr__(self) -> str:
        return "ANY"


ANY = _Any()


@dataclass(frozen=True)
class Meta:
    """Shape and dtype of an operand or output on one mesh axis: local to the axes before it.

    `ragged`: dims that an earlier axis splits unevenly. `cut`: all dims that earlier axes split, with the split factor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    ragged: tuple[int, ...] = ()
    cut: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, meta: TensorMeta) -> Meta:
        return cls(tuple(meta.shape), meta.dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Call:
    """One call of an op, on one mesh axis. `call["dim"]` is an argument by its schema name, defaults filled in.

    Tensor operands are flat: `names`, `inputs` and `current` (their placements on this axis) go together.
    """

    op: Op
    values: Mapping[str, Any]
    names: tuple[str, ...]
    inputs: tuple[Meta, ...]
    outputs: tuple[Meta | None, ...]
    current: tuple[Placement, ...] = ()
    size: int = 1
    axis: str = ""

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def dim(self, name: str = "dim", *, of: int = 0) -> int:
        """Return a dim argument, counted from the front of operand `of`."""
        return normal_dim(self.values[name], self.inputs[of].ndim)

    def dims(self, name: str = "dim", *, of: int = 0) -> tuple[int, ...]:
        """Return an argument that lists dims; None and an empty list mean all of them."""
        given = self.values[name]
        ndim = self.inputs[of].ndim
        if given is None or given == [] or ndim == 0:
            return tuple(range(ndim))
        return tuple(normal_dim(d, ndim) for d in ([given] if isinstance(given, int) else given))


def normal_dim(dim: int, ndim: int) -> int:
    return dim + ndim if dim < 0 else dim


@dataclass(frozen=True)
class Local:
    """Shapes after redistribution: global shapes of the inputs, local shapes of inputs and outputs."""

    global_shapes: tuple[tuple[int, ...], ...]
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...] | None, ...]


class Here(Protocol):
    """Information about the current rank, for a row's own computation."""

    def offset(self, operand: int, dim: int) -> int:
        """Return the offset of this rank's shard of an operand in the global tensor."""

    def shape(self, operand: int) -> tuple[int, ...]:
        """Return an operand's global shape."""

    def all_reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """Reduce over the mesh axes that chose this row: "sum", "max", "min"."""

    def coordinate(self, operand: int, dim: int) -> tuple[int, int]:
        """Return this rank's index on the one mesh axis that splits a dim of an operand, and the axis's size."""

    def exchange(
        self, tensor: torch.Tensor, like: tuple[int, int], to: int, source: int, shape: Sequence[int]
    ) -> Callable[[], torch.Tensor]:
        """Start to send a tensor to the rank of index `to` on the axis of `coordinate(*like)`.

        Collective over the axis. The returned function waits for the tensor, of local `shape`, that the rank of index
        `source` sends to this rank.
        """


Compute = Callable[[Op, list[Any], dict[str, Any], Here], Any]
"""(op, local args, kwargs, here) -> the local results."""


Localize = Callable[[Op, list[Any], Local], tuple[Op, list[Any]]]


@dataclass(frozen=True)
class Row:
    """Placements of outputs and inputs on one mesh axis, in the flat order of the op's tensors.

    Attributes:
        outs: one placement per output; None for an output that is absent.
        ins: one placement per tensor operand, keyword operands last.
        parallel: along the split dims the op treats indices independently, so that a fused split (`_StridedShard`) is
            as valid as a plain one (unless the row has its own computation), and shards may be uneven as long as all
            split dims have the same size.
        partition: a replicated operand may become a partial sum: its value on one rank and zeros on the others.
        compute: the computation on local tensors, if it is not the op itself; see `Compute`.
        anywhere: `compute` does not use the offsets of shards, so that a fused split is valid there too.
    """

    outs: tuple[Placement | None, ...]
    ins: tuple[Placement | _Any, ...]
    parallel: bool = True
    partition: bool = False
    compute: Compute | None = None
    anywhere: bool = False


Rows = Callable[[Call], Iterable[Row]]


def row(outs: Iterable[Placement | None], ins: Iterable[Placement | _Any], **options: Any) -> Row:
    return Row(tuple(outs), tuple(ins), **options)


@dataclass(frozen=True)
class Rule:
    """The rows of an op, and the conversion of its non-tensor arguments to local ones.

    Attributes:
        rows: `Call -> iterable of Row`. The row that replicates everything is implicit.
        localize: `(op, args, Local) -> (op, args)`: rewrites sizes in `args`, or the op, for local tensors.
        empty: the op supports tensors without elements, so that there may be more ranks than indices to split.
    """

    rows: Rows
    localize: Localize | None = None
    empty: bool = False


_RULES: dict[Op | str, Rule] = {}


def rule(*ops: Op | str | None, localize: Localize | None = None, empty: bool = False) -> Callable[[Rows], Rows]:
    """Register the rows of one or several ops.

    A name such as "package::op" stands for an op of a package that may be imported later, None for one that this
    version of torch does not have.
    """

    def register(rows: Rows) -> Rows:
        for op in ops:
            if op is not None:
                _RULES[op] = Rule(rows, localize, empty)
        return rows

    return register


def rule_of(op: Op) -> Rule | None:
    return _RULES.get(op) or _RULES.get(op.name())


def ruled_ops() -> Sequence[Op]:
    return tuple(op for op in _RULES if not isinstance(op, str))


def aten(name: str) -> Op | None:
    """Look up an aten overload by its name ("add.Tensor"; "mm" means "mm.default"), or None where torch lacks it."""
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base, None), overload or "default", None)

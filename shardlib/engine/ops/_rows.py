"""What a sharding rule is: rows, each true by itself on one mesh axis.

A row says: "with the operands placed so on a mesh axis, running the op on the local tensors gives outputs placed
so". A rule is a function from one call of an op to the rows that hold for it. Rules know nothing of meshes, costs
or other axes: `_choose` applies them to one mesh axis after the other, which keeps propagation linear in the number
of axes and lets `shardlib.testing.ops` prove every row by brute force on one axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from shardlib.engine._torch import Op, TensorMeta

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
    "row",
    "rule",
    "rule_of",
    "ruled_ops",
]

# Attention over keys and values that this mesh axis splits passes them round; over those of other axes it gathers them
# or trades them for heads.
RING_AXIS = "cp"

R = Replicate()
P = Partial("sum")


def S(dim: int) -> Shard:
    return Shard(dim)


class _Any:
    """In a row's inputs: this operand's values are not read, so that it may stay as it is."""

    def __repr__(self) -> str:
        return "ANY"


ANY = _Any()


@dataclass(frozen=True)
class Meta:
    """Shape and dtype of an operand or output, as one mesh axis sees it: local to the axes before it.

    `ragged` are dims that an axis before split unevenly, `cut` those that were split at all, with the split factor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    ragged: tuple[int, ...] = ()
    cut: tuple[tuple[int, int], ...] = ()

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


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
    current: tuple[Placement, ...]
    size: int
    axis: str = ""

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def dim(self, name: str = "dim", *, of: int = 0) -> int:
        """A dim argument, counted from the front of operand `of`."""
        return normal_dim(self.values[name], self.inputs[of].ndim)

    def dims(self, name: str = "dim", *, of: int = 0) -> tuple[int, ...]:
        """An argument that lists dims; None and an empty list mean all of them."""
        given = self.values[name]
        ndim = self.inputs[of].ndim
        if given is None or given == [] or ndim == 0:
            return tuple(range(ndim))
        return tuple(normal_dim(d, ndim) for d in ([given] if isinstance(given, int) else given))


def normal_dim(dim: int, ndim: int) -> int:
    return dim + ndim if dim < 0 else dim


@dataclass(frozen=True)
class Local:
    """What a rank knows when it runs a row: shapes after redistribution, local ones, and the inputs' global ones."""

    wholes: tuple[tuple[int, ...], ...]
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...] | None, ...]


class Here(Protocol):
    """What a row's own computation may ask about the rank it runs on."""

    def offset(self, operand: int, dim: int) -> int:
        """Where this rank's shard of an operand begins in the global tensor."""

    def shape(self, operand: int) -> tuple[int, ...]:
        """An operand's global shape."""

    def all_reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """Reduce over the mesh axes that chose this row: "sum", "max", "min"."""

    def place(self, operand: int, dim: int) -> tuple[int, int]:
        """This rank's index on the one mesh axis that splits a dim of an operand, and the axis's size."""

    def exchange(
        self, tensor: torch.Tensor, like: tuple[int, int], to: int, source: int, shape: Sequence[int]
    ) -> Callable[[], torch.Tensor]:
        """Begin to send a tensor to the rank of index `to` on the axis of `place(*like)`.

        All ranks of the axis do so at once. The result waits for what the rank of index
        `source` sends here, of local `shape`.
        """


Compute = Callable[[Op, list[Any], dict[str, Any], Here], Any]
"""(op, local args, kwargs, here) -> what the op would have returned on local tensors."""


Localize = Callable[[Op, list[Any], Local], tuple[Op, list[Any]]]


Metas = Callable[[Mapping[str, Any]], TensorMeta | None]


@dataclass(frozen=True)
class Row:
    """Placements of outputs and inputs on one mesh axis, in the flat order of the op's tensors.

    Attributes:
        outs: one placement per output; None for an output that is absent.
        ins: one placement per tensor operand, keyword operands last.
        parallel: along the split dims the op treats indices one by one, so that a fused split (`_StridedShard`)
            does as well as a plain one (unless the row computes something of its own), and shards may be uneven as
            long as all split dims have one size.
        partition: replicated operands may become one rank's whole and the others' zeros to serve as a partial sum.
        compute: replaces the op on local tensors where that is not the op itself; see `Compute`.
        anywhere: `compute` does not ask where a shard begins, so that a fused split does as well there too.
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
    """The rows of an op, and how its non-tensor arguments become local.

    Attributes:
        rows: `Call -> iterable of Row`. "Replicate everything" is always understood and need not be given.
        localize: `(op, args, Local) -> (op, args)`: rewrites sizes in `args`, or the op, for local tensors.
        empty: the op takes tensors without elements, so that there may be more ranks than indices to split.
        metas: the outputs' metadata from the arguments by name (tensors as specs), where PyTorch's own shape function
            refuses what the op accepts; None leaves it to that function.
    """

    rows: Rows
    localize: Localize | None = None
    empty: bool = False
    metas: Metas | None = None


_RULES: dict[Op | str, Rule] = {}


def rule(
    *ops: Op | str | None, localize: Localize | None = None, empty: bool = False, metas: Metas | None = None
) -> Callable[[Rows], Rows]:
    """Register the rows of one or several ops.

    A name such as "package::op" stands for an op of a package that may be imported later, None for one that this
    version of torch does not have.
    """

    def register(rows: Rows) -> Rows:
        for op in ops:
            if op is not None:
                _RULES[op] = Rule(rows, localize, empty, metas)
        return rows

    return register


def rule_of(op: Op) -> Rule | None:
    return _RULES.get(op) or _RULES.get(op.name())


def ruled_ops() -> Sequence[Op]:
    return tuple(op for op in _RULES if not isinstance(op, str))


def aten(name: str) -> Op | None:
    """An aten overload by its name ("add.Tensor"; "mm" means "mm.default"), or None where torch lacks it."""
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base, None), overload or "default", None)

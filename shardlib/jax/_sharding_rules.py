"""Sharding rules of JAX primitives for which JAX's explicit sharding is undecided."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardlib._mesh_shape import MeshShape

__all__ = [
    "ADVISED",
    "KEEPS_A_PARAMETER",
    "UNSHARDED",
    "Conflict",
    "Move",
    "Operand",
    "Ruling",
    "Spec",
    "collective",
    "has_rule",
    "joined",
    "moved",
    "moves",
    "ruled",
]

Spec = tuple[tuple[str, ...], ...]
ADVISED = "{by the means at hand}"  # in advice: the typer writes how the program at hand is told a layout
UNSHARDED = "computes with unsharded operands"  # a callback, or what neither JAX nor we can type


class Move(NamedTuple):
    """A communication: "sum", "gather" or "exchange", over mesh axes."""

    kind: str
    axes: tuple[str, ...]


def moved(kind: str, axes: Iterable[str]) -> Counter[Move]:
    """Return one communication over axes, or none where there are none."""
    over = tuple(sorted(axes))
    return Counter([Move(kind, over)] if over else [])


# The result is the same tensor, seen another way.
KEEPS_A_PARAMETER = {
    "convert_element_type", "transpose", "slice", "dynamic_slice", "reshape", "squeeze", "broadcast_in_dim", "copy",
    "copy_p",
    "stop_gradient", "optimization_barrier", "gather",
}  # fmt: skip


@dataclass(frozen=True)
class Operand:
    """A value of the program.

    Attributes:
        aval: its shape and dtype.
        spec: for each dim the axes that split it.
        parameter: the tensor of the model that it is, or "".
        literal: the constant that it is, or None.
    """

    aval: Any
    spec: Spec
    parameter: str = ""
    literal: Any = None

    @staticmethod
    def unsharded(aval: Any, *, literal: Any = None) -> Operand:
        return Operand(aval, ((),) * len(getattr(aval, "shape", ())), "", literal)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.aval.shape)

    @property
    def text(self) -> str:
        """Sizes with axes, as in `256@dp 16 (512)@tp`; before it a parameter's name."""
        dims = [
            str(n) + (f"@({','.join(a)})" if len(a) > 1 else f"@{a[0]}" if a else "")
            for n, a in zip(self.shape, self.spec, strict=True)
        ]
        return f"{self.parameter + ' ' if self.parameter else ''}({' '.join(dims)})"


@dataclass(frozen=True)
class Ruling:
    """The sharding of a primitive's results, and the communication, as declared and beyond."""

    outs: tuple[Spec, ...]
    moved: Counter[Move] = field(default_factory=Counter)
    reshards: tuple[str, ...] = ()


class Conflict(Exception):
    """Operands that do not say one thing; `outs` is what to go on with."""

    def __init__(self, text: str, advice: str = "", outs: tuple[Spec, ...] = ()) -> None:
        super().__init__(text)
        self.text, self.advice, self.outs = text, advice, outs


Rule = Callable[[Any, Sequence[Operand], MeshShape], Ruling]
_RULES: dict[str, Rule] = {}


def has_rule(eqn: Any) -> bool:
    """Return whether a primitive has a rule here, so that JAX need not decide."""
    return eqn.primitive.name in _RULES


def ruled(eqn: Any, operands: Sequence[Operand], asked: tuple[Spec, ...] | None, shape: MeshShape) -> Ruling | None:
    """Return our ruling if there is one, else JAX's; None where both need unsharded operands.

    Raises:
        Conflict: the operands contradict each other.
    """
    name = eqn.primitive.name
    if name in _RULES:
        return _RULES[name](eqn, operands, shape)
    if asked is not None:
        if name == "reduce" or name.startswith(("reduce_", "arg")):
            return Ruling(asked, moved("sum", _reduced(eqn, operands)))
        lost = any(_axes(o.spec) for o in operands) and not any(map(_axes, asked))
        return Ruling(asked, reshards=(UNSHARDED,) if lost else ())
    if name in _JOINED:
        return _elementwise(eqn, operands)
    along = _along(eqn, operands)
    if along is not None:
        specs = tuple(tuple(() if d in along else a for d, a in enumerate(o.spec)) for o in operands)
        outs = tuple(_like(var, operands, specs) for var in eqn.outvars)
        return Ruling(outs, reshards=("runs along a dim that is sharded",))
    return None


def moves(before: Spec, after: Spec) -> Counter[Move]:
    """Return the communication that changes a sharding; none where the value is only sliced."""
    lost = [set(a) - set(b) for a, b in zip(before, after, strict=True)]
    have, wanted = _axes(before), _axes(after)
    return moved("exchange", {a for axes in lost for a in axes} & wanted) + moved("gather", have - wanted)


def _axes(spec: Spec) -> set[str]:
    return {axis for axes in spec for axis in axes}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


def _reduced(eqn: Any, operands: Sequence[Operand]) -> tuple[str, ...]:
    dims = eqn.params.get("axes", eqn.params.get("dimensions", ()))
    return tuple(axis for dim in dims for axis in operands[0].spec[dim])


# --- collectives of shard_map -----------------------------------------------------------------------------------------

_COLLECTIVES = {
    "psum": "sum",
    "pmax": "sum",
    "pmin": "sum",
    "reduce_scatter": "sum",
    "all_gather": "gather",
    "all_to_all": "exchange",
    "ppermute": "exchange",
    "pvary": "",
    "pcast": "",
    "pbroadcast": "",
}


def collective(eqn: Any, operands: Sequence[Operand], shape: MeshShape) -> Ruling | None:
    """Rule a collective over manual axes: axes that are not manual stay where the shape stays."""
    kind = next((kind for name, kind in _COLLECTIVES.items() if eqn.primitive.name.startswith(name)), None)
    if kind is None:
        return None
    over = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    axes = [axis for axis in (over if isinstance(over, tuple) else (over,)) if isinstance(axis, str)]
    specs = [operand.spec for operand in operands]
    outs = tuple(_like(var, [one], [one.spec]) for var, one in zip(eqn.outvars, operands, strict=True))
    lost = any(set(spec) - set(out) for spec, out in zip(specs, outs, strict=True))
    reshards = ("changes a dim that is sharded over an axis of another kind",) if lost else ()
    return Ruling(outs, moved(kind, [axis for axis in axes if kind and shape[axis] > 1]), reshards)


# --- dims that are joined -------------------------------------------------------------------------------------------

_ELEMENTWISE = """add add_any sub mul div rem max min pow atan2 nextafter and or xor eq ne lt le gt ge select_n clamp
complex shift_left shift_right_logical shift_right_arithmetic igamma igammac"""
_JOINED = frozenset(_ELEMENTWISE.split())


def _elementwise(eqn: Any, operands: Sequence[Operand]) -> Ruling:
    """Rule an elementwise primitive: operands that are not sharded are sliced as the others."""
    arrays = [o for o in operands if len(o.spec) == len(eqn.outvars[0].aval.shape) and o.spec]
    return Ruling((joined([o.spec for o in arrays]),))


def joined(specs: Sequence[Spec]) -> Spec:
    """Return the one sharding that all values can have.

    Raises:
        Conflict: there is none.
    """
    dims, unlike = [], []
    for dim, entries in enumerate(zip(*specs, strict=True)):
        given_axes = list(dict.fromkeys(e for e in entries if e))
        if len(given_axes) > 1:
            unlike.append((dim, given_axes))
        dims.append(given_axes[0] if given_axes else ())
    clean = _without_repeats(dims)
    if unlike:
        dim, given_axes = unlike[0]
        raise Conflict(
            f"dim {dim} is sharded over {_named(given_axes[0])} in one operand and over {_named(given_axes[1])} in "
            "another",
            f"One of the two has to be redistributed, and no rule says which: give both the same layout, {ADVISED}.",
            (clean,),
        )
    if clean != tuple(dims):
        axis = next(a for a in _axes(tuple(dims)) if sum(a in d for d in dims) > 1)
        first, second = [d for d, axes in enumerate(dims) if axis in axes][:2]
        raise Conflict(
            f"axis {axis} shards dim {first} in one operand and dim {second} in another",
            f"An axis shards one dim of a value: replicate one of the operands, {ADVISED}.",
            (clean,),
        )
    return clean


def _without_repeats(dims: Sequence[tuple[str, ...]]) -> Spec:
    used: set[str] = set()
    kept = []
    for axes in dims:
        kept.append(tuple(a for a in axes if a not in used))
        used |= set(axes)
    return tuple(kept)


def _named(axes: Sequence[str]) -> str:
    return ",".join(axes)


# --- products -------------------------------------------------------------------------------------------------------


@_rule("dot_general")
def _product(eqn: Any, operands: Sequence[Operand], shape: MeshShape) -> Ruling:
    (left_in, right_in), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    left, right = operands
    left, right, gathered = _gathered_on_a_grid(left, right, (left_in, left_batch), (right_in, right_batch))
    batch = [_agreed(left.spec[a], right.spec[b], "batch dim") for a, b in zip(left_batch, right_batch, strict=True)]
    free = [
        o.spec[d]
        for o, given in ((left, (*left_in, *left_batch)), (right, (*right_in, *right_batch)))
        for d in range(len(o.spec))
        if d not in given
    ]
    out = _without_repeats([*batch, *free])
    summed = _contracted(left, right, left_in, right_in, out, shape)
    if out != (*batch, *free):
        axis = next(a for a in _axes((*batch, *free)) if sum(a in d for d in (*batch, *free)) > 1)
        raise Conflict(
            f"axis {axis} would shard two dims of the result, one from each operand",
            f"Replicate one operand over {axis}, {ADVISED}, or leave its rule out.",
            (out,),
        )
    return Ruling((out,), moved("sum", summed) + gathered)


def _gathered_on_a_grid(
    left: Operand, right: Operand, left_dims: Sequence[Sequence[int]], right_dims: Sequence[Sequence[int]]
) -> tuple[Operand, Operand, Counter[Move]]:
    """Gather operands for a product with a matrix both of whose dims are split; return them, and the gathers.

    Where the two are split over one axis by dims that do not go together, one is gathered over it, as in SUMMA: the
    matrix, if its contracted dim is; else what it is applied to.
    """
    if bool(left.parameter) == bool(right.parameter):
        return left, right, Counter()
    (weight, w_dims), (x, x_dims) = ((left, left_dims), (right, right_dims))[:: 1 if left.parameter else -1]
    inner, kept = _split_over(weight, *w_dims)
    if not (inner and kept):
        return left, right, Counter()
    x_inner, x_kept = _split_over(x, *x_dims)
    x_whole, w_whole = (x_inner | x_kept) & kept, inner & x_kept
    weight, x = _whole_over(weight, w_whole), _whole_over(x, x_whole)
    count = moved("gather", x_whole) + moved("gather", w_whole)
    return (weight, x, count) if left.parameter else (x, weight, count)


def _whole_over(one: Operand, gathered: set[str]) -> Operand:
    return dataclasses.replace(one, spec=tuple(tuple(axis for axis in dim if axis not in gathered) for dim in one.spec))


def _split_over(one: Operand, contracted: Sequence[int], batch: Sequence[int]) -> tuple[set[str], set[str]]:
    """Return the axes of contracted dims, and those of dims that are neither contracted nor batch dims."""
    inner = {axis for dim in contracted for axis in one.spec[dim]}
    return inner, _axes(tuple(axes for dim, axes in enumerate(one.spec) if dim not in batch)) - inner


def _agreed(one: tuple[str, ...], other: tuple[str, ...], what: str) -> tuple[str, ...]:
    if one and other and one != other:
        raise Conflict(
            f"a {what} is sharded over {_named(one)} in one operand and over {_named(other)} in the other",
            f"Give both the same layout, {ADVISED}.",
        )
    return one or other


def _contracted(
    left: Operand, right: Operand, left_in: Sequence[int], right_in: Sequence[int], out: Spec, shape: MeshShape
) -> set[str]:
    """Return the axes over which a product is summed."""
    summed: set[str] = set()
    for a, b in zip(left_in, right_in, strict=True):
        one, other = left.spec[a], right.spec[b]
        if one and other and one != other:
            raise Conflict(
                f"the contracted dim is sharded over {_named(one)} in one operand and over {_named(other)} in the "
                "other",
                "Shard it over the same axes in both.",
                (out,),
            )
        if bool(one) != bool(other):
            _one_sided(left, right, one, other, out, shape)
        summed |= set(one or other)
        if one and one == other and not (left.parameter or right.parameter):
            _refuse_unasked(one, out, shape)
    if twice := summed & _axes(out):
        raise Conflict(
            f"axis {_named(sorted(twice))} shards the contracted dim and a dim of the result",
            "Shard one of the two.",
            (tuple(tuple(axis for axis in axes if axis not in twice) for axes in out),),
        )
    return summed


def _one_sided(
    left: Operand, right: Operand, one: tuple[str, ...], other: tuple[str, ...], out: Spec, shape: MeshShape
) -> None:
    """Rule a row-parallel product: a parameter is split where it is contracted, and the other operand is sliced for
    free. So is what meets the rows of a batch, as a cotangent does that is equal for all of them."""
    split, unsharded = (left, right) if one else (right, left)
    axes = one or other
    if clash := set(axes) & _axes(unsharded.spec):
        raise Conflict(
            f"the contracted dim is sharded over {_named(axes)} in one operand only, and {_named(sorted(clash))} "
            "shards another dim of the other one",
            "Column-parallel after column-parallel? Shard the second weight where it is contracted (rowwise), or "
            f"replicate the activation, {ADVISED}.",
            (out,),
        )
    if not split.parameter and not set(axes) <= set(shape.data_axes):
        raise Conflict(
            f"the contracted dim is sharded over {_named(axes)} in one operand only",
            f'Shard it in both, as "rowwise" does for a weight, or replicate the activation, {ADVISED}.',
            (out,),
        )


def _refuse_unasked(axes: tuple[str, ...], out: Spec, shape: MeshShape) -> None:
    if model := [axis for axis in axes if axis in shape.model_axes]:
        raise Conflict(
            f"the result is a partial sum over {_named(model)} that no rule asks for: two activations are contracted "
            "over a dim that both shard",
            f"Shard another dim of both, such as that of heads, or replicate them, {ADVISED}.",
            (out,),
        )


@_rule("conv_general_dilated")
def _convolution(eqn: Any, operands: Sequence[Operand], shape: MeshShape) -> Ruling:
    numbers, (x, kernel) = eqn.params["dimension_numbers"], operands
    x_at, k_at, y_at = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    dims: list[tuple[str, ...]] = [()] * len(x.spec)
    dims[y_at[0]], dims[y_at[1]] = x.spec[x_at[0]], kernel.spec[k_at[0]]
    out = _without_repeats(dims)
    grouped = eqn.params["feature_group_count"] > 1 or eqn.params["batch_group_count"] > 1
    halo = tuple("a window runs over a dim that is sharded" for d in x_at[2:] if x.spec[d])[:1]
    if grouped:
        unsharded = tuple(() if d == y_at[1] else a for d, a in enumerate(out))
        split = x.spec[x_at[1]] or kernel.spec[k_at[0]]
        return Ruling((unsharded,), reshards=(*halo, *(["computes groups of sharded channels"] if split else [])))
    summed = _contracted(x, kernel, (x_at[1],), (k_at[1],), out, shape)
    return Ruling((out,), moved("sum", summed), halo)


# --- dims that come apart or together -------------------------------------------------------------------------------


@_rule("reshape")
def _reshape(eqn: Any, operands: Sequence[Operand], shape: MeshShape) -> Ruling:
    """Rule a reshape: axes go to the outermost of the dims that a split dim is divided into, as far as they divide
    it."""
    old, new = operands[0].shape, tuple(eqn.outvars[0].aval.shape)
    if 0 in old:
        return Ruling((((),) * len(new),))
    out: list[tuple[str, ...]] = [()] * len(new)
    lost: list[str] = []
    for sources, targets in _groups(old, new):
        pieces = [axis for d in sources for axis in operands[0].spec[d]]
        placed = _placed(operands[0], sources, targets, new, shape)
        for d, axes in placed.items():
            out[d] = axes
        kept = [axis for axes in placed.values() for axis in axes]
        lost += [axis for axis in pieces if axis not in kept]
    reshards = (f"shards of {_named(lost)} do not stay contiguous: {old} becomes {new}",) if lost else ()
    return Ruling((tuple(out),), reshards=reshards)


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return the shortest runs of dims of both shapes that hold the same elements."""
    found, i, j = [], 0, 0
    while i < len(old) and j < len(new):
        start, to, have, want = i, j, old[i], new[j]
        while have != want:
            if have < want:
                i += 1
                have *= old[i]
            else:
                j += 1
                want *= new[j]
        i, j = i + 1, j + 1
        found.append((list(range(start, i)), list(range(to, j))))
    return found  # what is left on either side has one element a dim


def _placed(
    x: Operand, sources: list[int], targets: list[int], new: Sequence[int], shape: MeshShape
) -> dict[int, tuple[str, ...]]:
    """Return the axes of a run's new dims; axes of inner dims stay only where each device has one outer index."""
    axes: list[str] = []
    for d in sources:
        axes += x.spec[d]
        if math.prod(shape[axis] for axis in x.spec[d]) != x.shape[d]:
            break
    return _outermost(tuple(axes), targets, new, shape)


def _outermost(
    axes: tuple[str, ...], targets: Sequence[int], new: Sequence[int], shape: MeshShape
) -> dict[int, tuple[str, ...]]:
    """Assign axes to dims; an axis goes to the next dim only where the one before has one element per device."""
    placed: dict[int, tuple[str, ...]] = {}
    left = list(axes)
    for d in targets:
        size, own = new[d], list[str]()
        while left and size % shape[left[0]] == 0:
            size //= shape[left[0]]
            own.append(left.pop(0))
        if own:
            placed[d] = tuple(own)
        if size > 1 or not left:
            break
    return placed


@_rule("slice", "dynamic_slice", "pad", "rev")
def _cut(eqn: Any, operands: Sequence[Operand], shape: MeshShape) -> Ruling:
    """Rule a slice: a sliced dim must be unsharded."""
    x, new = operands[0], tuple(eqn.outvars[0].aval.shape)
    turned = eqn.params.get("dimensions", ()) if eqn.primitive.name == "rev" else ()
    out = tuple(
        () if n != m or d in turned else a for d, (n, m, a) in enumerate(zip(x.shape, new, x.spec, strict=True))
    )
    reshards = ("takes a slice of a dim that is sharded",) if out != x.spec else ()
    return Ruling((out,), reshards=reshards)


@_rule("dynamic_update_slice")
def _written(eqn: Any, operands: Sequence[Operand], shape: MeshShape) -> Ruling:
    """Rule a write to a slice, as to a cache: dims that it fills have one layout in both, others are as before."""
    x, update = operands[:2]
    filled = [n == m for n, m in zip(x.shape, update.shape, strict=True)]
    inner = tuple(axes if full else () for full, axes in zip(filled, update.spec, strict=True))
    at_part = any(a or b for full, a, b in zip(filled, x.spec, update.spec, strict=True) if not full)
    return Ruling((joined([x.spec, inner]),), reshards=("writes to a slice of a dim that is sharded",) * at_part)


@_rule("concatenate")
def _concatenated(eqn: Any, operands: Sequence[Operand], shape: MeshShape) -> Ruling:
    at = eqn.params["dimension"]
    specs = [tuple(() if d == at else a for d, a in enumerate(o.spec)) for o in operands]
    reshards = ("concatenates along a dim that is sharded",) if any(o.spec[at] for o in operands) else ()
    return Ruling((joined(specs),), reshards=reshards)


@_rule("split")
def _parted(eqn: Any, operands: Sequence[Operand], shape: MeshShape) -> Ruling:
    at, x = eqn.params["axis"], operands[0]
    out = tuple(() if d == at else a for d, a in enumerate(x.spec))
    return Ruling((out,) * len(eqn.outvars), reshards=("takes a slice of a dim that is sharded",) if x.spec[at] else ())


# --- look-ups -------------------------------------------------------------------------------------------------------


@_rule("gather")
def _gathered(eqn: Any, operands: Sequence[Operand], shape: MeshShape) -> Ruling:
    """Rule a lookup in a table split by rows: each device looks up its own rows, and the results are summed, as in
    Megatron."""
    x, index = operands[0], operands[1]
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    batching = tuple(getattr(numbers, "operand_batching_dims", ()))
    index_batching = tuple(getattr(numbers, "start_indices_batching_dims", ()))
    kept = [d for d in range(len(x.spec)) if d not in numbers.collapsed_slice_dims and d not in batching]
    ndim = len(eqn.outvars[0].aval.shape)
    out: list[tuple[str, ...]] = [()] * ndim
    reshards: list[str] = []
    for at, d in zip(numbers.offset_dims, kept, strict=True):
        if sizes[d] == x.shape[d]:
            out[at] = x.spec[d]
        elif x.spec[d]:
            reshards.append("looks up slices of a dim that is sharded")
    own = [d for d in range(ndim) if d not in numbers.offset_dims]
    for at, d in zip(own, range(len(index.spec) - 1), strict=True):
        out[at] = index.spec[d]
        if d in index_batching:
            out[at] = _agreed(index.spec[d], x.spec[batching[index_batching.index(d)]], "batch dim")
    summed = {a for d in numbers.collapsed_slice_dims for a in x.spec[d]}
    clean = _without_repeats(out)
    if clean != tuple(out) or summed & _axes(clean):
        axis = sorted((summed & _axes(clean)) or {a for a in _axes(tuple(out)) if sum(a in d for d in out) > 1})[0]
        raise Conflict(
            f"axis {axis} shards the table and the indices that are looked up in it",
            "Replicate the indices, or the table, over it.",
            (clean,),
        )
    return Ruling((clean,), moved("sum", summed), tuple(reshards))


@_rule("scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter-min", "scatter-max")
def _scattered(eqn: Any, operands: Sequence[Operand], shape: MeshShape) -> Ruling:
    """Rule a scatter: the result is sharded as its destination or, if that is not sharded, as the written rows."""
    x, index, updates = operands
    numbers = eqn.params["dimension_numbers"]
    batching = tuple(getattr(numbers, "operand_batching_dims", ()))
    index_batching = tuple(getattr(numbers, "scatter_indices_batching_dims", ()))
    left = (*numbers.inserted_window_dims, *batching)
    out, reshards = list(x.spec), []
    for at, d in zip(numbers.update_window_dims, [d for d in range(len(x.spec)) if d not in left], strict=True):
        if updates.spec[at] and not out[d] and updates.shape[at] == x.shape[d]:
            out[d] = updates.spec[at]
        elif (updates.spec[at] or updates.shape[at] != x.shape[d]) and updates.spec[at] != out[d]:
            reshards.append("writes to a slice of a dim that is sharded")
    own = [d for d in range(len(updates.spec)) if d not in numbers.update_window_dims]
    rows = set[str]()
    for d, at in zip(range(len(index.spec) - 1), own, strict=True):  # the last dim of the indices is a coordinate
        axes = _agreed(index.spec[d], updates.spec[at], "dim of rows")
        if d in index_batching:
            dim = batching[index_batching.index(d)]
            out[dim] = _agreed(out[dim], axes, "batch dim")
        else:
            rows |= set(axes)
    adds = "add" in eqn.primitive.name
    if not adds and (rows or any(x.spec[d] for d in numbers.scatter_dims_to_operand_dims)):
        reshards.append("writes to places that other devices hold")
    clean = _without_repeats(out)
    return Ruling((clean,), moved("sum", rows - _axes(clean) if adds else ()), tuple(reshards[:1]))


# --- dims that are run along ----------------------------------------------------------------------------------------


def _along(eqn: Any, operands: Sequence[Operand]) -> set[int] | None:
    """Return the dims that a primitive needs unsharded."""
    name, ndim = eqn.primitive.name, len(operands[0].spec)
    if name == "sort":
        return {eqn.params["dimension"] % ndim}
    if name.startswith("cum"):
        return {eqn.params["axis"] % ndim}
    if name == "top_k":
        return {eqn.params.get("operand_axis", eqn.params.get("axis", -1)) % ndim}
    if name.startswith("reduce_window"):
        return {d for d, n in enumerate(eqn.params["window_dimensions"]) if n != 1}
    return None


def _like(var: Any, operands: Sequence[Operand], specs: Sequence[Spec]) -> Spec:
    """Return the sharding of the first operand with as many dims as the result, for dims of the same size."""
    for operand, spec in zip(operands, specs, strict=True):
        if len(spec) == len(var.aval.shape):
            return tuple(a if n == m else () for a, n, m in zip(spec, operand.shape, var.aval.shape, strict=True))
    return ((),) * len(var.aval.shape)

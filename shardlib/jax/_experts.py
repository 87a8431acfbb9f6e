"""Experts on JAX: pairs of a token and a chosen expert in blocks of static shape, each of one expert.

A program has static shapes, and the number of tokens that choose an expert is a value. Pairs are sorted by expert, and
each expert has as many blocks as its pairs need; what is left of its last block is padding. For P pairs and E experts,
blocks of P / E pairs are at most 2 E whatever the choices are, so that nothing is dropped and less than 2 P + E rows
are computed (as in Gale et al., "MegaBlocks", arXiv 2211.15841, section 5, whose blocks a kernel skips).

Data ranks route their own tokens. Where experts are sharded over an axis, its ranks gather the tokens of all, compute
the pairs of their experts, and scatter the sums: a rank can get every pair, so there are blocks for as many. With a
capacity, each expert takes so many pairs of each rank, which an all-to-all exchanges.

Padding repeats a pair of the same expert, whose numbers are finite if the model's are: a gradient of zero times
infinity would not be zero.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from shardlib.errors import InputError
from shardlib.jax._bits import to_numpy
from shardlib.jax._borders import Constraints
from shardlib.jax._context import by_shard, manual_axes
from shardlib.jax._dtypes import as_dtype
from shardlib.jax._export import Graph
from shardlib.jax._fused import Fused, unfused, with_parts
from shardlib.jax._interpreter import run
from shardlib.jax._opaque import OP
from shardlib.jax._table import lowering

__all__: list[str] = []

Array = Any
# Takes one expert's parameters, a token and its weight.
One = Callable[[Sequence[Array], Array, Array], Array]


@with_parts(f"{OP}.default")
@lowering(f"{OP}.default", constrained=True)
def _experts(
    tokens: Any,
    numbers: Any,
    weights: Any,
    params: Sequence[Any],
    program: int,
    dtype: Any,
    axis: str,
    capacity: float,
    *,
    constraints: Constraints,
) -> Array:
    tokens, numbers, weights = map(unfused, (tokens, numbers, weights))
    parts = [param.parts[1:] if isinstance(param, Fused) else None for param in params]
    arrays = [param.array if isinstance(param, Fused) else param for param in params]
    one = functools.partial(_one, constraints, constraints.programs[program], parts)
    if not len(tokens):
        return jnp.zeros(tokens.shape, as_dtype(dtype))
    if not isinstance(constraints.mesh, Mesh):
        return _without_routing(one, arrays, tokens, numbers, weights, axis, constraints)
    return _on_ranks(one, arrays, tokens, numbers, weights, axis, capacity, constraints)


def _one(
    constraints: Constraints, program: Graph, parts: Sequence[Any], params: Sequence[Array], token: Array, weight: Array
) -> Array:
    """Compute what one expert makes of one token."""
    own = [
        param[None] if sizes is None else Fused(param[None], ((1,), *sizes))
        for param, sizes in zip(params, parts, strict=True)
    ]
    given = iter((token[None], weight[None, None], *own))
    inputs = {
        node: next(given) if source.kind == "argument" else jnp.asarray(to_numpy(source.value))
        for node, source in program.sources.items()
    }
    inside = Constraints(program, (), constraints.mesh, constraints.shape, 0)
    return run(program, inputs, inside, None)[0][0][0]


def _without_routing(
    one: One,
    params: Sequence[Array],
    tokens: Array,
    numbers: Array,
    weights: Array,
    axis: str,
    constraints: Constraints,
) -> Array:
    """Give every expert all tokens: what is typed on a mesh without devices, since layouts do not depend on routing."""
    data = constraints.shape.data_axes if constraints.is_batch(tokens) else ()
    others = tuple(name for name in data if name != axis) or None
    tokens, numbers, weights = (constraints.split_along(x, others) for x in (tokens, numbers, weights))
    chosen = jnp.where(numbers[:, :, None] == jnp.arange(len(params[0])), weights[:, :, None], 0).sum(1)
    made = jax.vmap(jax.vmap(one, (None, 0, 0)), (0, None, 1))(params, tokens, chosen)
    return constraints.split_along(made.sum(0), data or None)


# --- ranks ----------------------------------------------------------------------------------------------------------


def _on_ranks(
    one: One,
    params: Sequence[Array],
    tokens: Array,
    numbers: Array,
    weights: Array,
    axis: str,
    capacity: float,
    constraints: Constraints,
) -> Array:
    """Let each data rank route its own tokens, if they are evenly many."""
    shape = constraints.shape
    data = tuple(name for name in shape.data_axes if shape[name] > 1 and name not in manual_axes())
    axis = axis if axis in data else ""
    is_split = len(tokens) % math.prod(shape[name] for name in data) == 0
    if capacity and not (is_split and axis):
        raise InputError(
            f"expert_capacity limits the choices of each data rank, and {len(tokens)} tokens do not divide evenly over "
            f"the ranks of {', '.join(data) or 'no axis'}. Call the model with a batch that they divide, outside of "
            "jax.shard_map, or leave expert_capacity out."
        )
    ranks = shape[axis] if axis else 1
    experts, count = len(params[0]), -(-len(params[0]) // ranks)
    if not data:
        return _by_blocks(one, params, tokens, numbers, weights)
    if missing := count * ranks - experts:
        params = [jnp.pad(p, [(0, missing), *[(0, 0)] * (p.ndim - 1)]) for p in params]

    def local(params: Sequence[Array], first: Array, tokens: Array, numbers: Array, weights: Array) -> Array:
        if capacity:
            limit = math.ceil(capacity * numbers.size / experts)
            return _exchanged(one, params, tokens, numbers, weights, axis, ranks, limit)
        if not axis:
            return _by_blocks(one, params, tokens, numbers, weights)
        if is_split:
            tokens, numbers, weights = (lax.all_gather(x, axis, tiled=True) for x in (tokens, numbers, weights))
        made = _by_blocks(one, params, tokens, numbers - first, weights)
        return lax.psum_scatter(made, axis, tiled=True) if is_split else lax.psum(made, axis)

    own, rows = PartitionSpec(axis or None), PartitionSpec(data if is_split else None)
    firsts = count * jnp.arange(ranks, dtype=numbers.dtype)
    run_local = by_shard(local, constraints.mesh, set(data), (own, own, rows, rows, rows), rows)
    return run_local(params, firsts, tokens, numbers, weights)


def _exchanged(
    one: One,
    params: Sequence[Array],
    tokens: Array,
    numbers: Array,
    weights: Array,
    axis: str,
    ranks: int,
    limit: int,
) -> Array:
    """Send each expert its first `limit` choices of this rank, all first choices before all second ones."""
    count = len(params[0])
    routes = _Routes.of(numbers, count * ranks)
    positions = jnp.where(routes.order < limit, routes.experts * limit + routes.order, -1)

    def to_experts(x: Array) -> Array:
        """(experts of all ranks, limit) of this rank -> (experts of this rank, limit of all ranks)."""
        x = lax.all_to_all(x.reshape(ranks, count, limit, *x.shape[2:]), axis, 0, 0)
        return jnp.moveaxis(x, 0, 1).reshape(count, ranks * limit, *x.shape[3:])

    def back(x: Array) -> Array:
        x = jnp.moveaxis(x.reshape(count, ranks, limit, *x.shape[2:]), 1, 0)
        return lax.all_to_all(x, axis, 0, 0).reshape(ranks * count, limit, *x.shape[3:])

    slots = _Slots.of(positions, (count * ranks, limit))
    rows, own, filled = map(to_experts, (*slots.gather(tokens, weights), slots.filled))
    made = _recomputed(functools.partial(_computed, one))(params, rows, own, filled)
    return slots.combine(back(made), numbers.shape)


def _by_blocks(one: One, params: Sequence[Array], tokens: Array, numbers: Array, weights: Array) -> Array:
    """Compute the choices of some experts, counted from the first of them; other numbers are other ranks' experts."""
    count, pairs = len(params[0]), numbers.size
    size, busy = -(-pairs // count), min(count, pairs)
    # `busy` experts have a first block each, and no more than this number of further pairs fill further blocks.
    blocks = busy + (pairs - busy) // size
    routes = _Routes.of(numbers, count)
    ends = jnp.cumsum(-(-routes.counts // size))
    firsts = jnp.append(0, ends)[routes.experts]
    positions = jnp.where(routes.experts < count, firsts * size + routes.order, -1)
    owners = jnp.minimum((ends <= jnp.arange(blocks)[:, None]).sum(1), count - 1)
    slots = _Slots.of(positions, (blocks, size))

    @_recomputed
    def computed(params: Sequence[Array], tokens: Array, weights: Array) -> Array:
        return _computed(one, [param[owners] for param in params], *slots.gather(tokens, weights), slots.filled)

    return slots.combine(computed(params, tokens, weights), numbers.shape)


def _recomputed(function: Callable[..., Array]) -> Callable[..., Array]:
    """Keep nothing but products for backward: a copy of each block's parameters would be larger than all experts."""
    return jax.checkpoint(function, policy=jax.checkpoint_policies.checkpoint_dots)  # type: ignore[no-any-return]


def _computed(one: One, params: Sequence[Array], rows: Array, weights: Array, filled: Array) -> Array:
    """Compute blocks of rows, each with the parameters of its expert; slots that are not filled repeat a filled one."""
    taken = jnp.where(filled, jnp.arange(filled.shape[1]), jnp.argmax(filled, 1)[:, None])
    rows, weights = jnp.take_along_axis(rows, taken[..., None], 1), jnp.take_along_axis(weights, taken, 1)
    used = filled.any(1)

    def guarded(x: Array) -> Array:
        return jnp.where(used.reshape(-1, *[1] * (x.ndim - 1)), x, 0)

    return jax.vmap(jax.vmap(one, (None, 0, 0)))([guarded(p) for p in params], guarded(rows), guarded(weights))


@dataclass(frozen=True)
class _Routes:
    """Choices in turn: all first choices, then all second ones.

    Attributes:
        experts: the expert of each choice; the number of experts where it is none of them.
        order: how many choices of the same expert are before it.
        counts: the number of choices of each expert.
    """

    experts: Array
    order: Array
    counts: Array

    @classmethod
    def of(cls, numbers: Array, count: int) -> _Routes:
        in_turn = numbers.T.reshape(-1)
        experts = jnp.where((in_turn >= 0) & (in_turn < count), in_turn, count)
        by_expert = jnp.argsort(experts, stable=True)
        counts = jnp.bincount(experts, length=count + 1)
        before = (jnp.cumsum(counts) - counts)[experts[by_expert]]
        order = jnp.zeros_like(by_expert).at[by_expert].set(jnp.arange(len(by_expert)) - before)
        return cls(experts, order, counts[:count])


@dataclass(frozen=True)
class _Slots:
    """Slots for choices in turn.

    Attributes:
        positions: the slot of each choice; -1 where it has none.
        choices: the choice in each slot.
        filled: whether there is one.
    """

    positions: Array
    choices: Array
    filled: Array

    @classmethod
    def of(cls, positions: Array, shape: tuple[int, int]) -> _Slots:
        count = math.prod(shape)
        at = jnp.where(positions >= 0, positions, count)  # beyond the end, where nothing is set
        choices = jnp.zeros(count, at.dtype).at[at].set(jnp.arange(len(at), dtype=at.dtype), mode="drop")
        filled = jnp.zeros(count, bool).at[at].set(True, mode="drop")
        return cls(positions, choices.reshape(shape), filled.reshape(shape))

    def gather(self, tokens: Array, weights: Array) -> tuple[Array, Array]:
        """Return the token and the weight in each slot."""
        return tokens[self.choices % len(tokens)], weights.T.reshape(-1)[self.choices]

    def combine(self, made: Array, shape: tuple[int, int]) -> Array:
        """Return for each token the sum of what its choices give."""
        flat = made.reshape(-1, *made.shape[2:])
        each = jnp.where(self.positions[:, None] >= 0, flat[self.positions], 0)
        return each.reshape(*shape[::-1], -1).sum(0)

"""Experts that lie on different ranks: a token goes to the ranks that have its experts, and one result comes back.

A module of experts holds all of them in parameters whose first dim counts them, and is called, as those of transformers
are, with tokens (token, embed), the numbers of their experts (token, choice) and the weights of these (token, choice);
it returns (token, embed). Where a rule spreads the first dim over an expert axis, whose ranks carry different tokens,
the module runs on its rank's experts, on all tokens that come to them, and knows nothing of it. Each token travels to a
rank once, however many of its experts are there. What they make of it is added up before it travels back, in the dtype
of tokens. No token is dropped unless the plan sets a capacity.

    forward    numbers of tokens -> tokens, experts' numbers, weights ... run ... results <-
    backward   gradients of results -> ... gradients of tokens and weights <-

An expert's gradient is complete where it lies: of all tokens of the axis. It is divided by the axis' ranks, for the
loss is the mean of theirs, and is then summed over the other data axes alone.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shardlib.engine import _torch
from shardlib.engine.borders import moved
from shardlib.engine.lost import naming_lost_ranks_in_backward
from shardlib.engine.plain import plain
from shardlib.engine.region import made_global, made_plain
from shardlib.errors import InputError, PlanError

__all__ = ["Spread", "install", "refuse_dropout"]

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
# What modules call the number of experts that they hold; they are told that of their rank's while they run.
_COUNTS = ("num_experts", "num_local_experts", "n_experts", "n_routed_experts")


@dataclass(frozen=True)
class Spread:
    """How the experts of one module lie.

    Attributes:
        name: of the module.
        keys: of its parameters whose first dim counts experts.
        bounds: the first expert of each rank of the axis, and behind them how many there are.
        group: the ranks of the axis, in its order.
        index: this rank's place in it.
        inner: the mesh on which each expert is split, where it is.
        capacity: what a rank's tokens may ask of an expert, as a multiple of the mean; None is without limit.
    """

    name: str
    keys: tuple[str, ...]
    bounds: tuple[int, ...]
    group: dist.ProcessGroup
    index: int
    inner: DeviceMesh | None = None
    capacity: float | None = None

    @property
    def ranks(self) -> int:
        return len(self.bounds) - 1

    @property
    def experts(self) -> int:
        return self.bounds[-1]

    @property
    def own(self) -> int:
        return self.bounds[self.index + 1] - self.bounds[self.index]


def install(module: nn.Module, spread: Spread) -> Callable[[], None]:
    """Let a module of experts run on the tokens of all ranks; returns what undoes it."""
    inner, before = module.forward, module.__dict__.get("forward")
    signature = inspect.signature(inner)

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        given = signature.bind(*args, **kwargs).arguments
        if len(given) != 3:
            raise InputError(
                f'"{spread.name}", whose experts lie on {spread.ranks} ranks, was called with {", ".join(given)}. Give '
                "tokens, the numbers of their experts, and the weights of these, and nothing else."
            )
        return _run(module, inner, spread, *given.values())

    module.forward = forward

    def undo() -> None:
        if before is None:
            del module.forward
        else:
            module.forward = before

    return undo


def refuse_dropout(name: str, module: nn.Module) -> None:
    """Refuse what draws random numbers by element where elements come from other ranks.

    Raises:
        PlanError: a module of experts has dropout of its own.
    """
    for child_name, child in module.named_modules():
        if isinstance(child, _DROPOUT) and child.p > 0:
            raise PlanError(
                f'"{name}.{child_name}" drops elements of tokens that come from other ranks, and rng="exact" draws by '
                'the place that a token has in the batch. Put the dropout behind the experts, or use rng="fast".'
            )


def _run(
    module: nn.Module,
    inner: Callable[..., torch.Tensor],
    spread: Spread,
    tokens: torch.Tensor,
    numbers: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    mesh = next((given.device_mesh for given in (tokens, weights) if isinstance(given, DTensor)), None)
    tokens, weights = made_plain(tokens), made_plain(weights)
    numbers = plain(numbers)
    _refuse_other_shapes(spread, tokens, numbers, weights)
    if spread.capacity is not None:
        numbers = _within_capacity(numbers, spread)
    route = _Route.of(numbers, spread)
    made = _run_here(module, inner, spread, *route.go(tokens, numbers, weights), pairs=route.pairs)
    result = route.back(made, tokens)
    return result if mesh is None else made_global(result, mesh)


def _run_here(
    module: nn.Module,
    inner: Callable[..., torch.Tensor],
    spread: Spread,
    tokens: torch.Tensor,
    numbers: torch.Tensor,
    weights: torch.Tensor,
    *,
    pairs: int | None = None,
) -> torch.Tensor:
    """What this rank's experts make of the tokens that have come, weighted and added up for each of them.

    `numbers` are counted from this rank's first expert, and -1 where a choice is another rank's; `pairs` is how many
    are not, where they cannot be read.
    """
    if pairs is None:
        row, choice = (numbers >= 0).nonzero(as_tuple=True)
    else:
        row = choice = numbers.new_zeros(pairs)
    if not row.numel():
        return _Unvisited.apply(tokens, weights, *(_torch.own_tensors(module)[0][key] for key in spread.keys))
    with _own_experts(module, spread):
        each = row.numel() > tokens.shape[0]  # then some have come for several experts
        made = _inside(
            inner, spread.inner, tokens[row] if each else tokens, numbers[row, choice, None], weights[row, choice, None]
        )
    made = made.to(tokens.dtype)  # which all ranks know, those that nothing came to as well
    return tokens.new_zeros(tokens.shape).index_add(0, row, made) if each else made


def _inside(
    inner: Callable[..., torch.Tensor],
    mesh: DeviceMesh | None,
    tokens: torch.Tensor,
    numbers: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    if mesh is None:
        return inner(tokens, numbers, weights)
    return made_plain(inner(made_global(tokens, mesh), numbers, made_global(weights, mesh)))


@contextmanager
def _own_experts(module: nn.Module, spread: Spread) -> Iterator[None]:
    """The module has this rank's experts alone, as tensors that are plain or, where experts are split, whole for all
    that it sees."""
    held = _torch.own_tensors(module)[0]
    before = {key: held[key] for key in spread.keys}
    counts = {name: getattr(module, name) for name in _COUNTS if getattr(module, name, None) == spread.experts}
    try:
        for key, param in before.items():
            held[key] = _Own.apply(param, spread.own, spread.inner, 1.0 / spread.ranks)
        for name in counts:
            setattr(module, name, spread.own)
        yield
    finally:
        held.update(before)
        for name, count in counts.items():
            setattr(module, name, count)


class _Own(torch.autograd.Function):
    """The experts that this rank has of a parameter; its gradient is multiplied with `share`."""

    @staticmethod
    def forward(ctx: Any, param: DTensor, own: int, inner: DeviceMesh | None, share: float) -> torch.Tensor:  # type: ignore[override]
        ctx.spec, ctx.share, ctx.placements = _torch.spec_of(param), share, ()
        local = _torch.local_of(param)
        if inner is None:
            return local.view_as(local)
        names = inner.mesh_dim_names or ()
        by_axis = dict(zip(param.device_mesh.mesh_dim_names or (), param.placements, strict=True))
        ctx.placements = tuple(by_axis.get(name, Replicate()) for name in names)
        return _torch.wrap(local, _torch.spec(inner, ctx.placements, (own, *param.shape[1:]), param.dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        if isinstance(grad, DTensor):
            grad = _torch.local_of(grad if grad.placements == ctx.placements else moved(grad, ctx.placements))
        return _torch.wrap(grad * ctx.share, ctx.spec), None, None, None


class _Unvisited(torch.autograd.Function):
    """What experts make of no tokens. All have a gradient all the same, of zeros: where others wait for one, in
    backward, this rank must not fall out."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weights: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.alike = [weights.new_empty(weights.shape), *params]
        ctx.needed = [given.requires_grad for given in ctx.alike]
        return tokens.new_zeros(tokens.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return grad.new_zeros(grad.shape), *(_zeros(like) for like in ctx.alike)


def _zeros(like: torch.Tensor) -> torch.Tensor:
    if isinstance(like, DTensor):
        return _torch.wrap(torch.zeros_like(_torch.local_of(like)), _torch.spec_of(like))
    return torch.zeros_like(like)


@dataclass(frozen=True)
class _Route:
    """Where this rank's tokens go, and how many come.

    Attributes:
        rows: this rank's tokens in the order in which they are sent: rank by rank; a token stands there once for each
            rank that it goes to.
        to: that rank, for each of them.
        sent, received: how many go to, and come from, each rank.
        pairs: in a dry run, how many choices of this rank's experts come.
    """

    spread: Spread
    rows: torch.Tensor
    to: torch.Tensor
    sent: list[int]
    received: list[int]
    pairs: int | None = None

    @classmethod
    def of(cls, numbers: torch.Tensor, spread: Spread) -> _Route:
        """Of experts' numbers; those beyond the last expert ask for none."""
        bounds = torch.tensor(spread.bounds[1:], device=numbers.device)
        asked = numbers.new_zeros((numbers.shape[0], spread.ranks + 1), dtype=torch.bool)
        asked.scatter_(1, torch.bucketize(numbers, bounds, right=True), True)
        asked = asked[:, : spread.ranks]
        counts = asked.sum(0)
        coming = torch.empty_like(counts)
        _all_to_all(coming, counts, None, None, spread.group)
        if not _torch.has_values(numbers):
            return cls._expected(numbers, spread)
        to, rows = asked.t().nonzero(as_tuple=True)
        return cls(spread, rows, to, counts.tolist(), coming.tolist())

    @classmethod
    def _expected(cls, numbers: torch.Tensor, spread: Spread) -> _Route:
        """Where every expert is as popular as any other: a token misses a rank if it chooses among the others'."""
        tokens, choices = numbers.shape
        every = math.comb(spread.experts, choices)
        own = [end - start for start, end in itertools.pairwise(spread.bounds)]
        sent = [round(tokens * (1 - math.comb(spread.experts - held, choices) / every)) for held in own]
        rows = numbers.new_zeros(sum(sent))
        pairs = round(spread.ranks * tokens * choices * spread.own / spread.experts)
        return cls(spread, rows, rows, sent, [sent[spread.index]] * spread.ranks, pairs)

    def go(
        self, tokens: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tokens that come to this rank's experts, these experts' numbers here, and their weights."""
        first = torch.tensor(self.spread.bounds, device=numbers.device)
        here, end = first[self.to][:, None], first[self.to + 1][:, None]
        asked = numbers[self.rows]
        asked = torch.where((asked >= here) & (asked < end), asked - here, -1)
        return self._sent(tokens[self.rows]), self._sent(asked), self._sent(weights[self.rows])

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        return _Exchanged.apply(tensor, self.sent, self.received, self.spread.group)

    def back(self, made: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """What all ranks made of this rank's tokens, added up."""
        results = _Exchanged.apply(made, self.received, self.sent, self.spread.group)
        return tokens.new_zeros(tokens.shape).index_add(0, self.rows, results)


class _Exchanged(torch.autograd.Function):
    """Rows that go to each rank, for those that come; gradients go the other way."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.way = received, sent, group
        out = rows.new_empty((sum(received), *rows.shape[1:]))
        _all_to_all(out, rows.contiguous(), received, sent, group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return _Exchanged.apply(grad, *ctx.way), None, None, None


@naming_lost_ranks_in_backward
def _all_to_all(
    out: torch.Tensor,
    rows: torch.Tensor,
    received: Sequence[int] | None,
    sent: Sequence[int] | None,
    group: dist.ProcessGroup,
) -> None:
    dist.all_to_all_single(out, rows, received, sent, group=group)


def _within_capacity(numbers: torch.Tensor, spread: Spread) -> torch.Tensor:
    """The experts' numbers without those that are asked for too often, which become one beyond the last.

    Of the choices for one expert the first ones stay, all first choices before all second ones (Lepikhin et al.,
    "GShard", arXiv 2006.16668, section 2.2): as many as `capacity * tokens * choices / experts`, rounded up.
    """
    assert spread.capacity is not None
    limit = math.ceil(spread.capacity * numbers.numel() / spread.experts)
    in_turn = numbers.t().reshape(-1)
    asked = nn.functional.one_hot(in_turn, spread.experts + 1)
    before = (asked.cumsum(0) - asked).gather(1, in_turn[:, None])[:, 0]
    return torch.where(before < limit, in_turn, spread.experts).view(numbers.shape[::-1]).t()


def _refuse_other_shapes(spread: Spread, tokens: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> None:
    """Before anything is sent: ranks that go on alone would wait for ever."""
    fits = tokens.ndim == numbers.ndim == 2 and numbers.shape == weights.shape and len(tokens) == len(numbers)
    if not fits or numbers.is_floating_point():
        shapes = ", ".join(str(tuple(given.shape)) for given in (tokens, numbers, weights))
        raise InputError(
            f'"{spread.name}", whose experts lie on {spread.ranks} ranks, was called with global shapes {shapes}, the '
            f"second of {numbers.dtype}. It takes tokens (token, embed), integers that say which experts (token, "
            "choice), and their weights (token, choice)."
        )

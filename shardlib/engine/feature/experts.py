"""Expert parallelism: a token is sent to the ranks of its experts, and one result is sent back.

A module of experts has parameters whose first dim is the expert index. As in transformers, it takes tokens (token,
embed), expert indices (token, choice) and their weights (token, choice), and returns (token, embed). Where a rule
splits the first dim over an expert axis, whose ranks have different tokens, the module runs unchanged on its rank's
experts and on all tokens that are routed to them. A token is sent to a rank once, even if it chooses several experts of
that rank. Their weighted results are summed before they are sent back, in the dtype of tokens. No token is dropped
unless the plan sets a capacity.

    forward    token counts -> tokens, expert indices, weights ... run ... results <-
    backward   gradients of results -> ... gradients of tokens and weights <-

The gradient of an expert on its rank already includes all tokens of the axis. It is divided by the size of the axis,
because the loss is the mean over ranks, and is then reduced over the other data axes only.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shardlib.engine import _torch
from shardlib.engine.model.region import unwrap_dtensor, wrap_replicated
from shardlib.engine.ops.redistribute import redistribute_gradient, to_full_tensor
from shardlib.engine.ranks.lost import naming_lost_ranks_in_operations
from shardlib.engine.undo import replace_forward
from shardlib.errors import InputError, PlanError

__all__ = ["Spread", "counts_experts", "holding", "install", "refuse_dropout"]

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
# Attributes of modules for their number of experts; while the module runs, they are set to the rank's number.
_COUNTS = ("num_experts", "num_local_experts", "n_experts", "n_routed_experts")

_all_to_all = naming_lost_ranks_in_operations(dist.all_to_all_single)


@dataclass(frozen=True)
class Spread:
    """The distribution of one module's experts over ranks.

    Attributes:
        name: of the module.
        keys: names of its parameters whose first dim is the expert index.
        bounds: the first expert of each rank of the axis, followed by the number of experts.
        group: the ranks of the axis, in its order.
        index: this rank's index in the group.
        inner: the mesh over which each expert is sharded, if it is.
        capacity: the largest number of a rank's tokens per expert, as a multiple of the mean; None is without limit.
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
    """Let a module of experts run on the tokens of all ranks, and return an undo function."""
    inner = module.forward
    signature = inspect.signature(inner)

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        given = signature.bind(*args, **kwargs).arguments
        if len(given) != 3:
            raise InputError(
                f'"{spread.name}", whose experts are sharded over {spread.ranks} ranks, was called with '
                f"{', '.join(given)}. Give the tokens, the numbers of their experts, and the weights of these, and "
                "nothing else."
            )
        return _run(module, inner, spread, *given.values())

    return replace_forward(module, forward)


def refuse_dropout(name: str, module: nn.Module) -> None:
    """Refuse dropout inside experts, whose elements belong to other ranks, with exact random numbers.

    Raises:
        PlanError: a module of experts contains dropout.
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
    indices: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    mesh = next((x.device_mesh for x in (tokens, weights) if isinstance(x, DTensor)), None)
    tokens, weights = unwrap_dtensor(tokens), unwrap_dtensor(weights)
    indices = to_full_tensor(indices)
    _refuse_other_shapes(spread, tokens, indices, weights)
    if spread.capacity is not None:
        indices = _within_capacity(indices, spread)
    route = _Route.of(indices, spread)
    results = _run_local(module, inner, spread, *route.dispatch(tokens, indices, weights), pairs=route.pairs)
    result = route.combine(results, tokens)
    return result if mesh is None else wrap_replicated(result, mesh)


def _run_local(
    module: nn.Module,
    inner: Callable[..., torch.Tensor],
    spread: Spread,
    tokens: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    *,
    pairs: int | None = None,
) -> torch.Tensor:
    """Run this rank's experts on the received tokens, and return the weighted sum of results for each token.

    `indices` are relative to this rank's first expert, and -1 where a choice is another rank's; `pairs` is the number
    of other choices in a dry run, where tensors have no values.
    """
    if pairs is None:
        row, choice = (indices >= 0).nonzero(as_tuple=True)
    else:
        row = choice = indices.new_zeros(pairs)
    if not row.numel():
        return _NoTokens.apply(tokens, weights, *(_torch.own_tensors(module)[0][key] for key in spread.keys))
    with _own_experts(module, spread):
        each = row.numel() > tokens.shape[0]  # True if some tokens chose several experts of this rank
        given, indices, weights = tokens[row] if each else tokens, indices[row, choice], weights[row, choice, None]
        if spread.inner is not None:
            given, weights = wrap_replicated(given, spread.inner), wrap_replicated(weights, spread.inner)
        results = inner(given, indices[:, None], weights)
        results = results if spread.inner is None else unwrap_dtensor(results)
    results = results.to(tokens.dtype)  # ranks without tokens know this dtype too
    return tokens.new_zeros(tokens.shape).index_add(0, row, results) if each else results


def counts_experts(module: nn.Module) -> bool:
    """Return whether a module has an attribute for a number of experts."""
    return any(isinstance(getattr(module, name, None), int) for name in _COUNTS)


@contextmanager
def holding(module: nn.Module, params: Mapping[str, torch.Tensor], experts: int, own: int) -> Iterator[None]:
    """Replace parameters of a module, and its number of experts, which becomes `own`, inside the block."""
    held = _torch.own_tensors(module)[0]
    before = {key: held[key] for key in params}
    counts = [name for name in _COUNTS if getattr(module, name, None) == experts]
    try:
        held.update(params)
        for name in counts:
            setattr(module, name, own)
        yield
    finally:
        held.update(before)
        for name in counts:
            setattr(module, name, experts)


@contextmanager
def _own_experts(module: nn.Module, spread: Spread) -> Iterator[None]:
    """Replace the module's parameters by this rank's experts inside the block.

    They are plain tensors or, where experts are sharded, DTensors over the inner mesh.
    """
    params = _torch.own_tensors(module)[0]
    own = {key: _OwnExperts.apply(params[key], spread.own, spread.inner, 1.0 / spread.ranks) for key in spread.keys}
    with holding(module, own, spread.experts, spread.own):
        yield


class _OwnExperts(torch.autograd.Function):
    """This rank's experts of a parameter; the gradient is multiplied by `share`."""

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
            grad = _torch.local_of(
                grad if grad.placements == ctx.placements else redistribute_gradient(grad, ctx.placements)
            )
        return _torch.wrap(grad * ctx.share, ctx.spec), None, None, None


class _NoTokens(torch.autograd.Function):
    """The result of a rank that received no tokens.

    It gives all operands a gradient of zeros, so that idle ranks join the collectives of backward.
    """

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weights: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.like = [weights.new_empty(weights.shape), *params]
        return tokens.new_zeros(tokens.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return grad.new_zeros(grad.shape), *(_zeros(like) for like in ctx.like)


def _zeros(like: torch.Tensor) -> torch.Tensor:
    if isinstance(like, DTensor):
        return _torch.wrap(torch.zeros_like(_torch.local_of(like)), _torch.spec_of(like))
    return torch.zeros_like(like)


@dataclass(frozen=True)
class _Route:
    """The routing of tokens between ranks.

    Attributes:
        rows: this rank's tokens in the order in which they are sent: rank by rank; a token occurs once for each rank
            that it is sent to.
        to: the destination rank of each row.
        sent, received: the number of rows sent to, and received from, each rank.
        pairs: in a dry run, the number of received choices of this rank's experts.
    """

    spread: Spread
    rows: torch.Tensor
    to: torch.Tensor
    sent: list[int]
    received: list[int]
    pairs: int | None = None

    @classmethod
    def of(cls, indices: torch.Tensor, spread: Spread) -> _Route:
        """Make the route for expert indices; an index beyond the last expert is not routed."""
        bounds = torch.tensor(spread.bounds[1:], device=indices.device)
        chosen = indices.new_zeros((indices.shape[0], spread.ranks + 1), dtype=torch.bool)
        chosen.scatter_(1, torch.bucketize(indices, bounds, right=True), True)
        chosen = chosen[:, : spread.ranks]
        counts = chosen.sum(0)
        received = torch.empty_like(counts)
        _all_to_all(received, counts, None, None, spread.group)
        if not _torch.has_values(indices):
            return cls._expected(indices, spread)
        sent, received = torch.stack([counts, received]).tolist()  # the host waits for the device once
        to, rows = torch.nonzero_static(chosen.t(), size=sum(sent)).unbind(1)
        return cls(spread, rows, to, sent, received)

    @classmethod
    def _expected(cls, indices: torch.Tensor, spread: Spread) -> _Route:
        """Estimate the route for uniform choices: a token skips a rank if it chooses other ranks' experts only."""
        tokens, choices = indices.shape
        every = math.comb(spread.experts, choices)
        own = [end - start for start, end in itertools.pairwise(spread.bounds)]
        sent = [round(tokens * (1 - math.comb(spread.experts - count, choices) / every)) for count in own]
        rows = indices.new_zeros(sum(sent))
        pairs = round(spread.ranks * tokens * choices * spread.own / spread.experts)
        return cls(spread, rows, rows, sent, [sent[spread.index]] * spread.ranks, pairs)

    def dispatch(
        self, tokens: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the tokens that are routed to this rank, their local expert indices, and their weights."""
        bounds = torch.tensor(self.spread.bounds, device=indices.device)
        start, end = bounds[self.to][:, None], bounds[self.to + 1][:, None]
        chosen = indices[self.rows]
        local = torch.where((chosen >= start) & (chosen < end), chosen - start, -1)
        return self._exchange(tokens[self.rows]), self._exchange(local), self._exchange(weights[self.rows])

    def _exchange(self, tensor: torch.Tensor) -> torch.Tensor:
        return _AllToAll.apply(tensor, self.sent, self.received, self.spread.group)

    def combine(self, results: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' results for each of this rank's tokens."""
        results = _AllToAll.apply(results, self.received, self.sent, self.spread.group)
        return tokens.new_zeros(tokens.shape).index_add(0, self.rows, results)


class _AllToAll(torch.autograd.Function):
    """All-to-all of rows; its backward is the all-to-all of gradients in the other direction."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.reverse = received, sent, group
        out = rows.new_empty((sum(received), *rows.shape[1:]))
        _all_to_all(out, rows.contiguous(), received, sent, group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return _AllToAll.apply(grad, *ctx.reverse), None, None, None


def _within_capacity(indices: torch.Tensor, spread: Spread) -> torch.Tensor:
    """Replace choices beyond the capacity of an expert by an index beyond the last expert.

    Each expert keeps its first `capacity * tokens * choices / experts` choices, rounded up; all first choices precede
    all second choices (Lepikhin et al., "GShard", arXiv 2006.16668, section 2.2).
    """
    assert spread.capacity is not None
    limit = math.ceil(spread.capacity * indices.numel() / spread.experts)
    in_turn = indices.t().reshape(-1)
    chosen = nn.functional.one_hot(in_turn, spread.experts + 1)
    before = (chosen.cumsum(0) - chosen).gather(1, in_turn[:, None])[:, 0]
    return torch.where(before < limit, in_turn, spread.experts).view(indices.shape[::-1]).t()


def _refuse_other_shapes(spread: Spread, tokens: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> None:
    """Refuse wrong shapes before any communication: a rank that raises later would leave the others waiting."""
    fits = tokens.ndim == indices.ndim == 2 and indices.shape == weights.shape and len(tokens) == len(indices)
    if not fits or indices.is_floating_point():
        shapes = ", ".join(str(tuple(x.shape)) for x in (tokens, indices, weights))
        raise InputError(
            f'"{spread.name}", whose experts are sharded over {spread.ranks} ranks, was called with global shapes '
            f"{shapes}, the second of {indices.dtype}. It takes tokens (token, embed), the integer numbers of their "
            "experts (token, choice), and the weights of these (token, choice)."
        )

"""Train a model sharded and on one device, side by side on every rank, and say how far apart they are.

Tolerance: float64 has 53 bits, so one rounding is 1.1e-16 of a result. Splitting a contraction over ranks reorders
sums of at most some thousand terms; with the error growing like the square root of their number and a few dozen layers
of them, 1e-12 relative is generous, and 1e-10 a bound that only a wrong number passes. Elements that are zero in exact
arithmetic (the gradient of a key bias) are noise of absolute size 1e-17; `_FLOOR` keeps them from being divided by
themselves.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import shardlib as sl
from shardlib.engine import agree

TOLERANCE = 1e-10
_FLOOR = 1e-3

Batch = tuple[tuple[Any, ...], dict[str, Any]]


def assert_same_numbers(*args: Any, **kwargs: Any) -> None:
    """`differences(...)`, all within `TOLERANCE`."""
    found = differences(*args, **kwargs)
    wrong = {what: value for what, value in found.items() if not value <= TOLERANCE}
    assert not wrong, f"rank {dist.get_rank()}: {wrong}"


def differences(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[[int], Batch],
    loss_of: Callable[[Any], torch.Tensor],
    mesh: str,
    rules: Any,
    *,
    steps: int = 3,
    accumulate: int = 1,
    dtype: torch.dtype = torch.float64,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    same_random: bool = False,
    no_sync: bool = False,
    before_step: Callable[[nn.Module, int], None] = lambda _model, _step: None,
    clip: float | None = None,
    **options: Any,
) -> dict[str, float]:
    """The largest relative difference of each kind of value over some training steps; runs on every rank.

    `make_batch(step)` gives positional and keyword arguments for the global batch, batch dim first. The loss must be a
    mean over the batch. With `rng="exact"` the reference draws exactly too. `same_random` lets the sharded run draw
    from the generator state that the reference drew from.
    With `no_sync`, accumulated gradients are reduced by the last backward pass of a step alone. `before_step` may
    change both models before a step; `clip` is the gradient norm that steps are clipped to.
    """
    torch.manual_seed(0)
    reference = make_model().to(dtype)
    sharded = sl.shard_model(copy.deepcopy(reference), mesh, rules, **options)
    optimizers = [optimizer(m.parameters(), lr=1e-2) for m in (reference, sharded)]
    worst: dict[str, float] = {}

    def note(kind: str, got: Any, want: Any) -> None:
        for name in want:
            worst[f"{kind} {name}"] = max(worst.get(f"{kind} {name}", 0.0), relative(got.get(name), want[name]))

    for step in range(steps):
        for o, model in zip(optimizers, (reference, sharded), strict=True):
            o.zero_grad()
            before_step(model, step)
        for micro in range(accumulate):
            args, kwargs = _cast(make_batch(step * accumulate + micro), dtype)
            state = torch.get_rng_state()
            with sl.exact_random() if options.get("rng") == "exact" else nullcontext():
                want = loss_of(reference(*args, **kwargs)) / accumulate
            if same_random:
                torch.set_rng_state(state)
            args, kwargs = local_rows((args, kwargs), sl.plan_of(sharded).mesh)
            want.backward()
            with sl.no_sync(sharded) if no_sync and micro < accumulate - 1 else nullcontext():
                got = loss_of(sharded(*args, **kwargs)) / accumulate
                got.backward()
            note("loss", {"": mean_over_data(got.detach(), sl.plan_of(sharded).mesh)}, {"": want.detach()})
        note("gradient", gradients(sharded), gradients(reference))
        if clip is not None:
            norms = [nn.utils.clip_grad_norm_(m.parameters(), clip) for m in (sharded, reference)]
            note("norm", {"": whole(norms[0])}, {"": norms[1]})
        for o in optimizers:
            o.step()
        note("value", values(sharded), values(reference))
    _replicas_agree(sharded)
    return worst


def relative(got: torch.Tensor | None, want: torch.Tensor | None) -> float:
    if got is None or want is None:
        return 0.0 if got is want else float("inf")
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    if not want.numel():
        return 0.0
    if not (want.is_floating_point() or want.is_complex()):
        return 0.0 if torch.equal(got, want) else float("inf")
    off = ((got - want).abs().max() / max(want.abs().max().item(), _FLOOR)).item()
    return float("inf") if math.isnan(off) else off  # two NaNs show nothing


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else whole(p.grad) for name, p in model.named_parameters()}


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: whole(tensor.detach()) for name, tensor in named.items()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_rows(batch: Any, shape: sl.MeshShape) -> Any:
    """The rows of a global batch that this rank's place on the data axes gives it."""
    index, count = data_place(shape)
    return pytree.tree_map_only(torch.Tensor, lambda t: t.chunk(count)[index], batch)


def data_place(shape: sl.MeshShape) -> tuple[int, int]:
    return shape.data_place(shape.coordinate(dist.get_rank()))


def mean_over_data(value: torch.Tensor, shape: sl.MeshShape) -> torch.Tensor:
    """Mean over all ranks: those of a model group hold the same value."""
    dist.all_reduce(value)
    return value / dist.get_world_size()


def _cast(batch: Batch, dtype: torch.dtype) -> Batch:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, batch)


def _replicas_agree(model: nn.Module) -> None:
    """Ranks that hold the same elements of a tensor hold the same bits."""
    shape = sl.plan_of(model).mesh
    mine: Mapping[str, Any] = {name: (_held(t, shape), agree.fingerprint(_local(t))) for name, t in _tensors(model)}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    for name in mine:
        bits: dict[Any, int] = {}
        for held, mark in (prints[name] for prints in every):
            assert bits.setdefault(held, mark) == mark, f"replicas of {name} differ"


def _held(tensor: torch.Tensor, shape: sl.MeshShape) -> tuple[int, ...]:
    """This rank's place on the axes that split a tensor."""
    if not isinstance(tensor, DTensor):
        return ()
    return tuple(
        index
        for index, placement in zip(tensor.device_mesh.get_coordinate() or (), tensor.placements, strict=True)
        if not placement.is_replicate()
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return [(name, t.detach()) for name, t in named]

"""Compute one norm of all gradients, in any mixture of layouts: each element of each tensor counts once.

A replicated tensor is counted by the rank at coordinate 0 of every axis that does not split it. Plain tensors, DTensors
on the model mesh and shards on the whole mesh thus go into one sum, and one all-reduce over the whole mesh gives all
ranks the same bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shardlib.engine import _torch
from shardlib.engine.data.params import local_of
from shardlib.engine.ops.redistribute import redistribute_gradient
from shardlib.engine.ranks.lost import naming_lost_ranks
from shardlib.engine.sharded import param_state_of, records_of
from shardlib.errors import ShardingError
from shardlib.layout._local import replica_id

__all__ = ["clip_among", "clip_grad_norm_", "clip_grad_value_", "get_grad_norm"]

Parameters: TypeAlias = nn.Module | torch.Tensor | Iterable[torch.Tensor]
Counting: TypeAlias = tuple[DeviceMesh | None, dist.ProcessGroup | None]


@torch.no_grad()
def clip_grad_norm_(
    model_or_params: Parameters, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale gradients in place so that their norm, over all elements of all parameters, is at most `max_norm`.

    Same as `torch.nn.utils.clip_grad_norm_` on one device, for any sharded model. All ranks call it.

    Args:
        model_or_params: a model, or its parameters; they need not be sharded.
        max_norm: gradients of a larger norm are multiplied by `max_norm / (norm + 1e-6)`; `inf` leaves all as they are.
        norm_type: p of the p-norm, a positive number, or `inf` for the largest absolute value.
        error_if_nonfinite: raise on all ranks if the norm is infinite or nan, and change nothing.

    Returns:
        The norm before clipping, a plain scalar with the same bits on every rank.

    Raises:
        ShardingError: an argument is invalid; no backward pass has reduced a gradient yet; the norm is not finite, with
            `error_if_nonfinite`.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> layer(torch.tensor([[3.0, 4.0]])).sum().backward()
    >>> clip_grad_norm_(layer, 1.0)
    tensor(5.)
    >>> layer.weight.grad
    tensor([[0.6000, 0.8000]])
    """
    return clip_among((), _unique(model_or_params), max_norm, norm_type, error_if_nonfinite)


@torch.no_grad()
def clip_among(
    among: Iterable[torch.Tensor],
    params: list[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Do as `clip_grad_norm_`, on all ranks that have tensors of `among`, also on those without `params`."""
    limit = _limit("max_norm", max_norm)
    norm = _norm_among(among, params, norm_type, error_if_nonfinite)
    if limit < math.inf:
        factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
        for grads in _by_device_and_dtype([local_of(p.grad) for p in params if p.grad is not None]):
            _torch.multiply_all(grads, factor.to(grads[0].device))
    return norm


@torch.no_grad()
def get_grad_norm(
    model_or_params: Parameters, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Return the norm that `clip_grad_norm_` would return; leave gradients as they are. All ranks call it.

    Args:
        model_or_params: a model, or its parameters; they need not be sharded.
        norm_type: p of the p-norm, a positive number, or `inf` for the largest absolute value.
        error_if_nonfinite: raise on all ranks if the norm is infinite or nan.

    Raises:
        ShardingError: as `clip_grad_norm_`.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> layer(torch.tensor([[3.0, 4.0]])).sum().backward()
    >>> get_grad_norm(layer), get_grad_norm(layer, 1), get_grad_norm(layer, "inf")
    (tensor(5.), tensor(7.), tensor(4.))
    """
    return _norm_among((), _unique(model_or_params), norm_type, error_if_nonfinite)


def _norm_among(
    among: Iterable[torch.Tensor], params: list[torch.Tensor], norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor:
    p = _checked_type(norm_type)
    by_mesh: dict[Counting, list[torch.Tensor]] = {_counting(param): [] for param in (*among, *params)}
    summed = list(_gradients(params))
    for param, grad in summed:
        mesh, _ = counting = _counting(param)
        param_state = param_state_of(param)
        if (mesh is None or _counts_here(grad, mesh)) and (param_state is None or param_state.is_counted):
            by_mesh[counting].append(local_of(grad))
    device = _device_of(params)
    totals = [_summed(_power(local, p, device), counting, p) for counting, local in by_mesh.items()]
    dtypes = [grad.dtype for _, grad in summed] or [one.dtype for one in params]  # a stage may be frozen
    norm = _total_norm(totals, p, device).to(_norm_dtype(dtypes))
    if error_if_nonfinite and not torch.isfinite(norm):
        raise ShardingError(
            f"The norm of order {p:g} of all gradients is {norm.item()}, on all ranks. Look for the step at which the "
            "loss stops to be finite, or leave error_if_nonfinite=False."
        )
    return norm


@torch.no_grad()
def clip_grad_value_(model_or_params: Parameters, clip_value: float) -> None:
    """Clamp every element of every gradient to [-clip_value, clip_value], in place. All ranks call it.

    Raises:
        ShardingError: the value is negative or nan; no backward pass has reduced a gradient yet.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> layer(torch.tensor([[3.0, -4.0]])).sum().backward()
    >>> clip_grad_value_(layer, 3.5)
    >>> layer.weight.grad
    tensor([[ 3.0000, -3.5000]])
    """
    limit = _limit("clip_value", clip_value)
    summed = list(_gradients(_unique(model_or_params)))
    for param, grad in summed:
        param.grad = grad
    _torch.clamp_all([local_of(grad) for _, grad in summed], limit)


def _unique(given: Parameters) -> list[torch.Tensor]:
    """Return parameters in order, each once, if tied or given twice."""
    if isinstance(given, nn.Module | torch.Tensor):
        params: list[Any] = [given] if isinstance(given, torch.Tensor) else [*given.parameters()]
    else:
        params = [*given] if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    for param in params:
        if not isinstance(param, torch.Tensor):
            raise ShardingError(
                f"The gradients of {type(param).__name__} {param!r} were asked for; give a model, or its parameters."
            )
    return list({id(param): param for param in params}.values())


def _limit(name: str, value: float) -> float:
    limit = _number(value)
    if not limit >= 0:
        raise ShardingError(f"{name}={value!r} was given; give a number that is not negative, such as 1.0.")
    return limit


def _checked_type(norm_type: float) -> float:
    p = _number(norm_type)
    if not p > 0:
        raise ShardingError(f"norm_type={norm_type!r} was given; give a positive number, such as 2.0, or inf.")
    return p


def _number(value: Any) -> float:
    """Return a number, or nan for what is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _gradients(params: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the parameters that have a gradient, with the gradient; reduce partial sums first."""
    params = [*params]
    _refuse_between_passes(params)
    for param in params:
        if (grad := param.grad) is not None:
            if (param_state := param_state_of(param)) is not None:
                param_state.check_reduced()
            if isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements):
                grad = redistribute_gradient(
                    grad, tuple(Replicate() if each.is_partial() else each for each in grad.placements)
                )
            yield param, grad


def _refuse_between_passes(params: list[torch.Tensor]) -> None:
    reducer = next((one.reducer for one in records_of(params) if one.reducer.is_between_passes()), None)
    if reducer is not None:
        raise ShardingError(
            f"The plan makes a step of {reducer.passes} backward passes (accumulate), and not all have run: gradients "
            "are partial sums, whose norm and whose clipping mean nothing. Clip after the last pass; or let "
            "shardlib.OptimizerWrapper(...).clip_grad_norm_ count them: it does nothing before."
        )


def _device_of(params: list[torch.Tensor]) -> torch.device:
    """Return the device on which ranks exchange norms: that of computation, even for offloaded parameters."""
    known = next((param_state.device for param in params if (param_state := param_state_of(param)) is not None), None)
    return known or (params[0].device if params else torch.device("cpu"))


def _counting(param: torch.Tensor) -> Counting:
    """Return the mesh over which the elements of a parameter are counted, and the group of all pipeline stages.

    Each is None where it does not apply; without both, each rank counts for itself.
    """
    param_state = param_state_of(param)
    if param_state is not None:
        return param_state.mesh, param_state.pipeline_group
    return param.device_mesh if isinstance(param, DTensor) else None, None


def _counts_here(grad: torch.Tensor, mesh: DeviceMesh) -> bool:
    """Tell whether this rank counts the elements of its local tensor, and not another rank with the same ones."""
    split: set[str | int] = set()
    if isinstance(grad, DTensor):
        placements = zip(_names(grad.device_mesh), grad.placements, strict=True)
        split = {name for name, placement in placements if not placement.is_replicate()}
    sizes = dict(zip(_names(mesh), mesh.shape, strict=True))
    coordinate = dict(zip(_names(mesh), mesh.get_coordinate() or (), strict=True))
    return replica_id(split, sizes, coordinate) == 0


def _names(mesh: DeviceMesh) -> Sequence[str | int]:
    """Return the names of the mesh's axes; their numbers if they have none, where all tensors are on that mesh."""
    return mesh.mesh_dim_names or range(mesh.ndim)


def _power(tensors: list[torch.Tensor], p: float, device: torch.device) -> torch.Tensor:
    """Return the term that is reduced over ranks: the norm to the power of p; for inf, the maximum and a nan flag."""
    norms = [
        norm.to(device, _SUM_DTYPE)
        for batch in _by_device_and_dtype([one.abs() if one.is_complex() else one for one in tensors])
        for norm in _torch.norms_of(batch, p, _norm_dtype([batch[0].dtype]))
    ]
    each = torch.stack(norms) if norms else torch.zeros(1, dtype=_SUM_DTYPE, device=device)
    if p < math.inf:
        return each.pow(p).sum()
    # A max-reduction over ranks may lose a nan.
    return torch.stack([each.nan_to_num(nan=0.0, posinf=math.inf).max(), each.isnan().any().to(_SUM_DTYPE)])


_SUM_DTYPE = torch.float64


def _by_device_and_dtype(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the tensors of each device and dtype, which one call takes together."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    yield from groups.values()


def _norm_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the real dtype of the norm of tensors of these dtypes: at least float32."""
    return functools.reduce(torch.promote_types, (dtype.to_real() for dtype in dtypes), torch.float32)


@naming_lost_ranks("step")
def _summed(value: torch.Tensor, counting: Counting, p: float) -> torch.Tensor:
    mesh, pipeline_group = counting
    for group in (*(() if mesh is None else _groups(mesh)), *(() if pipeline_group is None else (pipeline_group,))):
        dist.all_reduce(value, op=dist.ReduceOp.MAX if p == math.inf else dist.ReduceOp.SUM, group=group)
    return value


def _groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Return one group of all ranks where mesh axes have names, as in shardlib; else one group for each mesh dim."""
    if mesh.size() == 1:
        return []
    if mesh.mesh_dim_names is None:
        return [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    active = tuple(name for dim, name in enumerate(mesh.mesh_dim_names) if mesh.size(dim) > 1)
    return [_torch.flattened(mesh, active).get_group()]


def _total_norm(totals: list[torch.Tensor], p: float, device: torch.device) -> torch.Tensor:
    if not totals:
        return torch.zeros((), device=device)
    if p < math.inf:
        return torch.stack(totals).sum().pow(1 / p)
    largest, is_nan = torch.stack(totals).amax(0)
    return torch.where(is_nan > 0, math.nan, largest)

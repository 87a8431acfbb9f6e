"""The two runs of a case, side by side on every rank: the single device, and this rank's part of the sharded run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardlib._mesh import mesh as make_mesh
from shardlib.engine import _torch, get_plan, shard_model
from shardlib.engine.feature import exact
from shardlib.engine.feature.exact import draw_exactly
from shardlib.engine.sharded import is_sharded
from shardlib.errors import InputError
from shardlib.testing.at_scale import at_scale
from shardlib.testing.equivalence.case import Case
from shardlib.testing.equivalence.parts import RankCoordinate
from shardlib.testing.equivalence.train import Run, Trained

__all__ = ["Twins", "all_twins", "single_device", "twins"]


@dataclass(eq=False)
class Twins:
    """The runs of a case that start from the same weights.

    Attributes:
        exact: the single device in float64, where the case's dtype is another.
    """

    case: Case
    single: Run
    sharded: Trained
    exact: Run | None
    rank_coordinate: RankCoordinate

    @property
    def runs(self) -> list[Trained]:
        return [run for run in (self.single, self.exact, self.sharded) if run is not None]


def twins(case: Case) -> Twins:
    """Return the runs of a case at its first scale."""
    return all_twins(dataclasses.replace(case, scales=case.scales[:1]))[0]


def all_twins(case: Case) -> list[Twins]:
    """Build the model once, copy it, and shard the copy, for each scale; where nothing is sent between the phases of
    parameters, scales do not differ. Every rank of the mesh calls it; for JAX one process.

    The runs of one device are those of all scales.
    """
    if case.engine == "jax":
        return [_twins_on_jax(case)]
    device_mesh = make_mesh(case.mesh)
    rank_coordinate = RankCoordinate(case.mesh, case.mesh.coordinate(dist.get_rank()))
    single = single_device(case).to(device_mesh.device_type)
    exact = in_dtype(_torch.copied(single), torch.float64) if case.dtype is not torch.float64 else None
    first = _sharded(case, _torch.copied(single), device_mesh, rank_coordinate)
    models = [first]
    for scale in case.scales[1:] if _has_scales(case, first) else ():
        other = dataclasses.replace(case, scales=(scale,))
        models.append(_sharded(other, _torch.copied(single), device_mesh, rank_coordinate))
    averaged = get_plan(first).step.accumulate if is_sharded(first) else 1
    case = _with_passes(case, averaged)
    alone, exact_run = Run(case, single), None if exact is None else Run(case, exact)
    return [
        Twins(
            dataclasses.replace(case, scales=(scale,)),
            alone,
            Run(case, model, rank_coordinate.data, sharded=True),
            exact_run,
            rank_coordinate,
        )
        for model, scale in zip(models, case.scales, strict=False)
    ]


def _has_scales(case: Case, model: nn.Module) -> bool:
    """Return whether sizes of buckets change anything."""
    chosen = case.options.keys() & {"bucket_mb"}
    return is_sharded(model) and not chosen and next(iter(get_plan(model).movements()), None) is not None


def _with_passes(case: Case, averaged: int) -> Case:
    """Return the case with as many backward passes as the plan averages."""
    if averaged > 1 and case.accumulate not in (1, averaged):
        raise InputError(
            f"equivalent() was given accumulate={case.accumulate}, and the plan's accumulate({averaged}) makes a step "
            f"of {averaged} passes. Give one of them."
        )
    return dataclasses.replace(case, accumulate=max(averaged, case.accumulate))


def _twins_on_jax(case: Case) -> Twins:
    from shardlib.testing.equivalence.on_jax import JaxRun  # JAX may not be installed

    single = single_device(case)
    exact = Run(case, in_dtype(_torch.copied(single), torch.float64)) if case.dtype is not torch.float64 else None
    run = Run(case, single)
    return Twins(case, run, JaxRun(case, _torch.copied(single), run), exact, RankCoordinate(case.mesh, {}))


def single_device(case: Case) -> nn.Module:
    _torch.seed_all(case.seed)
    model = case.model()
    if not isinstance(model, nn.Module):
        raise InputError(f"model= returned a {type(model).__name__}; it has to make an nn.Module.")
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise InputError(
            "model= made a model on the meta device, which has no values to compare. Make it on CPU; it is sharded "
            "afterwards."
        )
    return in_dtype(model, case.dtype)


def in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert as `model.to(dtype)` does, but complex tensors (rotary frequencies) stay complex."""
    numbers = {torch.float64: torch.complex128}.get(dtype, torch.complex64)
    kept = {t: t.detach().to(numbers) for t in (*model.parameters(), *model.buffers()) if t.is_complex()}
    for tensor, value in kept.items():
        tensor.data = value
    for module in model.modules():
        tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        for tensor in tensors:
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
    return model


def _sharded(case: Case, model: nn.Module, device_mesh: DeviceMesh, rank_coordinate: RankCoordinate) -> nn.Module:
    if case.shard is None:
        rng = "fast" if case.mesh.pipeline_axes else case.rng  # stages draw at the same time
        chosen = {"compile": None, "rng": rng, **case.options}
        transforms = case.transforms
        if case.scales[0] and "bucket_mb" not in case.options:
            transforms = (at_scale, *transforms, at_scale)
        return shard_model(model, device_mesh, case.rules, transforms=transforms, **chosen)
    made = case.shard(model, device_mesh)
    if not isinstance(made, nn.Module):
        raise InputError(f"shard= returned a {type(made).__name__}; it has to return the sharded nn.Module.")
    if case.rng == "exact":
        draw_exactly(made, exact.DataRank(*rank_coordinate.data))
    return made

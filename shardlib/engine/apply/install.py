"""Hooks and forwards of modules that compute with local shards; each function registers its undo."""

from __future__ import annotations

import itertools

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardlib.engine import _torch, ops
from shardlib.engine.apply.rank_plan import RankPlan, owner_of
from shardlib.engine.data import state
from shardlib.engine.data.conversion import refuse_conversions, refuse_pickles
from shardlib.engine.feature import balance, batchnorm, exact, experts
from shardlib.engine.model import borders
from shardlib.engine.model.choose_regions import inside
from shardlib.engine.model.embedding import is_embedding, look_up_locally
from shardlib.engine.model.linear import compute_locally
from shardlib.engine.model.region import install_region
from shardlib.engine.undo import Undo
from shardlib.rules.dims import linear_dims

__all__ = ["install_modules", "spread_experts"]


def install_modules(model: nn.Module, rank_plan: RankPlan, undo: Undo, *, global_batch_norm: bool) -> None:
    """Let modules compute with local shards and DTensors, and let the model load plain state dicts.

    The order of hooks on one module matters: those of a region come before those of its input and output layouts. The
    root's hooks are installed later, and run around all of these.
    """
    if len(rank_plan.model_axes + rank_plan.data_axes) > 1:
        _torch.gather_uneven_splits_in_turn()
    if rank_plan.model_mesh is not None:
        ops.enable(rank_plan.model_mesh)
        _install_regions(model, rank_plan, rank_plan.model_mesh, undo)
        _install_borders(model, rank_plan, rank_plan.model_mesh, undo)
        _install_layers(model, rank_plan, rank_plan.model_mesh, undo)
    _install_experts(model, rank_plan, undo)
    is_split = bool(rank_plan.model_axes or rank_plan.data_axes)
    if is_split:  # a stage that one rank holds is cast as on one device
        refuse_conversions(model, undo)
    if is_split or rank_plan.pipeline_group is not None:
        refuse_pickles(model, undo)
    if (data_group := rank_plan.group(rank_plan.data_axes)) is not None:
        for handle in balance.install(model, data_group):
            undo.callback(handle.remove)
        for module in filter(batchnorm.is_batch_norm, model.modules() if global_batch_norm else ()):
            undo.callback(batchnorm.use_global_batch(module, data_group))
    _make_gradients_dense(model, undo)
    place = rank_plan.place()
    drawing = exact.draw_exactly(model, place) if place is not None else []
    for handle in (*drawing, model.register_load_state_dict_pre_hook(state.shard_plain_tensors)):
        undo.callback(handle.remove)


def _make_gradients_dense(model: nn.Module, undo: Undo) -> None:
    """Let embeddings with `sparse=True` have dense gradients: buckets, shards and clipping know no others."""
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            module.sparse = False
            undo.callback(setattr, module, "sparse", True)


def _install_regions(model: nn.Module, rank_plan: RankPlan, model_mesh: DeviceMesh, undo: Undo) -> None:
    for region in rank_plan.regions:
        for handle in install_region(model.get_submodule(region), model_mesh):
            undo.callback(handle.remove)


def _install_borders(model: nn.Module, rank_plan: RankPlan, model_mesh: DeviceMesh, undo: Undo) -> None:
    for border in rank_plan.plan.borders:
        if not inside(border.module, rank_plan.regions):
            continue
        module = model.get_submodule(border.module)
        if border.layout is None:
            handle = borders.install_gradient_border(module)
        else:
            layout = rank_plan.on_model_axes(border.layout)
            install = borders.install_input_border if border.side == "input" else borders.install_output_border
            handle = install(module, layout, model_mesh)
        undo.callback(handle.remove)


def _install_layers(model: nn.Module, rank_plan: RankPlan, model_mesh: DeviceMesh, undo: Undo) -> None:
    layouts_out = {b.module: b.layout for b in rank_plan.plan.borders if b.side == "output" and b.layout is not None}
    for name, module in model.named_modules():
        if not inside(name, rank_plan.regions):
            continue
        if is_embedding(module):
            undo.callback(look_up_locally(module))
        if linear_dims(module) is None:
            continue
        weight = _torch.own_tensors(module)[0].get("weight")
        if weight is not None and rank_plan.is_global(f"{name}.weight".lstrip("."), weight):
            layout = layouts_out.get(name)
            out = None if layout is None else borders.border_placements(rank_plan.on_model_axes(layout), model_mesh)
            undo.callback(compute_locally(module, out))


def spread_experts(rank_plan: RankPlan) -> dict[str, list[str]]:
    """Return the modules whose experts are distributed over several ranks, each with the names of their parameters."""
    found: dict[str, list[str]] = {}
    for row in rank_plan.plan.rows:
        if row.kind == "parameter" and rank_plan.is_spread(row.name):
            found.setdefault(owner_of(row.name), []).append(row.name)
    return found


def _install_experts(model: nn.Module, rank_plan: RankPlan, undo: Undo) -> None:
    for owner, names in spread_experts(rank_plan).items():
        module = model.get_submodule(owner)
        if rank_plan.exact_random:
            experts.refuse_dropout(owner, module)
        undo.callback(experts.install(module, _spread(rank_plan, owner, names)))


def _spread(rank_plan: RankPlan, owner: str, names: list[str]) -> experts.Spread:
    """Return the distribution of a module's experts over ranks."""
    row = rank_plan.rows[names[0]]
    (axis,) = (axis for axis in row.compute.axes if axis in rank_plan.expert_axes)
    group = rank_plan.group((axis,))
    assert group is not None
    coordinates = [dict(rank_plan.coordinate, **{axis: at}) for at in range(rank_plan.shape[axis])]
    sizes = [row.compute.local_shape(row.global_shape, rank_plan.shape, coordinate)[0] for coordinate in coordinates]
    inner = rank_plan.model_mesh if any(rank_plan.is_split(rank_plan.rows[name].compute) for name in names) else None
    keys = tuple(name.rpartition(".")[2] for name in names)
    bounds = tuple(itertools.accumulate(sizes, initial=0))
    return experts.Spread(
        owner, keys, bounds, group, rank_plan.coordinate[axis], inner, rank_plan.plan.step.capacity_factor
    )

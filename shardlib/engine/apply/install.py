"""What is installed on the modules of a model so that they compute with local shards; each leaves its undo."""

from __future__ import annotations

import itertools
from contextlib import ExitStack

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardlib.engine import _torch, balance, batchnorm, borders, exact, experts, ops, state
from shardlib.engine.apply.rank_plan import RankPlan, owner_of
from shardlib.engine.conversion import refuse_conversions
from shardlib.engine.linear import compute_locally
from shardlib.engine.region import install_region
from shardlib.engine.regions import inside
from shardlib.rules.dims import linear_dims

__all__ = ["install_modules", "spread_experts"]


def install_modules(model: nn.Module, here: RankPlan, undo: ExitStack, *, global_batch_norm: bool) -> None:
    """Let modules compute with what their tensors have become, and load plain state dicts.

    Order matters for hooks on one module: a region's before its borders', and those of the root, which come later,
    around all of them.
    """
    if len(here.model_axes + here.data_axes) > 1:
        _torch.gather_uneven_splits_in_turn()
    if here.model_mesh is not None:
        ops.enable(here.model_mesh)
        _install_regions(model, here, here.model_mesh, undo)
        _install_borders(model, here, here.model_mesh, undo)
        _install_linears(model, here, here.model_mesh, undo)
    _install_experts(model, here, undo)
    if here.model_axes or here.data_axes:
        undo.callback(refuse_conversions(model))
    if (data_group := here.group(here.data_axes)) is not None:
        for handle in balance.install(model, data_group):
            undo.callback(handle.remove)
    if global_batch_norm and here.data_axes:
        _install_batch_norm(model, here, undo)
    place = here.place()
    drawing = exact.draw_exactly(model, place) if place is not None else []
    for handle in (*drawing, state.accept_plain_state(model)):
        undo.callback(handle.remove)


def _install_regions(model: nn.Module, here: RankPlan, model_mesh: DeviceMesh, undo: ExitStack) -> None:
    for region in here.regions:
        for handle in install_region(model.get_submodule(region), model_mesh):
            undo.callback(handle.remove)


def _install_borders(model: nn.Module, here: RankPlan, model_mesh: DeviceMesh, undo: ExitStack) -> None:
    for border in here.plan.borders:
        if not inside(border.module, here.regions):
            continue
        module = model.get_submodule(border.module)
        if border.layout is None:
            handle = borders.install_gradient_border(module)
        else:
            layout = here.on_model_axes(border.layout)
            install = borders.install_input_border if border.side == "input" else borders.install_output_border
            handle = install(module, layout, model_mesh)
        undo.callback(handle.remove)


def _install_linears(model: nn.Module, here: RankPlan, model_mesh: DeviceMesh, undo: ExitStack) -> None:
    layouts_out = {b.module: b.layout for b in here.plan.borders if b.side == "output" and b.layout is not None}
    for name, module in model.named_modules():
        if _is_global_linear(here, name, module) and inside(name, here.regions):
            layout = layouts_out.get(name)
            place = borders.border_placements
            border = None if layout is None else place(here.on_model_axes(layout), model_mesh)
            undo.callback(compute_locally(module, border))


def _is_global_linear(here: RankPlan, name: str, module: nn.Module) -> bool:
    """Tell whether a module is a linear layer, with a weight of its own that is a DTensor."""
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    if weight is None or linear_dims(module) is None:
        return False
    return here.is_global(f"{name}.weight".lstrip("."), weight)


def spread_experts(model: nn.Module, here: RankPlan) -> dict[str, list[str]]:
    """Return the modules whose experts lie on several ranks, each with the names of their parameters."""
    found: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        if here.is_spread(name):
            found.setdefault(owner_of(name), []).append(name)
    return found


def _install_experts(model: nn.Module, here: RankPlan, undo: ExitStack) -> None:
    for owner, names in spread_experts(model, here).items():
        module = model.get_submodule(owner)
        if here.exact_random:
            experts.refuse_dropout(owner, module)
        undo.callback(experts.install(module, _spread(here, owner, names)))


def _spread(here: RankPlan, owner: str, names: list[str]) -> experts.Spread:
    """Return how the experts lie that a module's parameters are."""
    row = here.rows[names[0]]
    (axis,) = (axis for axis in row.compute.axes if axis in here.expert_axes)
    group = here.group((axis,))
    assert group is not None
    places = [dict(here.coordinate, **{axis: at}) for at in range(here.shape[axis])]
    sizes = [row.compute.local_shape(row.global_shape, here.shape, place)[0] for place in places]
    inner = here.model_mesh if any(here.is_split(here.rows[name].compute) for name in names) else None
    keys = tuple(name.rpartition(".")[2] for name in names)
    bounds = tuple(itertools.accumulate(sizes, initial=0))
    return experts.Spread(owner, keys, bounds, group, here.coordinate[axis], inner, here.plan.step.capacity_factor)


def _install_batch_norm(model: nn.Module, here: RankPlan, undo: ExitStack) -> None:
    group = here.group(here.data_axes)
    assert group is not None
    for module in model.modules():
        if batchnorm.is_batch_norm(module):
            undo.callback(batchnorm.use_global_batch(module, group))

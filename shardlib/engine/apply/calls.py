"""Wrappers around the calls of a model's modules: at most one for each module, and none for most.

A call passes through these layers, from the outside in:

1. stages of a pipeline: run a module, or skip it on this rank; outside of the class's `__call__` (`pipeline/route.py`);
2. units, and the model unless its parameters are plain tensors: are in no graph of the caller's (`compile.py`);
3. the model: reports ranks that are lost in its forward (`lost.py`); modules that users call in its place: check and
   cast their inputs as the model does (`root.py`);
4. recomputed modules: are called again in backward, with all the layers below (`recompute.py`);
5. repeated blocks with a deferred all-gather of updates: wait for their own parameters (`schedule.py`);
6. units: unshard their parameters, and reshard them afterwards (`units.py`);
7. the module's own call: its compiled graph (`compile.py`), or its hooks and forward.

A unit is outside of the graph, since the compiler must not manage its collectives and buffers. It is inside of
recomputation, since a recomputed module needs unsharded parameters again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from shardlib.engine import _torch
from shardlib.engine.apply.install import spread_experts
from shardlib.engine.apply.rank_plan import RankPlan
from shardlib.engine.apply.root import Root
from shardlib.engine.data.schedule import Updates
from shardlib.engine.data.units import Units
from shardlib.engine.feature.compile import CompileReport, compile_blocks, run_eagerly, warn_of_no_effect
from shardlib.engine.feature.recompute import recompute_in
from shardlib.engine.pipeline.route import Route
from shardlib.engine.ranks.lost import watch_forward
from shardlib.engine.undo import Undo

__all__ = ["compile_calls", "wrap_calls"]

# Called as `wrapper(call, *args, **kwargs)`; calls `call`.
Wrapper = Callable[..., Any]


_TRAVELLING = "how many tokens come to the experts of a rank is known when they do, and a graph has to know it before"


def compile_calls(model: nn.Module, rank_plan: RankPlan, backend: str | None, undo: Undo) -> CompileReport:
    """Compile repeated blocks if there is a model axis: compiling removes the cost of DTensor's dispatch."""
    eager = dict.fromkeys(spread_experts(rank_plan), _TRAVELLING)
    backend = backend if rank_plan.model_mesh is not None else None
    report, uncompile = compile_blocks(model, backend, rank_plan.place(), eager=eager)
    undo.callback(uncompile)
    return report


def wrap_calls(
    model: nn.Module,
    rank_plan: RankPlan,
    units: Units | None,
    updates: Updates | None,
    root: Root,
    recomputed: Sequence[str],
    undo: Undo,
    *,
    route: Route | None,
    check: bool,
) -> None:
    """Wrap the calls of modules in their layers, after blocks have been compiled.

    With `check`, ranks that are lost in forward are reported.
    """
    plain = units is None and route is None and rank_plan.model_mesh is None
    innermost_first: tuple[Mapping[str, Wrapper], ...] = (
        {name: partial(units.call, unit) for name, unit in units.units.items() if name} if units is not None else {},
        {name: partial(updates.call, name) for name in rank_plan.deferred} if updates is not None else {},
        {name: recompute_in(model.get_submodule(name)) for name in recomputed},
        {"": watch_forward(rank_plan.ranks_of_forward)} if check else {},
        dict.fromkeys(_entries(model), root.call) if _has_entries(rank_plan, root, check=check) else {},
        {} if plain else dict.fromkeys(["", *(units.units if units is not None else ())], run_eagerly),
    )
    if not plain and _torch.compiled_call(model) is not None:
        warn_of_no_effect()
    wrappers: dict[nn.Module, list[Wrapper]] = {}
    for layer in innermost_first:
        for name, wrapper in layer.items():
            wrappers.setdefault(model.get_submodule(name), []).append(wrapper)
    for module, around in wrappers.items():
        compile_ = warn_of_no_effect if module is model and not plain else None
        undo.callback(_torch.go_through(module, *around, compile_=compile_))
    for name, wrapper in route.around_modules(model).items() if route is not None else ():
        undo.callback(_torch.go_around(model.get_submodule(name), wrapper))


def _has_entries(rank_plan: RankPlan, root: Root, *, check: bool) -> bool:
    """Tell whether a call of a module in the place of the model has to do what the model does at first."""
    compares = check and rank_plan.model_mesh is not None
    return rank_plan.stages is None and (compares or root.casting.changes)


def _entries(model: nn.Module) -> list[str]:
    """Return the modules that users call in the place of the model: its children, and those of its containers."""
    found: list[str] = []
    pending = [("", model)]
    while pending:
        parent, module = pending.pop()
        for name, child in module.named_children():
            full = f"{parent}.{name}".lstrip(".")
            if isinstance(child, nn.ModuleList | nn.ModuleDict):
                pending.append((full, child))
            elif not isinstance(child, torch.jit.ScriptModule):
                found.append(full)
    return found

"""What stands around the calls of a model's modules: one wrapper for a module, and none for most.

A call goes through these, from the outside in:

1. stages of a pipeline: run, or are skipped on this rank; outside of a class's own `__call__` (`pipeline/route.py`);
2. the model: names ranks that are lost in its forward (`lost.py`);
3. recomputed modules: are called again in backward, with all that follows here (`recompute.py`);
4. repeated blocks whose updates arrive late: wait for their own parameters (`updates.py`);
5. units: unshard their parameters, and reshard them afterwards (`units.py`);
6. the module's own call: its compiled graph (`compile.py`), or its hooks and forward.

A unit stands outside of the graph, since neither its collectives nor its memory are the compiler's, and inside of
recomputing, since what is computed again needs unsharded parameters again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn

from shardlib.engine import _torch
from shardlib.engine.apply.install import spread_experts
from shardlib.engine.apply.parameters import Movers
from shardlib.engine.apply.rank_plan import RankPlan
from shardlib.engine.compile import CompileReport, compile_blocks
from shardlib.engine.lost import watch_forward
from shardlib.engine.pipeline.route import Route
from shardlib.engine.recompute import recompute
from shardlib.engine.schedule import wait_in_modules
from shardlib.engine.units import unshard_in_modules

__all__ = ["compile_calls", "wrap_calls"]

# Calls what it is given: `wrapper(call, *args, **kwargs)`.
Wrapper = Callable[..., Any]


_TRAVELLING = "how many tokens come to the experts of a rank is known when they do, and a graph has to know it before"


def compile_calls(model: nn.Module, here: RankPlan, backend: str | None, undo: ExitStack) -> CompileReport:
    """Compile repeated blocks, where a model axis splits any: DTensor's decisions are what compiling takes away."""
    eager = dict.fromkeys(spread_experts(model, here), _TRAVELLING)
    backend = backend if here.model_mesh is not None else None
    report, uncompile = compile_blocks(model, backend, here.place(), eager=eager)
    undo.callback(uncompile)
    return report


def wrap_calls(
    model: nn.Module,
    movers: Movers,
    recomputed: Sequence[str],
    undo: ExitStack,
    *,
    route: Route | None,
    check: bool,
) -> None:
    """Let the calls of modules go through what they need around them, after blocks have been compiled.

    Args:
        model: that the modules are in.
        movers: of its parameters.
        recomputed: modules that compute again in backward.
        undo: takes the wrappers away.
        route: of microbatches through this rank's stages.
        check: name ranks that are lost in forward.
    """
    units, updates = movers.units, movers.updates
    innermost_first: tuple[Mapping[str, Wrapper], ...] = (
        unshard_in_modules(units) if units is not None else {},
        wait_in_modules(updates, movers.late) if updates is not None else {},
        recompute(recomputed, units),
        {"": watch_forward} if check else {},
    )
    wrappers: dict[nn.Module, list[Wrapper]] = {}
    for layer in innermost_first:
        for name, wrapper in layer.items():
            wrappers.setdefault(model.get_submodule(name), []).append(wrapper)
    for module, around in wrappers.items():
        undo.callback(_torch.go_through(module, *around))
    for name, wrapper in route.around_modules(model).items() if route is not None else ():
        undo.callback(_torch.go_around(model.get_submodule(name), wrapper))

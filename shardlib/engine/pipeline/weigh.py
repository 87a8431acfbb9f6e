"""Measuring the cost of modules by running them, for stages that are balanced by cost.

The forward of the whole model runs on fake tensors, so that a model on `meta`, or one that fits on no device, can be
weighed too. Seconds are measured one module at a time, on zeros of the shapes of its arguments, in a copy whose
parameters are zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardlib._measure import timed
from shardlib._plan import Plan, RulesLike, as_rules
from shardlib.engine import _torch
from shardlib.engine._torch import pytree
from shardlib.engine.feature.flops import operations_of
from shardlib.engine.pipeline.batch import Call, as_call, key_of
from shardlib.engine.pipeline.stages import fake_copy, fake_like
from shardlib.engine.ranks import agree
from shardlib.errors import PlanError, RuleError
from shardlib.rules import Balanced, By, Weigh

__all__ = ["refuse_idle_example", "weighing"]

_REPEATS = 3  # of which the fastest counts: other load on the machine slows some of them down


def weighing(example: Any, device: torch.device, mesh: DeviceMesh | None = None) -> Weigh | None:
    """Return a function that weighs modules by their operations, the same on every machine; None without an example.

    With a mesh it can also weigh them by the time on the first rank.

    Raises:
        RuleError: there is no mesh to measure times on, or the first rank could not run a module; raised on all ranks.
    """

    def weigh(model: nn.Module, names: Sequence[str], by: By) -> Sequence[float]:
        if by != "time":
            return _operations(model, names, example, device)
        if mesh is None:
            raise RuleError(
                'Balanced(by="time") measures on the devices that train, and a plan knows none. Let '
                'shard_model(..., example=batch) measure, and look at sl.get_plan(model); or plan by="flops".'
            )
        everyone = _torch.flattened(mesh, mesh.mesh_dim_names or ()).get_group()
        seconds, failed = None, None
        if dist.get_rank(everyone) == 0:
            try:
                seconds = _seconds(model, names, example, device)
            except Exception as error:
                failed = error
        text = f"{type(failed).__name__}: {failed}" if failed is not None else None
        found, text = agree.of_first((seconds, text), everyone)
        if text is not None:
            raise RuleError(f'Balanced(by="time"): rank 0 could not measure the modules, it raised {text}') from failed
        return found

    return None if example is None else weigh


def refuse_idle_example(rules: RulesLike | Plan | None, example: Any) -> None:
    """Refuse an example that no stages are weighed with.

    Raises:
        PlanError: the rules do not weigh stages.
    """
    if example is None:
        return
    given = as_rules(rules).stages if rules is not None and not isinstance(rules, Plan) else None
    if not (isinstance(given, Balanced) and given.by != "params"):
        raise PlanError(
            "shard_model was given example=, with which stages are weighed, and the rules have none that are: "
            'stages=Balanced(by="flops") or Balanced(by="time"). Leave it out; plan(..., example=) makes a dry run.'
        )


# --- operations -------------------------------------------------------------------------------------------------------


def _operations(model: nn.Module, names: Sequence[str], example: Any, device: torch.device) -> list[float]:
    found = dict.fromkeys(names, 0.0)
    counter = _Operations()

    def begin(name: str, _call: Call) -> None:
        found[name] -= counter.total

    def end(name: str) -> None:
        found[name] += counter.total

    with counter:
        _run_fake(model, names, example, device, begin, end)
    return list(found.values())


class _Operations(_torch.TorchDispatchMode):
    total = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        self.total += operations_of(op, args, kwargs or {}, out)
        return out


def _run_fake(
    model: nn.Module,
    names: Sequence[str],
    example: Any,
    device: torch.device,
    begin: Callable[[str, Call], None],
    end: Callable[[str], None] = lambda _name: None,
) -> None:
    """Run forward on fake tensors, and call `begin` and `end` around each call of a named module."""
    mode = _torch.new_fake_mode()
    fake = fake_copy(model, mode, device, {})
    for name in names:
        module = fake.get_submodule(name)
        module.register_forward_pre_hook(
            lambda _module, args, kwargs, name=name: begin(name, (args, kwargs)), prepend=True, with_kwargs=True
        )
        module.register_forward_hook(lambda _module, _args, _output, name=name: end(name), always_call=True)
    with mode, torch.no_grad(), torch.random.fork_rng(devices=()):
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda x: fake_like(x, mode, device), as_call(example))
        try:
            fake(*args, **kwargs)
        except _torch.fake_tensor_errors() as error:
            raise RuleError(
                f"The modules of {type(model).__name__} cannot be weighed on shapes alone: its forward depends on "
                f'values of tensors ({type(error).__name__}). Use Balanced(by="params"), or name the stages.'
            ) from error


# --- seconds ----------------------------------------------------------------------------------------------------------


def _seconds(model: nn.Module, names: Sequence[str], example: Any, device: torch.device) -> list[float]:
    """Return the seconds of each module. Modules of the same structure and the same calls are measured once."""
    calls: dict[str, list[Call]] = {name: [] for name in names}
    _run_fake(model, names, example, device, lambda name, call: calls[name].append(call))
    known: dict[Any, float] = {}
    found = []
    for name in names:
        module, total = model.get_submodule(name), 0.0
        built = repr(module), tuple((tuple(t.shape), t.dtype) for t in (*module.parameters(), *module.buffers()))
        for args, kwargs in calls[name]:
            key = (*built, key_of((args, kwargs)))
            if key not in known:
                known[key] = _measured(module, args, kwargs, device)
            total += known[key]
        found.append(total)
    return found


def _measured(module: nn.Module, args: Any, kwargs: Any, device: torch.device) -> float:
    """Return the seconds of the fastest forward and backward of a single module."""
    real = _torch.copied_with(module, lambda tensor: _zeros(tensor, device))

    def once() -> float:
        given = pytree.tree_map_only(torch.Tensor, lambda tensor: _zeros(tensor, device, grad=True), (args, kwargs))
        return timed(lambda: real(*given[0], **given[1]), _torch.tensors_in, device)[0]

    with torch.enable_grad(), torch.random.fork_rng():
        return min([once() for _ in range(1 + _REPEATS)][1:])


def _zeros(tensor: torch.Tensor, device: torch.device, *, grad: bool = False) -> torch.Tensor:
    made = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    return made.requires_grad_(grad and (made.is_floating_point() or made.is_complex()))

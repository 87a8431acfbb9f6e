"""Step any `torch.optim` optimizer on sharded parameters at the speed of plain tensors.

Element-wise optimizers compute every element of the update from the same element of parameter, gradient and state, so
that stepping on local shards is exact. While such an optimizer steps, its parameters and state are the local tensors;
before and after, they are DTensors with global shapes. Where the plan splits state over data axes, each rank steps on
its shard of a parameter, and the shards are gathered afterwards. An optimizer that is not known to be element-wise
steps on DTensors, and on full gradients.

Only a step that torch defines, or that is registered here, sees local tensors. A user's own hooks, and a subclass that
edits gradients and then calls `super().step()`, see the parameters of the model. One hook, the first of all, inspects
each optimizer that steps; it ignores an optimizer without parameters of a sharded model.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as torch_optimizer
from torch.utils.weak import WeakIdKeyDictionary

from shardlib.engine import _torch, offload
from shardlib.engine.borders import moved
from shardlib.engine.executor.bucket import in_batches
from shardlib.engine.full_step import FullTensorStep
from shardlib.engine.lost import naming_lost_ranks
from shardlib.engine.params import ParamState, local_of
from shardlib.engine.schedule import Updates, updates_of, wait_for_updates
from shardlib.engine.sharded import Sharded, param_state_of, records_of
from shardlib.errors import ShardingError, warn

__all__ = [
    "FUSED_DTYPES",
    "FUSED_SGD_DTYPES",
    "register_elementwise",
    "register_in_pieces",
    "register_per_tensor",
    "stepping_through_wrapper",
    "steps_whole_tensors",
    "watch_optimizers",
]

_ELEMENTWISE: set[type[torch.optim.Optimizer]] = {
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
}

_PER_TENSOR: set[type[torch.optim.Optimizer]] = {torch.optim.Adafactor, torch.optim.Muon}

_IN_PIECES = set(_ELEMENTWISE)  # their step is the same as one step for each parameter, one after another

_FUSED = {torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad}
FUSED_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
# torch 2.13's fused SGD reads and writes out of bounds for half-precision parameters of more than 32 elements.
FUSED_SGD_DTYPES = {torch.float32, torch.float64}
_STEP = torch.zeros((), dtype=torch.float32)  # the kind of step counter of the fused kernels

_replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter that sharding has replaced in its model -> its name
_stepping: WeakIdKeyDictionary = WeakIdKeyDictionary()  # optimizer -> _Saved


def register_elementwise(optimizer: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Register an optimizer of your own as element-wise, so that it may step on local shards. Usable as a decorator.

    Element-wise: each element of the update depends on that same element of parameter, gradient and state alone.
    Adam is; LAMB (norms of full tensors), Adafactor (row and column sums) and Muon (full matrices) are not.

    >>> @register_elementwise
    ... class SignSGD(torch.optim.SGD):
    ...     pass
    """
    _ELEMENTWISE.add(optimizer)
    return optimizer


def register_per_tensor(optimizer: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Register an optimizer of your own that updates each parameter from that parameter's gradient and state alone.

    It then gets full tensors where the plan shards them, each on one rank, so that norms and matrices are the same as
    on one device. LAMB and Muon are such optimizers; one that reads several parameters at once (for a common step size)
    is not. Usable as a decorator.

    >>> @register_per_tensor
    ... class Lars(torch.optim.SGD):
    ...     pass
    """
    _PER_TENSOR.add(optimizer)
    return optimizer


def steps_whole_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimizer gets full tensors. State of another shape than the parameter's is then replicated."""
    return type(optimizer) in _PER_TENSOR


def register_in_pieces(optimizer: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Register an element-wise optimizer whose step may run in pieces, each with some of the parameters: the optimizer
    itself counts nothing.

    With offloaded state, one piece then steps while others are copied. Usable as a decorator.

    >>> @register_in_pieces
    ... @register_elementwise
    ... class Plain(torch.optim.SGD):
    ...     pass
    """
    _IN_PIECES.add(optimizer)
    return optimizer


_through_wrapper = False


@contextmanager
def stepping_through_wrapper() -> Iterator[None]:
    """Mark steps in the block as those that an `OptimizerWrapper` has prepared."""
    global _through_wrapper
    before, _through_wrapper = _through_wrapper, True
    try:
        yield
    finally:
        _through_wrapper = before


_watching: list[Any] = []


def watch_optimizers(replaced: Mapping[torch.Tensor, str]) -> None:
    """Install the hook on all optimizers, once; reinstall it, since a caller may have cleared all optimizer hooks.

    Args:
        replaced: the names of the parameters that sharding has replaced in their model; no optimizer may step on them.
    """
    _replaced.update(replaced)
    for handle in _watching:
        handle.remove()
    _watching[:] = [torch_optimizer.register_optimizer_step_pre_hook(_inspect)]


def _inspect(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Inspect an optimizer that begins to step; the first hook of every step in this process."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    records = [record for record in records_of(params) if record.looks_after_steps]
    if _torch.depth_of_step(optimizer) == 1:
        if optimizer in _stepping:
            _put_back(optimizer)  # the previous step has raised
        unknown = [p for p in params if param_state_of(p) is None]
        _refuse_replaced(unknown, len(params))
        _refuse_incomplete_step(records, params)
        if records and not _torch.is_hooked(optimizer, _before_step):
            _warn_of_unknown(unknown, records, len(params))
        for record in records:
            if record.comparison is not None:
                record.comparison.before_step()
    if records:
        _torch.hook_around_step(optimizer, _before_step, _after_step)


@naming_lost_ranks("step")
def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Replace the parameters before a step of an optimizer with parameters of a sharded model; the last pre-hook."""
    depth = _torch.depth_of_step(optimizer)
    begin = _begin_of(optimizer, depth)
    if begin is None or optimizer in _stepping:
        return None
    params = [p for group in optimizer.param_groups for p in group["params"]]
    closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer itself
    if closure is None or begin is _step_on_gathered_gradients:
        _begin(begin, optimizer, params, depth)
        return None
    # These optimizers call their closure first and once: compute the loss and its gradients before shards replace the
    # parameters.
    with torch.enable_grad():
        loss = closure()
    _begin(begin, optimizer, params, depth)
    return (args[0], lambda: loss), {key: value for key, value in kwargs.items() if key != "closure"}


_Begin: TypeAlias = Callable[[torch.optim.Optimizer, list[torch.Tensor]], None]


def _begin(begin: _Begin, optimizer: torch.optim.Optimizer, params: list[torch.Tensor], depth: int) -> None:
    begin(optimizer, params)
    if (saved := _stepping.get(optimizer)) is not None:
        saved.depth = depth


def _begin_of(optimizer: torch.optim.Optimizer, depth: int) -> _Begin | None:
    """Return the function that prepares a step, the `depth`th of nested ones; None if a nested, known step follows."""
    kind = _kind_of(type(optimizer), depth)
    if kind is None:
        return None
    if kind in _ELEMENTWISE:
        return _step_on_local_tensors
    return _step_on_owned_tensors if kind in _PER_TENSOR else _step_on_gathered_gradients


def _kind_of(optimizer: type[torch.optim.Optimizer], depth: int) -> type | None:
    """Return the class that determines what the `depth`th of nested steps needs; None if a nested step does."""
    known = _ELEMENTWISE | _PER_TENSOR
    stepping = [kind for kind in optimizer.__mro__ if "step" in vars(kind)]
    current, bases = stepping[depth - 1], stepping[depth:]
    if any(kind in known for kind in bases) and _torch.calls_step_of_base(current):
        return None
    if depth == 1 and optimizer in known:
        return optimizer
    return current if current in known and not _overrides_more(optimizer, current) else optimizer


def _overrides_more(optimizer: type, base: type) -> bool:
    """Tell whether a subclass overrides methods, other than `step`, that the step of its base may call."""
    subclasses = optimizer.__mro__[: optimizer.__mro__.index(base)]
    defined = {name for kind in subclasses if kind not in _ELEMENTWISE | _PER_TENSOR for name in vars(kind)}
    return any(name in vars(base) for name in defined if name != "step" and not name.startswith("__"))


@naming_lost_ranks("step")
def _after_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Restore the parameters after a step, and begin to gather updated shards; the first post-hook."""
    saved = _stepping.get(optimizer)
    if saved is None or saved.depth != _torch.depth_of_step(optimizer):
        return
    inner = optimizer.state
    _put_back(optimizer)
    # Backward through a graph from before the step raises, as on one device: local shards count their changes by
    # themselves, and the fused kernels count none (2.13.0).
    torch.autograd.graph.increment_version([param for param in saved.params if param.grad is not None])
    if saved.full_step is not None:
        _finish_full_step(saved, inner)
    for updates in saved.updates:
        updates.begin(saved.params)


def _finish_full_step(saved: _Saved, inner: Any) -> None:
    """Scatter updated tensors and their state in the layouts of the plan."""
    assert saved.full_step is not None
    ours = {id(one.param_state.param) for one in saved.full_step.tensors}
    saved.outer.update({p: inner[p] for p in saved.params if id(p) not in ours and p in inner})
    for param, state in saved.full_step.scatter(inner).items():
        saved.outer[param] = state
    for one in saved.full_step.tensors:
        master = saved.full_step.masters.get(id(one.param_state.param))
        if master is not None:
            saved.outer.setdefault(one.param_state.param, {})[MASTER] = (
                one.param_state.wrap(master) if one.param_state.has_sharded_state else master
            )


def _refuse_replaced(unknown: list[torch.Tensor], count: int) -> None:
    stale = [name for p in unknown if (name := _replaced.get(p)) is not None]
    if stale:
        raise ShardingError(
            f"This optimizer was built before its model was sharded: {len(stale)} of its {count} parameters "
            f'(the first is "{stale[0]}") are no longer the model\'s, and stepping them would train nothing. '
            "Build the optimizer after shard_model: torch.optim.AdamW(model.parameters())."
        )


def _refuse_incomplete_step(records: list[Sharded], params: list[torch.Tensor]) -> None:
    for record in records:
        if (name := next(record.reducer.pending(params), None)) is not None:
            raise ShardingError(
                f'An optimizer stepped while a backward pass runs, and the gradient of "{name}" is not reduced yet: it '
                "is when backward() returns. Step then; or let the plan store parameters in shards, as zero(3) and "
                "fsdp() do, whose gradients are reduced before hooks see them."
            )
        if record.plan.step.scaler is not None and not _through_wrapper:
            raise ShardingError(
                "The plan scales the loss (precision), and this optimizer does not know of it. Wrap it: "
                "opt = shardlib.OptimizerWrapper(opt, model), then opt.backward(loss) and opt.step()."
            )
        if record.reducer.is_between_passes():
            raise ShardingError(
                f"The plan makes a step of {record.reducer.passes} backward passes (accumulate), and not all have run. "
                "Step after the last one; shardlib.OptimizerWrapper counts them for you."
            )


def _warn_of_unknown(params: list[torch.Tensor], records: list[Sharded], count: int) -> None:
    """Warn of parameters outside of sharded models, which train on each data rank's own examples.

    The blocks of a model may have been sharded, and not its root.
    """
    data_ranks = max(record.plan.mesh.data_ranks for record in records)
    unknown = [p for p in params if p.requires_grad]
    if data_ranks > 1 and unknown:
        shapes = ", ".join(str(tuple(p.shape)) for p in unknown[:3])
        warn(
            f"{len(unknown)} of this optimizer's {count} parameters belong to no sharded model (of shapes "
            f"{shapes}{', ...' if len(unknown) > 3 else ''}): their gradients are not averaged over the {data_ranks} "
            "data ranks, so that replicas diverge. Call shard_model on the module that holds all of them.",
        )


@dataclass(eq=False)
class _Saved:
    """The values that a step has replaced.

    Attributes:
        groups: the optimizer's former param groups.
        outer: the optimizer state by the model's parameters.
        params: all parameters of the groups.
        updates: gathers the shards that are stepped on.
        gradients: the gradients that full ones have replaced.
        leaves: the parameters, each with its state and the leaf that represents it.
        copies: the copies that are stepped on, each with the parameter state and the memory that it is rounded into.
        written: the number of copies that have been written back.
        full_step: the step on full tensors, if any.
        all_groups: the former list of groups; groups without tensors that this rank steps may be left out of the step.
        depth: the depth among nested steps.
    """

    groups: list[dict[str, Any]]
    outer: Any
    params: list[torch.Tensor]
    updates: list[Updates] = field(default_factory=list)
    gradients: dict[torch.Tensor, torch.Tensor | None] = field(default_factory=dict)
    leaves: list[tuple[torch.Tensor, ParamState | None, torch.Tensor]] = field(default_factory=list)
    copies: list[tuple[ParamState, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    written: int = 0
    full_step: FullTensorStep | None = None
    all_groups: list[dict[str, Any]] | None = None
    depth: int = 1


def _step_on_local_tensors(optimizer: torch.optim.Optimizer, params: list[torch.Tensor]) -> None:
    saved = _Saved([dict(group) for group in optimizer.param_groups], optimizer.state, params, updates_of(params))
    saved.all_groups = optimizer.param_groups
    _stepping[optimizer] = saved
    if not saved.updates and all(map(_steps_in_place, params)):
        for group in saved.all_groups:
            if _may_fuse(optimizer, group, optimizer.state):
                group["fused"] = True
        return
    optimizer.state = defaultdict(dict)
    try:
        _put_local_tensors(optimizer, saved, saved.all_groups)
    except BaseException:
        _put_back(optimizer)
        raise


def _steps_in_place(param: torch.Tensor) -> bool:
    one = param_state_of(param)
    return one is None or not (one.master_dtype is not None or one.steps_on_host or one.local_leaf is not None)


def _put_local_tensors(optimizer: torch.optim.Optimizer, saved: _Saved, groups: list[dict[str, Any]]) -> None:
    """Replace the parameters of a step by leaves.

    Parameters that step on the host step here in pieces, if the optimizer allows it.
    """
    params = saved.params
    shards = {key: shard for updates in saved.updates for key, shard in updates.local_shards(params).items()}
    pieces = [_Piece(each, shards) for each in _in_pieces(params)]
    stepped: set[int] = set()
    for piece in pieces:
        piece.wait()
        if type(optimizer) in _IN_PIECES:
            optimizer.param_groups = _groups_of(piece, optimizer, saved)
            _torch.step_without_hooks(optimizer)
            _write_back(saved)
            stepped |= piece.copies.keys()
    copies = {key: copy for piece in pieces for key, copy in piece.copies.items()}
    for group in groups:
        rest = [p for p in group["params"] if id(p) not in stepped]
        group["params"] = [_local_view(p, shards.get(id(p)), copies.get(id(p)), optimizer.state, saved) for p in rest]
        if _may_fuse(optimizer, group, optimizer.state):
            group["fused"] = True
    optimizer.param_groups = [group for group in groups if group["params"]] if stepped else groups


class _Piece:
    """Parameters that step on the host together, while those of the next piece are copied to the host.

    Gradients are copied now and not as soon as they are reduced, since until now they may be clipped on the device.

    Args:
        params: the parameters.
        shards: this rank's shards of some parameters, by the parameter's id.

    Attributes:
        copies: this rank's shards of parameter and gradient on the host, by the parameter's id.
    """

    def __init__(self, params: list[torch.Tensor], shards: dict[int, torch.Tensor]) -> None:
        self.params, self.shards, self._downloads = params, shards, offload.Downloads()
        self.copies: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        for param in params:
            param_state = param_state_of(param)
            assert param_state is not None
            grad, staging = None, param_state.mutable.staging
            if param.grad is not None:
                grad = self._downloads.begin(_local_gradient(param, param_state), staging, "gradient")
                param_state.copied("gradients, step")
            param_state.copied("parameters, step")
            shard = self._downloads.begin(_memory(param, shards.get(id(param))), staging, "shard")
            self.copies[id(param)] = shard, grad

    def wait(self) -> None:
        """Wait for the copies."""
        self._downloads.wait()


def _in_pieces(params: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    on_host = [p for p in params if (param_state := param_state_of(p)) is not None and param_state.steps_on_host]
    return in_batches(
        on_host,
        alone=lambda _: False,
        key=lambda _: None,
        size=lambda p: local_of(p).nbytes,
        limit=PIECE_BYTES,
    )


PIECE_BYTES = 32 << 20
"""The size of a chunk of parameters that step on the host: enough for each copy to run at full speed."""


def _groups_of(piece: _Piece, optimizer: torch.optim.Optimizer, saved: _Saved) -> list[dict[str, Any]]:
    """Return param groups of the copies of a piece."""
    made = []
    for before in saved.groups:
        ours = [p for p in before["params"] if id(p) in piece.copies]
        if ours:
            views = (_local_view(p, piece.shards.get(id(p)), piece.copies[id(p)], optimizer.state, saved) for p in ours)
            group = {**before, "params": list(views)}
            made.append({**group, "fused": True} if _may_fuse(optimizer, group, optimizer.state) else group)
    return made


def _memory(param: torch.Tensor, shard: torch.Tensor | None) -> torch.Tensor:
    """Return this rank's shard of a parameter, in the layout of its state: the memory that an update goes into."""
    local = one.local_leaf if shard is None and (one := param_state_of(param)) is not None else shard
    return param.detach() if local is None else local


def _step_on_owned_tensors(optimizer: torch.optim.Optimizer, params: list[torch.Tensor]) -> None:
    """Let each rank step the full tensors that it owns, where the plan splits some."""
    known = [(p, one) for p in params if p.grad is not None and (one := param_state_of(p)) is not None]
    param_states = [one for _, one in known]
    if not any(one.has_sharded_state or one.master_dtype is not None or one.offloaded for one in param_states):
        return
    wait_for_updates(params)
    outer = optimizer.state
    saved = _Saved([dict(group) for group in optimizer.param_groups], outer, params)
    saved.all_groups = optimizer.param_groups
    masters = {}
    for one in param_states:
        one.check_reduced()
        if one.master_dtype is not None:
            shard = _local_shard(one)
            low = offload.on_host(shard, one.device) if one.steps_on_host else shard
            masters[id(one.param)] = _master(one, low, outer.get(one.param, {}))
    saved.full_step = FullTensorStep(param_states, masters)
    inner: defaultdict[torch.Tensor, Any] = defaultdict(dict)
    stripped = {p: {k: v for k, v in outer[p].items() if k != MASTER} for p, _ in known if p in outer}
    inner.update(saved.full_step.gather(stripped))
    leaves = {id(one.param_state.param): one.leaf for one in saved.full_step.owned}
    others = {id(p) for p, _ in known}
    for group in optimizer.param_groups:
        kept = (leaves.get(id(p)) if id(p) in others else p for p in group["params"])
        group["params"] = [p for p in kept if p is not None]
    inner.update({p: outer[p] for p in params if id(p) not in others and p in outer})
    optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]
    optimizer.state = inner
    _stepping[optimizer] = saved


def _local_shard(param_state: ParamState) -> torch.Tensor:
    """Return this rank's shard of the stored parameter, in the layout of its state."""
    local = local_of(param_state.param)
    if not param_state.is_updated_sharded:
        return local
    assert param_state.shard_spec is not None and param_state.transport is not None
    return param_state.shard_spec.take(local, param_state.transport.index)


def _step_on_gathered_gradients(optimizer: torch.optim.Optimizer, params: list[torch.Tensor]) -> None:
    """Give full gradients to an optimizer of unknown kind, so that every rank makes the same step."""
    known = [one for p in params if (one := param_state_of(p)) is not None]
    refused = next(
        (
            one
            for one in known
            if one.master_dtype is not None or one.offloaded or (one.is_stored_sharded and one.has_sharded_state)
        ),
        None,
    )
    if refused is not None:
        name = type(optimizer).__qualname__
        raise ShardingError(
            f"{name} steps on parameters that are stored in shards or in low precision, or whose state is on the host "
            f'(the first is "{refused.name}"), and shardlib does not know whether it can. If each element of its '
            f"update depends on that element alone, call shardlib.register_elementwise({name}); if on that full "
            f"tensor, shardlib.register_per_tensor({name}). Else train with zero(1) or zero(2), without precision and "
            "offload."
        )
    saved = _Saved([dict(group) for group in optimizer.param_groups], optimizer.state, params)
    for updates in updates_of(params):
        updates.wait()
        for param, grad in updates.full_gradients(params):
            saved.gradients[param], param.grad = param.grad, grad
    if saved.gradients:
        _stepping[optimizer] = saved
        _warn_of_full_state(type(optimizer).__qualname__)


@functools.cache
def _warn_of_full_state(name: str) -> None:
    warn(
        f"The plan shards optimizer state over data axes, but shardlib does not know whether {name} can step on "
        f"shards: every rank keeps all of its state and steps on full tensors. Say what it needs: "
        f"shardlib.register_elementwise({name}) if each element of its update depends on that element alone, "
        f"shardlib.register_per_tensor({name}) if on one full tensor.",
    )


def _may_fuse(optimizer: torch.optim.Optimizer, group: dict[str, Any], state: Any) -> bool:
    """Tell whether to use torch's fused CPU kernel, several times faster, where the user left the choice to torch.

    On accelerators torch itself uses the multi-tensor form of the same update by default.
    """
    open_choice = all(group.get(key, True) is None for key in ("fused", "foreach")) and not group.get("differentiable")
    if not open_choice or type(optimizer) not in _FUSED or isinstance(group.get("lr"), torch.Tensor):
        return False  # the loop computes with a tensor learning rate in its dtype
    sgd = type(optimizer) is torch.optim.SGD
    dtypes = FUSED_SGD_DTYPES if sgd else FUSED_DTYPES
    for p in group["params"]:
        if p.device.type != "cpu" or p.dtype not in dtypes or (p.grad is not None and p.grad.stride() != p.stride()):
            return False
        if p in state and state[p].get("step", _STEP).dtype != _STEP.dtype:
            return False
    return not sgd or _momentum_of_all_or_none(group, state)


def _momentum_of_all_or_none(group: dict[str, Any], state: Any) -> bool:
    """Tell whether all parameters or none have momentum. torch 2.13's fused SGD raises otherwise: after unfreezing."""
    begun = {"momentum_buffer" in state[p] if p in state else False for p in group["params"] if p.grad is not None}
    return not group.get("momentum") or len(begun) < 2


def _local_view(
    param: torch.Tensor,
    shard: torch.Tensor | None,
    on_host: tuple[torch.Tensor, torch.Tensor | None] | None,
    inner: Any,
    saved: _Saved,
) -> torch.Tensor:
    """Return the plain leaf that represents a parameter during the step, with its gradient and state.

    Args:
        param: the parameter of the model.
        shard: this rank's shard, where that is not the local tensor of the parameter.
        on_host: the copies of shard and gradient to step on.
        inner: the optimizer's state during the step, by leaf.
        saved: records the leaf, and the copies to write back.
    """
    param_state = param_state_of(param)
    leaf = _leaf(param, param_state, shard, on_host, saved)
    state = saved.outer.get(param)
    saved.leaves.append((param, param_state, leaf))
    if leaf is not param:
        grad = (
            on_host[1] if on_host is not None else None if param.grad is None else _local_gradient(param, param_state)
        )
        leaf.grad = None if grad is None else _in_memory_like(leaf, grad)
        state = state and {k: _local_state(param, param_state, value) for k, value in state.items() if k != MASTER}
    if state is not None:
        inner[leaf] = state
    return leaf


def _leaf(
    param: torch.Tensor, param_state: ParamState | None, shard: torch.Tensor | None, on_host: Any, saved: _Saved
) -> torch.Tensor:
    memory = _memory(param, shard)
    source = memory if on_host is None else on_host[0]
    if param_state is not None and param_state.master_dtype is not None:
        leaf = _master(param_state, source, saved.outer.get(param, {}))
    elif on_host is not None:
        leaf = source
    else:
        is_plain = param_state is None or param_state.local_leaf is None
        return param if shard is None and is_plain else memory
    assert param_state is not None
    saved.copies.append((param_state, leaf, memory))
    return leaf


MASTER = "master_parameter"
"""The key in the optimizer's state of the copy that is stepped on, where the plan has one."""


def _master(param_state: ParamState, memory: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    """Return the copy to step on, with the values that were written to the parameter since the last step."""
    kept = param_state.take_master()
    known = _local_state(param_state.param, param_state, state[MASTER]) if MASTER in state else kept
    if known is None:
        return memory.to(param_state.master_dtype, copy=True)
    known = known.to(memory.device)
    unchanged = known.to(memory.dtype) == memory
    # In place, without a test whether any element has changed, which would synchronize an accelerator.
    return torch.where(unchanged, known, memory.to(known.dtype), out=known)


def _local_gradient(param: torch.Tensor, param_state: ParamState | None) -> torch.Tensor:
    """Return this rank's shard of a gradient."""
    grad = param.grad
    assert grad is not None
    if param_state is not None:
        param_state.check_reduced()
        if param_state.is_updated_sharded:
            return local_of(grad)
    if not isinstance(param, DTensor):
        return grad
    if not isinstance(grad, DTensor):
        raise ShardingError(
            f"A sharded parameter of global shape {tuple(param.shape)} has a plain gradient. Assign `p.grad` as a "
            "DTensor in the parameter's placements, or let backward() make it."
        )
    if grad.placements != param.placements and not (param_state is not None and param_state.is_local_shard(grad)):
        grad = moved(grad, param.placements)
    return _torch.local_of(grad)


def _in_memory_like(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient with the strides and dtype of its parameter, since fused kernels ignore strides."""
    same = grad.stride() == param.stride() and grad.dtype == param.dtype
    return grad if same else torch.empty_like(param).copy_(grad)


def _local_state(param: torch.Tensor, param_state: ParamState | None, value: Any) -> Any:
    """Return the local tensor of a state entry, on the device of the plan: a loaded entry may be elsewhere."""
    local = _torch.local_of(value) if isinstance(value, DTensor) else _shard_state(param, param_state, value)
    is_offloaded = param_state is not None and "state" in param_state.offloaded and isinstance(local, torch.Tensor)
    return local.to(offload.HOST) if is_offloaded else local


def _shard_state(param: torch.Tensor, param_state: ParamState | None, value: Any) -> Any:
    """Return the local tensor of a state entry; shard a plain tensor of global shape (a loaded one)."""
    if isinstance(value, torch.Tensor) and value.ndim and value.shape == param.shape:
        if param_state is not None and param_state.is_updated_sharded:
            return param_state.take(value)
        if isinstance(param, DTensor):
            return _torch.shard(value, param.device_mesh, param.placements)
    return value


def _put_back(optimizer: torch.optim.Optimizer) -> None:
    """Restore the values that a step has replaced: after the step, or before the next one if it raised."""
    saved = _stepping.pop(optimizer, None)
    if saved is None:
        return
    for param, grad in saved.gradients.items():
        param.grad = grad
    inner, outer = optimizer.state, saved.outer
    if saved.all_groups is not None:
        optimizer.param_groups = saved.all_groups
    for group, before in zip(optimizer.param_groups, saved.groups, strict=True):
        group.update({key: before[key] for key in ("params", "fused") if key in before})
    optimizer.state = outer
    if inner is outer or saved.full_step is not None:
        return
    for param, param_state, leaf in saved.leaves:
        state = inner.get(leaf)
        if state is not None:
            outer[param] = state if leaf is param else _global_state(param, param_state, outer.get(param, {}), state)
        if leaf is not param:
            leaf.grad = None
    _write_back(saved)
    for param_state, master, _ in saved.copies:
        if param_state.master_dtype is not None and param_state.param in outer:
            outer[param_state.param][MASTER] = _global_value(
                param_state.param, param_state, outer[param_state.param].get(MASTER), master
            )
        elif param_state.master_dtype is not None:
            param_state.keep_master(master)


def _write_back(saved: _Saved) -> None:
    """Copy the stepped copies into the memory of their parameters, each once."""
    for param_state, stepped, memory in saved.copies[saved.written :]:
        if param_state.steps_on_host:
            offload.upload(stepped, memory, param_state.mutable.staging["shard"])
            param_state.copied("updated parameters")
        else:
            memory.copy_(stepped)
    saved.written = len(saved.copies)


def _global_state(
    param: torch.Tensor, param_state: ParamState | None, before: dict[str, Any], local: dict[str, Any]
) -> dict[str, Any]:
    return {key: _global_value(param, param_state, before.get(key), value) for key, value in local.items()}


def _global_value(param: torch.Tensor, param_state: ParamState | None, before: Any, value: Any) -> Any:
    if isinstance(before, DTensor) and _torch.local_of(before) is value:
        return before
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return value
    if param_state is not None and param_state.is_updated_sharded:
        return param_state.wrap(value) if tuple(value.shape) == param_state.shard_shape else value
    if not isinstance(param, DTensor):
        return value
    return _torch.wrap(value, _torch.spec_of(param)) if value.shape == local_of(param).shape else value

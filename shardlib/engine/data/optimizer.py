"""Step any `torch.optim` optimizer on sharded parameters at the speed of plain tensors.

Element-wise optimizers compute every element of the update from the same element of parameter, gradient and state, so
that stepping on local shards is exact. The step that torch defines then runs on a *stand-in*: an object of a subclass
of the optimizer's class, with the same attributes, whose `param_groups` and `state` have local tensors. The optimizer
itself keeps the parameters of the model, and state that is DTensors with global shapes, so that nothing has to be put
back where a step raises. Where the plan splits state over data axes, each rank steps on its shard of a parameter, and
the shards are gathered afterwards. An optimizer that is not known to be element-wise steps on DTensors, and on full
gradients.

Only a step that torch defines, or that is registered here, sees local tensors. A user's own hooks, and a subclass that
edits gradients and then calls `super().step()`, see the parameters of the model. One hook, the first of all, inspects
each optimizer that steps; it ignores an optimizer without parameters of a sharded model.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias, TypeVar, overload

import torch
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as torch_optimizer
from torch.utils.weak import WeakIdKeyDictionary

from shardlib._plan import Optimizer
from shardlib.engine import _torch
from shardlib.engine.data import offload
from shardlib.engine.data.full_step import MASTER, FullTensorStep
from shardlib.engine.data.params import ParamState, local_of
from shardlib.engine.data.schedule import Updates
from shardlib.engine.ops.redistribute import redistribute_gradient
from shardlib.engine.ranks.lost import naming_lost_ranks
from shardlib.engine.sharded import Sharded, param_states_of, records_of, updates_of, wait_for_updates
from shardlib.errors import InputError, ShardingError, warn

__all__ = [
    "FUSED_DTYPES",
    "FUSED_SGD_DTYPES",
    "register_optimizer",
    "stepping_through_wrapper",
    "steps_shards",
    "steps_whole_tensors",
    "watch_optimizers",
]

_KNOWN: dict[type[torch.optim.Optimizer], Optimizer] = {
    torch.optim.ASGD: "elementwise",
    torch.optim.Adadelta: "elementwise",
    torch.optim.Adafactor: "per_tensor",
    torch.optim.Adagrad: "elementwise",
    torch.optim.Adam: "elementwise",
    torch.optim.AdamW: "elementwise",
    torch.optim.Adamax: "elementwise",
    torch.optim.Muon: "per_tensor",
    torch.optim.NAdam: "elementwise",
    torch.optim.RAdam: "elementwise",
    torch.optim.RMSprop: "elementwise",
    torch.optim.Rprop: "elementwise",
    torch.optim.SGD: "elementwise",
}

_FUSED = {torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad}
FUSED_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
# torch 2.13's fused SGD reads and writes out of bounds for half-precision parameters of more than 32 elements.
FUSED_SGD_DTYPES = {torch.float32, torch.float64}
_STEP = torch.zeros((), dtype=torch.float32)  # the kind of step counter of the fused kernels

_STEP_HAS_NO_GRAPH = (
    "is updated in shards, which replace the parameters during each step, and a graph cannot follow that"
)

_replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter that sharding has replaced in its model -> its name


Kind = TypeVar("Kind", bound=type[torch.optim.Optimizer])
Needs: TypeAlias = Literal["shard", "tensor"]
_NEEDS: dict[Needs, Optimizer] = {"shard": "elementwise", "tensor": "per_tensor"}


@overload
def register_optimizer(optimizer: Kind, *, needs: Needs) -> Kind: ...
@overload
def register_optimizer(*, needs: Needs) -> Callable[[Kind], Kind]: ...


def register_optimizer(optimizer: Any = None, *, needs: Needs) -> Any:
    """Register the class of an optimizer of your own, by what its step needs of a parameter, its gradient and state.

    Usable as a decorator. Without a registration, an optimizer gets full gradients on every rank, and is refused where
    parameters are stored in shards.

    Args:
        optimizer: the class; without it, a decorator is returned.
        needs: "shard" where each element of the update depends on that same element of parameter, gradient and state
            alone, as in Adam: it then steps on local shards. "tensor" where the update depends on one whole tensor, as
            in LAMB, which takes norms, or Muon: it then gets full tensors, each on one rank. An optimizer that reads
            several parameters at once, as for a common step size, is neither.

    Raises:
        InputError: `needs` is another word, or `optimizer` is no class of optimizers.

    >>> @register_optimizer(needs="shard")
    ... class SignSGD(torch.optim.SGD):
    ...     pass
    """
    if needs not in _NEEDS:
        raise InputError(f"register_optimizer(needs={needs!r}): give one of {', '.join(map(repr, _NEEDS))}.")
    if optimizer is None:
        return functools.partial(register_optimizer, needs=needs)
    if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        raise InputError(
            f"register_optimizer was given {optimizer!r}; give a class, a subclass of torch.optim.Optimizer."
        )
    _KNOWN[optimizer] = _NEEDS[needs]
    return optimizer


def steps_whole_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimizer gets full tensors. State of another shape than the parameter's is then replicated."""
    return _KNOWN.get(type(optimizer)) == "per_tensor"


def steps_shards(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimizer is known to step on local shards. All of its state has the parameter's shape then, but
    for single numbers."""
    return _KNOWN.get(type(optimizer)) == "elementwise"


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


def watch_optimizers(replaced: Mapping[torch.Tensor, str]) -> None:
    """Install the hook on all optimizers, once; reinstall it, since a caller may have cleared all optimizer hooks.

    Args:
        replaced: the names of the parameters that sharding has replaced in their model; no optimizer may step on them.
    """
    _replaced.update(replaced)
    hook = torch_optimizer.register_optimizer_step_pre_hook
    _torch.patch(watch_optimizers, lambda: hook(_inspect).remove, anew=True)


def _inspect(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Inspect an optimizer that begins to step; the first hook of every step in this process."""
    if isinstance(optimizer, _StandIn):
        return
    if torch.compiler.is_compiling():
        torch.compiler.disable(_refuse_compiled, reason=_STEP_HAS_NO_GRAPH)(optimizer)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    found = records_of(params)
    records = [record for record in found if record.changes_steps]
    if _torch.class_of_step(optimizer) is _torch.classes_with_step(type(optimizer))[0]:
        known = param_states_of(found)
        unknown = [p for p in params if id(p) not in known]
        _refuse_replaced(unknown, len(params))
        _refuse_incomplete_step(records, params)
        _refuse_dense_gradients(optimizer, [known[id(p)] for p in params if id(p) in known])
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
    """Let a stand-in step for an optimizer with parameters of a sharded model; the last pre-hook."""
    if isinstance(optimizer, _StandIn):
        return None
    kind = _kind_of(type(optimizer), _torch.class_of_step(optimizer))
    if kind is None:
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer itself
    rest = args[1:]
    if closure is not None and kind != "unknown":
        # These optimizers call their closure first and once: compute the loss and its gradients before shards stand for
        # the parameters.
        with torch.enable_grad():
            loss = closure()
        rest, kwargs = (lambda: loss,), {key: value for key, value in kwargs.items() if key != "closure"}
    step = _Step(optimizer)
    if not _PREPARE[kind](step):
        return None if rest == args[1:] else ((optimizer, *rest), kwargs)
    return (step.stand_in, *rest), kwargs


def _kind_of(optimizer: type[torch.optim.Optimizer], current: type) -> Optimizer | None:
    """Return what the step of a class needs, which runs; None if that of a base class needs it, which it calls."""
    classes = _torch.classes_with_step(optimizer)
    bases = classes[classes.index(current) + 1 :]
    if any(kind in _KNOWN for kind in bases) and _torch.calls_step_of_base(current):
        return None
    if current is classes[0] and optimizer in _KNOWN:
        return _KNOWN[optimizer]
    if current in _KNOWN and not _overrides_more(optimizer, current):
        return _KNOWN[current]
    return _KNOWN.get(optimizer, "unknown")


def _overrides_more(optimizer: type, base: type) -> bool:
    """Tell whether a subclass overrides methods, other than `step`, that the step of its base may call."""
    subclasses = optimizer.__mro__[: optimizer.__mro__.index(base)]
    defined = {name for kind in subclasses if kind not in _KNOWN for name in vars(kind)}
    return any(name in vars(base) for name in defined if name != "step" and not name.startswith("__"))


@naming_lost_ranks("step")
def _after_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Take over what a stand-in has computed, and begin to gather updated shards; the first post-hook."""
    if not args or not isinstance(args[0], _StandIn) or isinstance(optimizer, _StandIn):
        return
    step: _Step = args[0].step_of
    step.finish()
    # Backward through a graph from before the step raises, as on one device: local shards count their changes by
    # themselves, and the fused kernels count none (2.13.0).
    torch.autograd.graph.increment_version([param for param in step.params if param.grad is not None])
    for updates in step.updates:
        updates.begin(step.params)


def _refuse_compiled(optimizer: torch.optim.Optimizer) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    known = param_states_of(records_of(params))
    found = [one for p in params if (one := known.get(id(p))) is not None]
    for one in found:
        if isinstance(one.param, DTensor) or one.has_sharded_state:
            raise ShardingError(
                f'torch.compile was given the step of {type(optimizer).__name__}, and "{one.name}" '
                f"{_STEP_HAS_NO_GRAPH}. Call optimizer.step() itself; torch's fused and foreach kernels update many "
                "tensors in a call."
            )


def _refuse_dense_gradients(optimizer: torch.optim.Optimizer, param_states: list[ParamState]) -> None:
    """Refuse an optimizer that takes sparse gradients alone, where a gradient was reduced."""
    if not isinstance(optimizer, torch.optim.SparseAdam):
        return
    for one in param_states:
        if one.param.grad is not None and not one.param.grad.is_sparse:
            raise ShardingError(
                f'SparseAdam takes sparse gradients alone, and that of "{one.name}" is dense: shardlib reduces '
                "gradients as dense tensors, also those of nn.Embedding(sparse=True). Step on it with "
                "torch.optim.Adam, SGD or Adagrad."
            )


def _refuse_replaced(unknown: list[torch.Tensor], count: int) -> None:
    stale = [name for p in unknown if (name := _replaced.get(p)) is not None]
    if stale:
        raise ShardingError(
            f"This optimizer was built before its model was sharded: {len(stale)} of its {count} parameters "
            f'(the first is "{stale[0]}") are no longer the model\'s, and stepping them would train nothing. '
            "Build the optimizer after shard_model: torch.optim.AdamW(model.parameters()). Where the model's mesh was "
            "changed, give the optimizer to reshard(model, mesh, optimizer)."
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


_Copies: TypeAlias = dict[int, tuple[torch.Tensor, torch.Tensor | None]]


class _StandIn:
    """The base of the classes of stand-ins."""

    __slots__ = ()
    param_groups: list[dict[str, Any]]
    state: dict[torch.Tensor, Any]
    step_of: Any


@functools.cache
def _stand_in_class(kind: type[torch.optim.Optimizer]) -> type:
    """Return a subclass whose objects have param groups and state of their own, and all else of another object."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (_StandIn, kind), {"__slots__": ("param_groups", "state", "step_of"), **names})


class _Step:
    """One step of an optimizer.

    Attributes:
        optimizer: the optimizer, which keeps its param groups and state.
        is_of_torch: whether torch or shardlib has written its step, which counts nothing and assigns no `p.data`.
        stand_in: the object that steps in its place.
        params: all parameters of the groups.
        states: the states of those of sharded models, by the parameter's id.
        updates: gathers the shards that are stepped on.
        shards: this rank's shards of parameters, by the parameter's id, where they are not the local tensor.
        copies: the copies on the host of shards and gradients to step on, by the parameter's id.
        leaves: what is stepped on in the place of parameters: the leaf, the parameter state, and the memory that the
            leaf is rounded into, if that is another one.
        full: leaves with the full value and gradient of a parameter, by the parameter.
        count_written: the number of leaves that have been written back.
        full_step: the step on full tensors, if any.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.is_of_torch = type(optimizer).__module__.partition(".")[0] in ("torch", "shardlib")
        self.params: list[torch.Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self.states = param_states_of(records_of(self.params))
        self.updates: list[Updates] = []
        self.shards: dict[int, torch.Tensor] = {}
        self.copies: _Copies = {}
        self.leaves: list[tuple[torch.Tensor, ParamState, torch.Tensor]] = []
        self.full: dict[torch.Tensor, torch.Tensor] = {}
        self.count_written = 0
        self.full_step: FullTensorStep | None = None
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []  # of the optimizer and the stand-in
        kind: Any = type(optimizer)
        made: Any = object.__new__(_stand_in_class(kind))
        made.__dict__ = optimizer.__dict__  # shared: what a step sets is set on the optimizer
        made.step_of, made.state = self, defaultdict(dict, optimizer.state)
        self.stand_in = made

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        """The state that the stand-in steps on, by leaf."""
        return self.stand_in.state

    def set_leaves(self, leaf_of: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        """Give the stand-in the leaves of the parameters; leave out parameters without one, and empty groups."""
        self._groups = []
        for group in self.optimizer.param_groups:
            leaves = [leaf for p in group["params"] if (leaf := leaf_of(p)) is not None]
            if leaves:
                own = {**group, "params": leaves}
                if _may_fuse(type(self.optimizer), self.state, own):
                    own["fused"] = True
                self._groups.append((group, own))
        self.stand_in.param_groups = [own for _, own in self._groups]

    def finish(self) -> None:
        """Write the leaves into their parameters, and take the state over."""
        self.write_back()
        inner, outer = self.state, self.optimizer.state
        if self.full_step is not None:
            outer.update(self.full_step.scatter({**inner}))
            for leaf in self.full_step.leaves.values():
                inner.pop(leaf, None)
        single = _keys_of_other_shapes(inner, self.leaves)
        for leaf, param_state, _ in self.leaves:
            state, leaf.grad = inner.pop(leaf, None), None
            if state is not None:
                before = outer.get(param_state.param, {})
                local = state if param_state.master_dtype is None else {**state, MASTER: leaf}
                outer[param_state.param] = {
                    key: value if key in single else _global_value(param_state, before.get(key), value)
                    for key, value in local.items()
                }
            if param_state.master_dtype is not None:
                param_state.keep_master(None if state is not None else leaf)
        for param, leaf in self.full.items():
            leaf.grad = None
            if not _torch.share_memory(local_of(leaf), local_of(param)):  # the step has assigned `p.data`
                param.data = leaf.detach()
            if leaf in inner:
                inner[param] = inner.pop(leaf)
        outer.update(inner)
        for group, own in self._groups:
            group.update({key: value for key, value in own.items() if key not in ("params", "fused")})

    def write_back(self) -> None:
        """Copy the leaves into the memory of their parameters, each once."""
        for leaf, param_state, memory in self.leaves[self.count_written :]:
            if param_state.steps_on_host:
                offload.upload(leaf, memory, param_state.mutable.staging["shard"])
                param_state.copied("updated parameters")
            elif leaf is not memory and not _torch.share_memory(leaf, memory):
                memory.copy_(leaf)
        self.count_written = len(self.leaves)


def _step_on_local_tensors(step: _Step) -> bool:
    """Give the stand-in local tensors.

    Parameters that step on the host step here in pieces, if the optimizer itself counts nothing, as torch's do.
    """
    step.updates = updates_of(step.params)
    for updates in step.updates:
        step.shards |= updates.local_shards(step.params)
    states = (step.states.get(id(p)) for p in step.params)
    on_host = [one for one in states if one is not None and one.steps_on_host]
    stepped: set[int] = set()
    # While a piece steps, the next ones are copied.
    for downloads, copies in [_copies_on_host(piece, step.shards) for piece in _pieces(on_host)]:
        downloads.wait()
        step.copies |= copies
        if step.is_of_torch:
            _step_piece(step, copies)
            stepped |= copies.keys()
    step.set_leaves(lambda p: None if id(p) in stepped else _leaf(p, step))
    return True


def _pieces(param_states: Iterable[ParamState]) -> Iterator[list[ParamState]]:
    """Divide parameters into pieces of some size."""
    piece, size = list[ParamState](), 0
    for one in param_states:
        piece.append(one)
        size += local_of(one.param).nbytes
        if size >= PIECE_BYTES:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def _step_piece(step: _Step, piece: _Copies) -> None:
    step.set_leaves(lambda p: _leaf(p, step) if id(p) in piece else None)
    _torch.step_without_hooks(step.stand_in)
    step.write_back()


def _copies_on_host(
    param_states: list[ParamState], shards: dict[int, torch.Tensor]
) -> tuple[offload.Downloads, _Copies]:
    """Begin to copy this rank's shards of parameters and gradients to the host; return them by the parameter's id.

    Gradients are copied now and not as soon as they are reduced, since until now they may be clipped on the device.
    """
    downloads = offload.Downloads()
    copies: _Copies = {}
    for param_state in param_states:
        param, grad, staging = param_state.param, None, param_state.mutable.staging
        if param.grad is not None:
            grad = downloads.begin(_local_gradient(param_state), staging, "gradient")
            param_state.copied("gradients, step")
        param_state.copied("parameters, step")
        shard = downloads.begin(shards.get(id(param), local_of(param)), staging, "shard")
        copies[id(param)] = shard, grad
    return downloads, copies


PIECE_BYTES = 32 << 20
"""The size of a chunk of parameters that step on the host: enough for each copy to run at full speed."""


def _step_on_owned_tensors(step: _Step) -> bool:
    """Let each rank step the full tensors that it owns, where the plan splits some."""
    known = {p: step.states[id(p)] for p in step.params if p.grad is not None and id(p) in step.states}
    if not any(one.has_sharded_state or one.master_dtype is not None or one.offloaded for one in known.values()):
        return False
    wait_for_updates(step.params)
    state = {p: step.state.pop(p, {}) for p in known}
    for p, one in known.items():
        one.check_reduced()
        if one.master_dtype is not None:
            shard = _local_shard(one)
            low = offload.on_host(shard, one.device) if one.steps_on_host else shard
            state[p] = {**state[p], MASTER: _master(one, low, state[p])}
    step.full_step = FullTensorStep([*known.values()])
    step.state.update(step.full_step.gather(state))
    leaves = step.full_step.leaves
    step.set_leaves(lambda p: leaves.get(p) if p in known else p)
    return True


def _local_shard(param_state: ParamState) -> torch.Tensor:
    """Return this rank's shard of the stored parameter, in the layout of its state."""
    local = local_of(param_state.param)
    if not param_state.is_updated_sharded:
        return local
    assert param_state.shard_spec is not None and param_state.transport is not None
    return param_state.shard_spec.take(local, param_state.transport.index)


def _step_on_gathered_gradients(step: _Step) -> bool:
    """Give full gradients to an optimizer of unknown kind, so that every rank makes the same step."""
    known = [step.states[id(p)] for p in step.params if id(p) in step.states]
    refused = next(
        (
            one
            for one in known
            if one.master_dtype is not None or one.offloaded or (one.is_stored_sharded and one.has_sharded_state)
        ),
        None,
    )
    if refused is not None:
        name = type(step.optimizer).__qualname__
        raise ShardingError(
            f"{name} steps on parameters that are stored in shards or in low precision, or whose state is on the host "
            f'(the first is "{refused.name}"), and shardlib does not know whether it can. If each element of its '
            f'update depends on that element alone, call shardlib.register_optimizer({name}, needs="shard"); if on '
            'that full tensor, needs="tensor". Else train with zero(1) or zero(2), without precision and offload.'
        )
    for updates in updates_of(step.params):
        updates.wait()
        for param, grad in updates.full_gradients(step.params):
            leaf = step.full[param] = _torch.alias(param)
            leaf.grad = grad
            if param in step.state:
                step.state[leaf] = step.state.pop(param)
    if not step.full:
        return False
    _warn_of_full_state(type(step.optimizer).__qualname__)
    step.set_leaves(lambda p: step.full.get(p, p))
    return True


@functools.cache
def _warn_of_full_state(name: str) -> None:
    warn(
        f"The plan shards optimizer state over data axes, but shardlib does not know whether {name} can step on "
        f"shards: every rank keeps all of its state and steps on full tensors. Say what it needs: "
        f'shardlib.register_optimizer({name}, needs="shard") if each element of its update depends on that element '
        'alone, needs="tensor" if on one full tensor.',
    )


def _may_fuse(kind: type[torch.optim.Optimizer], state: Mapping[Any, Any], group: dict[str, Any]) -> bool:
    """Tell whether to use torch's fused CPU kernel, several times faster, where the user left the choice to torch.

    On accelerators torch itself uses the multi-tensor form of the same update by default.
    """
    open_choice = all(group.get(key, True) is None for key in ("fused", "foreach")) and not group.get("differentiable")
    if not open_choice or kind not in _FUSED or isinstance(group.get("lr"), torch.Tensor):
        return False  # the loop computes with a tensor learning rate in its dtype
    sgd = kind is torch.optim.SGD
    dtypes = FUSED_SGD_DTYPES if sgd else FUSED_DTYPES
    for p in group["params"]:
        if not p.is_cpu or p.dtype not in dtypes or ((grad := p.grad) is not None and grad.stride() != p.stride()):
            return False
        if not all(_fits(value, p) for value in state.get(p, {}).values()):
            return False
    return not sgd or _momentum_of_all_or_none(group, state)


def _fits(value: Any, param: torch.Tensor) -> bool:
    """Tell whether a fused kernel may read an entry of the state: it looks at neither shapes nor strides."""
    if not isinstance(value, torch.Tensor):
        return True
    if not value.ndim:
        return value.dtype == _STEP.dtype
    return value.shape == param.shape and value.stride() == param.stride()


def _momentum_of_all_or_none(group: dict[str, Any], state: Any) -> bool:
    """Tell whether all parameters or none have momentum. torch 2.13's fused SGD raises otherwise: after unfreezing."""
    begun = {"momentum_buffer" in state.get(p, {}) for p in group["params"] if p.grad is not None}
    return not group.get("momentum") or len(begun) < 2


def _leaf(param: torch.Tensor, step: _Step) -> torch.Tensor:
    """Return the plain leaf that represents a parameter during the step, with its gradient and its state; the parameter
    itself if it is one."""
    key, inner = id(param), step.state
    param_state, shard, on_host = step.states.get(key), step.shards.get(key), step.copies.get(key)
    is_plain = shard is None and on_host is None and not isinstance(param, DTensor)
    if param_state is None or (is_plain and param_state.master_dtype is None):
        return param
    memory = local_of(param) if shard is None else shard
    if on_host is not None:
        leaf, grad = on_host
    else:
        leaf, grad = (
            memory if step.is_of_torch else memory.detach(),
            None if param.grad is None else _local_gradient(param_state),
        )
    if param_state.master_dtype is not None:
        leaf = _master(param_state, leaf, inner.get(param, {}))
    step.leaves.append((leaf, param_state, memory))
    leaf.grad = None if grad is None else _in_memory_like(leaf, grad)
    if (state := inner.pop(param, None)) is not None:
        inner[leaf] = {key: _local_state(param_state, value) for key, value in state.items() if key != MASTER}
    return leaf


def _master(param_state: ParamState, memory: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    """Return the copy to step on, with the values that were written to the parameter since the last step."""
    kept = param_state.mutable.master
    known = _local_state(param_state, state[MASTER]) if MASTER in state else kept
    if known is None:
        return memory.to(param_state.master_dtype, copy=True)
    known = known.to(memory.device)
    unchanged = known.to(memory.dtype) == memory
    # In place, without a test whether any element has changed, which would synchronize an accelerator.
    return torch.where(unchanged, known, memory.to(known.dtype), out=known)


def _local_gradient(param_state: ParamState) -> torch.Tensor:
    """Return this rank's shard of a gradient."""
    param, grad = param_state.param, param_state.param.grad
    assert grad is not None
    param_state.check_reduced()
    if param_state.is_updated_sharded and not param_state.is_local_shard(grad):  # zeros
        return local_of(grad).new_zeros(param_state.shard_shape)
    if not isinstance(param, DTensor) or param_state.is_local_shard(grad):
        return local_of(grad)
    if not isinstance(grad, DTensor):
        raise ShardingError(
            f"A sharded parameter of global shape {tuple(param.shape)} has a plain gradient. Assign `p.grad` as a "
            "DTensor in the parameter's placements, or let backward() make it."
        )
    return _torch.local_of(
        grad if grad.placements == param.placements else redistribute_gradient(grad, param.placements)
    )


def _in_memory_like(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient with the strides and dtype of its parameter, since fused kernels ignore strides."""
    same = grad.stride() == param.stride() and grad.dtype == param.dtype
    return grad if same else torch.empty_like(param).copy_(grad)


def _local_state(param_state: ParamState, value: Any) -> Any:
    """Return the local tensor of a state entry, on the device of the plan. A loaded one may be full, and elsewhere."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, DTensor):
        value = _torch.local_of(value)
    elif param_state.has_sharded_state and value.shape == param_state.param.shape:
        value = param_state.take(value)
    return value.to(offload.HOST) if "state" in param_state.offloaded else value


def _keys_of_other_shapes(
    state: Mapping[Any, dict[str, Any]], leaves: Sequence[tuple[torch.Tensor, ParamState, torch.Tensor]]
) -> set[str]:
    """Return the keys of state that for some parameter has another shape than its local shard, as `torch.zeros(1)`.

    Where the local shard of another parameter has one element too, the shape of its state alone does not tell.
    """
    return {
        key
        for leaf, param_state, _ in leaves
        for key, value in state.get(leaf, {}).items()
        if isinstance(value, torch.Tensor) and tuple(value.shape) != param_state.shard_shape
    }


def _global_value(param_state: ParamState, before: Any, value: Any) -> Any:
    """Return a state entry as it is between steps: a DTensor, if it is split as its parameter is."""
    if isinstance(before, DTensor) and _torch.local_of(before) is value:
        return before
    if isinstance(value, torch.Tensor) and value.ndim and tuple(value.shape) == param_state.shard_shape:
        if param_state.is_updated_sharded:
            return param_state.wrap(value)
        if isinstance(param_state.param, DTensor):
            return _torch.wrap(value, _torch.spec_of(param_state.param))
    return value


# Each gives the stand-in what it steps on, and tells whether that is another thing than the optimizer has.
_PREPARE: dict[Optimizer, Callable[[_Step], bool]] = {
    "elementwise": _step_on_local_tensors,
    "per_tensor": _step_on_owned_tensors,
    "unknown": _step_on_gathered_gradients,
}

"""Any `torch.optim` optimizer on sharded parameters at the speed of plain tensors.

Element-wise optimizers compute every element of the update from the same element of parameter, gradient and state, so
stepping on local shards is exact. While such an optimizer steps, its parameters and state are the local tensors;
before and after, they are DTensors with global shapes. Where the plan splits state over data axes, each rank steps on
its part of a parameter, and the parts are gathered afterwards. An optimizer that is not known to be element-wise
steps on DTensors, and on whole gradients.

Only a step that torch defines, or that is registered here, sees this. A user's own hooks, and a subclass that edits
gradients and then calls `super().step()`, see the parameters of the model. One hook, the first of all, looks at each
optimizer that steps; it leaves one that has no parameter of a sharded model as it is.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as torch_optimizer
from torch.utils.weak import WeakIdKeyDictionary

from shardlib.engine import _torch, offload
from shardlib.engine.borders import moved
from shardlib.engine.executor.bucket import in_batches
from shardlib.engine.gradients import GradientReducer
from shardlib.engine.held import Held, held_of, local_of
from shardlib.engine.lost import naming_lost_ranks
from shardlib.engine.schedule import Updates, updates_of, wait_for_updates
from shardlib.engine.whole import WholeStep
from shardlib.errors import ShardingError

__all__ = [
    "FUSED_DTYPES",
    "FUSED_SGD_DTYPES",
    "adopt",
    "look_after",
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

_IN_PIECES = set(_ELEMENTWISE)  # a step of theirs is that of each parameter by itself, one after another

_FUSED = {torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad}
FUSED_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
# torch 2.13's fused SGD reads and writes beside half-precision parameters of more than 32 elements.
FUSED_SGD_DTYPES = {torch.float32, torch.float64}
_STEP = torch.zeros((), dtype=torch.float32)  # what the fused kernels count steps in

T = TypeVar("T")


class _ByParameter(Generic[T]):
    """What is known of a parameter, by identity and as long as it lives; asked for every parameter at every step."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[weakref.ref[torch.Tensor], T]] = {}

    def put(self, param: torch.Tensor, value: T) -> None:
        key = id(param)
        self._held[key] = (weakref.ref(param, lambda _gone: self._held.pop(key, None)), value)

    def get(self, param: torch.Tensor) -> T | None:
        held = self._held.get(id(param))
        return held[1] if held is not None and held[0]() is param else None


@dataclass(frozen=True, eq=False)
class _Keeper:
    """What a step has to know of a parameter's model: how many data ranks it trains on, what reduces its gradients, and
    whether its loss is scaled."""

    data_ranks: int
    reducer: weakref.ref[GradientReducer]
    scaled: bool


_local_leaf: _ByParameter[torch.Tensor] = _ByParameter()  # of a sharded parameter: a plain leaf over its local memory
_replaced: _ByParameter[str] = _ByParameter()  # of a parameter that was replaced in sharding: its name
_ours: _ByParameter[_Keeper] = _ByParameter()  # of each parameter of a sharded model
_hooks: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of optimizers that have stepped on such parameters
_stepping: WeakIdKeyDictionary = WeakIdKeyDictionary()  # optimizer -> _Saved


def register_elementwise(optimizer: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Say that an optimizer of your own is element-wise, so that it may step on local shards. Usable as a decorator.

    Element-wise: each element of the update depends on that same element of parameter, gradient and state alone.
    Adam is; LAMB (norms of whole tensors), Adafactor (row and column sums) and Muon (whole matrices) are not.

    >>> @register_elementwise
    ... class SignSGD(torch.optim.SGD):
    ...     pass
    """
    _ELEMENTWISE.add(optimizer)
    return optimizer


def register_per_tensor(optimizer: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Say that an optimizer of your own updates each parameter from that parameter's gradient and state alone.

    It then gets whole tensors where the plan splits them, each on one rank, so that norms and matrices are those of one
    device. LAMB is such an optimizer, and Muon; one that looks at several parameters at once (a common step size) is
    not. Usable as a decorator.

    >>> @register_per_tensor
    ... class Lars(torch.optim.SGD):
    ...     pass
    """
    _PER_TENSOR.add(optimizer)
    return optimizer


def steps_whole_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer gets whole tensors. Its state of other shapes than a parameter's is whole on all ranks."""
    return type(optimizer) in _PER_TENSOR


def register_in_pieces(optimizer: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Say that a step of an element-wise optimizer may be several, each of some parameters: it counts nothing itself.

    Of state on the host one piece then steps while others are on the way. Usable as a decorator.

    >>> @register_in_pieces
    ... @register_elementwise
    ... class Plain(torch.optim.SGD):
    ...     pass
    """
    _IN_PIECES.add(optimizer)
    return optimizer


def adopt(name: str, before: nn.Parameter, after: nn.Parameter) -> None:
    """Tell the hooks that the parameter `before` was replaced by `after`, a DTensor or a plain one elsewhere."""
    if _torch.has_gradient_hooks(before):
        raise ShardingError(
            f'"{name}" has hooks on its gradient (register_hook), and sharding puts another parameter in its place. '
            "Register them after shard_model."
        )
    _replaced.put(before, name)
    if isinstance(after, DTensor):
        _local_leaf.put(after, _torch.local_of(after).detach())


def look_after(params: Iterable[nn.Parameter], data_ranks: int, reducer: GradientReducer, *, scaled: bool) -> None:
    """Tell the hooks that these are the parameters of a model whose gradients are averaged over data ranks.

    Args:
        params: of the model.
        data_ranks: how many.
        reducer: of the model's gradients.
        scaled: whether its loss is scaled, which only an `OptimizerWrapper` knows to undo.
    """
    keeper = _Keeper(data_ranks, weakref.ref(reducer), scaled)
    for param in params:
        _ours.put(param, keeper)


_through_wrapper = False


@contextmanager
def stepping_through_wrapper() -> Iterator[None]:
    """A step inside is one that an `OptimizerWrapper` has prepared."""
    global _through_wrapper
    before, _through_wrapper = _through_wrapper, True
    try:
        yield
    finally:
        _through_wrapper = before


_watching: list[Any] = []


def watch_optimizers() -> None:
    """Look at all optimizers that step, once; again where somebody has cleared the hooks of all optimizers since."""
    for handle in _watching:
        handle.remove()
    _watching[:] = [
        torch_optimizer.register_optimizer_step_pre_hook(_meet),
    ]


def _meet(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The first hook of every step in this process."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if (outermost := _torch.depth_of_step(optimizer) == 1) and optimizer in _stepping:
        _put_back(optimizer)  # the step before has raised
    if outermost:
        _refuse_replaced(params)
    keepers = {keeper for p in params if (keeper := _ours.get(p)) is not None}
    if not keepers:
        return
    if outermost:
        if optimizer not in _hooks:
            _warn_of_strangers(params)
        _refuse_half_a_step(keepers, params)
    for handle in _hooks.get(optimizer, ()):
        handle.remove()
    _hooks[optimizer] = _torch.hook_around_step(optimizer, _before_step, _after_step)


@naming_lost_ranks("step")
def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The last hook before a step of an optimizer that has parameters of a sharded model."""
    depth = _torch.depth_of_step(optimizer)
    begin = _way_of(optimizer, depth)
    if begin is None or optimizer in _stepping:
        return None
    params = [p for group in optimizer.param_groups for p in group["params"]]
    closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer itself
    if closure is None or begin is _step_on_gathered_gradients:
        _begin(begin, optimizer, params, depth)
        return None
    # These optimizers call their closure first and once: the loss and its gradients are made before the parameters are
    # replaced by their parts.
    with torch.enable_grad():
        loss = closure()
    _begin(begin, optimizer, params, depth)
    return (args[0], lambda: loss), {key: value for key, value in kwargs.items() if key != "closure"}


_Way: TypeAlias = Callable[[torch.optim.Optimizer, list[torch.Tensor]], None]


def _begin(begin: _Way, optimizer: torch.optim.Optimizer, params: list[torch.Tensor], depth: int) -> None:
    begin(optimizer, params)
    if (saved := _stepping.get(optimizer)) is not None:
        saved.depth = depth


def _way_of(optimizer: torch.optim.Optimizer, depth: int) -> _Way | None:
    """How the step runs that is about to, the `depth`th of nested ones; None where it goes on to one that is known."""
    kind = _kind_of(type(optimizer), depth)
    if kind is None:
        return None
    if kind in _ELEMENTWISE:
        return _step_on_local_tensors
    return _step_on_owned_tensors if kind in _PER_TENSOR else _step_on_gathered_gradients


def _kind_of(optimizer: type[torch.optim.Optimizer], depth: int) -> type | None:
    """The class that says what a step needs, the `depth`th of nested ones; None where it is one that it calls."""
    known = _ELEMENTWISE | _PER_TENSOR
    stepping = [kind for kind in optimizer.__mro__ if "step" in vars(kind)]
    here, below = stepping[depth - 1], stepping[depth:]
    if any(kind in known for kind in below) and _torch.calls_step_of_base(here):
        return None
    if depth == 1 and optimizer in known:
        return optimizer
    return here if here in known and not _changes_more(optimizer, here) else optimizer


def _changes_more(optimizer: type, base: type) -> bool:
    """Whether a subclass changes what a step of its base calls."""
    between = optimizer.__mro__[: optimizer.__mro__.index(base)]
    own = {name for kind in between if kind not in _ELEMENTWISE | _PER_TENSOR for name in vars(kind)}
    return any(name in vars(base) for name in own if name != "step" and not name.startswith("__"))


@naming_lost_ranks("step")
def _after_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The first hook after it."""
    saved = _stepping.get(optimizer)
    if saved is None or saved.depth != _torch.depth_of_step(optimizer):
        return
    inner = optimizer.state
    _put_back(optimizer)
    if saved.whole is not None:
        _take_whole_step(saved, inner)
    for updates in saved.updates:
        updates.begin(saved.params)


def _take_whole_step(saved: _Saved, inner: Any) -> None:
    """Updated tensors and their state go back to where the plan has them."""
    assert saved.whole is not None
    ours = {id(one.held.param) for one in saved.whole.tensors}
    saved.outer.update({p: inner[p] for p in saved.params if id(p) not in ours and p in inner})
    for param, state in saved.whole.hand_out(inner).items():
        saved.outer[param] = state
    for one in saved.whole.tensors:
        master = saved.whole.masters.get(id(one.held.param))
        if master is not None:
            saved.outer.setdefault(one.held.param, {})[MASTER] = one.held.wrap(master) if one.held.is_split else master


def _refuse_replaced(params: list[torch.Tensor]) -> None:
    stale = [name for p in params if (name := _replaced.get(p)) is not None]
    if stale:
        raise ShardingError(
            f"This optimizer was built before its model was sharded: {len(stale)} of its {len(params)} parameters "
            f'(the first is "{stale[0]}") are no longer the model\'s, and stepping them would train nothing. '
            "Build the optimizer after shard_model: torch.optim.AdamW(model.parameters())."
        )


def _refuse_half_a_step(keepers: set[_Keeper], params: list[torch.Tensor]) -> None:
    for keeper in keepers:
        reducer = keeper.reducer()
        if reducer is not None and (name := next(reducer.pending(params), None)) is not None:
            raise ShardingError(
                f'An optimizer stepped while a backward pass runs, and the gradient of "{name}" is not reduced yet: it '
                "is when backward() returns. Step then; or let the plan store parameters in parts, as zero(3) and "
                "fsdp() do, whose gradients are reduced before hooks see them."
            )
        if keeper.scaled and not _through_wrapper:
            raise ShardingError(
                "The plan scales the loss (precision), and this optimizer does not know of it. Wrap it: "
                "opt = shardlib.OptimizerWrapper(opt, model), then opt.backward(loss) and opt.step()."
            )
        if reducer is not None and reducer.is_between_passes():
            raise ShardingError(
                f"The plan makes a step of {reducer.passes} backward passes (accumulate), and not all have run. "
                "Step after the last one; shardlib.OptimizerWrapper counts them for you."
            )


def _warn_of_strangers(params: list[torch.Tensor]) -> None:
    """Blocks were sharded and the root forgotten: what is left trains on each data rank's own examples."""
    data_ranks = max((keeper.data_ranks for p in params if (keeper := _ours.get(p)) is not None), default=1)
    strangers = [p for p in params if _ours.get(p) is None and p.requires_grad]
    if data_ranks > 1 and strangers:
        shapes = ", ".join(str(tuple(p.shape)) for p in strangers[:3])
        warnings.warn(
            f"{len(strangers)} of this optimizer's {len(params)} parameters belong to no sharded model (of shapes "
            f"{shapes}{', ...' if len(strangers) > 3 else ''}): nobody averages their gradients over the {data_ranks} "
            "data ranks, and they drift apart. Call shard_model on the module that holds all of them.",
            stacklevel=4,
        )


@dataclass(eq=False)
class _Saved:
    """What a step has replaced.

    Attributes:
        groups: the optimizer's param groups as they were.
        outer: its state, by the parameters that users know.
        updates: what gathers the parts that are stepped on.
        params: all parameters of the groups.
        gradients: those that were replaced by whole ones.
        leaves: parameters, what is known of each, and what stands for it.
        copies: those that are stepped on, each with the parameter and the memory that it is rounded into.
        written: how many of them have been.
        whole: the step on whole tensors that is under way.
        all_groups: the list of groups, of which some may be left out: those without tensors that this rank steps.
        depth: which of nested steps it is.
    """

    groups: list[dict[str, Any]]
    outer: Any
    params: list[torch.Tensor]
    updates: list[Updates] = field(default_factory=list)
    gradients: dict[torch.Tensor, torch.Tensor | None] = field(default_factory=dict)
    leaves: list[tuple[torch.Tensor, Held | None, torch.Tensor]] = field(default_factory=list)
    copies: list[tuple[Held, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    written: int = 0
    whole: WholeStep | None = None
    all_groups: list[dict[str, Any]] | None = None
    depth: int = 1


def _step_on_local_tensors(optimizer: torch.optim.Optimizer, params: list[torch.Tensor]) -> None:
    saved = _Saved([dict(group) for group in optimizer.param_groups], optimizer.state, params, updates_of(params))
    saved.all_groups = optimizer.param_groups
    _stepping[optimizer] = saved
    if not saved.updates and all(map(_steps_as_it_is, params)):
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


def _steps_as_it_is(param: torch.Tensor) -> bool:
    held = held_of(param)
    beside = held is not None and (held.master_dtype is not None or held.visits_host)
    return not beside and _local_leaf.get(param) is None


def _put_local_tensors(optimizer: torch.optim.Optimizer, saved: _Saved, groups: list[dict[str, Any]]) -> None:
    """Let leaves stand for parameters. Those that step on the host have done so when this returns, where that is known
    to be the same as stepping with all others."""
    params = saved.params
    parts = {key: part for updates in saved.updates for key, part in updates.local_shards(params).items()}
    pieces = [_Piece(each, parts) for each in _in_pieces(params)]
    stepped: set[int] = set()
    for piece in pieces:
        piece.arrive()
        if type(optimizer) in _IN_PIECES:
            optimizer.param_groups = _groups_of(piece, optimizer, saved)
            _torch.step_without_hooks(optimizer)
            _write_back(saved)
            stepped |= piece.copies.keys()
    copies = {key: copy for piece in pieces for key, copy in piece.copies.items()}
    for group in groups:
        rest = [p for p in group["params"] if id(p) not in stepped]
        group["params"] = [_local_view(p, parts.get(id(p)), copies.get(id(p)), optimizer.state, saved) for p in rest]
        if _may_fuse(optimizer, group, optimizer.state):
            group["fused"] = True
    optimizer.param_groups = [group for group in groups if group["params"]] if stepped else groups


class _Piece:
    """Parameters that step on the host together, while those of the next piece are on the way there.

    Gradients leave the device now and not as soon as they are reduced, since until now they may be clipped there.

    Args:
        params: they.
        parts: of some parameters, this rank's part by the parameter's id.

    Attributes:
        copies: by the parameter's id, on the host: this rank's part of it and of its gradient.
    """

    def __init__(self, params: list[torch.Tensor], parts: dict[int, torch.Tensor]) -> None:
        self.params, self.parts, self._downloads = params, parts, offload.Downloads()
        self.copies: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        for param in params:
            held = held_of(param)
            assert held is not None
            grad = None
            if param.grad is not None:
                grad = self._downloads.begin(_own_gradient(param, held), held.landing, "gradient")
            part = self._downloads.begin(_memory(param, parts.get(id(param))), held.landing, "part")
            self.copies[id(param)] = part, grad

    def arrive(self) -> None:
        self._downloads.wait()


def _in_pieces(params: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    visitors = [p for p in params if (held := held_of(p)) is not None and held.visits_host]
    return in_batches(
        visitors,
        alone=lambda _: False,
        key=lambda _: None,
        size=lambda p: local_of(p).nbytes,
        limit=PIECE_BYTES,
    )


PIECE_BYTES = 32 << 20
"""Of parameters that step on the host while others are on the way: enough for each transfer to run at full speed."""


def _groups_of(piece: _Piece, optimizer: torch.optim.Optimizer, saved: _Saved) -> list[dict[str, Any]]:
    """Param groups of a piece's copies."""
    made = []
    for before in saved.groups:
        ours = [p for p in before["params"] if id(p) in piece.copies]
        if ours:
            views = (_local_view(p, piece.parts.get(id(p)), piece.copies[id(p)], optimizer.state, saved) for p in ours)
            group = {**before, "params": list(views)}
            made.append({**group, "fused": True} if _may_fuse(optimizer, group, optimizer.state) else group)
    return made


def _memory(param: torch.Tensor, part: torch.Tensor | None) -> torch.Tensor:
    """This rank's part of a parameter, as its state lies: memory that an update goes into."""
    local = _local_leaf.get(param) if part is None else part
    return param.detach() if local is None else local


def _step_on_owned_tensors(optimizer: torch.optim.Optimizer, params: list[torch.Tensor]) -> None:
    """Each rank steps whole tensors of its own, where the plan splits some."""
    known = [(p, one) for p in params if p.grad is not None and (one := held_of(p)) is not None]
    held = [one for _, one in known]
    if not any(one.is_split or one.master_dtype is not None or one.hosted for one in held):
        return
    wait_for_updates(params)
    outer = optimizer.state
    saved = _Saved([dict(group) for group in optimizer.param_groups], outer, params)
    saved.all_groups = optimizer.param_groups
    masters = {}
    for one in held:
        one.refuse_own_examples()
        if one.master_dtype is not None:
            part = _own_part(one)
            low = offload.on_host(part, one.device) if one.visits_host else part
            masters[id(one.param)] = _master(one, low, outer.get(one.param, {}))
    saved.whole = WholeStep(held, masters)
    inner: defaultdict[torch.Tensor, Any] = defaultdict(dict)
    stripped = {p: {k: v for k, v in outer[p].items() if k != MASTER} for p, _ in known if p in outer}
    inner.update(saved.whole.gather(stripped))
    leaves = {id(one.held.param): one.leaf for one in saved.whole.own}
    others = {id(p) for p, _ in known}
    for group in optimizer.param_groups:
        kept = (leaves.get(id(p)) if id(p) in others else p for p in group["params"])
        group["params"] = [p for p in kept if p is not None]
    inner.update({p: outer[p] for p in params if id(p) not in others and p in outer})
    optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]
    optimizer.state = inner
    _stepping[optimizer] = saved


def _own_part(held: Held) -> torch.Tensor:
    """This rank's part, as the state lies, of what is stored."""
    local = local_of(held.param)
    if not held.updated_in_parts:
        return local
    assert held.cut is not None and held.transport is not None
    return held.cut.take(local, held.transport.index)


def _step_on_gathered_gradients(optimizer: torch.optim.Optimizer, params: list[torch.Tensor]) -> None:
    """Nothing is known of this optimizer: it gets whole gradients, and every rank makes the same step."""
    every = [one for p in params if (one := held_of(p)) is not None]
    hard = next(
        (o for o in every if o.master_dtype is not None or o.hosted or (o.is_stored_in_parts and o.is_split)), None
    )
    if hard is not None:
        name = type(optimizer).__qualname__
        raise ShardingError(
            f"{name} steps on parameters that are stored in parts or in low precision, or whose state is on the host "
            f'(the first is "{hard.name}"), and it is not known what it needs of them. If each element of its update '
            f"depends on that element alone, call shardlib.register_elementwise({name}); if on that whole tensor, "
            f"shardlib.register_per_tensor({name}). Else train with zero(1) or zero(2), without precision and offload."
        )
    saved = _Saved([dict(group) for group in optimizer.param_groups], optimizer.state, params)
    for updates in updates_of(params):
        updates.wait()
        for param, grad in updates.full_gradients(params):
            saved.gradients[param], param.grad = param.grad, grad
    if saved.gradients:
        _stepping[optimizer] = saved
        _tell_of_whole_state(type(optimizer).__qualname__)


@functools.cache
def _tell_of_whole_state(name: str) -> None:
    warnings.warn(
        f"The plan splits optimizer state over data axes, but nothing is known of {name}: every rank keeps all of its "
        f"state and makes the whole step. Say what it needs: shardlib.register_elementwise({name}) if each element of "
        f"its update depends on that element alone, shardlib.register_per_tensor({name}) if on one whole tensor.",
        stacklevel=6,
    )


def _may_fuse(optimizer: torch.optim.Optimizer, group: dict[str, Any], state: Any) -> bool:
    """Whether to take torch's fused CPU kernel, several times faster: the user must have left the choice to torch.

    On accelerators torch itself takes the multi-tensor form of the same update when nothing was chosen.
    """
    open_choice = all(group.get(key, True) is None for key in ("fused", "foreach")) and not group.get("differentiable")
    if not open_choice or type(optimizer) not in _FUSED or isinstance(group.get("lr"), torch.Tensor):
        return False  # the loop computes with a tensor for learning rate in that one's dtype
    sgd = type(optimizer) is torch.optim.SGD
    dtypes = FUSED_SGD_DTYPES if sgd else FUSED_DTYPES
    for p in group["params"]:
        if p.device.type != "cpu" or p.dtype not in dtypes or (p.grad is not None and p.grad.stride() != p.stride()):
            return False
        if p in state and state[p].get("step", _STEP).dtype != _STEP.dtype:
            return False
    return not sgd or _momentum_of_all_or_none(group, state)


def _momentum_of_all_or_none(group: dict[str, Any], state: Any) -> bool:
    """torch 2.13's fused SGD takes the momentum of some parameters only as an error: of one unfrozen since, say."""
    begun = {"momentum_buffer" in state[p] if p in state else False for p in group["params"] if p.grad is not None}
    return not group.get("momentum") or len(begun) < 2


def _local_view(
    param: torch.Tensor,
    part: torch.Tensor | None,
    on_host: tuple[torch.Tensor, torch.Tensor | None] | None,
    inner: Any,
    saved: _Saved,
) -> torch.Tensor:
    """The plain leaf that stands for a parameter during the step, with its gradient and state.

    Args:
        param: as users know it.
        part: this rank's part of it, where that is not what it holds.
        on_host: copies of its part and gradient that are to be stepped on.
        inner: the optimizer's state during the step, by leaf.
        saved: remembers the leaf, and what is to be written back.
    """
    held = held_of(param)
    leaf = _leaf(param, held, part, on_host, saved)
    state = saved.outer.get(param)
    saved.leaves.append((param, held, leaf))
    if leaf is not param:
        grad = on_host[1] if on_host is not None else None if param.grad is None else _own_gradient(param, held)
        leaf.grad = None if grad is None else _in_memory_like(leaf, grad)
        state = state and {k: _local_state(param, held, value) for k, value in state.items() if k != MASTER}
    if state is not None:
        inner[leaf] = state
    return leaf


def _leaf(
    param: torch.Tensor, held: Held | None, part: torch.Tensor | None, on_host: Any, saved: _Saved
) -> torch.Tensor:
    memory = _memory(param, part)
    here = memory if on_host is None else on_host[0]
    if held is not None and held.master_dtype is not None:
        leaf = _master(held, here, saved.outer.get(param, {}))
    elif on_host is not None:
        leaf = here
    else:
        return param if part is None and _local_leaf.get(param) is None else memory
    assert held is not None
    saved.copies.append((held, leaf, memory))
    return leaf


MASTER = "master_parameter"
"""Under this key the optimizer's state keeps the copy that is stepped on, where a plan says that there is one."""


def _master(held: Held, memory: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    """The copy to step on. What somebody else has written to the parameter since the last step counts."""
    known = _local_state(held.param, held, state[MASTER]) if MASTER in state else held.first_master
    held.first_master = None
    if known is None:
        return memory.to(held.master_dtype, copy=True)
    known = known.to(memory.device)
    unchanged = known.to(memory.dtype) == memory
    # In place, and without asking whether any has changed: an accelerator would be waited for.
    return torch.where(unchanged, known, memory.to(known.dtype), out=known)


def _own_gradient(param: torch.Tensor, held: Held | None) -> torch.Tensor:
    """What this rank has of a gradient: that of its part."""
    grad = param.grad
    assert grad is not None
    if held is not None:
        held.refuse_own_examples()
        if held.updated_in_parts:
            return local_of(grad)
    if not isinstance(param, DTensor):
        return grad
    if not isinstance(grad, DTensor):
        raise ShardingError(
            f"A sharded parameter of global shape {tuple(param.shape)} has a plain gradient. Assign `p.grad` as a "
            "DTensor in the parameter's placements, or let backward() make it."
        )
    if grad.placements != param.placements and not (held is not None and held.is_part(grad)):
        grad = moved(grad, param.placements)
    return _torch.local_of(grad)


def _in_memory_like(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Fused kernels walk parameter and gradient in step, whatever the strides: a part of a larger tensor is copied."""
    alike = grad.stride() == param.stride() and grad.dtype == param.dtype
    return grad if alike else torch.empty_like(param).copy_(grad)


def _local_state(param: torch.Tensor, held: Held | None, value: Any) -> Any:
    """One entry of the optimizer's state as its local tensor, where the plan keeps it: loaded ones may not be."""
    local = _torch.local_of(value) if isinstance(value, DTensor) else _cut_state(param, held, value)
    away = held is not None and "state" in held.hosted and isinstance(local, torch.Tensor)
    return local.to(offload.HOST) if away else local


def _cut_state(param: torch.Tensor, held: Held | None, value: Any) -> Any:
    """One entry as its local tensor; a plain tensor of global shape (loaded) is cut first."""
    if isinstance(value, torch.Tensor) and value.ndim and value.shape == param.shape:
        if held is not None and held.updated_in_parts:
            return held.take(value)
        if isinstance(param, DTensor):
            return _torch.shard(value, param.device_mesh, param.placements)
    return value


def _put_back(optimizer: torch.optim.Optimizer) -> None:
    """Undo what a step has replaced: after it, or before the next one if it raised."""
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
    if inner is outer or saved.whole is not None:
        return
    for param, held, leaf in saved.leaves:
        state = inner.get(leaf)
        if state is not None:
            outer[param] = state if leaf is param else _global_state(param, held, outer.get(param, {}), state)
        if leaf is not param:
            leaf.grad = None
    _write_back(saved)
    for held, master, _ in saved.copies:
        if held.master_dtype is not None and held.param in outer:
            outer[held.param][MASTER] = _global_value(held.param, held, outer[held.param].get(MASTER), master)
        elif held.master_dtype is not None:
            held.first_master = master


def _write_back(saved: _Saved) -> None:
    """What was stepped on beside the parameters goes into their own memory, each once."""
    for held, stepped, memory in saved.copies[saved.written :]:
        if held.visits_host:
            offload.upload(stepped, memory, held.landing["part"])
        else:
            memory.copy_(stepped)
    saved.written = len(saved.copies)


def _global_state(
    param: torch.Tensor, held: Held | None, before: dict[str, Any], local: dict[str, Any]
) -> dict[str, Any]:
    return {key: _global_value(param, held, before.get(key), value) for key, value in local.items()}


def _global_value(param: torch.Tensor, held: Held | None, before: Any, value: Any) -> Any:
    if isinstance(before, DTensor) and _torch.local_of(before) is value:
        return before
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return value
    if held is not None and held.updated_in_parts:
        return held.wrap(value) if tuple(value.shape) == held.part_shape else value
    if not isinstance(param, DTensor):
        return value
    return _torch.wrap(value, _torch.spec_of(param)) if value.shape == local_of(param).shape else value

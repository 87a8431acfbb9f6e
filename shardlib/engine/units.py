"""Parameters that are stored in parts are whole while they are computed with: a unit at a time.

A unit is a module whose parameters are gathered together, such as a block, or several small ones. While its forward
runs, its modules show unsharded tensors in the place of the stored parameters. An autograd function makes these of
those: its backward gets the gradients of a whole unit at once, and gives each parameter its shard of their mean. The
memory of whole parameters is lent: units take turns in two buffers, one for the unit that computes and one for the unit
that comes next, which is gathered meanwhile. What autograd has saved of a parameter is this memory, so that before a
unit's backward its parameters are gathered into the same place once more (Rajbhandari et al., "ZeRO", section 5.3; Zhao
et al., "PyTorch FSDP", VLDB 2023, sections 3.3 and 4.2, whose schedule this is).

What belongs to no unit (parameters of modules with parts that are units, parameters tied across units) is gathered
when the model is entered, and stays until backward has ended.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardlib._plan import ALONE_BYTES, Purpose, join_small, unit_of
from shardlib.engine import _torch
from shardlib.engine._torch import pytree
from shardlib.engine.executor import Executor
from shardlib.engine.executor.gather import UnshardBucket, unshard_buckets
from shardlib.engine.held import Held
from shardlib.engine.lost import naming_lost_ranks_in_backward
from shardlib.engine.schedule import RunOrder
from shardlib.errors import ShardingError

if TYPE_CHECKING:
    from shardlib.engine.gradients import GradientReducer

__all__ = ["Units", "lend", "unshard_in_modules"]

_ALIGNMENT = 64  # bytes; kernels are fastest there


@dataclass(eq=False)
class Lending:
    """A flat buffer in which units take turns, and who has it.

    Attributes:
        holder: the unit whose whole parameters lie in it now.
        busy: how many forwards of the holder are running.
    """

    flat: torch.Tensor
    holder: _Unit | None = None
    busy: int = 0


@dataclass(eq=False)
class _Unit:
    """Parameters that are gathered together.

    Attributes:
        name: of its modules; "" for what belongs to no unit.
        places: where modules keep them: the dict of a module's parameters, the key, the parameter, and what stands
            there while the model runs but not this unit.
        kept: whether they stay whole until backward has ended.
        shown: what its modules compute with while the model runs, by the identity of what is known of a parameter. All
            forwards of a unit share these, so that their gradients come together.
        depth: how many forwards of its modules are running.
        awaited: a backward pass will ask for it.
    """

    name: str
    held: list[Held]
    places: list[tuple[dict[str, Any], str, Held, torch.Tensor]]
    memory: Lending
    buckets: list[UnshardBucket]
    kept: bool
    shown: dict[int, torch.Tensor] = field(default_factory=dict)
    depth: int = 0
    awaited: bool = False

    @property
    def is_whole(self) -> bool:
        return self.memory.holder is self

    @naming_lost_ranks_in_backward
    def begin_to_gather(self) -> None:
        """Ask for every rank's parts. What else lies in the memory is gone from now on."""
        if self.memory.busy and self.memory.holder is not self:
            assert self.memory.holder is not None
            raise ShardingError(
                f'"{self.name}" runs inside of "{self.memory.holder.name}", whose whole parameters lie in the memory '
                "that both take turns in. Keep one of them whole: fsdp(reshard_after_forward=False), or zero(3) with "
                f'only= patterns that leave "{self.name}" out.'
            )
        if self.memory.holder is not None:
            self.memory.holder.finish_gathering()  # what it asked for comes into this memory
        self.memory.holder = self
        purpose: Purpose = "parameters, forward" if _torch.backward_id() == -1 else "parameters, backward"
        for bucket in self.buckets:
            bucket.begin(purpose)

    @naming_lost_ranks_in_backward
    def finish_gathering(self) -> None:
        for bucket in self.buckets:
            bucket.wait()

    def release(self) -> None:
        """Forward is over; what stays for backward stays."""
        if self.memory.holder is self and not self.depth and not (self.kept and self.awaited):
            self.finish_gathering()
            self.memory.holder = None

    def show(self, reducer: weakref.ref[GradientReducer], *, in_step: bool) -> None:
        """Let its modules compute with unsharded tensors; in a step of a pipeline, with the same ones throughout."""
        if in_step:
            self.shown = {id(held): _leaf(held) for held in self.held}
        learning = torch.is_grad_enabled() and any(held.param.requires_grad for held in self.held)
        if not self.shown or (learning and not any(tensor.requires_grad for tensor in self.shown.values())):
            self.shown = _unsharded(self.held, reducer)
        for owner, key, held, _ in self.places:
            owner[key] = self.shown[id(held)]

    def refuse_replaced(self) -> None:
        """Raise if modules have other tensors now than the parameters that were sharded."""
        for owner, key, held, _ in self.places:
            if owner.get(key) is not held.param:
                raise ShardingError(
                    f'"{held.name}" is stored in shards, and another tensor stands in its place since (assigned, tied, '
                    "parametrized, or given to torch.func.functional_call). Replace it before shard_model; copy "
                    "values into it by load_state_dict; or do not shard it between steps: zero(2), or only= patterns "
                    "without it."
                )

    def guard(self) -> None:
        for owner, key, _, guard in self.places:
            owner[key] = guard

    def hide(self) -> None:
        self.shown = {}  # it keeps a graph, through which the collector sees no cycle
        for owner, key, held, _ in self.places:
            owner[key] = held.param


def _leaf(held: Held) -> torch.Tensor:
    if held.leaf is None:
        if held.param.requires_grad and _torch.has_gradient_hooks(held.param):
            raise ShardingError(
                f'"{held.name}" is stored in shards and has hooks on its gradient, which pipeline steps do not call: '
                "they add up the gradients of all microbatches. Remove the hooks, or use zero(2) at most."
            )
        held.leaf = held.to_compute_with().requires_grad_(held.param.requires_grad)
    return held.leaf


def _unsharded(held: Sequence[Held], reducer: weakref.ref[GradientReducer]) -> dict[int, torch.Tensor]:
    """What modules compute with in the place of parameters; autograd leads gradients from there to the parameters."""
    shown = {id(one): one.to_compute_with() for one in held}
    trained = [one for one in held if one.param.requires_grad]
    if torch.is_grad_enabled() and trained:
        made = _Unshard.apply(reducer, trained, [shown[id(one)] for one in trained], *(one.param for one in trained))
        shown.update(zip(map(id, trained), made, strict=True))
    return shown


class _Unshard(torch.autograd.Function):
    """Parameters of a unit as they are stored -> as they are computed with; gradients go the other way, to the mean.

    Gathering has happened before, and reducing goes on until the backward pass has ended: `p.grad` gets its shard then.
    At once it is there only for what autograd gives to others too: hooks of the parameter, `autograd.grad`.
    """

    @staticmethod
    def forward(ctx: Any, reducer: Any, held: Sequence[Held], made: Sequence[torch.Tensor], *_params: Any) -> Any:  # type: ignore[override]
        ctx.reducer, ctx.held = reducer, held
        ctx.set_materialize_grads(False)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise ShardingError(
                f'A backward pass with create_graph=True reached "{ctx.held[0].name}", which is stored in shards: its '
                "second derivatives cannot be computed. Do not shard it between steps: zero(2), or only= patterns "
                "without it. Gradients of gradients of inputs can be computed at every stage."
            )
        nodes = [node for node, _ in ctx.next_functions]
        wanted = [_torch.asks_for_gradient(node) for node in nodes]
        at_once = [
            want is not True or _torch.has_gradient_hooks(one.param) for want, one in zip(wanted, ctx.held, strict=True)
        ]
        reducer = ctx.reducer()
        if reducer is None:
            raise ShardingError("A backward pass has come to a sharded model that is gone. Keep the model until then.")
        chosen = [i for i, want in enumerate(wanted) if want is not False]
        found = reducer.take_unsharded(
            [ctx.held[i] for i in chosen], [grads[i] for i in chosen], [at_once[i] for i in chosen]
        )
        results: list[torch.Tensor | None] = [None] * len(grads)
        for i, result in zip(chosen, found, strict=True):
            results[i] = result
        return (None, None, None, *results)


class Units:
    """The units of a model, by name: which of them are whole now, and which comes next."""

    def __init__(self, units: Mapping[str, _Unit]) -> None:
        self.units = units
        self._reducer: weakref.ref[GradientReducer] | None = None
        self._each = list({id(unit): unit for unit in units.values()}.values())
        self._order: RunOrder[_Unit] = RunOrder()
        self._inside = 0  # forwards of the whole model that are running
        self._in_step = False

    def give_gradients_to(self, reducer: GradientReducer) -> None:
        """Let this reduce the gradients of all parameters."""
        self._reducer = weakref.ref(reducer)

    # --- forward ------------------------------------------------------------------------------------------------------

    def enter_model(self) -> None:
        """A forward of the whole model begins: parts may have changed since the last one."""
        if _torch.backward_id() == -1:
            self.let_go()
            self._order.restart()
        idle = [unit for unit in self._each if not unit.depth]
        for unit in idle if not self._inside else ():
            unit.refuse_replaced()
        self._inside += 1
        for unit in idle:
            unit.guard()
        if (rest := self.units.get("")) is not None:
            self._enter(rest)

    def leave_model(self, output: Any) -> Any:
        if (rest := self.units.get("")) is not None:
            output = self._leave(rest, output)
        self._inside -= 1
        self._show_stored()
        if _torch.backward_id() == -1 and not self._inside:
            for unit in self._each:
                unit.release()
        return output

    def _show_stored(self) -> None:
        """Users see parameters as they are stored, unless a forward is running."""
        if not self._inside:
            for unit in self._each:
                if not unit.depth:
                    unit.hide()

    def abandon(self) -> None:
        """A forward of the model has raised."""
        self._inside = 0  # whatever was running inside of it is over too
        for unit in self._each:
            unit.depth = unit.memory.busy = 0
        self._show_stored()

    def call(self, unit: _Unit, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A forward of one unit, with its parameters whole."""
        self._enter(unit)
        try:
            output = inner(*args, **kwargs)
        except BaseException:
            self._hide(unit)
            raise
        return self._leave(unit, output)

    def _enter(self, unit: _Unit) -> None:
        self._show(unit)
        if _torch.backward_id() == -1:
            self._order.runs(unit)
            self._prefetch(self._order.after_forward_of(unit), unit)

    def _leave(self, unit: _Unit, output: Any) -> Any:
        self._hide(unit)
        if torch.is_grad_enabled():
            hook = _before_backward(weakref.ref(self), weakref.ref(unit))
            for leaf in pytree.tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not leaf.is_leaf:
                    leaf.register_hook(hook)
                    unit.awaited = True
        if _torch.backward_id() == -1 and not self._inside:
            unit.release()
        return output

    def _show(self, unit: _Unit) -> None:
        if not (self._inside or unit.depth):
            unit.refuse_replaced()
        self._make_whole(unit)
        unit.memory.busy += 1
        unit.depth += 1
        assert self._reducer is not None
        unit.show(self._reducer, in_step=self._in_step)

    def _hide(self, unit: _Unit) -> None:
        unit.memory.busy -= 1
        unit.depth -= 1
        if unit.depth == 0 and not self._inside:
            unit.hide()
        elif unit.depth == 0 and not unit.kept:
            unit.guard()

    # --- backward -----------------------------------------------------------------------------------------------------

    def before_backward(self, unit: _Unit) -> None:
        """Autograd is about to compute with what it has saved of a unit's parameters."""
        self._make_whole(unit)
        self._prefetch(self._order.after_backward_of(unit), unit)

    def call_again(self, name: str, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A module computes again in backward, when no forward has its unit shown; in forward, a plain call."""
        if _torch.backward_id() == -1:
            return inner(*args, **kwargs)
        names = dict.fromkeys(("", unit_of([name], self.units)))
        needed = [self.units[n] for n in names if n in self.units]
        for unit in needed:
            self._show(unit)
        try:
            return inner(*args, **kwargs)
        finally:
            for unit in needed:
                self._hide(unit)

    def let_go(self) -> None:
        """Nobody computes with whole parameters any more."""
        for unit in self._each:
            unit.finish_gathering()
            if not (self._in_step and unit.kept):
                unit.memory.holder, unit.awaited = None, False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Several passes through the model, between which no parameter changes: those kept whole stay so throughout.

        Gradients of all passes add up, and are handed to the reducer in the end.
        """
        self.let_go()
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False
            if self._reducer is not None and (reducer := self._reducer()) is not None:
                reducer.take_from_leaves()
        self.let_go()  # what has raised may be a rank that is gone, on which this would wait

    # --- both ---------------------------------------------------------------------------------------------------------

    def _make_whole(self, unit: _Unit) -> None:
        if not unit.is_whole:
            unit.begin_to_gather()
        unit.finish_gathering()

    def _prefetch(self, following: _Unit | None, unit: _Unit) -> None:
        """Begin to gather the unit that computes next, while this one computes in other memory."""
        if following is None or following.is_whole:
            return
        if following.memory is not unit.memory and not following.memory.busy:
            following.begin_to_gather()


def _before_backward(units: weakref.ref[Units], unit: weakref.ref[_Unit]) -> Callable[[torch.Tensor], None]:
    """A hook on an output, which does not keep the model: the collector does not see through a graph."""

    def hook(_grad: torch.Tensor) -> None:
        here, which = units(), unit()
        if here is not None and which is not None:
            here.before_backward(which)

    return hook


def lend(
    model: nn.Module,
    held: Iterable[Held],
    units: Sequence[str],
    kept: Callable[[str], bool],
    executor: Executor,
    *,
    bucket_bytes: int,
) -> Units:
    """Give every parameter that is stored in parts lent memory to be computed with in.

    Args:
        model: that they are parameters of.
        held: all parameters; those that are not stored in parts are left alone.
        units: names of modules that are units.
        kept: whether the parameters of a name stay whole until backward has ended.
        executor: gathers them.
        bucket_bytes: small units are gathered as one until they have so much, or what a tensor has that moves alone.
    """
    stored = [one for one in held if one.is_stored_in_parts]
    places, known = _places(model, stored), frozenset(units)
    groups: dict[str, list[Held]] = {}
    for one in stored:
        groups.setdefault(unit_of(one.names, known), []).append(one)
    let_go = {unit: unit != "" and not all(kept(one.name) for one in group) for unit, group in groups.items()}
    sizes = {unit: sum(map(_room, groups[unit])) for unit in units if unit in groups}
    joined = join_small(sizes, let_go.__getitem__, min(ALONE_BYTES, bucket_bytes))
    turns = [_together(groups, names) for names in joined if let_go[names[0]]]
    rings = [_memory_for(turns[start::2]) for start in (0, 1)]
    made: dict[str, _Unit] = {}
    turn = 0
    for names in [*joined, *([("",)] if "" in groups else [])]:
        group = _together(groups, names)
        if let_go[names[0]]:
            memory, turn = rings[turn], 1 - turn
        else:
            memory = _memory_for([group])
        _give_memory(group, memory.flat)
        unit = _Unit(
            ", ".join(names),
            group,
            [(*place, guard) for one in group for guard in [_Guard.of(one)] for place in places[id(one.param)]],
            memory,
            unshard_buckets(executor, group),
            kept=not let_go[names[0]],
        )
        made |= dict.fromkeys(names, unit)
    return Units(made)


def _together(groups: Mapping[str, list[Held]], names: Iterable[str]) -> list[Held]:
    return [held for name in names for held in groups[name]]


def _memory_for(groups: list[list[Held]]) -> Lending:
    """One buffer that is large enough for each of these groups."""
    size = max((sum(map(_room, group)) for group in groups), default=0)
    device = groups[0][0].device if groups else None
    return Lending(torch.empty(size, dtype=torch.uint8, device=device))


def _room(held: Held) -> int:
    assert held.cut is not None
    bytes_ = sum(held.cut.numels) * held.dtype.itemsize
    return -(-bytes_ // _ALIGNMENT) * _ALIGNMENT


def _give_memory(group: list[Held], flat: torch.Tensor) -> None:
    at = 0
    for held in group:
        assert held.cut is not None
        numel = sum(held.cut.numels)
        view = flat[at : at + numel * held.dtype.itemsize].view(held.dtype).view(held.cut.shape)
        held.unsharded = view.data
        at += _room(held)


def _places(model: nn.Module, stored: list[Held]) -> dict[int, list[tuple[dict[str, Any], str, Held]]]:
    """Find where modules keep parameters, by the id of each, in one walk of the model."""
    by_id = {id(held.param): held for held in stored}
    places: dict[int, list[tuple[dict[str, Any], str, Held]]] = {key: [] for key in by_id}
    for module in model.modules():
        parameters = _torch.own_tensors(module)[0]
        for key, param in parameters.items():
            if id(param) in by_id:
                places[id(param)].append((parameters, key, by_id[id(param)]))
    return places


class _Guard(torch.Tensor):
    """Stands for a parameter while the model runs but its unit does not. It can be asked for its shape and dtype.

    The stored parameter must not be found there: computed with beside tensors that differ from rank to rank, it would
    give wrong numbers without a word.
    """

    parameter: str

    @staticmethod
    def of(held: Held) -> torch.Tensor:
        assert held.unsharded is not None
        dtype, device, shape = held.dtype, held.unsharded.device, held.param.shape
        guard = _torch.with_values(
            lambda: torch.empty((), dtype=dtype, device=device).expand(shape).as_subclass(_Guard)
        )
        guard.parameter = held.name
        return guard

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        of_property = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else ""
        if (name in _ASKING or func in _ASKING) and of_property not in _VALUES:
            return _torch.call_below_subclass(func, *args, **(kwargs or {}))
        guards = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, _Guard)]
        raise ShardingError(
            f'"{guards[0].parameter}" is stored in parts and was read while its own module was not running, by '
            f"{of_property or name or func}. Leave it whole: give zero(3) or fsdp() only= patterns without it."
        )


_ASKING = {"__get__", "size", "dim", "numel", "is_floating_point", "is_complex", "element_size", "stride", "__len__"}
# Properties that are tensors: what they give would be computed with.
_VALUES = {"T", "mT", "H", "mH", "data", "real", "imag"}


def unshard_in_modules(units: Units) -> dict[str, Callable[..., Any]]:
    """Return, by name, what stands around the modules that are units, so that they run with whole parameters."""
    return {name: functools.partial(units.call, unit) for name, unit in units.units.items() if name}

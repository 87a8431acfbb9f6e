"""Unshard parameters that are stored in shards while their modules compute, one unit at a time.

A unit is a module whose parameters are gathered together, such as a block, or several small modules. While the forward
of a unit runs, its modules hold unsharded tensors in place of the stored parameters. An autograd function connects the
two: its backward receives the full gradients of a unit at once, and gives each parameter its shard of their mean.

Unsharded parameters alternate between two buffers: one for the unit that computes, and one for the next unit, which is
gathered meanwhile. Tensors that autograd saved alias these buffers. Before the backward of a unit, its parameters are
therefore gathered into the same buffer again (Rajbhandari et al., "ZeRO", section 5.3; Zhao et al., "PyTorch FSDP",
VLDB 2023, sections 3.3 and 4.2, whose schedule this is).

Backward comes to a unit by a hook on each tensor that the unit has given to others: in its output, in objects that it
returns, in lists and dicts that it was given, and in attributes of its modules. Where a tensor gets out by another way,
as through a closure, autograd raises: the version of unsharded tensors differs while another unit is in their buffer.

A module may read a parameter of another unit, as a tied head reads an embedding's. It is gathered into memory of its
own, which stays until backward has used it; its gradient joins that of the unit.

Parameters outside of units (those of modules that contain units, and those tied across units) are gathered when the
forward of the model begins, and stay unsharded until backward has ended.
"""

from __future__ import annotations

import functools
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardlib._mesh_shape import MeshShape
from shardlib._plan import Purpose, Unit, unshard_buckets
from shardlib.engine import _torch
from shardlib.engine._torch import pytree
from shardlib.engine.data.executor import Executor
from shardlib.engine.data.executor.gather import UnshardBucket
from shardlib.engine.data.params import ParamState
from shardlib.engine.data.schedule import RunOrder
from shardlib.engine.ranks.lost import naming_lost_ranks_in_operations
from shardlib.errors import ShardingError

if TYPE_CHECKING:
    from shardlib.engine.data.gradients import GradientReducer

__all__ = ["IN_BUFFER", "Units", "make_units", "read_sentinel"]

Hook = Callable[[torch.Tensor], None]
_ALIGNMENT = 64  # bytes; kernels are fastest there
# Advice in errors.
_KEEP_FULL = (
    "keep it full between steps: zero(2), or only= patterns without it (of a plugin: zero_stage=2, "
    'shard_param_frac=0, or sharding_strategy="NO_SHARD").'
)


@dataclass(eq=False)
class UnshardedBuffer:
    """A flat buffer that units share, one at a time.

    Attributes:
        flat: the memory, as bytes.
        holder: the unit whose unsharded parameters the buffer holds now.
        busy: the number of forwards of the holder that are running.
    """

    flat: torch.Tensor
    holder: _Unit | None = None
    busy: int = 0


@dataclass(eq=False)
class _Unit:
    """Parameters that are gathered together.

    Attributes:
        name: the names of the unit's modules; "" for the parameters outside of units.
        param_states: the parameters.
        owners: the places where modules keep the parameters: the dict of a module's parameters, the key, the parameter
            state, and the sentinel that stands there while the model runs but this unit does not.
        buffer: the memory of the unsharded parameters.
        buckets: the buckets that gather the parameters.
        stays_unsharded: whether the parameters stay unsharded until backward has ended.
        modules: the modules of the unit, whose attributes may keep results.
        unsharded: the tensors that its modules compute with while the model runs, by the id of the parameter's state.
            All forwards of a unit share them, so that their gradients arrive together.
        read: the copies that other modules than its own compute with while the model runs, by the same id.
        versions: how often each of these copies had been written to when it was made, by its own id.
        values: the number of different values that the stored parameters have had.
        stored_versions: how often each stored parameter had been written to when it was gathered last.
        version: the version of unsharded tensors: even while the buffer holds the unit, with its present values.
        written: the names of parameters that were written to while they were unsharded.
        left: the classes of unsharded tensors that others refer to after the forward of the unit, by the same id: until
            it runs again, they are read as sentinels are.
        depth: the number of forwards of the unit's modules that are running.
        awaited: whether a backward pass will need the unit.
        is_read_apart: whether a parameter has been read while the unit did not run.
        is_replaced: whether modules hold other tensors than the stored parameters.
    """

    name: str
    param_states: list[ParamState]
    owners: list[tuple[dict[str, Any], str, ParamState, _Sentinel]]
    buffer: UnshardedBuffer
    buckets: list[UnshardBucket]
    stays_unsharded: bool
    modules: list[nn.Module] = field(default_factory=list)
    unsharded: dict[int, torch.Tensor] = field(default_factory=dict)
    read: dict[int, torch.Tensor] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    values: int = 0
    stored_versions: list[int] = field(default_factory=list)
    version: int = 0
    written: list[str] = field(default_factory=list)
    left: dict[int, type] = field(default_factory=dict)
    depth: int = 0
    awaited: bool = False
    is_read_apart: bool = False
    is_replaced: bool = False
    _made_hooks: tuple[Hook, Hook] | None = None

    def hooks(self, units: Units) -> tuple[Hook, Hook]:
        """Return the hooks on an output and on an input: the same ones in each forward."""
        if self._made_hooks is None:
            self._made_hooks = _hooks(weakref.ref(units), weakref.ref(self))
        return self._made_hooks

    @property
    def is_unsharded(self) -> bool:
        """Whether the buffer holds the parameters of this unit, or receives them."""
        return self.buffer.holder is self

    @naming_lost_ranks_in_operations
    def begin_unshard(self) -> None:
        """Begin to gather the shards of all ranks. The previous content of the buffer is lost."""
        if self.buffer.busy and self.buffer.holder is not self:
            assert self.buffer.holder is not None
            raise ShardingError(
                f'"{self.name}" runs inside of "{self.buffer.holder.name}", whose unsharded parameters are in the '
                "buffer that both share. Keep one of them unsharded until backward: fsdp(reshard_after_forward=False); "
                f'or, for "{self.name}", {_KEEP_FULL}'
            )
        if self.buffer.holder is not None:
            self.buffer.holder.release()
        self.buffer.holder = self
        stored = [one.param._version for one in self.param_states]
        if stored != self.stored_versions:
            self.stored_versions, self.values = stored, self.values + 1
        self._set_version(2 * self.values)
        purpose: Purpose = "parameters, forward" if _torch.backward_id() == -1 else "parameters, backward"
        for bucket in self.buckets:
            bucket.begin(purpose)

    @naming_lost_ranks_in_operations
    def wait_for_unshard(self) -> None:
        for bucket in self.buckets:
            bucket.wait()

    def release(self) -> None:
        """Leave the buffer to others. Autograd then raises where it reads what it saved of this unit's parameters."""
        self.wait_for_unshard()  # the all-gather writes into the buffer
        if self.buffer.holder is self:
            self.buffer.holder = None
            self._set_version(2 * self.values + 1)

    def _set_version(self, version: int) -> None:
        self.written += [one.name for one in self.param_states if self._is_written(one)]
        self.version = version
        for one in self.param_states:
            one.set_unsharded_version(version)

    def reshard(self) -> None:
        """Free the buffer after forward, unless the parameters stay unsharded for backward."""
        if self.buffer.holder is self and not self.depth and not (self.stays_unsharded and self.awaited):
            self.release()

    def use_unsharded(self, reducer: weakref.ref[GradientReducer], *, in_step: bool) -> None:
        """Put unsharded tensors into the modules."""
        self._make_unsharded(reducer, in_step=in_step)
        for at, kind in self.left.items():
            self.unsharded[at].__class__ = kind
        self.left, self.is_replaced = {}, True
        for owner, key, param_state, _ in self.owners:
            owner[key] = self.unsharded[id(param_state)]

    def guard_references(self) -> None:
        """Have unsharded tensors to which others refer gathered when they are read: a hook has kept a weight, or the
        module has returned it, and the buffer will hold other values."""
        left = {*_torch.referenced(self.unsharded)}
        for *_, param_state, sentinel in self.owners if left else ():
            key = id(param_state)
            if param_state.mutable.leaf is not None:
                continue  # of a step of a pipeline, which refers to it
            if key in left and key not in self.left and _torch.has_values(tensor := self.unsharded[key]):
                self.left[key] = type(tensor)
                tensor.__class__ = _SentinelDTensor if isinstance(tensor, DTensor) else _Sentinel
                tensor.parameter, tensor.read = sentinel.parameter, sentinel.read  # type: ignore[attr-defined]

    def _make_unsharded(self, reducer: weakref.ref[GradientReducer], *, in_step: bool) -> None:
        """Make the unsharded tensors; during a step of a pipeline, the same ones for all microbatches."""
        if in_step:
            self.unsharded = {id(one): one.step_leaf() for one in self.param_states}
        needs_grad = torch.is_grad_enabled() and any(
            param_state.param.requires_grad for param_state in self.param_states
        )
        if not self.unsharded or (needs_grad and not any(tensor.requires_grad for tensor in self.unsharded.values())):
            self.unsharded, self.read, self.versions = _unsharded(self.param_states, reducer), {}, {}
            self.left = {}

    def read_apart(
        self, param_state: ParamState, reducer: weakref.ref[GradientReducer], *, in_step: bool
    ) -> torch.Tensor:
        """Return a copy of a parameter that a module of another unit reads; gather it, where it is the first time.

        The buffer is left alone: it may be that of the module that reads.
        """
        self.is_read_apart = True
        self._make_unsharded(reducer, in_step=in_step)
        source, found = self.unsharded[id(param_state)], self.read.get(id(param_state))
        if self.stays_unsharded and self.is_unsharded and _torch.backward_id() != -1:
            self.wait_for_unshard()
            return source
        needs_grad = source.requires_grad and torch.is_grad_enabled()
        if found is None or (needs_grad and not found.requires_grad):
            with torch.no_grad():
                found = param_state.gather()
            if needs_grad:
                found = _Read.apply(source, [found])
            self.read[id(param_state)] = found
            if not found.is_inference():
                self.versions[id(found)] = found._version
        return found

    def refuse_replaced(self) -> None:
        """Raise if a module holds another tensor than the parameter that was sharded."""
        for owner, key, param_state, _ in self.owners:
            if owner.get(key) is not param_state.param:
                raise ShardingError(
                    f'"{param_state.name}" is stored in shards, and another tensor stands in its place since '
                    "(assigned, tied, parametrized, or given to torch.func.functional_call). Replace it before "
                    f"shard_model; copy values into it by load_state_dict; or {_KEEP_FULL}"
                )

    def use_sentinels(self) -> None:
        """Put sentinels into the modules, which gather a parameter when it is read."""
        self.is_replaced = True
        for owner, key, param_state, sentinel in self.owners:
            sentinel.train(param_state.param.requires_grad)
            owner[key] = sentinel

    def use_sharded(self) -> list[str]:
        """Put the stored parameters back into the modules, unless another tensor stands there now.

        Returns the names of those that were written to while they were unsharded.
        """
        for owner, key, param_state, sentinel in self.owners:
            if (found := owner.get(key)) is not None and (found is sentinel or self._holds(found, param_state)):
                owner[key] = param_state.param
        self.is_replaced = False
        if self.stays_unsharded:
            self.guard_references()
        written, self.written = self.written + [one.name for one in self.param_states if self._is_written(one)], []
        self.forget()
        for one in self.param_states:
            one.set_unsharded_version(self.version)
        return written

    def forget(self) -> None:
        """Drop unsharded tensors: they hold an autograd graph, and no cycle through it is ever collected."""
        self.unsharded, self.read, self.versions, self.left = {}, {}, {}, {}

    def refuse_written(self, written: Sequence[str]) -> None:
        if written:
            raise ShardingError(
                f'"{written[0]}" is stored in shards and was written to while its unit "{self.name}" was unsharded, in '
                "forward: the write is lost when the unit is resharded. Write to it outside of forward, as after "
                f"the optimizer's step; or {_KEEP_FULL}"
            )

    def _is_written(self, param_state: ParamState) -> bool:
        """Tell whether an unsharded tensor was written to since it was gathered."""
        copy = self.read.get(id(param_state))
        if copy is not None and id(copy) in self.versions and copy._version != self.versions[id(copy)]:
            return True
        return param_state.unsharded_version != self.version

    def _holds(self, tensor: torch.Tensor, param_state: ParamState) -> bool:
        return tensor is self.unsharded.get(id(param_state))


def _unsharded(param_states: Sequence[ParamState], reducer: weakref.ref[GradientReducer]) -> dict[int, torch.Tensor]:
    """Return the tensors that modules compute with, by the id of the parameter state; autograd takes their gradients
    back to the parameters."""
    unsharded = {id(one): one.make_unsharded() for one in param_states}
    trained = [one for one in param_states if one.param.requires_grad]
    if torch.is_grad_enabled() and trained:
        made = _Unshard.apply(
            reducer, trained, [unsharded[id(one)] for one in trained], *(one.param for one in trained)
        )
        unsharded.update(zip(map(id, trained), made, strict=True))
    for one in param_states:
        if len(vars(one.param)) > 1:  # a user's own, beside the mark of a parameter
            vars(unsharded[id(one)]).update({k: v for k, v in vars(one.param).items() if k != "_is_param"})
        if one.compute_spec is not None:
            setattr(unsharded[id(one)], IN_BUFFER, True)
    return unsharded


IN_BUFFER = "_shardlib_in_buffer"
"""The attribute of a DTensor that is an unsharded parameter, whose memory others will take."""


class _Unshard(torch.autograd.Function):
    """Turn the stored parameters of a unit into unsharded ones in forward; reduce their gradients in backward.

    The all-gather has happened before. Reductions go on until the backward pass has ended: `p.grad` gets its shard
    then. A gradient is reduced immediately only where autograd also gives it to others: to hooks of the parameter, or
    to a caller of `autograd.grad`.
    """

    @staticmethod
    def forward(
        ctx: Any, reducer: Any, param_states: Sequence[ParamState], made: Sequence[torch.Tensor], *_params: Any
    ) -> Any:  # type: ignore[override]
        ctx.reducer, ctx.param_states = reducer, param_states
        ctx.versions = [one.param._version for one in param_states]
        ctx.set_materialize_grads(False)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise ShardingError(
                f'A backward pass with create_graph=True reached "{ctx.param_states[0].name}", which is stored in '
                f"shards: its second derivatives cannot be computed. To compute them, {_KEEP_FULL}"
            )
        for one, version in zip(ctx.param_states, ctx.versions, strict=True):
            if one.param._version != version:
                raise ShardingError(
                    f'"{one.name}" was changed, as by a step, after the forward that this backward pass belongs to. '
                    "Run backward before the parameter changes, or forward again."
                )
        nodes = [node for node, _ in ctx.next_functions]
        wanted = [_torch.asks_for_gradient(node) for node in nodes]
        at_once = [
            want is not True or _torch.has_gradient_hooks(one.param)
            for want, one in zip(wanted, ctx.param_states, strict=True)
        ]
        reducer = ctx.reducer()
        if reducer is None:
            raise ShardingError("A backward pass has come to a sharded model that is gone. Keep the model until then.")
        chosen = [i for i, want in enumerate(wanted) if want is not False]
        found = reducer.reduce_unsharded(
            [ctx.param_states[i] for i in chosen], [grads[i] for i in chosen], [at_once[i] for i in chosen]
        )
        results: list[torch.Tensor | None] = [None] * len(grads)
        for i, result in zip(chosen, found, strict=True):
            results[i] = result
        return (None, None, None, *results)


class _Read(torch.autograd.Function):
    """Let the gradient of a copy of an unsharded tensor join the tensor's own, whose values are not there."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, copy: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        return copy[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


class Units:
    """The units of a model, by module name; decides which of them are unsharded, and which one is prefetched."""

    def __init__(self, units: Mapping[str, _Unit]) -> None:
        self.units = units
        self._reducer: weakref.ref[GradientReducer] | None = None
        self._each = list({id(unit): unit for unit in units.values()}.values())
        self._order: RunOrder[_Unit] = RunOrder()
        self._inside = 0  # forwards of the whole model that are running
        self._in_step = False
        self._thread = threading.get_ident()  # of the last forward
        self.prefetched = 0  # how often a unit was gathered while another one computed
        this = weakref.ref(self)
        for unit in self._each:
            for *_, param_state, sentinel in unit.owners:
                sentinel.read = functools.partial(_read_apart, this, weakref.ref(unit), param_state)
                sentinel.pass_on = functools.partial(_reduce_outside_unit, this, param_state)

    def set_reducer(self, reducer: GradientReducer) -> None:
        """Set the reducer of the gradients of all parameters."""
        self._reducer, this = weakref.ref(reducer), weakref.ref(self)
        reducer.order_of_units = lambda: 0 if (live := this()) is None else live.order()

    def order(self) -> int:
        """Return a number that tells the orders apart in which units have run since the last forward began."""
        numbers = {id(unit): number for number, unit in enumerate(self._each)}
        return zlib.crc32(repr([numbers[id(unit)] for unit in self._order.running]).encode())

    # --- forward ------------------------------------------------------------------------------------------------------

    def enter_model(self) -> None:
        """Prepare for a forward of the whole model. Shards may have changed since the last one."""
        if _torch.backward_id() == -1:
            self.reshard_all()
            self._order.restart()
            self._thread = threading.get_ident()
        idle = [unit for unit in self._each if not unit.depth]
        for unit in idle if not self._inside else ():
            unit.refuse_replaced()
        self._inside += 1
        for unit in idle:
            unit.use_sentinels()
        if (root := self.units.get("")) is not None:
            self._enter(root)

    def leave_model(self, output: Any) -> Any:
        """Finish a forward of the whole model; return its output with hooks for backward."""
        if (root := self.units.get("")) is not None:
            output = self._leave(root, output)
        self._inside -= 1
        self._use_sharded()
        if _torch.backward_id() == -1 and not self._inside:
            for unit in self._each:
                unit.reshard()
        return output

    def _use_sharded(self, *, check: bool = True) -> None:
        """Put the stored parameters back into the modules, unless a forward is running; then refuse lost writes."""
        idle = [unit for unit in self._each if unit.is_replaced and not unit.depth] if not self._inside else []
        for unit, written in [(unit, unit.use_sharded()) for unit in idle]:
            if check:
                unit.refuse_written(written)

    def abandon(self) -> None:
        """Reset after a forward of the model has raised."""
        self._inside = 0  # the forwards inside of it have ended too
        for unit in self._each:
            unit.depth = unit.buffer.busy = 0
        self._use_sharded(check=False)

    def call(self, unit: _Unit, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the forward of one unit with unsharded parameters."""
        self._enter(unit)
        given = [*args, *kwargs.values()]
        known = self._hook_inputs(unit, given)
        try:
            output = inner(*args, **kwargs)
        except BaseException:
            self._end_compute(unit, check=False)
            raise
        return self._leave(unit, [output, [value for value in given if isinstance(value, list | dict)]], known)[0]

    def _enter(self, unit: _Unit) -> None:
        self._begin_compute(unit)
        if _torch.backward_id() == -1:
            self._order.runs(unit)
            self._prefetch(self._order.after_forward_of(unit), unit)

    def _hook_inputs(self, unit: _Unit, given: Sequence[Any]) -> dict[int, Any]:
        """Let a second backward through the gradient of an input unshard the unit; return the nodes of the tensors that
        the unit is given, itself or in lists and dicts that it may add to, by their ids."""
        if not torch.is_grad_enabled():
            return {}
        for value in given:
            if isinstance(value, torch.Tensor) and value.requires_grad:
                _hook_once(value, unit.hooks(self)[1])
        tensors = _torch.tensors_in([value for value in given if isinstance(value, torch.Tensor | list | dict)])
        return {id(tensor): tensor.grad_fn for tensor in tensors}

    def _leave(self, unit: _Unit, results: Any, known: Mapping[int, Any] | None = None) -> Any:
        """End the forward of a unit, and hook its results and what its modules keep, but for what it was given and has
        not written to."""
        self._end_compute(unit)
        if torch.is_grad_enabled():
            kept = [tensor for module in unit.modules for tensor in _kept_by(module)]
            for tensor in _torch.tensors_in([results, kept] if kept else results):
                unchanged = known and known.get(id(tensor)) is tensor.grad_fn
                away = isinstance(tensor, _SENTINELS)
                if tensor.requires_grad and not tensor.is_leaf and not unchanged and not away:
                    _hook_once(tensor, unit.hooks(self)[0])
                    unit.awaited = True
        if _torch.backward_id() == -1 and not self._inside:
            unit.reshard()
        return results

    def _begin_compute(self, unit: _Unit) -> None:
        if not (self._inside or unit.depth):
            unit.refuse_replaced()
        self._unshard(unit)
        unit.buffer.busy += 1
        unit.depth += 1
        assert self._reducer is not None
        unit.use_unsharded(self._reducer, in_step=self._in_step)

    def _end_compute(self, unit: _Unit, *, check: bool = True) -> None:
        unit.buffer.busy -= 1
        unit.depth -= 1
        if unit.depth == 0 and not unit.stays_unsharded:
            unit.use_sentinels()
            unit.guard_references()
        if unit.depth == 0 and not self._inside:
            written = unit.use_sharded()
            unit.refuse_written(written if check else ())

    def read_apart(self, unit: _Unit, param_state: ParamState) -> torch.Tensor:
        """Return a parameter of a unit that does not run, for whoever reads it."""
        assert self._reducer is not None
        if unit.is_unsharded and not torch.is_grad_enabled() and _torch.backward_id() != -1:
            return param_state.make_unsharded()  # for a backward function of the unit
        found = unit.read_apart(param_state, self._reducer, in_step=self._in_step)
        if not (self._inside or unit.depth) and _torch.backward_id() == -1:
            unit.forget()  # the parameter may change before it is read again
        return found

    # --- backward -----------------------------------------------------------------------------------------------------

    def before_backward(self, unit: _Unit) -> None:
        """Unshard a unit, whose saved parameters autograd is about to read."""
        if self._reducer is not None and (reducer := self._reducer()) is not None:
            reducer.begin()  # before anything is sent: ranks may compare where they are
        self._unshard(unit)
        self._prefetch(self._order.after_backward_of(unit), unit)

    def refuse_another_order(self, unit: _Unit) -> None:
        """Raise if autograd would go back through the gradients of units by turns: two buffers cannot hold them all.

        Of what it can run, autograd runs what was made last, by a number that each thread counts for itself. The
        backward pass of an accelerator, which makes gradients under create_graph=True, has a thread of its own.
        """
        if not unit.stays_unsharded and self._thread != threading.get_ident():
            raise ShardingError(
                f'A backward pass with create_graph=True went through "{unit.name}", which is resharded after forward, '
                "in another thread than forward, as on an accelerator. Autograd would go back through the gradients of "
                "several units by turns. Keep the units unsharded until backward: fsdp(reshard_after_forward=False); "
                f'or, for "{unit.name}", {_KEEP_FULL}'
            )

    def call_again(self, units: Sequence[_Unit], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run in backward a function of the forward of the model, which ran inside of these units: they are unsharded.

        It may read parameters of other units than run inside of it: of those that forward has read so, and of those
        that stayed unsharded in forward, where a read leaves no trace.
        """
        self._inside += 1
        for unit in self._each:
            if (unit.is_read_apart or unit.stays_unsharded) and not unit.depth:
                unit.use_sentinels()
        for unit in units:
            self._begin_compute(unit)
        try:
            return function(*args, **kwargs)
        finally:
            for unit in units:
                self._end_compute(unit)
            self._inside -= 1
            self._use_sharded()

    @property
    def is_running(self) -> bool:
        """Whether a forward of the model or of one of its units is running."""
        return self._inside > 0 or any(unit.depth for unit in self._each)

    def running(self) -> list[_Unit]:
        """Return the units whose forward is running."""
        return [unit for unit in self._each if unit.depth]

    def reshard_all(self) -> None:
        """Reshard all units, apart from those that stay unsharded during a step of a pipeline."""
        for unit in self._each:
            unit.wait_for_unshard()
            if not (self._in_step and unit.stays_unsharded):
                unit.release()
                unit.awaited = False
            if not (self._inside or unit.depth or self._in_step):
                unit.forget()  # what a backward function has read of the unit by a sentinel

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run several passes through the model, between which no parameter changes, in the block.

        Units with `stays_unsharded` stay unsharded throughout. Gradients of all passes add up, and go to the reducer at
        the end.
        """
        self.reshard_all()
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False
            if self._reducer is not None and (reducer := self._reducer()) is not None:
                reducer.collect_leaf_gradients()
        self.reshard_all()  # only without an exception: a rank may be gone, for which this would wait

    # --- both ---------------------------------------------------------------------------------------------------------

    def _unshard(self, unit: _Unit) -> None:
        if not unit.is_unsharded:
            unit.begin_unshard()
        unit.wait_for_unshard()

    def _prefetch(self, following: _Unit | None, unit: _Unit) -> None:
        """Begin to gather the unit that computes next, while this unit computes in the other buffer."""
        if following is None or following.is_unsharded:
            return
        if following.buffer is not unit.buffer and not following.buffer.busy:
            self.prefetched += 1
            following.begin_unshard()


_LIVE: weakref.WeakValueDictionary[int, Units] = weakref.WeakValueDictionary()  # in an order that ranks agree on


def _unsharded_again(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for activation checkpointing to call, in forward and again in backward.

    In forward it is called inside of the forwards of some units, whose parameters it may read; in backward it is called
    alone, where models of transformers checkpoint the forward of a block, and not its call.
    """
    for units in list(_LIVE.values()):
        if units.is_running:
            function = functools.partial(_call_checkpointed, units, units.running(), function)
    return function


def _call_checkpointed(
    units: Units, running: Sequence[_Unit], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if _torch.backward_id() == -1:
        return function(*args, **kwargs)
    return units.call_again(running, function, *args, **kwargs)


def _read_apart(units: weakref.ref[Units], unit: weakref.ref[_Unit], param_state: ParamState) -> torch.Tensor:
    live_units, live_unit = units(), unit()
    if live_units is None or live_unit is None:
        raise ShardingError(f'"{param_state.name}" was read, whose sharded model is gone. Keep the model until then.')
    return live_units.read_apart(live_unit, param_state)


def _hooks(units: weakref.ref[Units], unit: weakref.ref[_Unit]) -> tuple[Hook, Hook]:
    """Return the hooks on an output and on an input of a unit.

    They hold weak references: the garbage collector does not see through an autograd graph, so that strong references
    would keep the model alive.
    """

    def on_output(_grad: torch.Tensor) -> None:
        live_units, live_unit = units(), unit()
        if live_units is not None and live_unit is not None:
            live_units.before_backward(live_unit)

    def on_input(grad: torch.Tensor) -> None:
        if grad is not None and grad.requires_grad:  # create_graph=True: this gradient is a result of the unit too
            live_units, live_unit = units(), unit()
            if live_units is not None and live_unit is not None:
                live_units.refuse_another_order(live_unit)
            grad.register_hook(on_output)

    return on_output, on_input


def _hook_once(tensor: torch.Tensor, hook: Hook) -> None:
    """Register a hook, unless an earlier forward has: on a leaf, or on a tensor that a module keeps."""
    if not _torch.has_hook(tensor, hook):
        tensor.register_hook(hook)


def _kept_by(module: nn.Module) -> list[torch.Tensor]:
    """Return the tensors that a module keeps in attributes, as a router keeps its loss: alone, or in small containers.

    Objects are not opened: each forward asks, and an attribute may lead to a whole dataset.
    """
    found: list[torch.Tensor] = []
    for name, value in module.__dict__.items():
        if name not in _OF_A_MODULE:
            _add_tensors(value, found, depth=2)
    return found


def _add_tensors(value: Any, found: list[torch.Tensor], depth: int) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif depth and type(value) in (list, tuple, dict) and len(value) <= _SMALL:
        for one in value.values() if type(value) is dict else value:
            _add_tensors(one, found, depth - 1)


_OF_A_MODULE = frozenset(vars(nn.Module()))
_SMALL = 64  # elements


def make_units(
    model: nn.Module, param_states: Iterable[ParamState], units: Iterable[Unit], executor: Executor
) -> Units:
    """Install the units of a plan: assign each one a buffer, and the buckets that gather its parameters.

    Args:
        model: the model that has the parameters.
        param_states: its parameters; those that are not stored in shards are left alone.
        units: the units of the plan.
        executor: the executor that gathers the parameters.
    """
    by_name = {one.name: one for one in param_states if one.is_stored_sharded}
    owners = _owners_of(model, list(by_name.values()))
    groups = [(unit, [by_name[one.name] for one in unit.movements]) for unit in units]
    alternating = [group for unit, group in groups if unit.resharded]
    buffers = [_buffer_for(alternating[start::2]) for start in (0, 1)]
    made: dict[str, _Unit] = {}
    turn = 0
    for unit, group in groups:
        if unit.resharded:
            buffer, turn = buffers[turn], 1 - turn
        else:
            buffer = _buffer_for([group])
        _place_in_buffer(group, buffer.flat)
        sentinels = {id(one.param): _Sentinel.of(one) for one in group}
        modules = [module for name in unit.modules for module in model.get_submodule(name).modules() if name]
        buckets = unshard_buckets(unit, MeshShape.of(executor.mesh))
        joint = _Unit(
            ", ".join(unit.modules),
            group,
            [(*owner, sentinels[id(one.param)]) for one in group for owner in owners[id(one.param)]],
            buffer,
            [UnshardBucket(executor, [by_name[name] for name in bucket.names]) for bucket in buckets],
            stays_unsharded=not unit.resharded,
            modules=modules,
        )
        made |= dict.fromkeys(unit.modules, joint)
    all_units = Units(made)
    _torch.rebind_checkpointed(_unsharded_again)
    _LIVE[id(all_units)] = all_units
    return all_units


def _buffer_for(groups: list[list[ParamState]]) -> UnshardedBuffer:
    """Return a buffer that is large enough for each of these groups."""
    size = max((sum(map(_aligned_bytes, group)) for group in groups), default=0)
    device = groups[0][0].device if groups else None
    return UnshardedBuffer(torch.empty(size, dtype=torch.uint8, device=device))


def _aligned_bytes(param_state: ParamState) -> int:
    assert param_state.shard_spec is not None
    bytes_ = sum(param_state.shard_spec.numels) * param_state.dtype.itemsize
    return -(-bytes_ // _ALIGNMENT) * _ALIGNMENT


def _place_in_buffer(group: list[ParamState], flat: torch.Tensor) -> None:
    at = 0
    for param_state in group:
        param_state.place_unsharded(flat[at:])
        at += _aligned_bytes(param_state)


def _owners_of(model: nn.Module, stored: list[ParamState]) -> dict[int, list[tuple[dict[str, Any], str, ParamState]]]:
    """Find the module dicts that hold each parameter, by the parameter's id, in one walk of the model."""
    by_id = {id(param_state.param): param_state for param_state in stored}
    owners: dict[int, list[tuple[dict[str, Any], str, ParamState]]] = {key: [] for key in by_id}
    for module in model.modules():
        parameters = _torch.own_tensors(module)[0]
        for key, param in parameters.items():
            if id(param) in by_id:
                owners[id(param)].append((parameters, key, by_id[id(param)]))
    return owners


class _Sentinel(torch.Tensor):
    """Stands in place of a parameter while the model runs but the parameter's unit does not.

    Shape and dtype can be read without anything being sent; for any other op the parameter is gathered. The stored
    parameter must not stand there: in an op with tensors that differ between ranks, it would silently give wrong
    numbers.

    It is a leaf that requires a gradient where the parameter does, for readers that are no torch function: a
    `torch.autograd.Function` that is given the weight, as fused losses are, returns its gradient to the sentinel.
    """

    parameter: str
    read: Callable[[], torch.Tensor]
    pass_on: Callable[[torch.Tensor], None]
    trains: bool

    @staticmethod
    def of(param_state: ParamState) -> _Sentinel:
        dtype, device, shape = param_state.dtype, param_state.device, param_state.param.shape
        sentinel = _torch.with_values(
            lambda: torch.empty((), dtype=dtype, device=device).expand(shape).as_subclass(_Sentinel)
        )
        sentinel.parameter, sentinel.trains = param_state.name, False
        _torch.mark_parameter(sentinel)
        return sentinel

    def train(self, trains: bool) -> None:
        """Require a gradient, or none."""
        if self.trains != trains:
            self.trains = trains
            _torch.require_gradient(self, _on_gradient if trains else None)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _read_first(func, args, kwargs)


class _SentinelDTensor(DTensor):
    """A sentinel that is a DTensor: an unsharded parameter that others refer to after the forward of its unit."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _read_first(func, args, kwargs)


_SENTINELS = (_Sentinel, _SentinelDTensor)


def read_sentinel(tensor: Any) -> Any:
    """Return the parameter that a sentinel stands for, or another value itself: for functions of autograd, which do not
    ask a subclass."""
    return tensor.read() if isinstance(tensor, _SENTINELS) else tensor  # type: ignore[union-attr]


def _read_first(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function of tensors with the parameters that sentinels among its arguments stand for."""
    name = getattr(func, "__name__", "")
    of_property = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else ""
    if (name in _METADATA or func in _METADATA) and of_property not in _TENSOR_PROPERTIES:
        return _torch.call_below_subclass(func, *args, **(kwargs or {}))
    if of_property == "data" or name in _OF_A_LEAF:
        sentinel: Any = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, _SENTINELS))
        raise ShardingError(
            f'"{sentinel.parameter}" is stored in shards, and {of_property or name} was asked of it while its own '
            "module was not running, when a copy stands for it that others only read. Do so outside of forward, "
            f"or {_KEEP_FULL}"
        )
    args, kwargs = pytree.tree_map_only(_SENTINELS, lambda sentinel: sentinel.read(), (args, kwargs or {}))
    return func(*args, **kwargs)


def _on_gradient(sentinel: torch.Tensor) -> None:
    """Pass the gradient that autograd has accumulated in a sentinel on to its parameter."""
    assert isinstance(sentinel, _Sentinel)
    sentinel.pass_on(_torch.pop_gradient(sentinel))


def _reduce_outside_unit(units: weakref.ref[Units], param_state: ParamState, grad: torch.Tensor) -> None:
    live = units()
    reducer = None if live is None or live._reducer is None else live._reducer()
    if reducer is not None:
        reducer.reduce_outside_unit(param_state, grad)


_METADATA = {"__get__", "size", "dim", "numel", "is_floating_point", "is_complex", "element_size", "stride", "__len__"}
# What changes a parameter or looks at its gradient: a copy would change, or has a part of the gradient.
_OF_A_LEAF = {"__set__", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"}
_OF_A_LEAF |= {"backward", "grad"}
# Properties that return tensors, whose values would be read.
_TENSOR_PROPERTIES = {"T", "mT", "H", "mH", "data", "real", "imag"}

"""How one microbatch takes its way through one stage: the model's own forward, with only the stage's modules computing.

A call of a module of another stage returns tensors without values, of the shapes that it would have. The first call of
an own module that is given such a tensor is the stage's *gate*: what it lacks there is what the stage before has made,
and is received. The gate of the next stage ends the forward; what that one lacks is sent. So whatever stands around the
modules runs as it is: masks and positions are computed on every stage from the batch, which every stage gets.

Having no values is also what betrays a value that would have to come another way: it is refused, by name, wherever it
reaches a module of this stage or what is sent. Gates are found by each rank alone, by running forward with no values
from other stages, once for inputs of the same shapes; so that ranks know what they will send and receive.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardlib.engine import _torch
from shardlib.engine._torch import pytree
from shardlib.engine.pipeline.batch import refuse_unfit
from shardlib.engine.region import made_global, made_plain
from shardlib.errors import PlanError, ShardingError
from shardlib.rules import Stage

__all__ = ["Gate", "Message", "Route", "has_values", "without_fakes"]


_MOST_SHAPES = 256  # of inputs, whose ways are remembered


@dataclass(frozen=True)
class Message:
    """One tensor that goes from a stage to the next: where it stands among the arguments of a call, and its kind."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient comes back for it."""
        return self.dtype.is_floating_point or self.dtype.is_complex


@dataclass(frozen=True)
class Gate:
    """Where a stage begins: the number of a call, counted over calls of all stages' modules, and what it lacks."""

    call: int
    module: str
    messages: tuple[Message, ...]

    @cached_property
    def lacks_first(self) -> bool:
        """Whether all that is lacking is the first argument, as between blocks of most models."""
        return [each.path for each in self.messages] == ["[0][0]"]


@dataclass(eq=False)
class _Known:
    """What is known of inputs of some shapes: the gates of stages, and what each call returns, without values."""

    gates: list[Gate | None]
    outputs: dict[int, Any] = field(default_factory=dict)


@dataclass(eq=False)
class _Pass:
    """One run of the model's forward for one stage."""

    stage: int
    known: _Known
    searching: bool = False
    received: Sequence[torch.Tensor] = ()
    count: int = 0
    inside: bool = False
    entry: Gate | None = field(default=None, init=False)
    exit: Gate | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not self.searching:
            self.entry, self.exit = (*self.known.gates, None)[self.stage : self.stage + 2]


class _Reached(BaseException):
    """The next stage's gate was reached; no `except Exception` of a model stops it."""

    def __init__(self, values: Any) -> None:
        self.values = values


class Route:
    """Lets the calls of a model's modules go the way of a stage.

    Args:
        model: cut into stages.
        skeleton: the same modules without values.
        mode: in which tensors have no values.
        stages: of all ranks.
        own: numbers of those that this rank runs.
        everywhere: modules without parameters, which any stage calls that has what they are given.
        casting: what inputs are cast to, and in which context forward runs.
        splits_backward: gradients of inputs and of parameters are computed apart.
        region: the mesh of the model axes where all of this rank's model computes on DTensors. Messages are plain.
    """

    def __init__(
        self,
        model: nn.Module,
        skeleton: nn.Module,
        mode: Any,
        stages: Sequence[Stage],
        own: Sequence[int],
        everywhere: Sequence[str],
        casting: Any,
        *,
        splits_backward: bool = False,
        region: DeviceMesh | None = None,
    ) -> None:
        self.skeleton, self.mode, self.stages, self.own, self.casting = skeleton, mode, stages, own, casting
        self._everywhere = frozenset(everywhere)
        self._stage_of = {name: number for number, stage in enumerate(stages) for name in stage.modules}
        self._known: dict[Any, _Known] = {}
        self._active: _Pass | None = None
        self._forward = _weakly(model.forward)
        self._name = type(model).__name__
        self.splits_backward, self.region = splits_backward, region

    def around_modules(self, model: nn.Module) -> dict[str, Callable[..., Any]]:
        """Return, by name, what stands around the modules of stages; a module of several names is there once."""
        by_module: dict[int, tuple[nn.Module, list[str]]] = {}
        for name in self._stage_of:
            module = model.get_submodule(name)
            by_module.setdefault(id(module), (module, []))[1].append(name)
        return {names[0]: functools.partial(self._call, tuple(names)) for _, names in by_module.values()}

    def install(self, model: nn.Module, undo: ExitStack) -> None:
        """Take the model's forward."""
        model.__dict__["forward"] = self._run_forward
        undo.callback(model.__dict__.pop, "forward", None)

    # --- one pass -----------------------------------------------------------------------------------------------------

    def run(
        self, model: nn.Module, stage: int, key: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], received: Any
    ) -> Any:
        """Forward of one stage: the tensors that the next one's gate lacks, or the model's output on the last."""
        with self._passing(_Pass(stage, self._known[key], received=received)):
            return model(*args, **kwargs)

    @contextmanager
    def _passing(self, one: _Pass) -> Iterator[None]:
        before, self._active = self._active, one
        try:
            yield
        finally:
            self._active = before

    def _run_forward(self, *args: Any, **kwargs: Any) -> Any:
        """In the place of the model's forward, inside of its hooks."""
        one = self._active
        if one is None:
            raise ShardingError(
                f"This {self._name} is cut into stages, none of which can run alone. Call "
                "shardlib.pipeline_step(model, "
                "batch, criterion) on all ranks; with forward_only=True for its outputs."
            )
        try:
            output = self._forward()(*args, **kwargs)
        except _Reached as reached:
            return reached.values
        if one.exit is not None:
            raise PlanError(
                f'Stage {one.stage} has run to the end of {self._name} and has not come to "{one.exit.module}", where '
                f"stage {one.stage + 1} begins: forward calls other modules for this microbatch than for one like it. "
                "Let it call the same ones whatever the values."
            )
        return output

    def _call(self, names: tuple[str, ...], inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        one = self._active
        if one is None or one.inside:
            if one is None and not any(self._stage_of[name] in self.own for name in names):
                raise ShardingError(f'"{names[0]}" is on stage {self._stage_of[names[0]]}, and not on this rank.')
            return inner(*args, **kwargs)
        number, one.count = one.count, one.count + 1
        name = next((name for name in names if self._stage_of[name] == one.stage), names[0])
        if one.searching:
            return self._search(one, number, name, args, kwargs)
        if one.exit is not None and number == one.exit.call:
            raise _Reached(self._leaving(one, one.exit, args, kwargs))
        if self._stage_of[name] != one.stage and not self._can_call(name, args, kwargs):
            return self._elsewhere(one.known, number, name, args, kwargs)
        if one.entry is not None and number == one.entry.call:
            args, kwargs = self._entering(one, one.entry, name, args, kwargs)
        self._refuse_fakes(one, name, args, kwargs)
        one.inside = True
        try:
            return inner(*args, **kwargs)
        finally:
            one.inside = False

    def _can_call(self, name: str, args: Any, kwargs: Any) -> bool:
        """Whether a module of another stage can be called here as well as there."""
        return name in self._everywhere and _all_have_values(args, kwargs)

    def _entering(self, one: _Pass, gate: Gate, name: str, args: Any, kwargs: Any) -> Any:
        if gate.lacks_first and args and self.region is None:
            return (one.received[0], *args[1:]), kwargs
        given = {message.path: value for message, value in zip(gate.messages, one.received, strict=True)}
        flat, spec = pytree.tree_flatten_with_path((args, kwargs))
        leaves = [given.pop(pytree.keystr(path), leaf) for path, leaf in flat]
        if self.region is not None:
            leaves = [made_global(leaf, self.region) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        if given:
            raise PlanError(
                f'"{name}" was called without the argument {next(iter(given))} that stage {one.stage} received.'
            )
        return pytree.tree_unflatten(leaves, spec)

    def _leaving(self, one: _Pass, gate: Gate, args: Any, kwargs: Any) -> tuple[torch.Tensor, ...]:
        if gate.lacks_first and args:
            found = {gate.messages[0].path: args[0]}
        else:
            found = {pytree.keystr(path): leaf for path, leaf in pytree.tree_flatten_with_path((args, kwargs))[0]}
        values = []
        for message in gate.messages:
            value = found.get(message.path)
            if not isinstance(value, torch.Tensor) or not has_values(value):
                raise PlanError(
                    f'Stage {one.stage + 1} begins with "{gate.module}" and lacks {_argument(message.path)} there, '
                    f"which stage {one.stage} has not made: it comes from an earlier stage. Let both modules be on "
                    "one stage, or pass it through the modules between them."
                )
            values.append(made_plain(value) if isinstance(value, DTensor) else value)
        return tuple(values)

    def _refuse_fakes(self, one: _Pass, name: str, args: Any, kwargs: Any) -> None:
        if _all_have_values(args, kwargs):
            return
        flat = pytree.tree_flatten_with_path((args, kwargs))[0]
        path = next(pytree.keystr(path) for path, leaf in flat if not has_values(leaf))
        began = f'begins with "{one.entry.module}"' if one.entry is not None else "is the first"
        raise PlanError(
            f'"{name}" on stage {one.stage}, which {began}, is given a tensor of another stage as {_argument(path)}: '
            "only what the first module of a stage is given comes from the stage before it. Cut the model elsewhere, "
            "or name both modules on one stage."
        )

    # --- what other stages do, in shapes ------------------------------------------------------------------------------

    def _elsewhere(self, known: _Known, number: int, name: str, args: Any, kwargs: Any) -> Any:
        if number not in known.outputs:
            module, imagined = self.skeleton.get_submodule(name), _torch.imagined_in(self.mode)
            with torch.no_grad():
                try:
                    with self.mode:
                        fake = pytree.tree_map_only(torch.Tensor, imagined, (args, kwargs))
                        output = module(*fake[0], **fake[1])
                except _torch.fake_tensor_errors():
                    # It looks at values, as one that finds the tokens of each expert does; shapes do not depend on
                    # them.
                    output = _tried(module, args, kwargs)
            known.outputs[number] = pytree.tree_map_only(torch.Tensor, imagined, output)
        return known.outputs[number]

    def learn(self, key: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, training: bool) -> list[Gate | None]:
        """The gates of all stages for inputs like these, the same on every rank; found once.

        Raises:
            InputError: forward does not take such inputs.
            PlanError: a stage that is given nothing by the one before it.
        """
        if key not in self._known:
            refuse_unfit(self.skeleton.forward, self._name, (args, dict(kwargs)))
            self.skeleton.train(training)
            known = _Known([None])
            for stage in range(1, len(self.stages)):
                known.gates.append(self._gate(stage, known, args, dict(kwargs)))
            while len(self._known) >= _MOST_SHAPES:
                del self._known[next(iter(self._known))]
            self._known[key] = known
        return self.gates(key)

    def gates(self, key: Any) -> list[Gate | None]:
        """Of all stages, for inputs whose way is known."""
        return self._known[key].gates

    def _gate(self, stage: int, known: _Known, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Gate:
        args, kwargs = self.casting.on_entering(args, kwargs)
        try:
            with self._passing(_Pass(stage, known, searching=True)), torch.no_grad(), ExitStack() as computing:
                if self.casting.autocast is not None:
                    computing.enter_context(torch.autocast(self.casting.device_type, self.casting.autocast))
                self._forward()(*args, **kwargs)
        except _Reached as reached:
            return reached.values
        except _torch.fake_tensor_errors() as error:
            raise PlanError(
                f"{self._name} looks at values of tensors between its stages' modules, which ranks of other stages do "
                f"not have ({type(error).__name__}). Put that into a module of a stage, or the modules around it on "
                "one."
            ) from error
        raise PlanError(
            f"Stage {stage} ({', '.join(self.stages[stage].modules[:3])}, ...) is given nothing by the stages before "
            f"it: no call of its modules in the forward of {self._name} takes what they make. Name the stages in the "
            "order in which their modules run."
        )

    def _search(self, one: _Pass, number: int, name: str, args: Any, kwargs: Any) -> Any:
        own = self._stage_of[name] == one.stage
        if own:
            flat = pytree.tree_flatten_with_path((args, kwargs))[0]
            lacking = tuple(
                Message(pytree.keystr(path), tuple(leaf.shape), leaf.dtype)
                for path, leaf in flat
                if not has_values(leaf)
            )
            if lacking:
                raise _Reached(Gate(number, name, lacking))
        output = self._elsewhere(one.known, number, name, args, kwargs)
        # What this stage makes of the batch alone has values, whatever they are.
        here = own or self._can_call(name, args, kwargs)
        return pytree.tree_map_only(torch.Tensor, _zeros, output) if here else output


def _weakly(method: Callable[..., Any]) -> Callable[[], Any]:
    """What gives the method as long as its object lives: the model keeps its route, and not the route the model."""
    return weakref.WeakMethod(method) if isinstance(method, MethodType) else lambda: method


def has_values(leaf: Any) -> bool:
    """Whether this is no tensor, or one that can be read."""
    return not isinstance(leaf, torch.Tensor) or not _torch.is_imagined(leaf)


def _all_have_values(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Of arguments of a call."""
    return all(map(has_values, _torch.leaves_of(*args, *kwargs.values())))


def without_fakes(output: Any) -> Any:
    """An output with None in the place of what the last stage does not know."""
    return pytree.tree_map(lambda leaf: leaf if has_values(leaf) else None, output)


def _tried(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """What a module gives for zeros, with parameters of zeros that are let go of again."""
    tensors = [*module.parameters(), *module.buffers()]
    real = copy.deepcopy(module, {id(tensor): _as_kind(_zeros(tensor), tensor) for tensor in tensors})
    args, kwargs = pytree.tree_map_only(torch.Tensor, _zeros, (args, kwargs))
    with torch.random.fork_rng(devices=()):
        return real(*args, **kwargs)


def _as_kind(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return nn.Parameter(tensor, requires_grad=False) if isinstance(like, nn.Parameter) else tensor


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device) if not has_values(tensor) else tensor


def _argument(path: str) -> str:
    """
    >>> _argument("[1]['mask']"), _argument("[0][2]")
    ('argument "mask"', 'argument 2')
    """
    place, rest = path[1], path[3:]
    words = rest.replace("['", "").replace("']", "") if place == "1" else rest.strip("[]")
    return f'argument "{words}"' if place == "1" else f"argument {words}"

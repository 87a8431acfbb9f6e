"""Running one microbatch through one stage: the model's own forward, in which only the stage's modules compute.

A call of a module of another stage returns fake tensors of the shapes that the call would return. The first call of an
own module that is given a fake tensor is the *boundary* of the stage: the arguments without values there are outputs of
the previous stage, and are received. The forward ends at the boundary of the next stage; the arguments that the next
stage lacks are sent. The model's code around the modules therefore runs unchanged: every stage gets the batch, and
computes masks and positions from it.

A later module of the stage may be given a fake tensor too: a mask that the first stage makes, or a skip connection.
Then the outputs of earlier stages' modules from which it is computed *cross*: they are sent as well. A stage that has
received them returns them from its calls of those modules, so that forward computes the rest from values. The engine
refuses any other fake tensor by name, where it reaches a module of this stage or a message.

Each rank finds the boundaries alone, by running forward with fake tensors in the place of other stages' outputs, once
for inputs of the same shapes. All ranks thus know which messages they send and receive.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from shardlib.engine import _torch
from shardlib.engine._torch import flatten_with_path, pytree
from shardlib.engine.model.casting import Casting
from shardlib.engine.model.region import unwrap_dtensor, wrap_replicated
from shardlib.engine.pipeline.stages import Stages
from shardlib.engine.undo import Undo
from shardlib.errors import PlanError, ShardingError

__all__ = ["Message", "Route", "StageBoundary", "has_values", "without_fakes"]


_MOST_SHAPES = 256  # the number of input shapes whose boundaries are cached


class Output(NamedTuple):
    """A tensor that a module of a stage returns: the number of the call, and its place among the leaves."""

    call: int
    place: int


@dataclass(frozen=True)
class Message:
    """One tensor that a stage sends to the next: its path among the arguments of the call at which the next stage
    begins, or the output of an earlier call; and its shape and dtype."""

    path: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    output: Output | None = None

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient comes back for it."""
        return self.dtype.is_floating_point or self.dtype.is_complex


@dataclass(frozen=True)
class StageBoundary:
    """The start of a stage: the number of a call, counted over calls of all stages' modules, and what it lacks."""

    call: int
    module: str
    messages: tuple[Message, ...]

    @cached_property
    def lacks_first(self) -> bool:
        """Whether only the first argument is lacking, as between the blocks of most models."""
        return [each.path for each in self.messages] == ["[0][0]"]


@dataclass(eq=False)
class _Known:
    """The results for inputs of some shapes: the boundaries of stages, and of each call the fake output and the names
    of the module."""

    boundaries: list[StageBoundary | None]
    outputs: dict[int, Any] = field(default_factory=dict)
    callees: dict[int, tuple[str, ...]] = field(default_factory=dict)


@dataclass(eq=False)
class _Pass:
    """One run of the model's forward for one stage, from its boundary `entry` to that of the next stage.

    `crossing` are outputs of earlier stages that this one has received, and `kept` those of it that cross to the next.
    """

    stage: int
    known: _Known
    searching: bool = False
    origins: Origins | None = None
    crossing: dict[Output, torch.Tensor] = field(default_factory=dict)
    kept: dict[Output, torch.Tensor] = field(default_factory=dict)
    received: Sequence[torch.Tensor] = ()
    entry: StageBoundary | None = None
    exit: StageBoundary | None = None
    count: int = 0
    inside: bool = False
    begin_stream: Callable[..., None] = lambda *_place: None


class _Reached(BaseException):
    """Raised at the boundary of the next stage. Not an `Exception`, so that a model's handlers let it pass."""

    def __init__(self, values: Any) -> None:
        self.values = values


class Route:
    """Runs the modules of one stage in the model's forward, and skips those of other stages.

    Args:
        model: the model, cut into stages.
        stages: the stages, and which of them this rank runs.
        casting: the dtype that inputs are cast to, and the autocast context of forward.
        region: the mesh of the model axes, if all of this rank's model computes on DTensors. Messages are plain
            tensors.
    """

    def __init__(self, model: nn.Module, stages: Stages, casting: Casting, region: DeviceMesh | None) -> None:
        self.stages, self.casting, self.region = stages, casting, region
        self._stage_of = {name: number for number, stage in enumerate(stages.plan.stages) for name in stage.modules}
        self._known: dict[Any, _Known] = {}
        self._active: _Pass | None = None
        self._forward = _weakly(model.forward)
        self._name = type(model).__name__

    def around_modules(self, model: nn.Module) -> dict[str, Callable[..., Any]]:
        """Return the wrappers of the stages' modules by name; a module of several names is there once."""
        by_module: dict[nn.Module, list[str]] = {}
        for name in self._stage_of:
            by_module.setdefault(model.get_submodule(name), []).append(name)
        return {names[0]: functools.partial(self._call, tuple(names)) for names in by_module.values()}

    def install(self, model: nn.Module, undo: Undo) -> None:
        """Replace the model's forward."""
        before = {name: value for name, value in model.__dict__.items() if name == "forward"}
        model.__dict__["forward"] = self._run_forward
        undo.callback(model.__dict__.update, before)
        undo.callback(model.__dict__.pop, "forward", None)

    # --- one pass -----------------------------------------------------------------------------------------------------

    def run(
        self,
        model: nn.Module,
        stage: int,
        key: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        received: Any,
        begin_stream: Callable[..., None] | None = None,
    ) -> Any:
        """Run the forward of one stage; return the tensors that the next stage lacks, or the output of the model.

        `begin_stream` begins the random stream of a place in the forward.
        """
        known = self._known[key]
        entry, exit_ = (*known.boundaries, None)[stage : stage + 2]
        one = _Pass(stage, known, received=received, entry=entry, exit=exit_)
        for message, value in zip(entry.messages if entry is not None else (), received, strict=True):
            if message.output is not None:
                one.crossing[message.output] = value
        if begin_stream is not None:
            begin_stream("around", 0)
            one.begin_stream = begin_stream
        with self._passing(one):
            return model(*args, **kwargs)

    @contextmanager
    def _passing(self, one: _Pass) -> Iterator[None]:
        before, self._active = self._active, one
        try:
            yield
        finally:
            self._active = before

    def _run_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run in the place of the model's forward, inside of its hooks."""
        one = self._active
        if one is None:
            raise ShardingError(
                f"This {self._name} is split into pipeline stages, none of which can run alone. Call "
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
            if one is None and not any(self._stage_of[name] in self.stages.own for name in names):
                raise ShardingError(f'"{names[0]}" is on stage {self._stage_of[names[0]]}, and not on this rank.')
            return inner(*args, **kwargs)
        number, one.count = one.count, one.count + 1
        name = next((name for name in names if self._stage_of[name] == one.stage), names[0])
        if one.searching:
            return self._search(one, number, names, name, args, kwargs)
        if one.exit is not None and number == one.exit.call:
            raise _Reached(self._leaving(one, one.exit, args, kwargs))
        if self._stage_of[name] != one.stage and not self._can_call(name, args, kwargs):
            one.begin_stream("around", one.count)
            return self._crossed(one, number, self._elsewhere(one.known, number, name, args, kwargs))
        if one.entry is not None and number == one.entry.call:
            args, kwargs = self._entering(one, one.entry, name, args, kwargs)
        self._refuse_fakes(one, name, args, kwargs)
        one.inside = True
        one.begin_stream("inside", number)
        try:
            output = inner(*args, **kwargs)
            self._keep(one, number, output)
            return output
        finally:
            one.inside = False
            one.begin_stream("around", one.count)

    def _can_call(self, name: str, args: Any, kwargs: Any) -> bool:
        """Tell whether this rank can call a module of another stage itself."""
        return name in self.stages.everywhere and _all_have_values(args, kwargs)

    def _entering(self, one: _Pass, boundary: StageBoundary, name: str, args: Any, kwargs: Any) -> Any:
        if boundary.lacks_first and args and self.region is None:
            return (_writable(one.received[0]), *args[1:]), kwargs
        every = zip(boundary.messages, one.received, strict=True)
        given = {message.path: _writable(value) for message, value in every if message.path is not None}
        flat, spec = flatten_with_path((args, kwargs))
        leaves = [given.pop(pytree.keystr(path), leaf) for path, leaf in flat]
        if self.region is not None:
            leaves = [wrap_replicated(leaf, self.region) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        if given:
            raise PlanError(
                f'"{name}" was called without the argument {next(iter(given))} that stage {one.stage} received.'
            )
        return pytree.tree_unflatten(leaves, spec)

    def _leaving(self, one: _Pass, boundary: StageBoundary, args: Any, kwargs: Any) -> tuple[torch.Tensor, ...]:
        if boundary.lacks_first and args:
            found: dict[Any, Any] = {boundary.messages[0].path: args[0]}
        else:
            found = {pytree.keystr(path): leaf for path, leaf in flatten_with_path((args, kwargs))[0]}
        found |= one.crossing | one.kept
        values = []
        for message in boundary.messages:
            value = found.get(message.path if message.output is None else message.output)
            if message.output is not None and value is None:
                raise PlanError(
                    f'Stage {one.stage + 1} needs what "{one.known.callees[message.output.call][0]}" returns, and '
                    "forward has not called that for this microbatch, as for one like it. Let forward call the same "
                    "modules whatever the values."
                )
            if not isinstance(value, torch.Tensor) or not has_values(value):
                lacking = _argument(message.path or "")
                raise PlanError(
                    f'Stage {one.stage + 1} begins with "{boundary.module}" and lacks {lacking} there, '
                    f"which stage {one.stage} has not made: it comes from an earlier stage. Let both modules be on "
                    "one stage, or pass it through the modules between them. If modules pass objects of your own "
                    "class, torch.export.register_dataclass(Class) lets stages send their tensors."
                )
            values.append(unwrap_dtensor(value) if isinstance(value, DTensor) else value)
        return tuple(values)

    def _crossed(self, one: _Pass, number: int, output: Any) -> Any:
        """Return the output of a call of another stage's module, with the values that this stage has received of it."""
        if not any(each.call == number for each in one.crossing):
            return output
        leaves, spec = pytree.tree_flatten(output)
        for place in range(len(leaves)):
            if (value := one.crossing.get(Output(number, place))) is not None:
                value = value.clone()  # which forward may write to
                leaves[place] = value if self.region is None or one.searching else wrap_replicated(value, self.region)
        return pytree.tree_unflatten(leaves, spec)

    def _keep(self, one: _Pass, number: int, output: Any) -> None:
        """Keep what crosses of the output of a call of this stage, before forward may write to it."""
        places = [m.output.place for m in one.exit.messages if m.output and m.output.call == number] if one.exit else ()
        leaves = pytree.tree_leaves(output) if places else ()
        for place in places:
            value = leaves[place]
            one.kept[Output(number, place)] = unwrap_dtensor(value) if isinstance(value, DTensor) else value.clone()

    def _refuse_fakes(self, one: _Pass, name: str, args: Any, kwargs: Any) -> None:
        if _all_have_values(args, kwargs):
            return
        flat = flatten_with_path((args, kwargs))[0]
        path = next(pytree.keystr(path) for path, leaf in flat if not has_values(leaf))
        began = f'begins with "{one.entry.module}"' if one.entry is not None else "is the first"
        raise PlanError(
            f'"{name}" on stage {one.stage}, which {began}, is given a tensor of another stage as {_argument(path)}: '
            "only what the first module of a stage is given comes from the stage before it. Split the model elsewhere, "
            "or name both modules on one stage."
        )

    # --- the shapes of other stages' outputs --------------------------------------------------------------------------

    def _elsewhere(self, known: _Known, number: int, name: str, args: Any, kwargs: Any) -> Any:
        if number not in known.outputs:
            module, to_fake = self.stages.skeleton.get_submodule(name), _torch.to_fake(self.stages.mode)
            with torch.no_grad():
                try:
                    with self.stages.mode:
                        fake = pytree.tree_map_only(torch.Tensor, to_fake, (args, kwargs))
                        output = module(*fake[0], **fake[1])
                except _torch.fake_tensor_errors():
                    # It reads values, as a module that finds the tokens of each expert does; its output shapes do
                    # not depend on them.
                    output = _tried(module, args, kwargs)
            known.outputs[number] = pytree.tree_map_only(torch.Tensor, to_fake, output)
        return known.outputs[number]

    def learn(
        self, model: nn.Module, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[StageBoundary | None]:
        """Return the boundaries of all stages for inputs like these, the same on every rank. They are found once.

        Raises:
            PlanError: a stage gets no input from the stages before it.
        """
        if key not in self._known:
            self.stages.skeleton.train(model.training)
            known = _Known([None])
            args, kwargs = self.casting.cast_inputs(args, kwargs)
            with _keeping_buffers(model):
                stages = range(1, len(self.stages.plan.stages))
                for stage in stages:
                    known.boundaries.append(self._boundary(model, stage, known, args, kwargs))
                # The last stage first: what a stage sends is known then.
                crossing = {stage: self._crossing(model, stage, known, args, kwargs) for stage in reversed(stages)}
            _add_crossing(known, crossing, self._producer)
            while len(self._known) >= _MOST_SHAPES:
                del self._known[next(iter(self._known))]
            self._known[key] = known
        return self.boundaries(key)

    def boundaries(self, key: Any) -> list[StageBoundary | None]:
        """Return the boundaries of all stages, for inputs whose boundaries are known."""
        return self._known[key].boundaries

    def _boundary(
        self, model: nn.Module, stage: int, known: _Known, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> StageBoundary:
        try:
            with self._searching(model, _Pass(stage, known, searching=True)):
                self._forward()(*args, **kwargs)
        except _Reached as reached:
            return reached.values
        except _torch.fake_tensor_errors() as error:
            raise PlanError(
                f"{self._name} looks at values of tensors between its stages' modules, which ranks of other stages do "
                f"not have ({type(error).__name__}). Put that into a module of a stage, or the modules around it on "
                "one."
            ) from error
        modules = ", ".join(self.stages.plan.stages[stage].modules[:3])
        raise PlanError(
            f"Stage {stage} ({modules}, ...) is given nothing by the stages before it: no call of its modules in the "
            f"forward of {self._name} takes what they make. {self._advice(stage)}"
        )

    def _crossing(
        self, model: nn.Module, stage: int, known: _Known, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> set[Output]:
        """Find the outputs of earlier stages' modules from which arguments of this stage's later modules are computed.

        Corrects what the stage lacks where it begins, which may be computed from these outputs too.
        """
        found = set[Output]()
        while True:
            given = {each: _zeros(pytree.tree_leaves(known.outputs[each.call])[each.place]) for each in found}
            entry, exit_ = (*known.boundaries, None)[stage : stage + 2]
            one = _Pass(stage, known, searching=True, entry=entry, exit=exit_, crossing=given)
            one.origins = Origins()
            # An exception is that of a forward of zeros, or it comes again in the step, with a stage to name.
            with suppress(Exception, _Reached), self._searching(model, one), one.origins:
                one.origins.end(self._forward()(*args, **kwargs))
            more = {each for each in one.origins.needed if self._producer(known, each, stage) is not None} - found
            if not more:
                known.boundaries[stage] = one.entry
                return found
            found |= more

    def _producer(self, known: _Known, output: Output, stage: int) -> int | None:
        """Return the stage that makes an output and can send it to a later stage; None if there is none."""
        entry = known.boundaries[stage]
        earlier = [self._stage_of[name] for name in known.callees[output.call] if self._stage_of[name] < stage]
        if entry is None or not earlier or output.call >= entry.call:
            return None
        exit_ = known.boundaries[max(earlier) + 1]
        return max(earlier) if exit_ is not None and output.call < exit_.call else None

    @contextmanager
    def _searching(self, model: nn.Module, one: _Pass) -> Iterator[None]:
        """Return a context for a forward without values."""
        with self._passing(one), torch.no_grad(), self._without_values(model, one.stage), ExitStack() as computing:
            if self.casting.autocast is not None:
                computing.enter_context(torch.autocast(self.casting.device_type, self.casting.autocast))
            yield

    @contextmanager
    def _without_values(self, model: nn.Module, stage: int) -> Iterator[None]:
        """Put tensors without shards into the place of parameters, which forward may read between modules.

        They have values, all zeros, where the rank of the stage holds the parameter.
        """
        before, holder = list[tuple[dict[str, Any], dict[str, Any]]](), self.stages.rank_of(stage)
        modules = dict(model.named_modules())  # without those that were deleted since
        try:
            for name, own in self._parameters.items():
                if (module := modules.get(name)) is None:
                    continue
                for place in (_torch.own_tensors(module)[0], module.__dict__):
                    changed = {key: zeros if holder in held else fake for key, (fake, zeros, held) in own.items()}
                    changed = {key: tensor for key, tensor in changed.items() if key in place}
                    before.append((place, {key: place[key] for key in changed}))
                    place.update(changed)
            yield
        finally:
            for place, kept in before:
                place.update(kept)

    @cached_property
    def _parameters(self) -> dict[str, dict[str, tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]]]:
        """The parameters of each module: as a fake tensor, as zeros, and the coordinates of the ranks that hold it."""
        found = {}
        for name, module in self.stages.skeleton.named_modules():
            own = {}
            for key, fake in _torch.own_tensors(module)[0].items():
                row = self.stages.rows.get(f"{name}.{key}".lstrip("."))
                if fake is not None and row is not None:
                    zeros = torch.zeros((), dtype=fake.dtype, device=fake.device).expand(fake.shape)
                    own[key] = fake, zeros, self.stages.holders(row)
            found[name] = own
        return {name: own for name, own in found.items() if own}

    def _advice(self, stage: int) -> str:
        """Say what to do about a stage that is given nothing."""
        earlier = {
            id(self.stages.skeleton.get_submodule(name)): (name, number)
            for number, before in enumerate(self.stages.plan.stages[:stage])
            for name in before.modules
        }
        for name in self.stages.plan.stages[stage].modules:
            if found := earlier.get(id(self.stages.skeleton.get_submodule(name))):
                return (
                    f'"{name}" is the same module as "{found[0]}" on stage {found[1]}, and a stage calls the modules '
                    "that it has by itself. Put both on one stage; or make two modules with the same parameters, "
                    "which stages train as one: other = copy.deepcopy(module); other.weight = module.weight."
                )
        return "Name the stages in the order in which their modules run."

    def _search(self, one: _Pass, number: int, names: tuple[str, ...], name: str, args: Any, kwargs: Any) -> Any:
        if _torch.is_checkpointing():
            raise PlanError(
                f'forward of {self._name} calls "{name}" through torch.utils.checkpoint, which a pipeline cannot run '
                "again: the modules of other stages are not here. Call the module itself, and add "
                "shardlib.checkpoint_activations() to transforms; or checkpoint inside of the module's forward."
            )
        own = self._stage_of[name] == one.stage
        one.known.callees[number] = names
        if own and one.origins is None:
            if messages := _lacking(args, kwargs):
                raise _Reached(StageBoundary(number, name, messages))
        elif one.origins is not None and one.exit is not None and number == one.exit.call:
            lacking = {message.path for message in one.exit.messages}
            flat = flatten_with_path((args, kwargs))[0]
            one.origins.need([leaf for path, leaf in flat if pytree.keystr(path) in lacking])
            raise _Reached(None)
        elif one.entry is not None and number == one.entry.call:
            one.entry = StageBoundary(number, name, _lacking(args, kwargs))
        elif own and one.origins is not None and one.entry is not None and number > one.entry.call:
            one.origins.need((args, kwargs))
        with nullcontext() if one.origins is None else one.origins.paused():
            output = self._elsewhere(one.known, number, name, args, kwargs)
        # The output of this stage for the batch alone has values; which ones does not matter.
        if own or self._can_call(name, args, kwargs):
            output = pytree.tree_map_only(torch.Tensor, _zeros, output)
            if own and one.origins is not None:
                one.origins.begin(None, output)
            return output
        if one.origins is None:
            return output
        one.origins.begin(number, output)
        return self._crossed(one, number, output)


def _lacking(args: Any, kwargs: Any) -> tuple[Message, ...]:
    """Return the messages for the arguments without values, in an order that does not depend on that of keywords."""
    flat = [(pytree.keystr(path), leaf) for path, leaf in flatten_with_path((args, kwargs))[0]]
    lacking = [Message(path, tuple(leaf.shape), leaf.dtype) for path, leaf in flat if not has_values(leaf)]
    return tuple(sorted(lacking, key=lambda message: message.path or ""))


def _add_crossing(known: _Known, found: Mapping[int, set[Output]], producer: Callable[..., int | None]) -> None:
    """Let each output that crosses be sent from the stage that makes it to the one that needs it, by those between."""
    through: dict[int, set[Output]] = {}
    for stage, outputs in found.items():
        for output in outputs:
            first = producer(known, output, stage)
            assert first is not None
            for between in range(first + 1, stage + 1):
                through.setdefault(between, set()).add(output)
    for stage, outputs in through.items():
        boundary = known.boundaries[stage]
        assert boundary is not None
        leaves = {each: pytree.tree_leaves(known.outputs[each.call])[each.place] for each in sorted(outputs)}
        more = [Message(None, tuple(leaf.shape), leaf.dtype, each) for each, leaf in leaves.items()]
        known.boundaries[stage] = replace(boundary, messages=(*boundary.messages, *more))


class Origins(TorchFunctionMode):
    """Notes from which outputs of modules tensors are computed, in a forward for one stage.

    Attributes:
        needed: the outputs of other stages that this stage needs besides the arguments of its first module.
    """

    def __init__(self) -> None:
        super().__init__()
        self.needed: set[Output] = set()
        self._origins: dict[int, set[Output | None]] = {}  # None stands for this stage's modules
        self._alive: list[Any] = []  # since tensors are known by their identity
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context for what is computed inside of a module."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def begin(self, number: int | None, output: Any) -> None:
        """Note the output of a call; without a number, of a module of this stage."""
        for place, leaf in enumerate(pytree.tree_leaves(output)):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf, {None if number is None else Output(number, place)})

    def need(self, values: Any) -> None:
        """Note that a module of this stage, or a message, needs values."""
        self._need(self._of(leaf for leaf in _torch.leaves_of(values) if not has_values(leaf)))

    def end(self, output: Any) -> None:
        """Note what the model returns: what is computed with this stage's modules needs values."""
        for leaf in _torch.leaves_of(output):
            if not has_values(leaf) and None in (origins := self._of([leaf])):
                self._need(origins)

    def _need(self, origins: set[Output | None]) -> None:
        self.needed |= {each for each in origins if each is not None}

    def _note(self, leaf: torch.Tensor, origins: set[Output | None]) -> None:
        self._alive.append(leaf)
        self._origins.setdefault(id(leaf), set()).update(origins)

    def _of(self, leaves: Iterable[Any]) -> set[Output | None]:
        return set[Output | None]().union(*(self._origins.get(id(leaf), ()) for leaf in leaves))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        origins = self._of(_torch.leaves_of(args, kwargs))
        try:
            made = func(*args, **kwargs)
        except PlanError:  # it is written into a tensor that has values
            if None in origins:
                self._need(origins)
            raise
        for leaf in _torch.leaves_of(made) if origins else ():
            if isinstance(leaf, torch.Tensor):
                self._note(leaf, origins)
        return made


@contextmanager
def _keeping_buffers(model: nn.Module) -> Iterator[None]:
    """Undo in the end what the block does to buffers, as a forward that counts steps."""
    kept = [(buffers, dict(buffers)) for _, buffers in map(_torch.own_tensors, model.modules())]
    values = [(buffer, buffer._version, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffers, before in kept:
            buffers.update(before)
        for buffer, version, value in values:
            if buffer._version != version:
                buffer.copy_(value)


def _weakly(method: Callable[..., Any]) -> Callable[[], Any]:
    """Return a function that returns the method. It does not keep the method's object alive, which keeps its route."""
    return weakref.WeakMethod(method) if isinstance(method, MethodType) else lambda: method


def _writable(received: torch.Tensor) -> torch.Tensor:
    """Return a received tensor so that a module may write into it, as `ReLU(inplace=True)` does."""
    alias: torch.Tensor = _Alias.apply(received) if received.requires_grad else received
    return alias


class _Alias(torch.autograd.Function):
    """Returns the same memory as a tensor that is neither a leaf nor a view, into which autograd lets ops write."""

    @staticmethod
    def forward(_ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


def has_values(leaf: Any) -> bool:
    """Tell whether a value is not a tensor, or is a tensor that is not fake."""
    return not isinstance(leaf, torch.Tensor) or not _torch.is_fake(leaf)


def _all_have_values(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether no argument of a call is a fake tensor."""
    return all(map(has_values, _torch.leaves_of(*args, *kwargs.values())))


def without_fakes(output: Any) -> Any:
    """Return an output with None in the place of fake tensors."""
    return pytree.tree_map(lambda leaf: leaf if has_values(leaf) else None, output)


def _tried(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return the output of a module for zeros, in a temporary copy whose parameters are zeros."""
    real = _torch.copied_with(module, _zeros)
    args, kwargs = pytree.tree_map_only(torch.Tensor, _zeros, (args, kwargs))
    with torch.random.fork_rng(devices=()):
        return real(*args, **kwargs)


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device) if not has_values(tensor) else tensor


def _argument(path: str) -> str:
    """Describe an argument by its path in (args, kwargs).

    >>> _argument("[1]['mask']"), _argument("[0][2]")
    ('argument "mask"', 'argument 2')
    """
    kind, rest = path[1], path[3:]
    words = rest.replace("['", "").replace("']", "") if kind == "1" else rest.strip("[]")
    return f'argument "{words}"' if kind == "1" else f"argument {words}"

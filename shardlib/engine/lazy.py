"""Models built without memory, which get the values that building them would have given them, one tensor at a time.

Inside `LazyInitContext` tensors have no values, and what is done to them is put on a tape: operations on memory, in
the order in which they happened. Later the tape is played on real memory. A tensor lives there from the write that
gives it what is read later, or kept by the model, until its last use; then it is cut to a rank's shard, and gone.
Random operations draw from the generator as it stood, each after those before it, so that the numbers are those that
the model would have drawn.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from shardlib.engine import _torch, exact, pretrained
from shardlib.engine._torch import own_tensors, pytree
from shardlib.errors import ShardingError

__all__ = ["LazyInitContext", "build_again", "is_recorded", "values_of"]

aten = torch.ops.aten

# Writes that do not read what was there. (What is written to as `out=` is not read either.)
_OVERWRITES = frozenset(
    {
        aten.bernoulli_.float,
        aten.copy_.default,
        aten.exponential_.default,
        aten.fill_.Scalar,
        aten.fill_.Tensor,
        aten.normal_.default,
        aten.uniform_.default,
        aten.zero_.default,
    }
)


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies: in which memory, and how."""

    memory: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def covers(self, nbytes: int) -> bool:
        """Whether it is all of a memory of so many bytes."""
        distinct = all(stride > 0 for size, stride in zip(self.size, self.stride, strict=True) if size > 1)
        return distinct and math.prod(self.size) * self.dtype.itemsize == nbytes

    def of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor, in real memory."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(eq=False)
class _Step:
    """One operation on the tape.

    Attributes:
        op: the operation.
        arguments: positional ones and those by name, with places for tensors; what was real is kept as it was.
        reads: memories.
        writes: memories that it changes, and those that it makes.
        covers: those of them that keep nothing of what was there before.
        made: where its results lie; None for what lies in memory that was there.
        number: how many random operations came before, if it is one; else None.
        generator: the generator's state, where somebody has set it since the random operation before.
    """

    op: Any
    arguments: Any
    reads: frozenset[int]
    writes: frozenset[int]
    covers: frozenset[int]
    made: tuple[_Place | None, ...]
    number: int | None
    generator: torch.Tensor | None

    def play(self, memory: dict[int, torch.UntypedStorage], nbytes: Sequence[int]) -> None:
        """Run it. Memory that is not there yet comes into being."""
        for number in (self.reads | self.writes) - memory.keys():
            memory[number] = torch.UntypedStorage(nbytes[number])
        args, kwargs = pytree.tree_map_only(_Place, lambda place: place.of(memory[place.memory]), self.arguments)
        results = pytree.tree_leaves(self.op(*args, **kwargs))
        kept = {t.data_ptr() for t in pytree.tree_leaves(self.arguments) if isinstance(t, torch.Tensor)}
        for place, result in zip(self.made, results, strict=True):
            if place is None:
                continue
            alike = result.is_contiguous() and place.stride == result.stride() and not place.offset
            if alike and result.data_ptr() not in kept:
                memory[place.memory] = result.untyped_storage()
            else:
                place.of(memory[place.memory]).copy_(result)


class _Tape:
    """What was done inside a context.

    Args:
        before: the tape whose random numbers come before those of this one.
    """

    def __init__(self, before: _Tape | None) -> None:
        self.steps: list[_Step] = []
        self._before = before
        self._begin = self._expected = torch.get_rng_state()
        self._exact = exact.is_exact()
        self._decided = False  # whether random values have decided how it went on
        self._numbers: dict[int, int] = {}  # of memories, by their address
        self._alive: list[Any] = []  # imagined memory, so that no address comes again
        self._nbytes: list[int] = []
        self._random: list[_Step] = []
        self._drawn: list[
            torch.Tensor
        ] = []  # the generator's state after each of these, as far as they have been played
        self._drawn_exactly = self._exact
        self._warm: tuple[int, dict[int, torch.UntypedStorage]] = (0, {})  # memory, as it was after so many steps

    # --- recording ----------------------------------------------------------------------------------------------------

    def place(self, tensor: torch.Tensor) -> _Place:
        """Where a tensor lies."""
        address, storage = _torch.memory_of(tensor)
        number = self._numbers.get(address)
        if number is None:
            number = self._numbers[address] = len(self._nbytes)
            self._alive.append(storage)
            self._nbytes.append(storage.nbytes())
        return _Place(number, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))

    def record(self, op: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Put an operation at the end, unless it only looks at memory."""
        written = [one for one in _torch.written_to(op, args, kwargs) if _torch.is_imagined(one)]
        read: set[int] = set()

        def placed(tensor: torch.Tensor) -> Any:
            if not _torch.is_imagined(tensor):
                return _torch.with_values(lambda: tensor.detach().clone())
            if not any(tensor is one for one in written):
                read.add(self.place(tensor).memory)
            return self.place(tensor)

        arguments = pytree.tree_map_only(torch.Tensor, placed, (args, _on_cpu(op, kwargs, result)))
        changed = [self.place(one) for one in written]
        known = len(self._nbytes)
        results = [self.place(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in pytree.tree_leaves(result)]
        made = tuple(place if place is not None and place.memory >= known else None for place in results)
        new = {place.memory for place in made if place is not None}
        if not new and not changed:
            return
        writes = {place.memory for place in changed}
        blind = op in _OVERWRITES or _writes_out(op)
        covers = {p.memory for p in changed if blind and p.memory not in read and p.covers(self._nbytes[p.memory])}
        random = torch.Tag.nondeterministic_seeded in op.tags
        step = _Step(
            op,
            arguments,
            frozenset(read | (writes - covers)),
            frozenset(writes | new),
            frozenset(covers | new),
            made,
            len(self._random) if random else None,
            self._set_since() if random else None,
        )
        self.steps.append(step)
        if random:
            self._random.append(step)

    def _set_since(self) -> torch.Tensor | None:
        """The generator's state, if somebody has set it since it was last looked at."""
        with _torch.no_modes():
            now = torch.get_rng_state()
            if torch.equal(now, self._expected):
                return None
        self._expected = now
        return now

    # --- playing ------------------------------------------------------------------------------------------------------

    def read(self, tensors: Any) -> Any:
        """Tensors with the values that they have now."""
        wanted = {self.place(leaf).memory for leaf in pytree.tree_leaves(tensors) if _torch.is_imagined(leaf)}
        begin, memory = self._warm
        needed = self._needed(wanted, begin, memory.keys())
        played = {i for i, _, _ in needed}
        self._decided = self._decided or any(self.steps[i].number is not None for i in played)
        for i in range(begin, len(self.steps)):
            if i not in played:
                for number in self.steps[i].writes:
                    memory.pop(number, None)
        with self._drawing():
            for i, _, _ in needed:
                self._play(self.steps[i], memory)
        touched = wanted.union(*(self.steps[i].writes for i in played))
        self._warm = len(self.steps), {number: one for number, one in memory.items() if number in touched}

        def real(tensor: torch.Tensor) -> torch.Tensor:
            if not _torch.is_imagined(tensor):
                return tensor
            return self.place(tensor).of(memory[self.place(tensor).memory]).clone()

        return _torch.with_values(lambda: pytree.tree_map_only(torch.Tensor, real, tensors))

    def values(self, places: Mapping[str, _Place]) -> Iterator[tuple[str, torch.Tensor]]:
        """What lies at the end at some places, by name; each to be used before the next is asked for."""
        self._warm = 0, {}
        names: dict[int, list[str]] = {}
        for name, place in places.items():
            names.setdefault(place.memory, []).append(name)
        memory: dict[int, torch.UntypedStorage] = {}
        for i, done, over in self._needed(set(names), 0, ()):
            with self._drawing():
                self._play(self.steps[i], memory)
            for number in done:
                for name in names[number]:
                    yield name, places[name].of(memory[number])
            for number in (*done, *over):
                del memory[number]

    def _needed(self, wanted: set[int], begin: int, known: Iterable[int]) -> list[tuple[int, list[int], list[int]]]:
        """The steps that give memories their values: the number of each, what is wanted and done after it, and what
        else nobody reads after it.

        Args:
            wanted: memories.
            begin: after so many steps,
            known: these memories had their values already.
        """
        steps, later, wanted = [], set(wanted), set(wanted)
        for i in reversed(range(len(self.steps))):
            if i + 1 == begin:
                later -= set(known)
            if not later:
                break
            step = self.steps[i]
            if not step.writes & later:
                continue
            touched = step.reads | step.writes
            steps.append((i, sorted(touched & wanted), sorted(touched - later)))
            wanted -= touched
            later = (later - step.covers) | step.reads
        return steps[::-1]

    def _play(self, step: _Step, memory: dict[int, torch.UntypedStorage]) -> None:
        if step.number is not None:
            while len(self._drawn) < step.number:
                self._draw(self._random[len(self._drawn)], {})
            self._draw(step, memory)
        else:
            step.play(memory, self._nbytes)

    def _draw(self, step: _Step, memory: dict[int, torch.UntypedStorage]) -> None:
        assert step.number is not None
        begin = self._drawn[step.number - 1] if step.number else self._start()
        torch.set_rng_state(begin if step.generator is None else step.generator)
        step.play(memory, self._nbytes)
        if len(self._drawn) == step.number:
            self._drawn.append(torch.get_rng_state())

    def _start(self) -> torch.Tensor:
        """The generator's state before the first random step."""
        if self._before is not None:
            self._begin, self._before = self._before.end(), None
        return self._begin

    def end(self) -> torch.Tensor:
        """The generator's state after the last one."""
        with self._drawing():
            while len(self._drawn) < len(self._random):
                self._draw(self._random[len(self._drawn)], {})
            return self._drawn[-1] if self._drawn else self._start()

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Draw as was recorded, or exactly where that is asked for now; the generator stays where it is."""
        exactly = self._exact or exact.is_exact()
        if exactly and not self._exact and self._decided:
            raise ShardingError(
                "A model was built lazily, random values decided how it went on (as in trunc_normal_, which draws "
                'until all values fit), and rng="exact" draws others. Build it with exact ones: '
                "with shardlib.exact_random(), LazyInitContext(): ..."
            )
        if exactly != self._drawn_exactly:
            self._drawn, self._drawn_exactly = [], exactly
        with _torch.no_modes():
            before = torch.get_rng_state()
            try:
                with exact.ExactMode(exact.Place()) if exactly else nullcontext(), torch.no_grad():
                    yield
            finally:
                torch.set_rng_state(before)


def _writes_out(op: Any) -> bool:
    return any(argument.is_out for argument in _torch.schema_of(op).arguments)


def _on_cpu(op: Any, kwargs: Mapping[str, Any], result: Any) -> dict[str, Any]:
    """Arguments by name as they are when the tape is played: on a CPU, in the dtype that was the default."""
    made = {**kwargs}
    names = {argument.name for argument in _torch.schema_of(op).arguments}
    if "device" in names:
        made["device"] = torch.device("cpu")
    if "pin_memory" in names:
        made["pin_memory"] = None
    if "dtype" in names and made.get("dtype") is None and isinstance(result, torch.Tensor):
        made["dtype"] = result.dtype
    return made


class _Recorder:
    """Puts what is done on a tape. Where values decide how to go on, they are made."""

    def __init__(self, tape: _Tape) -> None:
        self.tape = tape

    def __call__(self, op: Any, args: Any, kwargs: Any) -> Any:
        if any(isinstance(leaf, torch.Generator) for leaf in pytree.tree_leaves((args, kwargs))):
            return self._really(op, args, kwargs)  # now, since nobody knows where that generator stands later
        try:
            result = op(*args, **kwargs)
        except _torch.fake_tensor_errors():
            return self._really(op, args, kwargs)
        self.tape.record(op, args, kwargs, result)
        return result

    def _really(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on values, and put what comes of it on the tape."""
        real_args, real_kwargs = self.tape.read((args, kwargs))
        result = _torch.with_values(lambda: op(*real_args, **_on_cpu(op, real_kwargs, None)))
        written = list(
            zip(_torch.written_to(op, args, kwargs), _torch.written_to(op, real_args, real_kwargs), strict=True)
        )
        for target, real in written:
            self(aten.copy_.default, (target, real), {})
        back = {id(real): target for target, real in written}

        def without_values(real: torch.Tensor) -> torch.Tensor:
            return back[id(real)] if id(real) in back else self(aten.clone.default, (real,), {})

        return pytree.tree_map_only(torch.Tensor, without_values, result)


_TO_PYTHON = frozenset({torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__})


class _Reader(TorchFunctionMode):
    """Methods that make Python's or numpy's values of a tensor, which dispatch does not see."""

    def __init__(self, tape: _Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _TO_PYTHON and _torch.is_imagined(args[0]):
            args = (self.tape.read(args[0].detach()), *args[1:])
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _Recorded:
    """Of a tensor on meta: how to make it."""

    tape: _Tape
    place: _Place
    version: int
    device: torch.device


_recorded: Any = WeakIdKeyDictionary()  # tensor -> _Recorded
# The last tape, and how it left the generator. A tape that begins there goes on with the numbers after its own.
_last: list[tuple[_Tape, torch.Tensor]] = []


def is_recorded(tensor: torch.Tensor) -> bool:
    """Whether a tensor on meta was made in a `LazyInitContext`."""
    return tensor in _recorded


def values_of(named: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The values of tensors that were made in a `LazyInitContext`, by name; of others, nothing.

    Each is whole, and to be used before the next is asked for.

    Raises:
        ShardingError: somebody has written to one of them since.
    """
    tapes: dict[int, tuple[_Tape, dict[str, _Place]]] = {}
    for name, tensor in named.items():
        if (known := _recorded.get(tensor)) is not None:
            if tensor._version != known.version:
                raise ShardingError(
                    f'"{name}" was written to after the LazyInitContext that it was made in, when it had no memory. '
                    "Initialise it inside, or after the model is sharded."
                )
            tapes.setdefault(id(known.tape), (known.tape, {}))[1][name] = known.place
    for tape, places in tapes.values():
        yield from tape.values(places)


class LazyInitContext:
    """Build models without memory; their values come when they are sharded, a tensor at a time.

    A model that is built inside has its parameters and buffers on `meta`. `shard_model` and `Booster.boost` give each
    rank its shards of the values that the same lines would have made, with the same seed, on one device: bit for bit
    those of PyTorch's CPU generator, or, inside `exact_random` and with `shard_model(rng="exact")`, the exact ones. The
    largest tensor has to fit into a rank's memory, the model has not. `from_pretrained` of transformers reads nothing
    inside; later each rank reads its slices.

    What a model computes while it is built is put on a tape, so code that looks at values (`if mask.any()`) runs as it
    would. Change nothing of its tensors between the block and sharding; `model.to(dtype)` may.

    Args:
        tensor_cls: None; ColossalAI's own kind of tensors is not needed.
        default_device: where `materialize` puts tensors; by default the CPU.

    Raises:
        ShardingError: inside another one, or a `tensor_cls`.

    Example:
        >>> with LazyInitContext():
        ...     model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        >>> model[0].weight.is_meta
        True
        >>> LazyInitContext.materialize(model)[0].weight.is_meta
        False
    """

    _inside: LazyInitContext | None = None

    def __init__(self, tensor_cls: Any = None, default_device: torch.device | str | None = None) -> None:
        if tensor_cls is not None:
            raise ShardingError("LazyInitContext was given a tensor_cls, which does not exist here. Leave it out.")
        self.default_device = torch.device(default_device or "cpu")
        self._stack = ExitStack()
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def __enter__(self) -> LazyInitContext:
        if LazyInitContext._inside is not None:
            raise ShardingError(
                "LazyInitContext was entered inside of one. One block is enough: build all models there."
            )
        goes_on = bool(_last) and torch.equal(_last[0][1], torch.get_rng_state())
        self._tape = _Tape(_last[0][0] if goes_on else None)
        modules = self._modules

        def note(module: nn.Module, _name: str, _tensor: Any) -> None:
            modules.add(module)

        with ExitStack() as stack:
            for watch in (_torch.watch_new_parameters, _torch.watch_new_buffers):
                stack.callback(watch(note).remove)
            stack.enter_context(pretrained.read_later())
            stack.enter_context(_torch.recording_imagined(_Recorder(self._tape)))
            stack.enter_context(_Reader(self._tape))
            self._stack = stack.pop_all()
        LazyInitContext._inside = self
        return self

    def __exit__(self, *exc: Any) -> None:
        LazyInitContext._inside = None
        self._stack.close()
        if exc[0] is not None:
            return
        for tensor, holders in _held_by(self._modules):
            if _torch.is_imagined(tensor):
                place = self._tape.place(tensor)
                empty = torch.empty_strided(place.size, place.stride, dtype=place.dtype, device="meta")
                after = _replace(tensor, empty, holders)
                _recorded[after] = _Recorded(self._tape, place, after._version, self.default_device)
        torch.rand(())  # so that a later block can tell whether the generator was seeded again
        _last[:] = [(self._tape, torch.get_rng_state())]

    @staticmethod
    def materialize(module: nn.Module, verbose: bool = False) -> nn.Module:
        """Give all tensors of a module that was built in a `LazyInitContext` their values, in place, in this process.

        Those that `from_pretrained` would have read come from `shard_model` only.
        """
        held = {str(number): one for number, one in enumerate(_held_by(module.modules())) if one[0].is_meta}
        for number, value in values_of({number: tensor for number, (tensor, _) in held.items()}):
            tensor, holders = held[number]
            device = _recorded.pop(tensor).device
            _replace(tensor, value.to(device, tensor.dtype, copy=True), holders)
        if verbose:
            print(f"{type(module).__name__}: {len(held)} tensors have their values.")
        return module


Holders = list[tuple[nn.Module, str]]


def _held_by(modules: Iterable[nn.Module]) -> list[tuple[torch.Tensor, Holders]]:
    """Each tensor once, with the modules that hold it, and their names for it."""
    found: dict[int, tuple[torch.Tensor, Holders]] = {}
    for module in modules:
        for held in own_tensors(module):
            for key, tensor in held.items():
                if tensor is not None:
                    found.setdefault(id(tensor), (tensor, []))[1].append((module, key))
    return list(found.values())


def _replace(tensor: torch.Tensor, other: torch.Tensor, holders: Holders) -> torch.Tensor:
    """Put another tensor in the place of this one, which stays a parameter if it is one, with its attributes.

    The same object becomes the other one; where somebody refers to it weakly (`nn.LSTM`), the modules get another one.
    """
    if isinstance(tensor, nn.Parameter):
        other = nn.Parameter(other, requires_grad=tensor.requires_grad)
    vars(other).update({key: value for key, value in vars(tensor).items() if key not in _torch.fake_attributes()})
    if not weakref.getweakrefs(tensor):
        torch.utils.swap_tensors(tensor, other)
        return tensor
    for module, key in holders:
        setattr(module, key, other)
    return other


def build_again(model: nn.Module) -> bool:
    """Find out what the values of a model of transformers on meta would have been: its class builds another one lazily.

    Returns:
        Whether it is such a model.
    """
    build = getattr(type(model), "_from_config", None)
    if build is None or not hasattr(model, "config"):
        return False
    with LazyInitContext():
        twin = build(copy.deepcopy(model.config))
    known = {**dict(twin.named_parameters()), **dict(twin.named_buffers())}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta and name in known:
            record = _recorded[known[name]]
            _recorded[tensor] = dataclasses.replace(record, version=tensor._version)
    return True

"""Lazy initialisation: models are built without memory, and get their values later, one tensor at a time.

Inside `LazyInitContext` tensors are fake, and a tape records the operations on their memory in order. Later the tape is
replayed on real memory. The memory of a tensor exists from the first write that a later read, or the model, depends on,
until its last use; then it is sharded and freed. Random operations draw from the recorded state of the generator, each
after those before it, so that the numbers are those that building the model would have drawn.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from shardlib.booster import _from_pretrained
from shardlib.engine import _torch
from shardlib.engine._torch import pytree, registered_tensors
from shardlib.engine.apply import materialize
from shardlib.engine.feature import exact
from shardlib.engine.ranks import agree
from shardlib.errors import ShardingError

__all__ = ["LazyInitContext", "build_again", "is_recorded", "values_of"]

aten = torch.ops.aten

# Writes that do not read the previous values. (Neither do writes to `out=`.)
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
class _View:
    """The location of a tensor: its memory, and its shape, strides and offset in it."""

    memory: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def covers(self, nbytes: int) -> bool:
        """Tell whether it covers all of a memory of so many bytes."""
        distinct = all(stride > 0 for size, stride in zip(self.size, self.stride, strict=True) if size > 1)
        return distinct and math.prod(self.size) * self.dtype.itemsize == nbytes

    def of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor in real memory."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(eq=False)
class _Step:
    """One operation on the tape.

    Attributes:
        op: the operation.
        arguments: its positional and keyword arguments, with views instead of fake tensors; real tensors are copied.
        reads: the memories that it reads.
        writes: the memories that it changes or creates.
        covers: those of them that it overwrites completely, or creates.
        made: the view of each result in new memory; None for results in existing memory.
        number: the number of random operations before it, if it is one; else None.
        generator: the state of the generator, if it was set since the last random operation: a state, or the number of
            random operations after which the tape was in it.
    """

    op: Any
    arguments: Any
    reads: frozenset[int]
    writes: frozenset[int]
    covers: frozenset[int]
    made: tuple[_View | None, ...]
    number: int | None
    generator: torch.Tensor | int | None

    def play(self, memory: dict[int, torch.UntypedStorage], nbytes: Sequence[int]) -> None:
        """Run the operation. Allocates memory that does not exist yet."""
        for number in (self.reads | self.writes) - memory.keys():
            memory[number] = torch.UntypedStorage(nbytes[number])
        args, kwargs = pytree.tree_map_only(_View, lambda view: view.of(memory[view.memory]), self.arguments)
        results = pytree.tree_leaves(self.op(*args, **kwargs))
        kept = {t.data_ptr() for t in pytree.tree_leaves(self.arguments) if isinstance(t, torch.Tensor)}
        for view, result in zip(self.made, results, strict=True):
            if view is None:
                continue
            same_layout = result.is_contiguous() and view.stride == result.stride() and not view.offset
            if same_layout and result.data_ptr() not in kept:
                memory[view.memory] = result.untyped_storage()
            else:
                view.of(memory[view.memory]).copy_(result)


class _Tape:
    """The operations inside a context.

    Args:
        before: the tape whose random numbers precede those of this one.
    """

    def __init__(self, before: _Tape | None) -> None:
        self.steps: list[_Step] = []
        self._before = before
        self._begin = self._expected = torch.get_rng_state()
        # Nothing is drawn while the tape records. So that the program may keep the generator's state and restore it,
        # each random operation leaves a state of its own, which stands for the one that drawing would have left.
        self._stands_for = {_digest(self._begin): 0}  # the number of random operations before that one
        self._set_at_end: torch.Tensor | int | None = None
        self._exact = exact.is_exact()
        self._decided = False  # whether the program has read random values, and may have branched on them
        self._numbers: dict[int, int] = {}  # numbers of memories by the id of their storage
        self._alive: list[Any] = []  # fake storages, kept so that no id is reused
        self._nbytes: list[int] = []
        self._random: list[_Step] = []
        # The generator's state after each of these random steps, as far as they have been played.
        self._drawn: list[torch.Tensor] = []
        self._drawn_exactly = self._exact
        self._warm: tuple[int, dict[int, torch.UntypedStorage]] = (0, {})  # the memory after a number of steps

    # --- recording ----------------------------------------------------------------------------------------------------

    def view_of(self, tensor: torch.Tensor) -> _View:
        """Return the view that a tensor is."""
        storage = tensor.untyped_storage()
        number = self._numbers.get(id(storage))
        if number is None:
            number = self._numbers[id(storage)] = len(self._nbytes)
            self._alive.append(storage)
            self._nbytes.append(storage.nbytes())
        return _View(number, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))

    def record(self, op: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Append an operation, unless it neither writes nor creates memory."""
        written = [one for one in _torch.written_to(op, args, kwargs) if _torch.is_fake(one)]
        read: set[int] = set()

        def to_view(tensor: torch.Tensor) -> Any:
            if not _torch.is_fake(tensor):
                return _torch.with_values(lambda: tensor.detach().clone())
            if not any(tensor is one for one in written):
                read.add(self.view_of(tensor).memory)
            return self.view_of(tensor)

        arguments = pytree.tree_map_only(torch.Tensor, to_view, (args, _on_cpu(op, kwargs, result)))
        changed = [self.view_of(one) for one in written]
        known = len(self._nbytes)
        results = [
            self.view_of(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in pytree.tree_leaves(result)
        ]
        made = tuple(view if view is not None and view.memory >= known else None for view in results)
        new = {view.memory for view in made if view is not None}
        if not new and not changed:
            return
        writes = {view.memory for view in changed}
        blind = op in _OVERWRITES or any(argument.is_out for argument in _torch.schema_of(op).arguments)
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
            self._state_if_set() if random else None,
        )
        self.steps.append(step)
        if random:
            self._random.append(step)
            self._leave_state()

    def _leave_state(self) -> None:
        """Put the generator into a state that stands for the one after all random operations so far."""
        with _torch.no_modes():
            seed = int.from_bytes(_digest(self._begin), "little") + len(self._random)
            self._expected = torch.Generator().manual_seed(seed % 2**63).get_state()
            torch.set_rng_state(self._expected)
        self._stands_for[_digest(self._expected)] = len(self._random)

    def _state_if_set(self) -> torch.Tensor | int | None:
        """Return the generator's state, or what it stands for, if it was set since the last random operation."""
        with _torch.no_modes():
            now = torch.get_rng_state()
            return None if torch.equal(now, self._expected) else self._stands_for.get(_digest(now), now)

    def _give_state(self, generator: torch.Generator) -> None:
        """Give a generator the state that its own stands for, if the program took it from the default generator."""
        with _torch.no_modes():
            at = self._stands_for.get(_digest(generator.get_state()))
        if at is not None:
            generator.set_state(self._drawn_until(at))

    def stop(self) -> None:
        """Note the state in which the program leaves the generator."""
        self._set_at_end = self._state_if_set()

    def run(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on tensors without values, or on their values if it needs them; record it."""
        args, kwargs = pytree.tree_map_only(torch.Generator, _unless_default, (args, kwargs))
        generators = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator)]
        if generators:
            for one in generators:
                self._give_state(one)
            # At once, since the state of that generator may be different later.
            return self._run_on_values(op, args, kwargs)
        try:
            result = op(*args, **kwargs)
        except _torch.fake_tensor_errors():
            return self._run_on_values(op, args, kwargs)
        self.record(op, args, kwargs, result)
        return result

    def _run_on_values(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on values, and record its results on the tape."""
        real_args, real_kwargs = self.read((args, kwargs))
        result = _torch.with_values(lambda: op(*real_args, **_on_cpu(op, real_kwargs, None)))
        written = list(
            zip(_torch.written_to(op, args, kwargs), _torch.written_to(op, real_args, real_kwargs), strict=True)
        )
        for target, real in written:
            self.run(aten.copy_.default, (target, real), {})
        back = {id(real): target for target, real in written}

        def without_values(real: torch.Tensor) -> torch.Tensor:
            return back[id(real)] if id(real) in back else self.run(aten.clone.default, (real,), {})

        return pytree.tree_map_only(torch.Tensor, without_values, result)

    # --- playing ------------------------------------------------------------------------------------------------------

    def read(self, tensors: Any) -> Any:
        """Return tensors with their current values."""
        wanted = {self.view_of(leaf).memory for leaf in pytree.tree_leaves(tensors) if _torch.is_fake(leaf)}
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
            if not _torch.is_fake(tensor):
                return tensor
            return self.view_of(tensor).of(memory[self.view_of(tensor).memory]).clone()

        return _torch.with_values(lambda: pytree.tree_map_only(torch.Tensor, real, tensors))

    def values(self, views: Mapping[str, _View]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the final values of views by name. Each must be used before the next is requested."""
        self._warm = 0, {}
        names: dict[int, list[str]] = {}
        for name, view in views.items():
            names.setdefault(view.memory, []).append(name)
        memory: dict[int, torch.UntypedStorage] = {}
        for i, done, over in self._needed(set(names), 0, ()):
            with self._drawing():
                self._play(self.steps[i], memory)
            for number in done:
                for name in names[number]:
                    yield name, views[name].of(memory[number])
            for number in (*done, *over):
                del memory[number]

    def _needed(self, wanted: set[int], begin: int, known: Iterable[int]) -> list[tuple[int, list[int], list[int]]]:
        """Return the steps that the values of memories depend on.

        For each: its number, the wanted memories that are final after it, and the other memories that no later step
        reads.

        Args:
            wanted: the memories.
            begin: the number of steps that have been played.
            known: the memories whose values exist after these steps.
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
        torch.set_rng_state(self._state(step.number if step.generator is None else step.generator))
        step.play(memory, self._nbytes)
        if len(self._drawn) == step.number:
            self._drawn.append(torch.get_rng_state())

    def _state(self, at: torch.Tensor | int) -> torch.Tensor:
        """Return the generator's state after a number of random steps, which have been drawn; a state is returned as it
        is."""
        if isinstance(at, torch.Tensor):
            return at
        return self._drawn[at - 1] if at else self._start()

    def _start(self) -> torch.Tensor:
        """Return the generator's state before the first random step."""
        if self._before is not None:
            self._begin, self._before = self._before.end(), None
        return self._begin

    def end(self) -> torch.Tensor:
        """Return the state in which drawing at once would have left the generator."""
        return self._drawn_until(len(self._random) if self._set_at_end is None else self._set_at_end)

    def _drawn_until(self, at: torch.Tensor | int) -> torch.Tensor:
        with self._drawing():
            while isinstance(at, int) and len(self._drawn) < at:
                self._draw(self._random[len(self._drawn)], {})
            return self._state(at)

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Draw in the recorded mode, or exactly if that is requested now; restore the generator's state on exit."""
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
                with exact.ExactMode(exact.DataRank()) if exactly else nullcontext(), torch.no_grad():
                    yield
            finally:
                torch.set_rng_state(before)


def _unless_default(generator: torch.Generator) -> torch.Generator | None:
    return None if generator is torch.default_generator else generator


def _digest(state: torch.Tensor) -> bytes:
    with _torch.no_modes():
        return hashlib.blake2b(state.numpy().tobytes(), digest_size=8).digest()


def _on_cpu(op: Any, kwargs: Mapping[str, Any], result: Any) -> dict[str, Any]:
    """Return keyword arguments for replaying: on a CPU, in the dtype that was the default."""
    made = {**kwargs}
    names = {argument.name for argument in _torch.schema_of(op).arguments}
    if "device" in names:
        made["device"] = torch.device("cpu")
    if "pin_memory" in names:
        made["pin_memory"] = None
    if "dtype" in names and made.get("dtype") is None and isinstance(result, torch.Tensor):
        made["dtype"] = result.dtype
    return made


_TO_PYTHON = frozenset({torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__})


class _Functions(TorchFunctionMode):
    """Intercepts what dispatch does not see: conversions to Python or numpy values, copies of a tensor, pickle."""

    def __init__(self, tape: _Tape, copies: list[torch.Tensor]) -> None:
        super().__init__()
        self.tape, self.copies = tape, copies

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _TO_PYTHON and _torch.is_fake(args[0]):
            args = (self.tape.read(args[0].detach()), *args[1:])
        elif func is torch.Tensor.__deepcopy__ and _torch.is_fake(args[0]):
            self.copies.append(_copied_fake(*args))
            return self.copies[-1]
        elif func is torch.Tensor.__reduce_ex__ and _torch.is_fake(args[0]):
            rebuild, *rest = func(*args, **(kwargs or {}))
            return _NotPickled(rebuild), *rest
        return func(*args, **(kwargs or {}))


def _copied_fake(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """Copy a fake tensor as `copy.deepcopy` copies one with values: a parameter without attributes, others with them.

    torch would ask for its data pointer.
    """
    copied = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        copied = nn.Parameter(copied, requires_grad=tensor.requires_grad)
    else:
        copied.requires_grad_(tensor.requires_grad)
        vars(copied).update(copy.deepcopy(_own_attributes(tensor), memo))
    memo[id(tensor)] = copied
    return copied


@dataclass(frozen=True)
class _Recorded:
    """The record of a tensor on meta: the tape and the view that give its values."""

    tape: _Tape
    view: _View
    version: int
    device: torch.device


_recorded: Any = WeakIdKeyDictionary()  # tensor -> _Recorded
# The last tape, and the generator's state at its end. A tape that begins in this state draws the numbers after it.
_last: list[tuple[_Tape, torch.Tensor]] = []


def is_recorded(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor on meta was created in a `LazyInitContext`."""
    return tensor in _recorded


def _keep(tensor: torch.Tensor, known: _Recorded) -> None:
    """Keep the record of a tensor on meta, and of the tensors that `copy.deepcopy` makes of it."""
    _recorded[tensor] = known
    tensor.__deepcopy__ = _NotPickled(functools.partial(_copied, weakref.ref(tensor)))  # type: ignore[method-assign]


@dataclass(frozen=True)
class _NotPickled:
    """A function that copies a tensor without values. pickle takes it along with the tensor, and is refused."""

    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __reduce__(self) -> NoReturn:
        raise ShardingError(
            "A tensor that was created in a LazyInitContext is pickled, by torch.save or to send it to another "
            "process, and has no values yet. Shard or boost the model and call shardlib.save, or call "
            "LazyInitContext.materialize(model) after the block and pickle it then. copy.deepcopy(model) copies it as "
            "it is."
        )


def _copied(this: weakref.ref[torch.Tensor], memo: dict[int, Any]) -> torch.Tensor:
    tensor = this()
    assert tensor is not None, "who copies it holds it"
    known, changed = _recorded[tensor], tensor._version
    copier = vars(tensor).pop("__deepcopy__")
    try:
        with _torch.no_modes():  # in a later block too the copy is on meta, with the values of this one
            copied = copy.deepcopy(tensor, memo)
    finally:
        tensor.__deepcopy__ = copier  # type: ignore[method-assign]
    # What was written to since is refused as in the tensor itself.
    _keep(copied, dataclasses.replace(known, version=copied._version + known.version - changed))
    return copied


def values_of(named: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the values of tensors that were created in a `LazyInitContext`, by name; other tensors are left out.

    Each is a full tensor, and must be used before the next is requested.

    Raises:
        ShardingError: a tensor was written to since.
    """
    tapes: dict[int, tuple[_Tape, dict[str, _View]]] = {}
    for name, tensor in named.items():
        if (known := _recorded.get(tensor)) is not None:
            if tensor._version != known.version:
                raise ShardingError(
                    f'"{name}" was written to after the LazyInitContext that it was made in, when it had no memory. '
                    "Initialise it inside, or after the model is sharded."
                )
            tapes.setdefault(id(known.tape), (known.tape, {}))[1][name] = known.view
    for tape, views in tapes.values():
        yield from tape.values(views)


class LazyInitContext:
    """Build models without memory; their values are computed when they are sharded, one tensor at a time.

    The parameters and buffers of a model that is built inside are on `meta`. `shard_model` and `Booster.boost` give
    each rank its shards of the values that the same code would have computed, with the same seed, on one device: bit
    for bit those of PyTorch's CPU generator, or, inside `exact_random` and with `shard_model(rng="exact")`, the exact
    ones. The largest tensor has to fit into a rank's memory, the full model does not. `from_pretrained` of transformers
    reads no weights inside; later each rank reads its slices.

    A tape records the operations of building a model, so that code that reads values (`if mask.any()`) works as usual.
    Do not change its tensors between the block and sharding; `model.to(dtype)` is allowed.

    Args:
        tensor_cls: must be None; it exists for compatibility with ColossalAI.
        default_device: the device where `materialize` puts tensors; by default the CPU.

    Raises:
        ShardingError: the context is nested in another one, or a `tensor_cls` is given.

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
        self._copies: list[torch.Tensor] = []

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
            stack.callback(_torch.watch_copies(modules.add))
            stack.enter_context(_from_pretrained.read_later())
            stack.enter_context(_torch.recording_fakes(self._tape.run))
            stack.enter_context(_Functions(self._tape, self._copies))
            self._stack = stack.pop_all()
        LazyInitContext._inside = self
        return self

    def __exit__(self, *exc: Any) -> None:
        LazyInitContext._inside = None
        self._stack.close()
        copies, self._copies = self._copies, []
        if exc[0] is not None:
            return
        # A copy of a parametrized module comes about without a word, but its tensors are noted.
        for tensor, holders in (*_tensors_of(self._modules), *((copied, []) for copied in copies)):
            if _torch.is_fake(tensor):
                view = self._tape.view_of(tensor)
                empty = torch.empty_strided(view.size, view.stride, dtype=view.dtype, device="meta")
                after = _replace(tensor, empty, holders)
                _keep(after, _Recorded(self._tape, view, after._version, self.default_device))
        self._tape.stop()
        torch.rand(())  # lets a later block detect that the generator was seeded again
        _last[:] = [(self._tape, torch.get_rng_state())]

    @staticmethod
    def materialize(module: nn.Module, verbose: bool = False) -> nn.Module:
        """Give all tensors of a module that was built in a `LazyInitContext` their values, in place, in this process.

        Values that `from_pretrained` would have read are available only from `shard_model`.
        """
        on_meta = {str(number): one for number, one in enumerate(_tensors_of(module.modules())) if one[0].is_meta}
        for number, value in values_of({number: tensor for number, (tensor, _) in on_meta.items()}):
            tensor, holders = on_meta[number]
            device = _recorded.pop(tensor).device
            vars(tensor).pop("__deepcopy__", None)
            _replace(tensor, value.to(device, tensor.dtype, copy=True), holders)
        if verbose:
            print(f"{type(module).__name__}: {len(on_meta)} tensors have their values.")
        return module


def _values_later(model: nn.Module, missing: Mapping[str, torch.Tensor]) -> tuple[Any, ...] | None:
    """Return the sources of a model that was built in a `LazyInitContext`: files, and the values on the tape."""
    if not any(map(is_recorded, missing.values())):
        return None
    return (*filter(None, [_from_pretrained.source_of(model)]), materialize.Values(values_of))


materialize.SOURCES.append(_values_later)

Holders = list[tuple[nn.Module, str]]


def _tensors_of(modules: Iterable[nn.Module]) -> list[tuple[torch.Tensor, Holders]]:
    """Return each tensor once, with the modules that hold it, and their names for it."""
    found: dict[int, tuple[torch.Tensor, Holders]] = {}
    for module in modules:
        for _, key, tensor in registered_tensors(module):
            found.setdefault(id(tensor), (tensor, []))[1].append((module, key))
    return list(found.values())


def _replace(tensor: torch.Tensor, other: torch.Tensor, holders: Holders) -> torch.Tensor:
    """Replace a tensor by another one. A parameter stays one, with its attributes.

    The same object gets the content of the other tensor. If there are weak references to it (`nn.LSTM`), the modules
    get a new object.
    """
    if isinstance(tensor, nn.Parameter):
        other = nn.Parameter(other, requires_grad=tensor.requires_grad)
    vars(other).update(_own_attributes(tensor))
    if not weakref.getweakrefs(tensor):
        torch.utils.swap_tensors(tensor, other)
        return tensor
    for module, key in holders:
        setattr(module, key, other)
    return other


def _own_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that users give a tensor."""
    return {key: value for key, value in vars(tensor).items() if key not in _torch.fake_attributes()}


def build_again(model: nn.Module) -> bool:
    """Find the values that a model of transformers on meta would have: its class builds another one lazily.

    Returns:
        Whether the model is one of transformers.
    """
    build = getattr(type(model), "_from_config", None)
    if build is None or not hasattr(model, "config"):
        return False
    with LazyInitContext():
        other = build(copy.deepcopy(model.config))
    known = agree.named_tensors(other)
    for name, tensor in agree.named_tensors(model).items():
        if tensor.is_meta and name in known:
            _keep(tensor, dataclasses.replace(_recorded[known[name]], version=tensor._version))
    return True

"""Fake tensors, which have no values; worlds of fake ranks for dry runs; the dispatch modes that make both."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardlib.engine._torch._private import private
from shardlib.engine._torch.collectives import AsyncTensor
from shardlib.engine._torch.meshes import forget_specs
from shardlib.engine._torch.ops import Op, collective_name, schema_of, written_to
from shardlib.engine._torch.patches import holding_patches, patch
from shardlib.engine._torch.tensor import _StridedShard
from shardlib.engine._torch.trees import pytree
from shardlib.errors import PlanError

private(
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch._subclasses.fake_tensor.unset_fake_temporarily",
    "torch._subclasses.fake_tensor.DataDependentOutputException",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException",
    why="to run a model on shapes alone",
    without="there are no dry runs, no lazy initialisation, and pipeline stages cannot learn their shapes",
)
private(
    "torch._subclasses.fake_tensor.FakeTensorMode.cache_clear",
    why="to forget the results of ops on fake tensors, one for each shape",
    without="memory grows without end where each step has another shape",
)
private(
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    "torch.utils._python_dispatch._disable_current_modes",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
    why="to see every op below autograd, or to keep one from being seen",
    without="steps cannot be recorded, and random numbers cannot be drawn by element",
)
private(
    "torch.distributed.tensor.placement_types._StridedShard.local_shard_size_and_offset",
    why="to let DTensor compute the shards of a fused dim in a dry run",
    without="a dry run or a compiled block with a sharded fused dim raises",
)
private(
    "torch.distributed.distributed_c10d._world",
    "torch.distributed.distributed_c10d._pg_map",
    "torch.distributed.distributed_c10d._pg_names",
    "torch.distributed.distributed_c10d._pg_group_ranks",
    "torch.distributed.distributed_c10d._pg_backend_config",
    "torch.distributed.distributed_c10d._tags_to_pg",
    "torch.distributed.distributed_c10d._pg_to_tag",
    "torch.distributed.distributed_c10d._group_count",
    "torch.distributed.distributed_c10d._unregister_process_group",
    "torch.distributed.tensor._random._rng_tracker",
    why="to put the process groups of this process out of sight for a world of fake ranks",
    without="a dry run for a mesh of another size needs as many processes",
)

import torch.distributed.tensor._random as dtensor_random
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)

R = TypeVar("R")

__all__ = [
    "TorchDispatchMode",
    "fake_attributes",
    "fake_mode",
    "fake_tensor_errors",
    "fake_tensors",
    "fake_world",
    "forget_fake_results",
    "give_fused_splits_real_offsets",
    "has_values",
    "innermost_mode",
    "is_fake",
    "is_fake_tensor",
    "is_traceable_wrapper_subclass",
    "new_fake_mode",
    "no_modes",
    "recording_fakes",
    "to_fake",
    "with_values",
]

_WORLD_TABLES = (
    "_pg_map",
    "_pg_names",
    "_pg_group_ranks",
    "_pg_backend_config",
    "_tags_to_pg",
    "_pg_to_tag",
    "_group_count",
    "_world",
)
# Groups are known to C++ by name, real and fake ones in one table; counting from here keeps the names apart.
_FIRST_FAKE_GROUP = 1_000_000_000


class _Mode(FakeTensorMode):
    """The mode of fake tensors, without three mistakes of torch's own."""

    def __deepcopy__(self, memo: Any) -> _Mode:
        """Return the mode itself, to which the copy of a tensor belongs too.

        `copy.deepcopy` copies the attributes of a buffer, and the mode is one. A copied mode would have copies of weak
        references to storages, each of which frees the reference (2.13.0): the process crashes later.
        """
        return self

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if collective_name(func) == "wait_tensor":
            return args[0]  # as the kernel does; the shape function makes another tensor (2.13.0)
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            return _grouped_product(*args, **(kwargs or {}))
        return super().dispatch(func, types, args, kwargs or {})


def _grouped_product(a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> torch.Tensor:
    """Return the fake output of `_grouped_mm`, whose shape function takes bfloat16 alone (2.13.0); the kernel does not.

    Raises:
        RuntimeError: the kernel does not take the dtype either.
    """
    if a.dtype not in _GROUPED:
        raise RuntimeError(f"Expected mat_a to be Float32, BFloat16 or Float16 matrix, got {a.dtype}")
    groups = a.shape[:1] if offs is None else offs.shape
    return a.new_empty((*(groups if a.ndim == b.ndim else ()), a.shape[-2], b.shape[-1]), dtype=out_dtype)


_GROUPED = (torch.float32, torch.float16, torch.bfloat16)


class _Remembering(_Mode):
    """Returns the same tensor again where an op is called with the same ones.

    Each op of fake tensors (2.13.0) costs as much as a small block computes, and every microbatch goes the same way.
    Results are not shared where autograd would write its history into them, nor for ops that change their operands.
    """

    most = 10_000

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._made: dict[Any, tuple[Any, Any, Any]] = {}

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        key = _call_key(func, args, kwargs or {})
        known = self.known(key)
        if known is not None:
            return known
        made = super().dispatch(func, types, args, kwargs or {})
        if isinstance(made, FakeTensor):
            made.__class__ = _Remembered
            if key is not None:
                if len(self._made) >= self.most:
                    self._made.clear()
                self._made[key] = made, _state_of(made), (args, kwargs)  # whose identities are in the key
        return made

    def from_tensor(self, tensor: torch.Tensor, **given: Any) -> FakeTensor:
        made = super().from_tensor(tensor, **given)
        made.__class__ = _Remembered
        return made

    def known(self, key: Any) -> torch.Tensor | None:
        """Return what a call gave before, unless it has been changed in place."""
        made, state, _ = self._made.get(key, _NOTHING) if key is not None else _NOTHING
        return made if made is not None and state == _state_of(made) else None


class _Remembered(FakeTensor):
    """Asks its mode for a known result before the mode is entered, which takes several times as long (2.13.0)."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first = args[0] if args else None
        if isinstance(first, _Remembered):
            mode: Any = first.fake_mode
            known = mode.known(_call_key(func, args, kwargs or {}))
            if known is not None:
                return known
        _refuse_lost_values(func, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def _refuse_lost_values(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse to write a tensor without values into one that has some, which would silently keep its old ones.

    Raises:
        PlanError: an op in place, or one with `out=`, does so.
    """
    kept = [tensor for tensor in written_to(op, args, kwargs) if not is_fake(tensor)]
    if kept and any(map(is_fake, _fakes((args, kwargs)))):
        raise PlanError(
            f"forward writes a tensor of another stage into one of shape {tuple(kept[0].shape)} that this stage has "
            f"made ({op}), outside of the stages' modules: only what the first module of a stage is given comes from "
            "the stage before it. Split the model elsewhere, name the modules that make both on one stage, or pass the "
            "tensor through the modules between them."
        )


_NOTHING = None, None, None


def _state_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.requires_grad


# Asked for a new tensor, often to be changed, or compared with its source by identity.
_FRESH = {torch.ops.aten.clone.default, torch.ops.aten._to_copy.default}


@functools.cache
def _gives_what_it_was_given(op: Any) -> bool:
    """Tell whether an op works in place or returns a view: autograd notes in the result whose it is."""
    return schema_of(op).is_mutable or any(each.alias_info is not None for each in schema_of(op).returns)


def _call_key(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Make a key that calls with the same result have in common; None where the result must not be shared."""
    if func in _FRESH or not isinstance(func, Op) or _gives_what_it_was_given(func):
        return None
    leaves: list[Any] = [func, *kwargs]
    if not any(isinstance(arg, FakeTensor) for arg in (*args, *kwargs.values())):
        return None  # two tensors made of nothing are two
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, FakeTensor):
            leaves.append(id(arg))
        elif isinstance(arg, torch.Tensor):
            leaves.append((arg.shape, arg.stride(), arg.dtype, arg.device))
        elif isinstance(arg, list | tuple):
            if any(isinstance(each, torch.Tensor | list | tuple) for each in arg):
                return None
            leaves.append(tuple(arg))
        else:
            leaves.append((type(arg), arg))
        if isinstance(arg, torch.Tensor) and arg.requires_grad:
            return None
    return tuple(leaves)


class _DryMode(_Mode):
    """The mode of a dry run."""


class _Marking(TorchDispatchMode):
    """Marks, in a dry run, where no tensor has values, those that would have none in a real run either.

    These are the tensors made while `depth` is not zero, and those computed from marked ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self.depth = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) or t is AsyncTensor for t in types):
            return NotImplemented
        if not self.depth:
            _refuse_lost_values(op, args, kwargs or {})
        made = op(*args, **(kwargs or {}))
        if self.depth or any(is_fake(leaf) for leaf in _fakes((args, kwargs))):
            for leaf in _fakes(made):
                leaf._shardlib_fake = True
        return made


def _fakes(tree: Any) -> Iterator[Any]:
    return (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, FakeTensor))


class _Marked:
    """The context that `new_fake_mode` returns in a dry run; it can be entered many times."""

    def __init__(self, mode: _Marking) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        self._mode.depth += 1

    def __exit__(self, *exc: object) -> None:
        self._mode.depth -= 1

    def from_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        with self:
            return tensor.detach()


@contextmanager
def fake_tensors(*, with_stages: bool = False) -> Iterator[None]:
    """Give tensors made inside the block a shape, a dtype and a device, and no values. Real ones may meet them.

    `with_stages` lets `is_fake` tell which of them would have none in a real run either.
    """
    marking = _Marking() if with_stages else nullcontext()
    with holding_patches(), _DryMode(allow_non_fake_inputs=True), marking:
        give_fused_splits_real_offsets()
        yield


def fake_mode() -> AbstractContextManager[Any]:
    """Return a context in which tensors are fake: the mode that is on, or a new one without torch's mistakes."""
    known = any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack())
    return nullcontext() if known else _Mode()


def new_fake_mode() -> Any:
    """Make a context in which tensors have no values. They stay so outside of it."""
    marking = next((mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, _Marking)), None)
    return _Remembering(allow_non_fake_inputs=True) if marking is None else _Marked(marking)


def forget_fake_results() -> None:
    """Clear torch's table of what ops on fake tensors return, which it never bounds (2.13.0)."""
    FakeTensorMode.cache_clear()


def is_fake(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has a shape, a dtype and a device, and no values.

    In a dry run, tell whether it would have none in a real run.
    """
    if isinstance(tensor, FakeTensor):
        return not isinstance(tensor.fake_mode, _DryMode) or hasattr(tensor, "_shardlib_fake")
    return False


def is_fake_tensor(value: Any) -> bool:
    """Tell whether a value is a fake tensor, of a dry run or not."""
    return isinstance(value, FakeTensor)


def to_fake(mode: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that makes a tensor without values of one that has some."""
    return lambda tensor: tensor if is_fake(tensor) else mode.from_tensor(tensor.detach())


@contextmanager
def recording_fakes(record: Callable[[Any, Any, Any], Any]) -> Iterator[None]:
    """Make a context in which tensors have no values and every operation goes through `record(op, args, kwargs)`.

    The context keeps no weak references to the tensors, so that others can be swapped into their places.
    """
    mode = _Mode(allow_non_fake_inputs=True)  # each call's own tensors, by which records differ
    memo = mode.fake_tensor_converter.tensor_memo

    class Recording(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            try:
                return record(op, args, kwargs or {})
            finally:
                memo.clear()

    with mode, Recording():
        yield


@functools.cache
def fake_attributes() -> frozenset[str]:
    """List the attributes that a parameter without values has, besides those that users give it."""
    return frozenset(vars(FakeTensorMode().from_tensor(torch.nn.Parameter(torch.empty(0)))))


def has_values(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor can be read: one of a dry run cannot, nor one on meta."""
    return not isinstance(tensor, FakeTensor) and not tensor.is_meta


def with_values(make: Callable[[], R]) -> R:
    """Call `make` so that the tensors it makes have values in a dry run too."""
    with unset_fake_temporarily():
        return make()


# A context that keeps the modes of dispatch that are on outside of it from seeing the operations inside.
no_modes = _disable_current_modes


def innermost_mode() -> Any:
    """Return the `TorchDispatchMode` that sees ops first, or None."""
    modes = _get_current_dispatch_mode_stack()
    return modes[-1] if modes else None


def give_fused_splits_real_offsets() -> None:
    """Let DTensor tell the shards of a fused split in a dry run and while a block is traced.

    It reads their offsets back from a small tensor of its own (2.13.0), which has no values there.
    """
    patch(give_fused_splits_real_offsets, _with_real_offsets)


def _with_real_offsets() -> Callable[[], None]:
    strided = _StridedShard.local_shard_size_and_offset

    def with_real_offsets(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return strided(*args, **kwargs)

    _StridedShard.local_shard_size_and_offset = with_real_offsets  # type: ignore[method-assign]
    return lambda: setattr(_StridedShard, "local_shard_size_and_offset", strided)


def fake_tensor_errors() -> tuple[type[Exception], ...]:
    """Return what fake tensors raise where a value would be needed."""
    return (DataDependentOutputException, DynamicOutputShapeException)


@contextmanager
def fake_world(axes: Mapping[str, int], device_type: str, rank: int = 0) -> Iterator[DeviceMesh]:
    """Be one rank, by default the first, of as many as a mesh has, all others fake; collectives return at once.

    Real process groups of this process, the default one included, are out of sight inside the block and back after
    it. What DTensor has cached names meshes, and a real and a fake mesh of one shape are equal to it: caches are
    dropped on both sides.
    """
    before = {name: getattr(c10d, name) for name in _WORLD_TABLES}
    tracker = dtensor_random._rng_tracker
    forget_specs()
    for name, value in before.items():
        setattr(c10d, name, _FIRST_FAKE_GROUP if isinstance(value, int) else type(value)())
    try:
        world = math.prod(axes.values())
        dist.init_process_group("fake", rank=rank, world_size=world)
        yield _fake_mesh(axes, device_type, rank)
    finally:
        for name in list(c10d._world.pg_names.values()):
            c10d._unregister_process_group(name)
        for name, value in before.items():
            setattr(c10d, name, value)
        forget_specs()
        dtensor_random._rng_tracker = tracker


def _fake_mesh(axes: Mapping[str, int], device_type: str, rank: int) -> DeviceMesh:
    """Make a mesh with the groups of this rank alone, so that a mesh of many thousand ranks costs nothing."""
    ranks = torch.arange(math.prod(axes.values())).view(*axes.values())
    place = (ranks == rank).nonzero()[0].tolist()
    groups = []
    for dim in range(ranks.ndim):
        row = ranks[tuple(slice(None) if other == dim else place[other] for other in range(ranks.ndim))]
        groups.append(dist.new_group(row.tolist()))
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=tuple(axes))

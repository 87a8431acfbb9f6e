"""Recording of one rank's step below autograd: collectives and the modules that cause them, gathered ops, live bytes.

The same code records a dry run and a real run, so that a prediction and a measurement differ only if the runs do.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardlib._mesh_shape import MeshShape
from shardlib._plan.report import DryRun, Gathered, Recorded, RunPhase
from shardlib.engine import _torch, ops
from shardlib.engine._torch import TorchDispatchMode, is_traceable_wrapper_subclass, pytree
from shardlib.engine.feature.flops import operations_of

__all__ = ["Call", "Recording", "record_collectives"]

_KINDS = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter", "send",
    "receive", "barrier",
)  # fmt: skip
_PAYLOADS = ("input", "inputs", "input_tensor", "input_tensors", "input_list", "tensors", "tensor")


class Call(NamedTuple):
    """One op on local tensors that a recording has seen.

    Attributes:
        op, args, kwargs, result: the call.
        ranks: the ranks of a collective; of any other op, and of one rank alone, none.
        collective: the record that it has left.
        flops: the floating-point operations that it counts for.
        place: returns the module and the phase that it belongs to.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    ranks: tuple[int, ...]
    collective: Recorded | None
    flops: int
    place: Callable[[], tuple[str, RunPhase]]


class Recording:
    """The record of a step, which grows while the `with` block runs.

    Attributes:
        collectives: in the order of issue, without those of a single rank.
        gathered: ops without a proven sharding rule, in order.
        start_bytes: local bytes of parameters and buffers at the start of the recording.
        peak_bytes: the maximum of live bytes: these, and every tensor that an op has made since.
        flops: floating-point operations of matrix products, convolutions and attention.
        live: the counter of live bytes.
    """

    def __init__(self, model: nn.Module) -> None:
        self.collectives: list[Recorded] = []
        self.gathered: list[Gathered] = []
        self.flops = 0
        self.live = LiveBytes()
        for tensor in (*model.parameters(), *model.buffers()):
            self.live.add(_torch.local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach())
        self.start_bytes = self.live.now

    @property
    def peak_bytes(self) -> int:
        return self.live.peak

    def report(self) -> DryRun:
        """Return the record as a value, which prints in a plan and compares."""
        return DryRun(tuple(self.collectives), tuple(self.gathered), self.start_bytes, self.peak_bytes, self.flops)


@contextmanager
def record_collectives(
    model: nn.Module, *, mesh: DeviceMesh | None = None, watch: Callable[[Call], object] | None = None
) -> Iterator[Recording]:
    """Record the collectives that this rank issues inside the block, the ops on all-gathered operands, and live bytes.

    Args:
        model: a sharded model; each collective is attributed to one of its modules.
        mesh: the mesh that names the axes; by default that of the model's DTensors.
        watch: is called after every op on local tensors.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> with record_collectives(model) as log:
        ...     model(torch.ones(1, 2)).sum().backward()
        >>> log.collectives, log.start_bytes
        ([], 24)
    """
    recording = Recording(model)
    meshes = (_torch.root_mesh(p.device_mesh) for p in model.parameters() if isinstance(p, DTensor))
    axes = functools.cache(functools.partial(_axes_of, mesh or next(meshes, None)))
    with (
        ops.record() as gathered,
        _Modules(model) as modules,
        _Recorder(recording, modules, axes, gathered, watch) as recorder,
    ):
        yield recording
        recorder.note_gathered()


class _Recorder(TorchDispatchMode):
    """Records each op on local tensors. Ops on DTensors pass through, and come back as ops on local tensors."""

    def __init__(
        self,
        recording: Recording,
        modules: _Modules,
        axes: Callable[[tuple[int, ...]], tuple[str, ...]],
        gathered: list[ops.GatheredOp],
        watch: Callable[[Call], object] | None,
    ) -> None:
        super().__init__()
        self.recording, self.modules, self.axes, self.gathered = recording, modules, axes, gathered
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) or t is _torch.AsyncTensor for t in types):
            return NotImplemented
        self.note_gathered()
        result = func(*args, **(kwargs or {}))
        kind = _kind_of(func)
        ranks: tuple[int, ...] = ()
        recorded = None
        if kind is not None:
            given = {**_torch.named_arguments(func, args), **(kwargs or {})}
            ranks = tuple(_torch.ranks_of_collective(given))
            recorded = self._record(kind, given, ranks) if len(ranks) > 1 else None
        flops = operations_of(func, args, kwargs or {}, result)
        self.recording.flops += flops
        for leaf in _torch.leaves_of(result):
            if isinstance(leaf, torch.Tensor):
                self.recording.live.add(leaf)
        if self.watch is not None:
            self.watch(Call(func, args, kwargs or {}, result, ranks, recorded, flops, self.modules.place))
        return result

    def note_gathered(self) -> None:
        """Attribute the ops that were gathered since the last op to the running module, before further ops run."""
        module = self.modules.place()[0] if len(self.gathered) > len(self.recording.gathered) else ""
        for op in self.gathered[len(self.recording.gathered) :]:
            self.recording.gathered.append(Gathered(op.op, module, op.reason))

    def _record(self, kind: str, given: dict[str, Any], ranks: tuple[int, ...]) -> Recorded:
        sent = () if kind in ("barrier", "receive") else next(given[n] for n in _PAYLOADS if n in given)
        payload = _bytes(sent)
        module, phase = self.modules.place()
        recorded = Recorded(kind, self.axes(ranks), payload, len(ranks), module, phase)
        self.recording.collectives.append(recorded)
        return recorded


class _Modules:
    """Tracks the running module: in forward by hooks, in backward by the sequence numbers of autograd nodes.

    Autograd numbers nodes in the order of forward. A module's forward therefore owns an interval of numbers, and a
    backward node belongs to the module with the smallest interval around its number. This is exact in any order of
    backward, and needs no hooks on tensors.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = {id(module): name for name, module in model.named_modules()}
        self._running: list[tuple[str, int]] = []
        self._intervals: list[tuple[int, int, str]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> _Modules:
        for module in self.model.modules():
            self._handles.append(module.register_forward_pre_hook(self._begin, prepend=True))
            self._handles.append(module.register_forward_hook(self._end, always_call=True))
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()

    def place(self) -> tuple[str, RunPhase]:
        """Return the module and the phase of the running op."""
        in_backward = _torch.backward_id() != -1
        if self._running:
            return self._running[-1][0], "backward" if in_backward else "forward"
        return (self._of_node(), "backward") if in_backward else ("", "outside")

    def _begin(self, module: nn.Module, _args: Any) -> None:
        self._running.append((self.names[id(module)], _torch.next_node_number()))

    def _end(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        name, first = self._running.pop()
        self._intervals.append((first, _torch.next_node_number(), name))

    def _of_node(self) -> str:
        number = _torch.running_node()
        around = [(last - first, name) for first, last, name in self._intervals if first <= number < last]
        return min(around, key=lambda item: item[0])[1] if around else ""


class LiveBytes:
    """A counter of the bytes of all added storages that are still alive."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def add(self, tensor: torch.Tensor) -> None:
        if is_traceable_wrapper_subclass(tensor):
            return
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key not in self._storages:
            self._storages[key] = weakref.ref(storage, lambda _: self._drop(key, size))
            self.now += size
            self.peak = max(self.peak, self.now)

    def _drop(self, key: int, size: int) -> None:
        del self._storages[key]
        self.now -= size


def _axes_of(mesh: DeviceMesh | None, ranks: Sequence[int]) -> tuple[str, ...]:
    """Return the mesh axes that a group of ranks spans."""
    position = {} if mesh is None else {rank: i for i, rank in enumerate(_torch.ranks_of_mesh(mesh))}
    if mesh is None or not position.keys() >= set(ranks):
        return ()
    shape = MeshShape.of(mesh)
    coordinates = [shape.at(position[rank]) for rank in ranks]
    axes = tuple(name for name in shape.names if len({coordinate[name] for coordinate in coordinates}) > 1)
    return axes if shape.only(axes).world_size == len(ranks) else ()


@functools.cache
def _kind_of(op: Any) -> str | None:
    """Return the kind of an op of torch.ops.c10d, _c10d_functional or _dtensor; None for an op that moves no data."""
    name = (_torch.collective_name(op) or "").replace("_", "").replace("recv", "receive")
    return next((kind for kind in _KINDS if kind.replace("_", "") in name), None)


def _bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in pytree.tree_leaves(tensors) if isinstance(t, torch.Tensor))

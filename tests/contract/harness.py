"""Run habits on one device and on sharded models, and compare what they return.

A *habit* is a small function of a `Run`, such as users write for one device. A *kind* is a way to shard its model. A
*cell* is one habit on one kind; a `Finding` says what came of it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

import shardlib as sl
from shardlib.engine import _torch
from shardlib.errors import ShardlibError
from shardlib.layout import Layout
from shardlib.testing.at_scale import at_scale

__all__ = [
    "DDP",
    "KINDS",
    "MICRO",
    "ONE",
    "Apart",
    "Block",
    "Finding",
    "Kind",
    "Net",
    "Run",
    "compare",
    "play",
    "random_rows",
]


# --- the model of most habits ---------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between two linear layers: two of width 8, unless other numbers are given."""

    def __init__(self, width: int = 8, blocks: int = 2) -> None:
        super().__init__()
        self.stem = nn.Linear(6, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@functools.cache
def _net() -> Net:
    torch.manual_seed(0)
    return Net().double()


@functools.lru_cache(maxsize=1)  # not more: it keeps the process groups, each with threads that ask for work
def _mesh(shape: str, patience: float | None, _world: Any) -> Any:
    return sl.mesh(shape, timeout=patience)


SPLIT = {"up": "colwise", "down": "rowwise", "head": "colwise"}
STAGES = "stem, blocks.0 | blocks.1, head"


# --- kinds ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A way to shard a model: a mesh and transforms."""

    mesh: str
    transforms: tuple[Any, ...] = ()
    compile: str | None = None

    @property
    def shape(self) -> sl.MeshShape:
        return sl.MeshShape(self.mesh)

    @property
    def ranks(self) -> int:
        return self.shape.world_size

    @property
    def costly(self) -> bool:
        """Does it take much longer than other kinds?"""
        return self.compile is not None or self.ranks > 2

    @property
    def staged(self) -> bool:
        return "pp" in self.mesh


ONE, DDP, MICRO = "one device", "DDP", "microbatches on one device"
KINDS: dict[str, Kind] = {
    "tp": Kind("tp=2"),
    "replicate": Kind("dp=2"),
    "zero(1)": Kind("dp=2", (sl.zero(1),)),
    "zero(2)": Kind("dp=2", (sl.zero(2),)),
    "zero(3)": Kind("dp=2", (sl.zero(3),)),
    "fsdp x tp": Kind("dp=2,tp=2", (sl.fsdp(),)),
    "pp": Kind("pp=2", (sl.pipeline("1f1b", microbatches=2),)),
    "compiled": Kind("tp=2", compile="aot_eager"),
}
_OTHERS = {ONE: Kind("dp=1"), DDP: Kind("dp=2"), MICRO: Kind("dp=1")}  # that cells are compared with


def kind_of(name: str) -> Kind:
    return KINDS[name] if name in KINDS else _OTHERS[name]


# --- what a habit is given --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OfRanks:
    """A value that each data rank has its own part of: their mean, sum or rows are what one device has."""

    how: str
    value: Any


@dataclass(frozen=True)
class Shard:
    """A local shard of a tensor that is sharded over all ranks."""

    local: torch.Tensor
    global_shape: tuple[int, ...]
    placements: tuple[Any, ...]
    mesh: str
    rank: int

    def of(self, full: torch.Tensor) -> torch.Tensor:
        """Return the same shard of another tensor."""
        layout = Layout.from_placements(self.placements, self.mesh, global_shape=self.global_shape)
        return layout.take(full, self.mesh, sl.MeshShape(self.mesh).coordinate(self.rank))


@dataclass
class Run:
    """What a habit is given: a model, its sharding, batches, and ways to return what one device returns too."""

    kind: str
    rank: int = 0
    patience: float | None = None  # seconds that ranks wait for each other; by default for ever
    check: Any = True  # as `shard_model` takes it

    @property
    def alone(self) -> bool:
        """Is the model not sharded?"""
        return self.kind in (ONE, MICRO)

    @property
    def data_rank(self) -> int:
        return self._data[0]

    @property
    def data_ranks(self) -> int:
        return self._data[1]

    @property
    def _data(self) -> tuple[int, int]:
        shape = kind_of(self.kind).shape
        return shape.data_place(shape.coordinate(self.rank))

    def model(self) -> Net:
        """Return a new model, with the same weights each time."""
        net = copy.deepcopy(_net())
        torch.manual_seed(0)
        return net

    def shard(
        self,
        model: nn.Module,
        split: Mapping[str, str] = SPLIT,
        stages: Any = STAGES,
        transforms: tuple[Any, ...] = (),
        *,
        by_default: bool = False,
    ) -> Any:
        """Shard a model, with units and buckets as small as they are large in a large model; on one device, return it.

        Args:
            model: a model for one device.
            split: the rules of model axes.
            stages: the modules of pipeline stages.
            transforms: transforms beside those of the kind.
            by_default: leave the sizes of units and buckets as users have them.
        """
        if self.alone:
            return model
        if self.kind == DDP:
            from torch.distributed._composable.replicate import replicate

            return replicate(model)
        kind = KINDS[self.kind]
        rules = sl.Rules(dict(split), unmatched="replicate") if split and "tp" in kind.mesh else sl.Rules({"**": None})
        if kind.staged:
            rules = rules.with_stages(stages)
        mesh = _mesh(kind.mesh, self.patience, dist.group.WORLD)
        scale = () if by_default else (at_scale,)
        transforms = (*scale, *kind.transforms, *transforms, *scale)
        return sl.shard_model(model, mesh, rules, transforms=transforms, compile=kind.compile, check=self.check)

    @contextlib.contextmanager
    def compiler(self) -> Iterator[None]:
        """Let `torch.compile` compile: in tests it is switched off, except on compiled blocks."""
        before = os.environ.pop("TORCHDYNAMO_DISABLE", None)
        try:
            yield
        finally:
            if before is not None:
                os.environ["TORCHDYNAMO_DISABLE"] = before

    def part(self, batch: torch.Tensor) -> torch.Tensor:
        """Return this data rank's rows of a batch."""
        return batch.chunk(self.data_ranks)[self.data_rank]

    def batch(self, i: int = 0) -> torch.Tensor:
        """Return this data rank's rows of batch `i`."""
        return self.part(random_rows(8, i))

    def loss(self, model: Callable[..., Any], i: int = 0) -> torch.Tensor:
        """Return the loss of this data rank's rows."""
        return criterion(model(self.batch(i)))

    def backward(self, model: nn.Module, i: int = 0) -> Any:
        """Do a forward and a backward, as a pipeline too, and return the loss."""
        if kind_of(self.kind).staged:
            return sl.pipeline_step(model, self.batch(i), lambda out, _batch: criterion(out)).loss.detach()
        parts, total = self.batch(i).chunk(2 if self.kind == MICRO else 1), 0.0
        for part in parts:
            loss = criterion(model(part)) / len(parts)
            loss.backward()
            total = total + loss.detach()
        return self.mean(total)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train(self, model: nn.Module, optimizer: Any = None, steps: int = 2, start: int = 0) -> list[Any]:
        """Train some steps, and return the losses."""
        optimizer = optimizer or self.optimizer(model)
        losses = []
        for i in range(start, start + steps):
            optimizer.zero_grad()
            losses.append(self.backward(model, i))
            optimizer.step()
        return losses

    def no_sync(self, model: nn.Module) -> Any:
        """Return `sl.no_sync(model)`; on one device nothing has to wait."""
        return contextlib.nullcontext() if self.alone else sl.no_sync(model)

    def weights(self, model: nn.Module) -> dict[str, Any]:
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    def buffers(self, model: nn.Module) -> dict[str, Any]:
        return {name: b.detach().clone() for name, b in model.named_buffers()}

    def gradients(self, model: nn.Module) -> dict[str, Any]:
        grads = {name: p.grad for name, p in model.named_parameters()}
        return {name: None if grad is None else grad.detach().clone() for name, grad in grads.items()}

    def trained(self, model: nn.Module, optimizer: Any = None, steps: int = 2, start: int = 0) -> Any:
        """Train some steps, and return losses and weights."""
        return self.train(model, optimizer, steps, start), self.weights(model)

    def outputs(self, model: Callable[..., Any], i: int = 0) -> OfRanks:
        """Return what the model makes of batch `i`, without gradients."""
        with torch.no_grad():
            return self.rows(model(self.batch(i)))

    def mean(self, value: torch.Tensor) -> OfRanks:
        """Return a number of this data rank's rows; over data ranks its mean is compared."""
        return OfRanks("mean", value.detach().clone())

    def stages(self, value: torch.Tensor) -> OfRanks:
        """Return a vector of this rank's parameters; those of all stages are compared, one after the other."""
        return OfRanks("stages", value.detach().clone())

    def sum(self, value: torch.Tensor) -> OfRanks:
        """Return a number of this data rank's rows; over data ranks its sum is compared."""
        return OfRanks("sum", value.detach().clone())

    def rows(self, value: torch.Tensor) -> OfRanks:
        """Return rows of this data rank; those of all data ranks are compared, one after the other."""
        return OfRanks("rows", value.detach().clone())


def random_rows(n: int, seed: int = 0) -> torch.Tensor:
    """Return inputs of the model, the same on every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    rows = torch.randn(n, 6, generator=generator, dtype=torch.float64, device="cpu")
    return rows.to(torch.get_default_device())


def criterion(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


# --- on a rank --------------------------------------------------------------------------------------------------------


@dataclass
class Part:
    """What a habit did on one rank: its values by path, or the error that it raised."""

    data_rank: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    refused: bool = False

    @property
    def end(self) -> str:
        return f"{'refused' if self.refused else 'raised'}: {self.error}" if self.error else "returned"


_PATIENCE, _LONGER = timedelta(seconds=8), timedelta(seconds=60)


def play(module: str, names: Iterable[str], kind: str, patience: float | None = None, check: Any = True) -> list[Part]:
    """Run habits of a module on this rank, one after the other.

    Raises:
        Apart: some ranks raised and others did not, or wait.
    """
    habits = vars(importlib.import_module(module))
    torch._dynamo.config.recompile_limit = 100  # of one class of blocks, which many habits share
    rank, parts = dist.get_rank(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            _torch.set_implicit_replication(False)  # the first forward of a process sets it
            run = Run(kind, rank, patience, check)
            part, returned = _begin(habits[name], run)
            _all_ended_alike(f"{kind} {name}", part)
            if not part.error:
                part.values = dict(_flat(returned))
            parts.append(part)
    return parts


def _begin(habit: Callable[..., Any], run: Run) -> tuple[Part, Any]:
    part = Part(run.data_rank)
    torch.manual_seed(0)
    try:
        arguments = inspect.signature(habit).parameters
        return part, habit(run, run.shard(run.model())) if "model" in arguments else habit(run)
    except Exception as error:
        part.error = f"{type(error).__name__}: {error}"
        part.refused = isinstance(error, ShardlibError)
        return part, None
    finally:
        torch.set_grad_enabled(True)


def _all_ended_alike(cell: str, part: Part) -> None:
    """Tell other ranks through the store how this one ended: a collective might meet another one."""
    store, mine, ranks = dist.distributed_c10d._get_default_store(), dist.get_rank(), range(dist.get_world_size())
    store.set(f"{cell} {mine}", part.end)
    ends = [part.end if rank == mine else _end_of(store, f"{cell} {rank}", part) for rank in ranks]
    if len({end.partition(":")[0] for end in ends}) > 1:
        raise Apart(ends)


def _end_of(store: Any, key: str, mine: Part) -> str:
    try:
        store.wait([key], _PATIENCE if mine.error else _LONGER)
    except Exception:
        return "waits"
    return str(store.get(key).decode())


class Apart(Exception):
    """Ranks ended differently: `finding` says how."""

    def __init__(self, ends: list[str]) -> None:
        super().__init__(ends)
        said = "; ".join(f"rank {rank} {end}" for rank, end in enumerate(ends))
        self.finding = Finding("refused" if any(end.startswith("refused") for end in ends) else "raised", said)


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over tensors and numbers inside of containers, each with its path."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from _flat(inner, f"{path}[{i}]")
    elif isinstance(value, OfRanks):
        yield path, OfRanks(value.how, _full(value.value))
    else:
        yield path, _own(value)


def _full(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        return "a tensor without values"
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _own(value: Any) -> Any:
    """Return this rank's shard of a DTensor of all ranks, which is compared without being gathered."""
    if not isinstance(value, DTensor) or value.device_mesh.size() < dist.get_world_size():
        return _full(value)
    if any(placement.is_partial() for placement in value.placements):
        return _full(value)
    mesh = str(sl.MeshShape.of(value.device_mesh))
    return Shard(_full(value.to_local()), tuple(value.shape), value.placements, mesh, dist.get_rank())


# --- what was found ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """What came of a cell: "same", "differs", "refused", "raised" or "hung", and how."""

    what: str
    how: str = ""

    def __str__(self) -> str:
        return f"{self.what}: {self.how}" if self.how else self.what


# Only the order of sums differs. A sum of n terms is off by n ulp at most, here of 64 terms at most, and a few layers
# and steps multiply that by some hundreds: 64 x 2^-52 x 500 = 7e-12. Adam divides by roots of squares, which halves no
# digits of what is not near zero.
_DIGITS = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 5e-3}
_ZERO = 1e-12


def compare(parts: list[Part], expected: list[Part], *, staged: bool = False) -> Finding:
    """Compare what ranks did with what one device did, or with what as many ranks did otherwise."""
    errors = list(dict.fromkeys(part.error for part in parts if part.error))
    if errors:
        refused = all(part.refused for part in parts)
        return Finding("refused" if refused else "raised", "\n".join(errors))
    return Finding("differs", wrong) if (wrong := _difference(parts, expected, staged=staged)) else Finding("same")


def _difference(parts: list[Part], expected: list[Part], *, staged: bool) -> str:
    found, expected_of = _over_ranks(parts, staged), _over_ranks(expected)
    wanted = expected_of[0]
    if staged:
        missing = wanted.keys() - set().union(*found)
    else:
        missing = set().union(*(wanted.keys() - values.keys() for values in found))
    if missing:
        return f"no rank has {_some(missing)}"
    for rank, values in enumerate(found):
        if len(expected_of) == len(found):  # of as many ranks, each with its own
            wanted = expected_of[rank]
        if more := values.keys() - wanted.keys():
            return f"rank {rank} has {_some(more)}, which one device has not"
        for path, value in values.items():
            if wrong := _unequal(value, wanted[path]):
                return f"{path or 'result'} on rank {rank}: {wrong}"
    return ""


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _over_ranks(parts: list[Part], staged: bool = False) -> list[dict[str, Any]]:
    """Return each rank's values, with parts of data ranks put together."""
    return [
        {
            path: _joined(parts, part, path, staged) if isinstance(value, OfRanks) else value
            for path, value in part.values.items()
        }
        for part in parts
    ]


def _joined(parts: list[Part], mine: Part, path: str, staged: bool) -> Any:
    own = mine.values[path]
    if own.how == "stages":
        return torch.cat([part.values[path].value for part in parts]) if staged else own.value
    by_data_rank = {part.data_rank: part.values[path].value for part in reversed(parts) if path in part.values}
    by_data_rank[mine.data_rank] = own.value
    values = [by_data_rank[rank] for rank in sorted(by_data_rank)]
    if not all(isinstance(value, torch.Tensor | float | int) for value in values):
        return own.value  # as a tensor without values, of another stage
    if own.how == "rows":
        return torch.cat(values)
    total = torch.stack([torch.as_tensor(value) for value in values]).sum(0)
    return total / len(values) if own.how == "mean" else total


def _unequal(value: Any, wanted: Any) -> str:
    if isinstance(wanted, OfRanks):
        wanted = wanted.value
    if isinstance(value, Shard) and isinstance(wanted, torch.Tensor):
        if value.global_shape != wanted.shape:
            return f"{list(value.global_shape)} is not {list(wanted.shape)}"
        value, wanted = value.local, value.of(wanted)
    if not isinstance(wanted, torch.Tensor) or not isinstance(value, torch.Tensor):
        with contextlib.suppress(Exception):
            if type(value) is type(wanted) and (value == wanted or _near(value, wanted)):
                return ""
        return f"{_short(value)} is not {_short(wanted)}"
    if (value.shape, value.dtype) != (wanted.shape, wanted.dtype):
        return f"{value.dtype} {list(value.shape)} is not {wanted.dtype} {list(wanted.shape)}"
    if not wanted.is_floating_point():
        return "" if torch.equal(value, wanted) else f"{_short(value)} is not {_short(wanted)}"
    digits = _DIGITS[wanted.dtype]
    if torch.allclose(value.double(), wanted.double(), rtol=digits, atol=digits / 100, equal_nan=True):
        return ""
    off = (value.double() - wanted.double()).abs().max().item()
    return f"off by {off:.2g}: {_short(value)} is not {_short(wanted)}"


def _near(value: Any, wanted: Any) -> bool:
    return isinstance(value, float) and abs(value - wanted) <= _ZERO + 1e-10 * abs(wanted)


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        numbers = value.flatten()[:4].tolist()
        text = ", ".join(f"{number:.6g}" for number in numbers)
        return f"[{text}{', ...' if value.numel() > 4 else ''}]"
    return repr(value)[:80]

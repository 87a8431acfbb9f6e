"""Comparisons of values that ranks must have in common, before a difference does harm: plan, weights, batch.

Every comparison first exchanges short checksums. The values that differ are exchanged only when an error is certain,
and the error shows them side by side.
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardlib.engine import _torch
from shardlib.engine._torch import flatten_with_path, pytree
from shardlib.errors import CheckpointError, InputError, PlanError, ShardingError, ShardlibError, by_rank, warn

__all__ = [
    "batch_fingerprint",
    "batches_agree",
    "checkpoints_agree",
    "draws_agree",
    "exchange",
    "fingerprint",
    "named_tensors",
    "of_first",
    "parts_agree",
    "places_agree",
    "plans_agree",
    "tensors_of",
    "warn_of_unequal_rows",
    "weights_agree",
    "weights_stay_equal",
]


def fingerprint(tensor: torch.Tensor) -> int:
    """Return a checksum of a tensor's shape, dtype and bytes. Equal tensors have equal checksums on every machine.

    That of a sparse tensor is of its parts, and of nothing else: a dense one with equal values has another.
    """
    if tensor.layout is not torch.strided:
        whole = tensor.detach().coalesce() if tensor.layout is torch.sparse_coo else tensor.detach()
        parts = _torch.leaves_of(whole.__reduce_ex__(2)[1])  # as `torch.save` takes it apart
        marks = [fingerprint(part) if isinstance(part, torch.Tensor) else str(part) for part in parts]
        return zlib.crc32(repr(marks).encode())
    values = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    seed = zlib.crc32(f"{values.dtype}{tuple(values.shape)}".encode())
    return zlib.crc32(values.reshape(-1).view(torch.uint8).numpy().data, seed) if values.numel() else seed


def plans_agree(lines: list[str], group: dist.ProcessGroup | None) -> None:
    """Raise `PlanError` if ranks of the group have different plans. `lines` describe the plan, one tensor a line."""
    by_rank = exchange_unequal(dict(enumerate(lines)), group)
    if by_rank is None:
        return
    first = _unequal(by_rank)[0]
    raise PlanError(
        "The ranks were given different rules, models or meshes. The first difference in their plans:\n"
        + _side_by_side([entry.get(first, "(nothing: this plan is shorter)") for entry in by_rank], group)
        + "\nGive every rank the same rules; do not let them depend on the rank."
    )


def weights_agree(tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Raise `ShardingError` if ranks start from different values of a tensor that all of them hold, not on `meta`."""
    here = {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}
    if (found := _differing(here, group)) is None:
        return
    names, shown = found
    _refuse_values_on_some_ranks(len(here), len(tensors), group)
    raise ShardingError(
        f"The ranks start from different weights: {len(names)} of {len(here)} tensors {_with_first(names)}:\n"
        + shown
        + "\nSeed every rank alike before the model is built (torch.manual_seed(0)), or load the same checkpoint."
    )


def _refuse_values_on_some_ranks(count: int, total: int, group: dist.ProcessGroup | None) -> None:
    """Raise `ShardingError` if ranks have values of different numbers of tensors, and the others on `meta`."""
    counts = exchange(count, group)
    if len(set(counts)) > 1:
        raise ShardingError(
            f"Ranks have values of different numbers of the model's {total} tensors, and the others on the meta "
            f"device:\n{_side_by_side(counts, group)}\nNo rank sends its values to the others. Load the weights on "
            "every rank; or build the model on every rank in shardlib.booster.LazyInitContext, also by "
            "from_pretrained: it then takes no memory, and shard_model gives each rank its shards."
        )


def weights_stay_equal(tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None, axes: str) -> None:
    """Raise `ShardingError` if ranks along some axes hold different values of a tensor that they have in common."""
    if (found := _differing(tensors, group)) is None:
        return
    names, shown = found
    raise ShardingError(
        f'Ranks along "{axes}" hold the same tensors, and have different values now: {len(names)} of {len(tensors)} '
        f"{_with_first(names)}:\n"
        + shown
        + "\nA rank has written to it, stepped, or cleared a gradient by itself; or a buffer is computed from each "
        "rank's own examples. Do the same on every rank."
    )


def places_agree(place: str, group: dist.ProcessGroup | None) -> None:
    """Raise `ShardingError` if ranks are at different places of a step, each told by a sentence."""
    if (by_rank := exchange_unequal(place, group)) is not None:
        raise ShardingError(
            "Ranks do different things:\n"
            + _side_by_side(by_rank, group)
            + "\nCall forward, backward and the optimizer's step equally often on every rank, on the same parts of the "
            "model, and set gradients to None on all ranks or on none."
        )


def parts_agree(comparisons: Iterable[Callable[[], None]], group: dist.ProcessGroup | None) -> None:
    """Run comparisons between parts of a group; if one of them finds a difference, raise it on every rank of the group.

    Without that, ranks of parts that agree would go on to a collective with ranks that have raised.
    """
    mine: ShardlibError | None = None
    for compare in comparisons:
        try:
            compare()
        except (ShardingError, InputError) as error:
            mine = mine or error
    by_rank = exchange_unequal(None if mine is None else str(mine), group)
    if mine is not None:
        raise mine
    if by_rank is not None:
        raise ShardingError(next(text for text in by_rank if text is not None))


def draws_agree(prints: Mapping[str, int], group: dist.ProcessGroup | None) -> None:
    """Raise `ShardingError` if ranks drew different initial values; `prints` are the checksums of the full tensors."""
    by_rank = exchange_unequal(dict(prints), group)
    if by_rank is None:
        return
    raise ShardingError(
        f'The ranks drew different initial values for "{_unequal(by_rank)[0]}", each from its own random state. Seed '
        "every rank alike before shard_model (torch.manual_seed(0)), and let init= not depend on the rank."
    )


def checkpoints_agree(marks: Mapping[str, int], group: dist.ProcessGroup | None) -> None:
    """Raise `CheckpointError` if ranks read different checkpoints, by the checksums of the index files."""
    if exchange_unequal(list(marks.values()), group) is not None:
        raise CheckpointError(
            f"The ranks read different checkpoints from {', '.join(map(repr, marks))}: one was replaced while they "
            "read, or each host has its own there. Shard again, from the same files on all hosts."
        )


def batches_agree(args: tuple[Any, ...], kwargs: Mapping[str, Any], group: dist.ProcessGroup | None, axes: str) -> None:
    """Raise `InputError` if ranks that work on the same examples were given different batches."""
    if (found := _differing(tensors_of(args, kwargs), group)) is None:
        return
    names, shown = found
    raise InputError(
        f'Ranks of the model axis "{axes}" work on the same examples, but were given different batches'
        + (f'; "{names[0]}" differs:\n' if names else ":\n")
        + shown
        + "\nPick the batch by the rank's place on the data axes alone, for example with "
        'DistributedSampler(dataset, num_replicas=mesh["dp"].size(), rank=mesh["dp"].get_local_rank()).'
    )


@_torch.no_modes()
def batch_fingerprint(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Return a checksum of a batch; None for one without a tensor of several values, and in a trace or a transform of
    `torch.func`, whose tensors have none."""
    try:
        given = tensors_of(args, kwargs).values()
        values = [tensor for tensor in given if tensor.numel() > 1 and _torch.has_values(tensor)]
        return zlib.crc32(repr([fingerprint(tensor) for tensor in values]).encode()) if values else None
    except (RuntimeError, NotImplementedError, TypeError):
        return None


def warn_of_unequal_rows(rows: int | None, group: dist.ProcessGroup | None, axes: str) -> None:
    """Warn on every rank of the data axes if their batches have different numbers of examples."""
    if (by_rank := exchange_unequal(rows, group)) is not None:
        warn(
            f'Ranks of the data axis "{axes}" were given batches of different sizes in this step:\n'
            + _side_by_side(by_rank, group)
            + "\nThe gradient is the mean of the ranks' means, and not the mean over all examples. Give each rank as "
            "many examples (drop_last=True), or call OptimizerWrapper.backward((sum, count)), which counts them. "
            'rng="exact" needs equal sizes.'
        )


def _with_first(names: list[str]) -> str:
    return f'differ, the first is "{names[0]}"' if names else "differ in name"


def _differing(tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None) -> tuple[list[str], str] | None:
    """Return the names of tensors with different values, and the first one side by side; None if all are equal.

    If the names themselves differ, the list is empty and the names are shown.
    """
    by_rank = exchange_unequal({name: fingerprint(tensor) for name, tensor in tensors.items()}, group)
    if by_rank is None:
        return None
    same_names = all(prints.keys() == tensors.keys() for prints in by_rank)
    names = _unequal(by_rank) if same_names else []
    shown = exchange(_shown(tensors[names[0]]), group) if names else [str(sorted(prints)) for prints in by_rank]
    return names, _side_by_side(shown, group)


def _unequal(by_rank: Sequence[Mapping[Any, Any]]) -> list[Any]:
    """Return the keys of which not all ranks have the same value."""
    keys = dict.fromkeys(key for values in by_rank for key in values)
    return [key for key in keys if len({values.get(key) for values in by_rank}) > 1]


def tensors_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors with values among arguments, by their path."""
    given = {"args": args, "kwargs": dict(kwargs)}
    return {
        f"{kind}{pytree.keystr(path)}": leaf
        for kind in given
        for path, leaf in flatten_with_path(given[kind])[0]
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor) and not leaf.is_meta
    }


@_torch.no_modes()
def exchange_unequal(value: Any, group: dist.ProcessGroup | None) -> list[Any] | None:
    """Return every rank's value, or None if all are equal, which takes one short exchange."""
    if group is None or dist.get_world_size(group) == 1:
        return None
    marks = _all_gather(_number(zlib.crc32(repr(value).encode())), group)
    return None if all(torch.equal(mark, marks[0]) for mark in marks) else exchange(value, group)


@_torch.no_modes()  # a dry run exchanges too, with itself
def exchange(value: Any, group: dist.ProcessGroup | None = None, classes: Sequence[type] = ()) -> list[Any]:
    """Return every rank's value, in the order of ranks. Collective over the group, by default over the job.

    Values are read as checkpoints are with `torch.load(weights_only=True)`: no bytes that reach a back end's socket are
    run as code.

    Args:
        value: tensors, numbers, strings, dtypes and containers of them.
        group: the ranks.
        classes: further classes of which values are.

    Raises:
        ShardingError: a rank has sent something else.
    """
    sent = _written(value)
    sizes = [int(size) for size in _all_gather(_number(sent.numel()), group)]
    padded = nn.functional.pad(sent, (0, max(sizes) - sent.numel()))
    every = zip(_all_gather(padded, group), sizes, strict=True)
    return [_read(rank, data[:size], classes) for rank, (data, size) in enumerate(every)]


@_torch.no_modes()
def of_first(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Return the value of the first rank, on every rank; nothing of the other ranks travels. For the rest as
    `exchange`."""
    sent = _written(value)
    size = int(_broadcast(_number(sent.numel()), group))
    return _read(0, _broadcast(sent.new_zeros(size) if dist.get_rank(group) else sent, group), ())


def _written(value: Any) -> torch.Tensor:
    written = io.BytesIO()
    torch.save(value, written)
    return torch.frombuffer(written.getbuffer(), dtype=torch.uint8)


def _read(rank: int, data: torch.Tensor, classes: Sequence[type]) -> Any:
    try:
        with torch.serialization.safe_globals(list(classes)):
            return torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise ShardingError(
            f"Rank {rank} of the group sent what no rank of shardlib sends; it was not read."
        ) from error


def _number(value: int) -> torch.Tensor:
    return torch.tensor(value, device="cpu")  # in `torch.device("meta")` too


def _all_gather(sent: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Return the tensors of all ranks, of equal shapes, on the CPU, whichever device the back end sends from."""
    on_device = sent.to(_device_of(group))
    every = [torch.empty_like(on_device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, on_device, group=group)
    return [tensor.cpu() for tensor in every]


def _broadcast(sent: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the first rank's tensor, as `_all_gather` does."""
    on_device = sent.to(_device_of(group))
    dist.broadcast(on_device, group=group, group_src=0)
    return on_device.cpu()


def _device_of(group: dist.ProcessGroup | None) -> str:
    devices = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]
    return "cpu" if "cpu" in devices else devices[0]


def _shown(tensor: torch.Tensor) -> str:
    values = ", ".join(f"{value:.6g}" for value in tensor.detach().flatten()[:4].tolist())
    dots = ", ..." if tensor.numel() > 4 else ""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} [{values}{dots}]"


def _side_by_side(shown: Iterable[Hashable], group: dist.ProcessGroup | None) -> str:
    return by_rank(zip(dist.get_process_group_ranks(group), shown, strict=True))


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by their first name, each tensor once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}

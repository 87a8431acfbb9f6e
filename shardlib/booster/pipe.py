"""`Pipe`: an `nn.Sequential` over several devices of one process, with the interface of fairscale's `Pipe`.

Microbatches are interleaved: at tick t, partition j computes microbatch t - j. Devices that compute asynchronously
therefore run concurrently. Autograd, which has one thread for each device, runs backward in the reverse order (Huang et
al., "GPipe", 2019).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils import checkpoint as recompute

from shardlib.booster._balance import balance_by_size, balance_by_time
from shardlib.booster._chunks import DeferredStatistics, chunk_sizes, joined, mapped, rows, split
from shardlib.errors import DeviceCountError, InputTypeError, PlanError, nearest

__all__ = ["Pipe", "balance_by_size", "balance_by_time"]

KEPT = ("always", "except_last", "never")


class Pipe(nn.Module):
    """A sequential in partitions, each on a device of this process, through which a batch runs in chunks.

    It computes the outputs, gradients and buffers of the sequential, except that BatchNorm normalizes each chunk by
    itself. Each chunk updates its running statistics, or with `deferred_batch_norm` the full batch does. For any model
    over the ranks of a mesh, use `shard_model` with stages.

    Args:
        module: the sequential; its layers are moved to the devices.
        balance: the number of layers of each partition; `balance_by_time` and `balance_by_size` find one.
        devices: at least one for each partition; by default all accelerators, or the CPU for each if there is none.
        chunks: the number of chunks of a batch; fewer for a batch of fewer rows.
        checkpoint: the chunks whose activations are recomputed in backward: "always" all, "except_last" all but the
            last, "never" none.
        deferred_batch_norm: update running statistics of BatchNorm once, with all chunks' examples.

    Attributes:
        partitions: the partitions, as sequentials whose layers keep their names.
        devices: the device of each partition.

    Raises:
        InputTypeError: the module is not a sequential.
        PlanError: the balance does not add up to its number of layers, partitions on different devices have a
            tensor in common, or `checkpoint` is not one of the three.
        DeviceCountError: there are too few devices.

    >>> model = Pipe(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), balance=[2, 1], chunks=3)
    >>> model(torch.ones(5, 4)).shape, [name for name, _ in model.named_parameters()][-1]
    (torch.Size([5, 2]), 'partitions.1.2.bias')
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Sequence[Any] | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        if balance is None:
            raise PlanError("Pipe was given no balance; balance_by_time and balance_by_size find one.")
        self.balance, self.chunks, self.checkpoint = list(balance), chunks, str(checkpoint)
        self._check(module)
        self.chunks = int(chunks)
        self.devices = _devices(devices, len(self.balance))
        names = [name for name, _ in module.named_modules(remove_duplicate=False) if name and "." not in name]
        layers = zip(names, module, strict=True)  # a layer that stands there twice has two names
        self.partitions = nn.ModuleList(nn.Sequential(OrderedDict(islice(layers, count))) for count in self.balance)
        self._refuse_shared()
        for partition, device in zip(self.partitions, self.devices, strict=True):
            partition.to(device)
        self._statistics = DeferredStatistics(self) if deferred_batch_norm else None

    def _check(self, module: Any) -> None:
        if not isinstance(module, nn.Sequential):
            raise InputTypeError(
                f"Pipe was given a {type(module).__name__}; give an nn.Sequential. Any other model runs in stages over "
                "the ranks of a mesh: shard_model with Rules(..., stages=...)."
            )
        if any(type(count) is not int or count < 1 for count in self.balance) or sum(self.balance) != len(module):
            raise PlanError(
                f"Pipe was given balance={self.balance} for a sequential of {len(module)} layers; give numbers from 1 "
                f"up that add up to {len(module)}, or let balance_by_time or balance_by_size find them."
            )
        if not isinstance(self.chunks, int | float) or self.chunks < 1 or self.chunks % 1:
            raise PlanError(f"Pipe was given chunks={self.chunks!r}; give a number from 1 up.")
        if self.checkpoint not in KEPT:
            listed = ", ".join(f'"{each}"' for each in KEPT)
            raise PlanError(
                f'Pipe was given checkpoint="{self.checkpoint}"; give one of {listed}.{nearest(self.checkpoint, KEPT)}'
            )

    def _refuse_shared(self) -> None:
        first: dict[torch.Tensor, tuple[str, torch.device]] = {}
        for partition, device in zip(self.partitions, self.devices, strict=True):
            every = (
                *partition.named_parameters(remove_duplicate=False),
                *partition.named_buffers(remove_duplicate=False),
            )
            for name, tensor in every:
                other, there = first.setdefault(tensor, (name, device))
                if there != device:
                    raise PlanError(
                        f'Pipe: "{name}" on {device} is the same tensor as "{other}" on {there}, and a tensor is on '
                        "one device. Give both layers to partitions of one device, or copy one: copy.deepcopy(layer)."
                    )

    def __len__(self) -> int:
        return sum(self.balance)

    def __iter__(self) -> Iterator[nn.Module]:
        for partition in self.partitions:
            assert isinstance(partition, nn.Sequential)
            yield from partition

    def __getitem__(self, index: int) -> nn.Module:
        return list(self)[index]

    def to(self, *args: Any, **kwargs: Any) -> Pipe:
        """Convert to a dtype, as any module does.

        Raises:
            InputTypeError: a device, or a tensor for its device: each partition stays on its own.
        """
        for given in (*args, *(value for name, value in kwargs.items() if name in ("device", "tensor"))):
            if isinstance(given, str | int | torch.device | torch.Tensor) and not isinstance(given, bool):
                self._refuse_move(given)
        return super().to(*args, **kwargs)

    def cuda(self, device: Any = None) -> NoReturn:
        """Raise an `InputTypeError`, as `to(device)` does."""
        self._refuse_move("cuda" if device is None else device)

    def cpu(self) -> NoReturn:
        """Raise an `InputTypeError`, as `to(device)` does."""
        self._refuse_move("cpu")

    def _refuse_move(self, device: Any) -> NoReturn:
        device = device.device if isinstance(device, torch.Tensor) else device
        raise InputTypeError(
            f"Pipe was to be moved to {device}; its partitions are on {', '.join(map(str, self.devices)) or 'none'}. "
            "Give devices= when it is built."
        )

    def forward(self, batch: Any) -> Any:
        """Return the output of the sequential, on the last device.

        Raises:
            InputTypeError: a batch without a tensor.
        """
        if (count := rows(batch)) is None:
            raise InputTypeError(
                f"Pipe was called with a {type(batch).__name__}; give a tensor, or tensors in a tuple."
            )
        if not self.balance:
            return batch
        with nullcontext() if self._statistics is None else self._statistics.over_chunks():
            return self._in_chunks(batch, chunk_sizes(count, min(self.chunks, count)))

    def _in_chunks(self, batch: Any, sizes: Sequence[int]) -> Any:
        count = len(sizes)
        values = split(batch, sizes)
        for tick in range(count + len(self.partitions) - 1):
            for index, partition in enumerate(self.partitions):
                chunk = tick - index
                if 0 <= chunk < count:
                    values[chunk] = self._run(partition, self.devices[index], values[chunk], last=chunk == count - 1)
        return values[0] if count == 1 else joined(values, sizes)

    def _run(self, partition: nn.Module, device: torch.device, value: Any, *, last: bool) -> Any:
        value = mapped(lambda tensor: tensor.to(device, non_blocking=True), value)
        again = self.checkpoint == "always" or (self.checkpoint == "except_last" and not last)
        if again and self.training and torch.is_grad_enabled():
            return recompute.checkpoint(partition, value, use_reentrant=False)
        return partition(value)


def _devices(given: Sequence[Any] | None, count: int) -> list[torch.device]:
    if given is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        kind, there = ("cpu", count) if found is None else (found.type, torch.accelerator.device_count())
        given = ["cpu"] * count if kind == "cpu" else [f"{kind}:{index}" for index in range(there)]
    if len(given) < count:
        raise DeviceCountError(
            f"Pipe has {count} partitions and {len(given)} device{'s' * (len(given) != 1)}. Give each partition one, "
            'such as devices=["cuda:0", "cuda:1"]; one may be named several times.'
        )
    return [torch.device(each) for each in given[:count]]

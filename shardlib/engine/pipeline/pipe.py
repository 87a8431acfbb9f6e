"""`Pipe`: a sequential over several devices of one process, as fairscale's users know it.

Microbatches take turns: at tick t, partition j computes microbatch t - j. Devices that compute asynchronously so
work at
the same time; backward goes the way back by autograd, which has a thread for each device (Huang et al., "GPipe", 2019).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as recompute

from shardlib.engine._torch import pytree
from shardlib.engine.pipeline.batch import joined, rows, sizes_of_parts, split
from shardlib.errors import PlanError, nearest

__all__ = ["Pipe"]

KEPT = ("always", "except_last", "never")


class Pipe(nn.Module):
    """A sequential in partitions, each on a device of this process, through which a batch runs in chunks.

    It computes what the sequential does: outputs, gradients, and buffers but for BatchNorm, which sees chunks. Over
    the ranks of a mesh, `shard_model` with stages does the same for any model.

    Args:
        module: what is cut; its layers are moved.
        balance: how many layers each partition gets.
        devices: one for each partition, at least; by default all accelerators, else the CPU for each.
        chunks: into how many parts a batch is cut; fewer where it has fewer rows.
        checkpoint: whose activations are computed again in backward: of "always" every chunk, "except_last", or
            "never" one.

    Attributes:
        partitions: the parts, as sequentials whose layers have their names.
        devices: of each.

    Raises:
        PlanError: no sequential, a balance that does not add up to its layers, too few devices, another `checkpoint`.

    >>> model = Pipe(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), balance=[2, 1], chunks=3)
    >>> model(torch.ones(5, 4)).shape, [name for name, _ in model.named_parameters()][-1]
    (torch.Size([5, 2]), 'partitions.1.2.bias')
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int],
        *,
        devices: Sequence[Any] | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
    ) -> None:
        super().__init__()
        self.balance, self.chunks, self.checkpoint = list(balance), chunks, checkpoint
        self._check(module)
        self.devices = _devices(devices, len(self.balance))
        layers = iter(module.named_children())
        self.partitions = nn.ModuleList(
            nn.Sequential(OrderedDict(next(layers) for _ in range(count))).to(device)
            for count, device in zip(self.balance, self.devices, strict=False)
        )

    def _check(self, module: Any) -> None:
        if not isinstance(module, nn.Sequential):
            raise PlanError(
                f"Pipe was given a {type(module).__name__}; give an nn.Sequential. Any other model runs in stages over "
                "the ranks of a mesh: shard_model with Rules(..., stages=...)."
            )
        if any(type(count) is not int or count < 1 for count in self.balance) or sum(self.balance) != len(module):
            raise PlanError(
                f"Pipe was given balance={self.balance} for a sequential of {len(module)} layers; give numbers from 1 "
                f"up that add up to {len(module)}."
            )
        if type(self.chunks) is not int or self.chunks < 1:
            raise PlanError(f"Pipe was given chunks={self.chunks!r}; give a number from 1 up.")
        if self.checkpoint not in KEPT:
            listed = ", ".join(f'"{each}"' for each in KEPT)
            raise PlanError(
                f'Pipe was given checkpoint="{self.checkpoint}"; give one of {listed}.{nearest(self.checkpoint, KEPT)}'
            )

    def __len__(self) -> int:
        return sum(self.balance)

    def __iter__(self) -> Iterator[nn.Module]:
        for partition in self.partitions:
            yield from partition.children()

    def __getitem__(self, index: int) -> nn.Module:
        return list(self)[index]

    def forward(self, batch: Any) -> Any:
        """The sequential's output, on the last device."""
        count = min(self.chunks, rows(batch))
        sizes = sizes_of_parts(rows(batch), count)
        values = split(batch, sizes)
        for tick in range(count + len(self.partitions) - 1):
            for place, partition in enumerate(self.partitions):
                chunk = tick - place
                if 0 <= chunk < count:
                    values[chunk] = self._run(partition, self.devices[place], values[chunk], last=chunk == count - 1)
        return values[0] if count == 1 else joined(values, sizes)

    def _run(self, partition: nn.Module, device: torch.device, value: Any, *, last: bool) -> Any:
        value = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), value)
        again = self.checkpoint == "always" or (self.checkpoint == "except_last" and not last)
        if again and self.training and torch.is_grad_enabled():
            return recompute.checkpoint(partition, value, use_reentrant=False)
        return partition(value)


def _devices(given: Sequence[Any] | None, count: int) -> list[torch.device]:
    if given is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        kind, there = ("cpu", count) if found is None else (found.type, torch.accelerator.device_count())
        given = ["cpu"] * count if kind == "cpu" else [f"{kind}:{index}" for index in range(there)]
    if len(given) < count:
        raise PlanError(
            f"Pipe has {count} partitions and {len(given)} device{'s' * (len(given) != 1)}. Give each partition one, "
            'such as devices=["cuda:0", "cuda:1"]; one may be named several times.'
        )
    return [torch.device(each) for each in given[:count]]

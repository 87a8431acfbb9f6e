"""Dataloaders for data ranks: each gets its share, in an order that all ranks agree on; a position can be saved."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.utils.data
from torch.utils.data.distributed import DistributedSampler

from shardlib.errors import CheckpointError, InputError

__all__ = ["DataLoader", "prepared"]


class _FromHere:
    """Mixed into a sampler: it begins as many indices later as `begin` says."""

    begin = 0

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(super().__iter__(), self.begin, None)  # type: ignore[misc]


class DataLoader(torch.utils.data.DataLoader[Any]):
    """torch's `DataLoader` with a position.

    `state_dict` says how many examples of which epoch all data ranks together have had. It is the same on all ranks,
    and fits any number of data ranks that make global batches of the same size.

    >>> loader = prepared(range(8), (0, 1), batch_size=2, shuffle=False, seed=0, sampler=None)
    >>> batches = iter(loader)
    >>> next(batches), loader.state_dict()
    (tensor([0, 1]), {'epoch': 0, 'examples': 2})
    >>> loader.load_state_dict({"epoch": 0, "examples": 4})
    >>> [batch.tolist() for batch in loader]
    [[4, 5], [6, 7]]
    """

    def __init__(self, dataset: Any, *, place: tuple[int, int], seed: int, **options: Any) -> None:
        super().__init__(dataset, **options)
        self._own_generator = "generator" not in options or options["generator"] is None
        if self._own_generator:
            self.generator = torch.Generator()
        self._place, self._seed = place, seed
        self._taken = 0  # batches of this epoch that this rank was given
        self._ended: int | None = None  # the last epoch that this rank was given to its end
        self._resumed: tuple[int, int] | None = None  # an epoch, and batches of it that were given before

    @property
    def epoch(self) -> int:
        """The epoch that was last set with `sampler.set_epoch`."""
        return int(getattr(self.sampler, "epoch", 0))

    @property
    def begins_at(self) -> int:
        """The number of batches that the next iteration skips, because they precede the loaded position."""
        return self._resumed[1] if self._resumed is not None and self._resumed[0] == self.epoch else 0

    @property
    def place(self) -> tuple[int, int]:
        """The data rank that receives the examples, and the number of data ranks."""
        return self._place

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        before, self._resumed, self._ended = self.begins_at, None, None
        self._taken = before
        self.sampler.begin = before * self._rows  # type: ignore[attr-defined]
        if self._own_generator:  # it gives workers their seeds: the same on ranks that get the same examples
            index, count = self._place
            self.generator.manual_seed((self._seed + self.epoch) * count + index)
        for batch in super().__iter__():
            self._taken += 1
            yield batch
        self._taken, self._ended = 0, self.epoch

    @property
    def _rows(self) -> int:
        if self.batch_size is None:
            raise InputError("A prepared dataloader has a batch_size; give a number of examples for one data rank.")
        return self.batch_size

    def state_dict(self) -> dict[str, int]:
        """Return the position of all data ranks: the epoch, and the number of its examples.

        After the last batch of an epoch, when the loop over it has ended, it is the beginning of the next epoch.
        """
        epoch, taken = self.epoch + (self._ended == self.epoch), self._taken
        if self._resumed is not None:
            epoch, taken = self._resumed
        return {"epoch": epoch, "examples": taken * self._rows * self._place[1]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the next iteration over that epoch at the saved position.

        Raises:
            CheckpointError: it is not what `state_dict` returns; that position is not between two global batches.
        """
        position = {key: state.get(key) for key in ("epoch", "examples")} if isinstance(state, Mapping) else {}
        if not position or not all(isinstance(count, int) and count >= 0 for count in position.values()):
            raise CheckpointError(
                f"load_state_dict of a dataloader was given {state!r}; give what its state_dict() returned, such as "
                '{"epoch": 1, "examples": 64}.'
            )
        batch = self._rows * self._place[1]
        taken, rest = divmod(state["examples"], batch)
        if rest:
            raise CheckpointError(
                f"The position is after {state['examples']} examples, and a global batch has {batch} here "
                f"({self._place[1]} data ranks of {self._rows}). Give a batch_size for which that position is between "
                "two global batches."
            )
        self._resumed, self._ended = (state["epoch"], taken), None
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(state["epoch"])


def prepared(
    dataset: Any, place: tuple[int, int], *, shuffle: bool, seed: int, sampler: Any, **options: Any
) -> DataLoader:
    """Return a dataloader for one data rank.

    Args:
        dataset: with a length and items by number.
        place: index of the data rank, and the number of data ranks.
        shuffle: in another order in each epoch.
        seed: the seed of that order.
        sampler: a class that replaces torch's `DistributedSampler`.
        **options: options of torch's `DataLoader`.

    Raises:
        InputError: a data set that cannot be shared so.
    """
    if isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__len__"):
        raise InputError(
            f"prepare_dataloader was given a {type(dataset).__name__}, which has no length, so that examples cannot be "
            "assigned to ranks. Give a dataset with `__len__` and `__getitem__`, or divide it yourself by rank."
        )
    index, count = place
    kind = DistributedSampler if sampler is None else sampler
    order = {"shuffle": shuffle, **({"seed": seed} if sampler is None else {})}
    made: Any = type(kind.__name__, (_FromHere, kind), {"__module__": kind.__module__})
    return DataLoader(
        dataset, place=place, seed=seed, sampler=made(dataset, num_replicas=count, rank=index, **order), **options
    )

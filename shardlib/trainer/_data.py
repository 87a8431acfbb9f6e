"""Dataloaders of scripts: divided among the ranks of the data axes that the config has; cut to whole steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data.distributed import DistributedSampler

from shardlib.booster import DataLoader
from shardlib.booster._data import prepared
from shardlib.errors import InputError
from shardlib.trainer._context import ParallelMode, global_context

__all__ = ["WholeSteps", "begins_at", "check_place", "get_dataloader", "length_of", "repeated_at_end"]


def get_dataloader(
    dataset: Any,
    add_sampler: bool = True,
    shuffle: bool = False,
    seed: int = 1024,
    drop_last: bool = False,
    pin_memory: bool = False,
    num_workers: int = 0,
    batch_size: int = 1,
    **options: Any,
) -> DataLoader:
    """Return a dataloader over this rank's share of a data set.

    The number of data ranks follows from the job's config; ranks of one tensor group get the same examples. Call this
    after `launch(config=...)`, before or after `initialize`.

    Args:
        dataset: a data set with a length and items by number.
        add_sampler: divide the examples; else every rank gets all of them.
        shuffle: use another order in each epoch; `Trainer` sets the epoch, other loops call
            `loader.sampler.set_epoch(epoch)`.
        seed: the seed of that order, and of workers.
        drop_last: leave out the last batch if it is smaller.
        pin_memory: as for torch's `DataLoader`.
        num_workers: likewise.
        batch_size: the number of examples per data rank.
        **options: options of torch's `DataLoader`.

    >>> loader = get_dataloader(range(6), batch_size=4)
    >>> [batch.tolist() for batch in loader]
    [[0, 1, 2, 3], [4, 5]]
    """
    place = 0, 1
    if add_sampler:
        place = global_context.get_local_rank(ParallelMode.DATA), global_context.get_world_size(ParallelMode.DATA)
    return prepared(
        dataset,
        place,
        batch_size=batch_size,
        shuffle=shuffle,
        seed=seed,
        sampler=None,
        drop_last=drop_last,
        pin_memory=pin_memory,
        num_workers=num_workers,
        **options,
    )


class WholeSteps:
    """A dataloader without the batches at the end of an epoch that do not fill a step.

    Args:
        loader: the wrapped loader, whose attributes this one has: `sampler`, `dataset`, `state_dict`.
        passes: batches per step.

    >>> [len(WholeSteps(range(7), 3)), list(WholeSteps(range(7), 3))]
    [6, [0, 1, 2, 3, 4, 5]]
    """

    def __init__(self, loader: Any, passes: int) -> None:
        self.loader, self.passes = loader, passes

    def __len__(self) -> int:
        return len(self.loader) - len(self.loader) % self.passes

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.loader, max(0, len(self) - begins_at(self.loader)))

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while it is copied or unpickled there is none yet
            raise AttributeError(name)
        return getattr(self.loader, name)


def begins_at(loader: Any) -> int:
    """Return the number of batches that the next iteration skips, where a position was loaded."""
    return int(getattr(loader, "begins_at", 0))


def length_of(loader: Any) -> int:
    """Return the number of batches of an epoch.

    Raises:
        InputError: the loader has no length.
    """
    try:
        return len(loader)
    except TypeError:
        raise InputError(
            f"The {type(loader).__name__} has no length, so the end of an epoch is not known. Give one with a length, "
            "or write the loop yourself with the engine."
        ) from None


def repeated_at_end(loader: Any) -> int:
    """Return how many of the last examples repeat another rank's, so that ranks have equally many: 1 or none."""
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return 0
    cut = getattr(loader, "drop_last", False) and sampler.num_samples % (getattr(loader, "batch_size", None) or 1)
    last = sampler.rank + sampler.num_replicas * (sampler.num_samples - 1)
    return int(not cut and last >= len(sampler.dataset))  # type: ignore[arg-type]


def check_place(loader: Any, what: str, index: int, count: int) -> None:
    """Refuse a loader of ours that yields another data rank's examples.

    Raises:
        InputError: the loader is another data rank's.
    """
    place = getattr(loader, "place", None)
    if place is not None and place[1] != 1 and place != (index, count):
        raise InputError(
            f"{what} was made for data rank {place[0]} of {place[1]}, and this one is {index} of {count}. Give the "
            "config to launch, before get_dataloader: launch_from_torch(config)."
        )

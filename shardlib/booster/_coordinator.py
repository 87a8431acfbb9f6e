"""`DistCoordinator`: the number of this rank, and code that runs on some ranks, or on all in turn."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch.distributed as dist

from shardlib.booster.launch import launched
from shardlib.errors import LaunchError

__all__ = ["DistCoordinator"]

P = ParamSpec("P")
R = TypeVar("R")
Group = dist.ProcessGroup | None


class DistCoordinator:
    """The rank of a process in its job. Instances have no state, so all of them are equivalent.

    Raises:
        LaunchError: no job has been joined.

    >>> import shardlib as sl
    >>> mesh = sl.mesh("dp=1")
    >>> coordinator = DistCoordinator()
    >>> coordinator.rank, coordinator.world_size, coordinator.is_master()
    (0, 1, True)
    >>> coordinator.print_on_master("loss 0.5")
    loss 0.5
    """

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise LaunchError("DistCoordinator() needs ranks that have met; call launch_from_torch() or sl.mesh first.")

    @property
    def rank(self) -> int:
        """This rank's number among all."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return dist.get_world_size()

    @property
    def local_rank(self) -> int:
        """The rank's number on its machine: as the launcher set it, else 0 in a job of one process."""
        job = launched()
        local_rank_text = (
            job.local_rank if job is not None and job.local_rank is not None else os.environ.get("LOCAL_RANK")
        )
        if local_rank_text is None and self.world_size > 1:
            raise LaunchError(
                "The number of this rank on its machine is not known. Start ranks by torchrun, which sets LOCAL_RANK, "
                "or give launch(local_rank=...)."
            )
        return int(local_rank_text or 0)

    def is_master(self, process_group: Group = None) -> bool:
        """Return whether this is the first rank, of all or of a group."""
        return dist.get_rank(process_group) == 0

    def is_node_master(self) -> bool:
        """Return whether this is the first rank of its machine."""
        return self.local_rank == 0

    def is_last_process(self, process_group: Group = None) -> bool:
        """Return whether this is the last rank, of all or of a group."""
        return dist.get_rank(process_group) == dist.get_world_size(process_group) - 1

    def print_on_master(self, message: str, process_group: Group = None) -> None:
        """Print on the first rank, of all or of a group."""
        if self.is_master(process_group):
            print(message, flush=True)

    def print_on_node_master(self, message: str) -> None:
        """Print on the first rank of each machine."""
        if self.is_node_master():
            print(message, flush=True)

    @contextmanager
    def priority_execution(self, executor_rank: int = 0, process_group: Group = None) -> Iterator[None]:
        """Run the block on one rank first, then on all others, which find for instance a file that the first has
        downloaded.

        Collective: every rank of the group enters it.

        Args:
            executor_rank: the rank, by its number in the group.
            process_group: all ranks by default.

        >>> import shardlib as sl
        >>> mesh = sl.mesh("dp=1")
        >>> with DistCoordinator().priority_execution():
        ...     print("first")
        first
        """
        first = dist.get_rank(process_group) == executor_rank
        if not first:
            self.block_all(process_group)
        try:
            yield
        finally:  # the others wait for it, also if it failed
            if first:
                self.block_all(process_group)

    def block_all(self, process_group: Group = None) -> None:
        """Wait until all ranks are here."""
        dist.barrier(process_group)

    def on_master_only(self, process_group: Group = None) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
        """Decorate a function to run on the first rank only, and to return None on the others.

        >>> import shardlib as sl
        >>> mesh = sl.mesh("dp=1")
        >>> @DistCoordinator().on_master_only()
        ... def report(loss):
        ...     return f"loss {loss}"
        >>> report(0.5)
        'loss 0.5'
        """

        def decorate(function: Callable[P, R]) -> Callable[P, R | None]:
            @functools.wraps(function)
            def run(*args: P.args, **kwargs: P.kwargs) -> R | None:
                return function(*args, **kwargs) if self.is_master(process_group) else None

            return run

        return decorate

"""Comparison of the mesh that ranks ask for, through the job's store, before a process group is made.

Ranks that make different groups wait for each other until the process group times out. The store answers without them.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from shardlib.errors import MeshError, by_rank

__all__ = ["importing", "ranks_ask_for", "tell_of"]

_PATIENCE = timedelta(seconds=5)  # for ranks that differ to say what they ask for, and to read what others do

_imports = False
_comparisons: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Refuse meshes inside the block, in which a rank of a test pool imports what a function needs.

    Each rank imports a file once, at the first call that needs it: ranks that have imported it do not take part.
    """
    global _imports
    _imports = True
    try:
        yield
    finally:
        _imports = False


def _refuse_at_import(mesh: str) -> None:
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    where = "a file" if frame is None else f'"{frame.f_code.co_filename}", line {frame.f_lineno}'
    raise MeshError(
        f"Rank {dist.get_rank()} was importing {where}, which asks for mesh {mesh} at its top level. A rank imports "
        "the files of the functions and classes that it is given, and each rank at another time. Put what makes a mesh "
        'and trains below `if __name__ == "__main__":`, or the model and its rules into a file of their own.'
    )


def ranks_ask_for(mesh: str, timeout: timedelta | None) -> None:
    """Raise `MeshError`, on all ranks, if one asks for another mesh. Collective over the job.

    Args:
        mesh: the mesh that this rank asks for, as text.
        timeout: the time to wait for ranks that have not asked yet; by default half an hour.
    """
    if _imports:
        _refuse_at_import(mesh)
    if (comparison := _Comparison.next()) is None:
        return
    comparison.say(mesh)
    try:
        agree = comparison.all_agree(timeout or default_pg_timeout)
    except dist.DistError as error:
        raise MeshError(
            f"Rank {dist.get_rank()} asked for mesh {mesh}, and timed out waiting for the other ranks: {error}\nCreate "
            "the same mesh on every rank of the job."
        ) from error
    if not agree:
        raise MeshError(
            f"The ranks ask for different meshes:\n{comparison.texts(mesh)}\nGive every rank the same mesh; do not let "
            "it depend on the rank."
        )


def tell_of(mesh: str) -> None:
    """Tell the other ranks which mesh this rank asks for, before it raises an error: they need not wait for it."""
    if _imports:
        _refuse_at_import(mesh)
    if (comparison := _Comparison.next()) is not None:
        comparison.say(mesh)
        comparison.texts(mesh)


class _Comparison:
    """One comparison: ranks find it by its number, which counts the meshes that each has asked for."""

    def __init__(self, number: int) -> None:
        assert dist.group.WORLD is not None
        self.store = dist.PrefixStore(f"shardlib/mesh/{number}", dist.group.WORLD.get_group_store())
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    @classmethod
    def next(cls) -> _Comparison | None:
        """Return the next one; None where no other rank is."""
        if not dist.is_initialized() or dist.get_backend() == dist.Backend.FAKE or dist.get_world_size() == 1:
            return None
        world = dist.group.WORLD
        assert world is not None
        _comparisons[world] = _comparisons.get(world, 0) + 1
        return cls(_comparisons[world])

    def say(self, mesh: str) -> None:
        """Compare with the mesh of the rank that came first; the last rank, and one that differs, end the waiting."""
        first = self.store.compare_set("first", "", mesh).decode()
        if first != mesh:
            self._conclude("different")
        if self.store.add("came", 1) == self.size:
            self._conclude("same")

    def _conclude(self, what: str) -> None:
        self.store.compare_set("conclusion", "", what)

    def all_agree(self, timeout: timedelta) -> bool:
        self.store.wait(["conclusion"], timeout)
        return self.store.get("conclusion") == b"same"

    def texts(self, mesh: str) -> str:
        """Return which ranks ask for which mesh. The job's store may end with the first rank that raises, so that each
        rank waits until all have read."""
        keys = [f"of/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], mesh)
        self._wait(keys)
        texts = [self.store.get(key).decode() if self.store.check([key]) else "none yet" for key in keys]
        if self.store.add("readers", 1) == self.size:
            self.store.set("all have read", "")
        self._wait(["all have read"])
        return by_rank(enumerate(texts))

    def _wait(self, keys: list[str]) -> None:
        with contextlib.suppress(dist.DistError):
            self.store.wait(keys, _PATIENCE)

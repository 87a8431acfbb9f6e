"""Changes to torch that sharded models need: made for the first of them, and undone with the last.

Code that needs a change calls `patch`. A sharded model holds all changes as long as it lives, and so does a block such
as a dry run. When nothing holds them, torch is as in a process that never imported shardlib.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

__all__ = ["hold_patches", "holding_patches", "patch", "unpatch"]

_undo: dict[Hashable, Callable[[], object]] = {}  # in the order in which the changes were made
_holders: set[object] = set()
_changing = threading.RLock()  # the garbage collector may end a model in any thread


def patch(key: Hashable, change: Callable[[], Callable[[], object]], *, anew: bool = False) -> None:
    """Make a change, unless it is made already. `change` returns the function that undoes it.

    `anew` undoes it first, and makes it again: others may have taken it away, as by clearing all hooks of modules.

    >>> words = ["torch"]
    >>> patch("words", lambda: words.append("patched") or words.pop)
    >>> words
    ['torch', 'patched']
    >>> unpatch("words")
    >>> words
    ['torch']
    """
    with _changing:
        if anew:
            unpatch(key)
        if key not in _undo:
            _undo[key] = change()


def unpatch(key: Hashable) -> None:
    """Undo a change at once, if it is made."""
    with _changing:
        if key in _undo:
            _undo.pop(key)()


def hold_patches(owner: object = None) -> Callable[[], None]:
    """Hold all changes until the returned function is called, or an owner is gone."""
    holder = object()
    _holders.add(holder)
    if owner is not None:
        weakref.finalize(owner, _release, holder).atexit = False
    return functools.partial(_release, holder)


@contextmanager
def holding_patches() -> Iterator[None]:
    """Hold all changes inside the block."""
    release = hold_patches()
    try:
        yield
    finally:
        release()


def _release(holder: object) -> None:
    _holders.discard(holder)
    if _changing.acquire(blocking=False):  # else another thread makes a change, which it holds
        try:
            while _undo and not _holders:
                _undo.popitem()[1]()  # the last change first: one may be of what another one has made
        finally:
            _changing.release()

"""Random states as tensors and JSON: of torch on CPU and on the accelerator, of Python, of numpy."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from shardlib.engine.feature.randomness import accelerator_random
from shardlib.errors import CheckpointError

__all__ = ["python_states", "restoring", "states"]

_WORDS = 624  # of a Mersenne Twister, which all three use on CPU


def states() -> dict[str, Any]:
    """Return the random states of torch in this process; with exact random numbers they are equal on all ranks."""
    found = {"torch": torch.get_rng_state()}
    if (module := accelerator_random()) is not None:
        found["accelerator"] = module.get_rng_state().cpu()
    return found


def python_states() -> dict[str, Any]:
    """Return the random states of Python and numpy in this process; they differ between ranks unless seeded."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
    }


def restoring(saved: Mapping[str, Any]) -> Callable[[], None]:
    """Check a result of `states` or `python_states`, or both in one, and return the call that restores it.

    Raises:
        CheckpointError: not a result of these.
    """
    parts = {"torch": _restoring_torch, "python": _restoring_python}
    try:
        restores = [part(saved) for key, part in parts.items() if key in saved]
        if not restores:
            raise KeyError("torch")
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError) as error:
        raise CheckpointError(
            f"the random states cannot be used: {type(error).__name__}: {error}. Use another checkpoint, or load with "
            "random=False."
        ) from error

    def restore() -> None:
        for each in restores:
            each()

    return restore


def _restoring_torch(saved: Mapping[str, Any]) -> Callable[[], None]:
    own = saved["torch"]
    theirs: Any = saved.get("accelerator")
    _check_torch(own)
    module = accelerator_random() if isinstance(theirs, torch.Tensor) else None
    if module is not None:
        torch.Generator(torch.accelerator.current_accelerator()).set_state(theirs)

    def restore() -> None:
        torch.set_rng_state(own)
        if module is not None:
            module.set_rng_state(theirs)

    return restore


def _restoring_python(saved: Mapping[str, Any]) -> Callable[[], None]:
    version, words, gauss = saved["python"]
    kind, keys, position, has_gauss, cached = saved["numpy"]
    python = (version, tuple(words.tolist()), gauss)
    numpy = (str(kind), keys.numpy().astype(np.uint32), position, has_gauss, cached)
    _check_python(python)
    _check_numpy(numpy)

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)

    return restore


# Each state is tried on a generator of no consequence, after what torch, Python and numpy do not check themselves: the
# index of the next word, with which they read memory, and the kind of numbers that are kept for the next call.


def _check_torch(state: torch.Tensor) -> None:
    torch.Generator().set_state(state)
    # The engine gives `left` words from `next` on, before it makes new ones; set_state checks each of them alone.
    left, following = int(state[8:12].view(torch.int32)), int(state[16:24].view(torch.int64))
    if not (following >= 0 and following + left <= _WORDS + 1):
        raise ValueError(f"torch's next word is {following} with {left} left, of {_WORDS}")


def _check_python(state: tuple[Any, ...]) -> None:
    random.Random().setstate(state)
    _check_number(state[2], "Python's next normal number", none=True)


def _check_numpy(state: tuple[Any, ...]) -> None:
    _, _, position, has_gauss, cached = state
    if type(position) is not int or not 0 <= position <= _WORDS:
        raise ValueError(f"numpy's position is {position!r}, which is not between 0 and {_WORDS}")
    if has_gauss not in (0, 1):
        raise ValueError(f"numpy's has_gauss is {has_gauss!r}, which is neither 0 nor 1")
    _check_number(cached, "numpy's next normal number", none=False)
    np.random.RandomState().set_state(state)


def _check_number(value: Any, what: str, *, none: bool) -> None:
    if not (isinstance(value, int | float) or (none and value is None)) or (value is not None and value != value):
        raise ValueError(f"{what} is {value!r}, which is not a number")

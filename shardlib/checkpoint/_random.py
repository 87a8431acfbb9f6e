"""Random states as tensors and JSON: of torch on CPU and on the accelerator, of Python, of numpy."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from shardlib.errors import CheckpointError

__all__ = ["restore", "states"]


def states() -> dict[str, Any]:
    """Return the random states of this process."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    found = {
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
    }
    if (module := _accelerator()) is not None:
        found["accelerator"] = module.get_rng_state().cpu()
    return found


def restore(saved: Mapping[str, Any]) -> None:
    """Restore the result of `states`.

    Raises:
        CheckpointError: not a result of `states`, before any change.
    """
    try:
        version, words, gauss = saved["python"]
        kind, keys, position, has_gauss, cached = saved["numpy"]
        python = (version, tuple(words.tolist()), gauss)
        numpy = (str(kind), keys.numpy().astype(np.uint32), position, has_gauss, cached)
        _check(saved["torch"], python, numpy)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"the random states cannot be used: {type(error).__name__}: {error}") from error
    torch.set_rng_state(saved["torch"])
    random.setstate(python)
    np.random.set_state(numpy)
    if (module := _accelerator()) is not None and isinstance(saved.get("accelerator"), torch.Tensor):
        module.set_rng_state(saved["accelerator"])


def _check(own: torch.Tensor, python: Any, numpy: Any) -> None:
    """Try the states on generators of no consequence."""
    torch.Generator().set_state(own)
    random.Random().setstate(python)
    np.random.RandomState().set_state(numpy)


def _accelerator() -> Any:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.get_device_module(device) if device is not None else None

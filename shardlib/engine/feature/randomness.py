"""Random states at the start: one stream for all ranks that share an example, and a different one for each data rank.

If random numbers are exact, all ranks have the same states, and the numbers of an example depend on its position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardlib.engine import _torch
from shardlib.engine.ranks import agree

__all__ = [
    "accelerator_random",
    "agree_on_random_state",
    "random_states",
    "set_random_states",
    "share_random_state",
]

# Large, so that neighbouring user seeds and neighbouring data ranks do not get the same stream.
_STRIDE = 0x9E3779B97F4A7C15


def agree_on_random_state(model_group: dist.ProcessGroup | None, data_index: int) -> None:
    """Give ranks of a model group the random states of its first rank, and all data ranks but the first another seed.

    Ranks that hold the same activation must draw the same dropout mask for it; ranks with different examples should
    not. The first data rank keeps its state, so that a run without data axes draws the numbers of a single device.
    """
    share_random_state(model_group)
    if data_index:
        state = int.from_bytes(bytes(torch.get_rng_state()[:8].tolist()), "little")
        _torch.seed_all((state + data_index * _STRIDE) % (1 << 63))


def share_random_state(group: dist.ProcessGroup | None) -> None:
    """Give all ranks of a group the random states of its first rank."""
    if group is not None:
        set_random_states(agree.of_first(random_states(), group))


def random_states() -> list[torch.Tensor]:
    """Return the states of torch's default generators: that of the CPU, and that of the accelerator if there is one."""
    accelerator = accelerator_random()
    return [torch.get_rng_state(), *([] if accelerator is None else [accelerator.get_rng_state().cpu()])]


def set_random_states(states: Sequence[torch.Tensor]) -> None:
    """Set the states of torch's default generators to what `random_states` returned."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        accelerator_random().set_rng_state(state)


def accelerator_random() -> Any:
    """Return torch's module of the accelerator, such as `torch.cuda`, or None without an accelerator."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if device is None else torch.get_device_module(device)

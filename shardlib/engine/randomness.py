"""Random state at the start: one stream for all ranks that share an example, and a different one for each data rank.

If random numbers are exact, all ranks have one state instead, and the numbers of an example depend on its position.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardlib.engine import _torch, agree

__all__ = ["agree_on_random_state", "share_random_state"]

# Large, so that neighbouring user seeds and neighbouring data ranks do not get the same stream.
_STRIDE = 0x9E3779B97F4A7C15


def agree_on_random_state(model_group: dist.ProcessGroup | None, data_index: int) -> None:
    """Give ranks of a model group the generator state of its first rank, and all data ranks but the first another seed.

    Ranks that hold the same activation must draw the same dropout mask for it; ranks with different examples should
    not. The first data rank keeps its state, so that a run without data axes draws the numbers of a single device.
    """
    share_random_state(model_group)
    if data_index:
        state = int.from_bytes(bytes(torch.get_rng_state()[:8].tolist()), "little")
        _torch.seed_all((state + data_index * _STRIDE) % (1 << 63))


def share_random_state(group: dist.ProcessGroup | None) -> None:
    """Give all ranks of a group the generator state of its first rank."""
    if group is not None:
        torch.set_rng_state(agree.of_first(torch.get_rng_state(), group))

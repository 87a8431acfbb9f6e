"""The libraries whose sharding an audit takes up, a file each."""

from __future__ import annotations

from typing import Any

from shardlib.testing.auditing.hosts._host import Host, NotOffered, NotReached
from shardlib.testing.auditing.hosts.accelerate import Accelerate, begin_anew
from shardlib.testing.auditing.hosts.deepspeed import DeepSpeed, forget_groups
from shardlib.testing.auditing.hosts.lightning import Lightning
from shardlib.testing.auditing.hosts.torchtitan import Torchtitan
from shardlib.testing.auditing.hosts.transformers import Transformers

__all__ = ["Host", "NotOffered", "NotReached", "begin_anew", "forget_groups", "host_of"]

HOSTS: tuple[type[Host], ...] = (
    Accelerate,
    Lightning,
    DeepSpeed,
    Torchtitan,
    Transformers,
    Host,
)  # the first that takes what `shard` returned


def host_of(made: Any) -> Host:
    """Return the host of what `shard` has returned.

    Raises:
        InputError: there is no model in it.
    """
    parts = tuple(made) if isinstance(made, tuple | list) else (made,)
    return next((host for host in HOSTS if host.takes(parts)), Host)(parts)

"""Small models that others shard, as a large one is sharded: by a booster, a trainer, or an integration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from shardlib.engine import apply
from shardlib.testing.at_scale import at_scale

__all__ = ["plans_at_scale"]


@contextmanager
def plans_at_scale() -> Iterator[None]:
    """Give the plan of every model that is sharded in the block the sizes of units and buckets of a large model.

    Or in a function that it decorates.
    """
    planned = apply.planned

    def plan(*args: Any, **options: Any) -> Any:
        return at_scale(planned(*args, **options))

    with mock.patch.object(apply, "planned", plan):
        yield

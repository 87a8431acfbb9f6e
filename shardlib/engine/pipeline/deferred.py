"""Statistics of BatchNorm over all chunks of a batch, for `Pipe(deferred_batch_norm=True)`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["DeferredStatistics"]

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

# Of the examples of one chunk: their number, and by channel their mean and sum of squared differences from it.
Part = tuple[int, torch.Tensor, torch.Tensor]


class DeferredStatistics:
    """Lets the BatchNorm modules of a model normalize each chunk by itself, and track statistics once for all chunks.

    A module's own tracking is off while it runs, which includes the second forward of a chunk that is recomputed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parts: dict[nn.Module, list[Part]] | None = None
        for module in model.modules():
            if isinstance(module, _NORMS) and module.track_running_stats:
                module.register_forward_pre_hook(self._begin)
                module.register_forward_hook(self._end, always_call=True)

    @contextmanager
    def over_chunks(self) -> Iterator[None]:
        """Return a context for the forward of all chunks of one batch, at whose end statistics are updated."""
        self._parts = {}
        try:
            yield
            for module, parts in self._parts.items():
                _track(module, parts)
        finally:
            self._parts = None

    @torch.no_grad()
    def _begin(self, module: Any, args: Any) -> None:
        if not module.training:
            return
        module.track_running_stats = False
        if self._parts is not None:
            value = args[0].detach()
            count, dims = value.numel() // value.shape[1], [dim for dim in range(value.ndim) if dim != 1]
            value = value.to(module.running_mean.dtype)
            mean = value.mean(dims)
            squares = (value.transpose(1, -1) - mean).square().transpose(1, -1).sum(dims)
            self._parts.setdefault(module, []).append((count, mean, squares))

    def _end(self, module: Any, _args: Any, _output: Any) -> None:
        module.track_running_stats = True


@torch.no_grad()
def _track(module: Any, parts: list[Part]) -> None:
    """Update running statistics as BatchNorm does with all parts at once.

    With n_i examples of mean m_i and squared differences s_i, those of all have the mean m = sum(n_i m_i) / n and the
    squared differences sum(s_i + n_i (m_i - m)^2) (Chan et al. 1979).
    """
    count = sum(n for n, _, _ in parts)
    mean = torch.stack([n * part for n, part, _ in parts]).sum(0) / count
    squares = torch.stack([s + n * (part - mean).square() for n, part, s in parts]).sum(0)
    module.num_batches_tracked += 1
    weight = 1 / module.num_batches_tracked.item() if module.momentum is None else module.momentum
    module.running_mean.lerp_(mean, weight)
    module.running_var.lerp_(squares / (count - 1), weight)

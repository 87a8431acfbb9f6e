"""Chunks of a batch for `Pipe`: splitting a batch, joining outputs, and BatchNorm statistics over all chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["DeferredStatistics", "chunk_sizes", "joined", "mapped", "rows", "split", "tensors_in"]

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

# Of the examples of one chunk: their number, and by channel their mean and sum of squared differences from it.
Part = tuple[int, torch.Tensor, torch.Tensor]


def mapped(fn: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Apply a function to each tensor in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, dict):
        return {key: mapped(fn, each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        each = [mapped(fn, one) for one in value]
        return type(value)(*each) if hasattr(value, "_fields") else type(value)(each)
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested tuples, lists and dicts, in the order of `mapped`."""
    found: list[torch.Tensor] = []
    mapped(found.append, value)
    return found


def _with_tensors(value: Any, tensors: Iterable[Any]) -> Any:
    """Return the value with other tensors in the place of its own, in order."""
    others = iter(tensors)
    return mapped(lambda _: next(others), value)


def rows(batch: Any) -> int | None:
    """Return the size of the leading dim of the first tensor that has dims; None without such a tensor.

    >>> rows((1, {"x": torch.ones(3, 2)}))
    3
    """
    return next((len(tensor) for tensor in tensors_in(batch) if tensor.ndim), None)


def chunk_sizes(count: int, chunks: int) -> list[int]:
    """Return the rows of each chunk, which differ by at most one, larger ones first.

    >>> chunk_sizes(5, 2)
    [3, 2]
    """
    return [count // chunks + (i < count % chunks) for i in range(chunks)]


def split(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Split the tensors that have the batch's number of rows; all else goes with every chunk.

    >>> [part["x"].tolist() for part in split({"x": torch.arange(5), "y": 1}, [3, 2])]
    [[0, 1, 2], [3, 4]]
    """
    count = sum(sizes)
    columns = [
        tensor.split(list(sizes)) if tensor.ndim and len(tensor) == count else [tensor] * len(sizes)
        for tensor in tensors_in(batch)
    ]
    return [_with_tensors(batch, parts) for parts in zip(*columns, strict=True)]


def joined(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Join the outputs of chunks: concatenate rows, average scalars over rows, and take all else from the first.

    >>> joined([(torch.tensor(1.0), torch.ones(1)), (torch.tensor(4.0), torch.zeros(2))], [1, 2])
    (tensor(3.), tensor([1., 0., 0.]))
    """
    together = zip(*map(tensors_in, outputs), strict=True)
    return _with_tensors(outputs[0], (_joined(tensors, sizes) for tensors in together))


def _joined(tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> Any:
    if not tensors[0].ndim:
        share = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
        return (torch.stack(list(tensors)) * share.to(tensors[0])).sum()
    return torch.cat(list(tensors)) if [*map(len, tensors)] == [*sizes] else list(tensors)


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

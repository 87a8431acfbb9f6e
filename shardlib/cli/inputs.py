"""Inputs of a model as one types them: shapes of one data rank, and batches drawn for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardlib._mesh_shape import MeshShape
from shardlib.cli.shapes import no_dtype, read_shapes
from shardlib.cli.usage import UsageError
from shardlib.engine._torch import pytree

__all__ = ["drawn", "of_all_ranks", "of_model", "read", "smallest_table"]


def read(given: list[str] | None) -> Any:
    """Return the example inputs that the options describe, on `meta`: all by position, or all by name."""
    if not given:
        return None
    return read_shapes(given, _tensor)


def _tensor(text: str, sizes: tuple[int, ...], dtype_name: str) -> torch.Tensor:
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        raise no_dtype(text, dtype_name, [name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)])
    return torch.empty(sizes, dtype=dtype, device="meta")


def of_model(model: nn.Module, shape: MeshShape) -> dict[str, torch.Tensor]:
    """Return what a Hugging Face model takes, on `meta`: one row of token ids, of a length that the mesh divides where
    positions allow, or one image."""
    name, config = getattr(model, "main_input_name", None), getattr(model, "config", None)
    size = getattr(config, "image_size", None)
    if name == "pixel_values" and size is not None:
        sides = (size, size) if isinstance(size, int) else tuple(size)
        return {name: torch.empty(1, getattr(config, "num_channels", 3), *sides, device="meta")}
    if name == "input_ids" and config is not None:
        longest = getattr(config, "max_position_embeddings", None) or 2**30
        length = 2 * shape.only(shape.model_axes).world_size
        ids = torch.empty(1, min(length, longest), dtype=torch.int64, device="meta")
        return {name: ids, **({"decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else {})}
    raise UsageError(
        f"{type(model).__name__} does not say what it takes. Give an --example of one data rank, such as 2x128 for "
        "token ids or x=2x64:float32, once for each input."
    )


def of_all_ranks(example: Any, ranks: int) -> Any:
    """Repeat rows of dim 0 for every data rank, to make a global batch."""
    tensors = [leaf for leaf in pytree.tree_leaves(example) if leaf.ndim]
    rows = len(tensors[0]) if tensors else 0

    def grown(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.ndim or len(tensor) != rows:
            return tensor
        return tensor.new_empty(rows * ranks, *tensor.shape[1:])

    return pytree.tree_map_only(torch.Tensor, grown, example)


def drawn(example: Any, below: int, step: int) -> Any:
    """Draw values for inputs on `meta`, new ones for each step: numbers of a normal distribution, or integers."""
    generator = torch.Generator().manual_seed(step)

    def values(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() or tensor.is_complex():
            return torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator)
        bound = 2 if tensor.dtype == torch.bool else min(below, torch.iinfo(tensor.dtype).max)
        return torch.randint(bound, tensor.shape, generator=generator).to(tensor.dtype)

    return pytree.tree_map_only(torch.Tensor, values, example)


def smallest_table(model: nn.Module) -> int:
    """Return the number of rows of the smallest embedding: a bound for numbers that may index any of them."""
    return min((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=2)

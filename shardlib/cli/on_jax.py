"""`shardlib check --jax`: a layout typed on a mesh of JAX devices that are not there."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardlib._mesh import MeshShape
from shardlib.cli.models import UsageError
from shardlib.engine._torch import pytree
from shardlib.rules import Rules

if TYPE_CHECKING:
    from shardlib.jax import LayoutReport

__all__ = ["as_json", "typed"]


def typed(model: nn.Module, mesh: str, rules: Rules, example: Any) -> LayoutReport:
    """Run `shardlib.jax.check_layouts` for inputs of one data rank.

    Raises:
        ShardlibError: JAX is missing; what `check_layouts` raises.
        UsageError: there is no example, and the model does not tell what it takes.
    """
    from shardlib.jax import check_layouts

    shape = MeshShape.of(mesh)
    config = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False  # type: ignore[union-attr]  # a cache is not an output that a graph can have
    given = _of_hugging_face(model, shape) if example is None else example
    return check_layouts(model, shape, rules, example=_of_all_ranks(given, shape.data_ranks))


def as_json(report: LayoutReport) -> dict[str, Any]:
    """Convert the report to JSON values."""
    return {
        "devices": report.mesh.world_size,
        "ops": report.ops,
        "modules": report.modules,
        "findings": [dataclasses.asdict(finding) for finding in report.findings],
        "reshards": [dataclasses.asdict(finding) for finding in report.reshards],
        "moved": dict(report.moved),
        "uneven": list(report.uneven),
    }


def _of_hugging_face(model: nn.Module, shape: MeshShape) -> dict[str, torch.Tensor]:
    """Return one row of token ids, of a length that the mesh divides where positions allow, or one image."""
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
        f"{type(model).__name__} does not say what it takes; give --jax an --example of one data rank, such as 2x128 "
        "for token ids or x=2x64:float32, once for each input."
    )


def _of_all_ranks(example: Any, ranks: int) -> Any:
    """Repeat rows of dim 0 for every data rank, to make a global batch."""
    tensors = [leaf for leaf in pytree.tree_leaves(example) if leaf.ndim]
    rows = len(tensors[0]) if tensors else 0

    def grown(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.ndim or len(tensor) != rows:
            return tensor
        return tensor.new_empty(rows * ranks, *tensor.shape[1:])

    return pytree.tree_map_only(torch.Tensor, grown, example)

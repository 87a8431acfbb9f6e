"""Batches that training meets and examples do not: labels that are left out, ranks with few tokens, equal tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardlib.engine._torch import pytree
from shardlib.testing.auditing.hosts import NotOffered

__all__ = ["has_experts", "one_token", "ragged", "token_ids", "unequal"]

IGNORED = -100
_LABELS = ("labels", "label", "targets", "target", "y")
_NO_TOKENS = re.compile("mask|position")
_EXPERTS = re.compile("moe|expert|mixture", re.IGNORECASE)


def ragged(batch: Any, ranks: int) -> Any:
    """Leave out every third label, of other positions in each row, and as many on each of `ranks` data ranks.

    >>> ragged({"labels": torch.arange(8).view(2, 4)}, 1)["labels"].tolist()
    [[-100, -100, 2, 3], [-100, 5, -100, 7]]
    """

    def left_out(labels: torch.Tensor) -> torch.Tensor:
        if labels.ndim == 1:
            rows = len(labels) // ranks
            out = torch.arange(len(labels)) % max(rows, 1) == 0
            if rows < 2:
                raise NotOffered("a data rank has one label")
            return labels.masked_fill(out, IGNORED)
        length = labels.shape[1]
        position = torch.arange(length)[None]
        row = torch.arange(len(labels)).unsqueeze(1)
        kept = max(length - 1, 1)
        turned = (position - 1 - row) % kept  # the first label is left out in every row: causal models shift it away
        out = (position == 0) | (turned < max(kept // 3, 1))
        return labels.masked_fill(out.view(*out.shape, *(1 for _ in labels.shape[2:])), IGNORED)

    return _with_labels(batch, left_out)


def unequal(batch: Any, ranks: int) -> Any:
    """Leave out more labels on each data rank than on the one before."""
    if ranks == 1:
        raise NotOffered("the mesh has no data axis")

    def left_out(labels: torch.Tensor) -> torch.Tensor:
        labels = labels.clone()
        for rank, part in enumerate(labels.chunk(ranks)):
            tokens = part.reshape(part.shape[0], -1)
            kept = max(2, tokens.shape[1] * (ranks - rank) // ranks)
            if labels.ndim == 1:
                part[max(1, len(part) * (ranks - rank) // ranks) :] = IGNORED
            else:
                part[:, kept:] = IGNORED
        return labels

    return _with_labels(batch, left_out)


def one_token(batch: Any, _ranks: int, index: int = 0) -> Any:
    """Repeat one token everywhere, so that most experts of a router get none."""

    def repeated(name: str, leaf: torch.Tensor) -> torch.Tensor:
        tokens = not leaf.is_floating_point() and leaf.dtype != torch.bool and leaf.ndim > 1
        chosen = tokens and not _NO_TOKENS.search(name)
        return torch.full_like(leaf, int(leaf.flatten()[index % leaf.numel()])) if chosen else leaf

    flat, spec = pytree.tree_flatten_with_path(batch)
    leaves = [repeated(pytree.keystr(path), leaf) if isinstance(leaf, torch.Tensor) else leaf for path, leaf in flat]
    return pytree.tree_unflatten(leaves, spec)


def has_experts(model: nn.Module) -> bool:
    """Return whether some module is named as mixtures of experts are."""
    return any(_EXPERTS.search(type(module).__name__) for module in model.modules())


def token_ids(batch: Any) -> torch.Tensor | None:
    """Return the token ids of a batch by keyword."""
    found = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return found if isinstance(found, torch.Tensor) else None


def _with_labels(batch: Any, change: Any) -> Any:
    if isinstance(batch, Mapping):
        name = next((name for name in _LABELS if _is_labels(batch.get(name))), None)
        if name is not None:
            return {**batch, name: change(batch[name])}
    elif isinstance(batch, tuple | list) and len(batch) > 1 and _is_labels(batch[-1]):
        return (*batch[:-1], change(batch[-1]))
    raise NotOffered("the batch has no integer labels")


def _is_labels(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_floating_point() and value.ndim > 0

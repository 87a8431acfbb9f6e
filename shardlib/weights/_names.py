"""The tensors of a model as checkpoints name them: other libraries load those, and a model in memory has its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

import torch
from torch import nn

from shardlib._plan.moves import Names, renamed
from shardlib.errors import InputError

__all__ = ["Convert", "is_of_transformers", "saved_names"]

Convert = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]


def saved_names(model: nn.Module, names: Names | str | None) -> Convert:
    """Return the function from a model's tensors by name to others that are parts of them.

    Args:
        model: the model.
        names: a mapping or a function of names, in which None leaves a tensor out; "huggingface" for what
            `save_pretrained` of a model of transformers writes; None for the model's own names.

    Raises:
        InputError: "huggingface", and the model is none of transformers.
    """
    if isinstance(names, str):
        if names != "huggingface" or not is_of_transformers(model):
            raise InputError(
                f'names="{names}" was given for a {type(model).__name__}; "huggingface" is for models of transformers. '
                "For others give a mapping or a function of names."
            )
        from transformers.core_model_loading import revert_weight_conversion

        return lambda tensors: revert_weight_conversion(model, tensors)  # type: ignore[arg-type]
    new = renamed(names)
    return lambda tensors: {name: tensor for old, tensor in tensors.items() if (name := new(old)) is not None}


def is_of_transformers(model: nn.Module) -> bool:
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)

"""The tensors of a model as checkpoints name them: other libraries load those, and a model in memory has its own."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardlib._plan.moves import Names, renamed
from shardlib.engine._torch import local_of
from shardlib.errors import InputError, PlanError

__all__ = ["Convert", "adapters_merged", "is_of_transformers", "saved_names"]

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
    if not isinstance(names, str):
        return partial(_renamed, renamed(names))
    if names != "huggingface" or not is_of_transformers(model):
        raise InputError(
            f'names="{names}" was given for a {type(model).__name__}; "huggingface" is for models of transformers. '
            "For others give a mapping or a function of names."
        )
    from transformers.core_model_loading import revert_weight_conversion

    base = _without_adapters(model)
    tuner: Any = getattr(model, "base_model", None)
    named = saved_names(model, None if base is model else partial(_name_without_adapters, tuner.prefix))
    return lambda tensors: revert_weight_conversion(base, {**named(tensors)})  # type: ignore[arg-type]


def _renamed(new: Callable[[str], str | None], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for old, tensor in tensors.items():
        if (name := new(old)) is None:
            continue
        if name in found:
            raise PlanError(
                f'names= gives two tensors the name "{name}", "{old}" and one before it. Leave one out: None.'
            )
        found[name] = tensor
    return found


def is_of_transformers(model: nn.Module) -> bool:
    """Return whether a model is one of transformers; with adapters of peft too."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(_without_adapters(model), transformers.PreTrainedModel)


@contextmanager
def adapters_merged(model: nn.Module | None) -> Iterator[None]:
    """Add adapters of peft to the weights that they adapt, for a while. The weights get their old bits back."""
    if model is None or _without_adapters(model) is model:
        yield
        return
    params = {name: param for name, param in model.named_parameters() if ".base_layer." in name}
    kept = {name: _local(param).clone() for name, param in params.items()}
    model.merge_adapter()  # type: ignore[operator]
    try:
        yield
    finally:
        model.unmerge_adapter()  # type: ignore[operator]
        with torch.no_grad():
            for name, param in params.items():
                _local(param).copy_(kept[name])


def _local(param: torch.Tensor) -> torch.Tensor:
    return (local_of(param) if isinstance(param, DTensor) else param).detach()


def _without_adapters(model: nn.Module) -> nn.Module:
    peft = sys.modules.get("peft")
    return model.get_base_model() if peft is not None and isinstance(model, peft.PeftModel) else model


def _name_without_adapters(prefix: str, name: str) -> str | None:
    """Return the name in the base model of a tensor in a model with adapters; None of what adapters have."""
    if f".{prefix}" in name or ".original_module." in name:
        return None
    name = re.sub(r"\.modules_to_save\.[^.]+\.", ".", name)
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")

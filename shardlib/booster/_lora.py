"""Adapters by peft: added before a model is sharded, and saved unsharded to be loaded on one device.

Their layouts follow from the rules for the model without them (`shardlib.rules._adapters`).
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from shardlib.booster._options import refuse_argument
from shardlib.engine import full_state_dict
from shardlib.engine.ranks import agree
from shardlib.engine.sharded import is_sharded
from shardlib.errors import CheckpointError, PlanError, ShardingError

__all__ = ["add_lora", "save_lora"]

_WEIGHTS = "adapter_model.safetensors"
# Fields about the run in which adapters were made, and about their first values, which saved ones have had.
_OF_A_RUN = {
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "init_lora_weights",
    "peft_version",
    "revision",
}


def add_lora(model: nn.Module, pretrained_dir: Any, lora_config: Any, quantization: Any, quantize: bool) -> nn.Module:
    """Add adapters to a model; see `Booster.enable_lora`."""
    peft = _peft()
    refuse_argument("enable_lora", "quantize", bool(quantize), False)
    refuse_argument("enable_lora", "bnb_quantization_config", quantization, None)
    if pretrained_dir is None and lora_config is None:
        raise PlanError(
            "enable_lora takes lora_config=peft.LoraConfig(...) for new adapters, or pretrained_dir= for saved ones, "
            "which have a configuration of their own; neither came."
        )
    if lora_config is not None and not isinstance(lora_config, peft.LoraConfig):
        raise PlanError(
            f"enable_lora was given lora_config={lora_config!r}; give a peft.LoraConfig, as in "
            'peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"]).'
        )
    if is_sharded(model):
        raise ShardingError("enable_lora was given a model that is sharded already. Call it before boost.")
    if any(param.is_meta for param in model.parameters()):
        raise ShardingError(
            "enable_lora was given a model on the meta device: what draws a model's first values there does not know "
            "that an adapter begins as zero. Add adapters inside of the LazyInitContext that the model is built in, or "
            "to a model that has its values."
        )
    if pretrained_dir is None:
        return peft.get_peft_model(model, lora_config)  # type: ignore[no-any-return]
    if os.path.isdir(pretrained_dir) and not (Path(pretrained_dir) / _WEIGHTS).is_file():
        raise CheckpointError(
            f'"{pretrained_dir}" has no {_WEIGHTS}. Give a folder that save_lora_as_pretrained or peft wrote; adapters '
            "in pickles are not read."
        )
    if lora_config is not None:
        _check_said(lora_config, peft.PeftConfig.from_pretrained(os.fspath(pretrained_dir)), pretrained_dir)
    return peft.PeftModel.from_pretrained(model, os.fspath(pretrained_dir), is_trainable=True)  # type: ignore[no-any-return]


def _check_said(given: Any, saved: Any, folder: Any) -> None:
    """Check that what a configuration says, other than by default, is so of saved adapters.

    Raises:
        PlanError: it is not.
    """
    unsaid = type(given)()
    for field in dataclasses.fields(given):
        name = field.name
        wanted, there = _plain(getattr(given, name)), _plain(getattr(saved, name, None))
        if name not in _OF_A_RUN and wanted not in (_plain(getattr(unsaid, name)), there):
            raise PlanError(
                f'enable_lora was given lora_config with {name}={wanted!r}, and the adapters in "{folder}" have '
                f"{there!r}. Saved adapters keep their configuration: leave lora_config out, or say the same."
            )


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | list | tuple) else getattr(value, "value", value)


def save_lora(model: nn.Module, checkpoint: str | os.PathLike[str]) -> None:
    """Save the adapters of a model; see `Booster.save_lora_as_pretrained`."""
    peft = _peft()
    if not isinstance(model, peft.PeftModel):
        raise ShardingError(
            f"save_lora_as_pretrained was given a {type(model).__name__}, which has no adapters. Give the model that "
            "enable_lora returned, boosted or not."
        )
    unsharded = full_state_dict(model, names=_on_any_rank(_adapter_names(peft, model)))
    problem = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            _write(model, unsharded, Path(checkpoint))
        except Exception as error:  # whatever it is, the other ranks are waiting
            problem = f'The adapters were not saved to "{checkpoint}": {error}'
    if dist.is_initialized():
        problem = agree.of_first(problem)
    if problem is not None:
        raise CheckpointError(problem)


def _adapter_names(peft: Any, model: Any) -> set[str]:
    """Return the tensors that peft saves, by their names in the model."""
    state = model.state_dict()
    kept = {
        id(value)
        for adapter in model.peft_config
        for value in peft.get_peft_model_state_dict(
            model, state_dict=state, adapter_name=adapter, save_embedding_layers=False
        ).values()
    }
    return {name for name, value in state.items() if id(value) in kept}


def _on_any_rank(names: set[str]) -> set[str]:
    """Return the union of the ranks' names; a stage of a pipeline has only its own."""
    if not dist.is_initialized():
        return names
    return set().union(*agree.exchange(names))


def _write(model: Any, unsharded: dict[str, Any], folder: Path) -> None:
    """Write files with peft to a folder beside the target; each then replaces the previous file."""
    if folder.is_file():
        raise NotADirectoryError(f'"{folder}" is a file')
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as beside:
        model.save_pretrained(beside, state_dict=unsharded, safe_serialization=True, save_embedding_layers=False)
        for path in sorted(Path(beside).rglob("*")):
            target = folder / path.relative_to(beside)
            if path.is_dir():
                target.mkdir(exist_ok=True)
            else:
                path.replace(target)


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise PlanError("Adapters need peft: pip install shardlib[lora].") from error
    return peft

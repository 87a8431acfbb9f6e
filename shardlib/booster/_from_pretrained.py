"""`from_pretrained` of transformers inside a `LazyInitContext`: the model is built, and nothing is read."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from shardlib.errors import CheckpointError

__all__ = ["read_later", "source_of"]

_sources: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def source_of(model: nn.Module) -> str | None:
    """Return the folder that `from_pretrained` would have read a model from inside `read_later`."""
    return _sources.get(model)


@contextmanager
def read_later() -> Iterator[None]:
    """Let `from_pretrained` of transformers, if that is imported, build models without reading files."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        yield
        return
    of_models = modeling.PreTrainedModel
    before = inspect.getattr_static(of_models, "from_pretrained")
    of_models.from_pretrained = classmethod(_build_only)
    try:
        yield
    finally:
        of_models.from_pretrained = before


# Options for the location and the reading of files, which do not change the model.
_OF_FILES = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
_OF_AUTO_CLASSES = ("adapter_kwargs", "_from_auto", "_commit_hash", "code_revision")
_EITHER_WAY = ("low_cpu_mem_usage", "use_safetensors", "weights_only", "disable_mmap", "trust_remote_code")
_OF_MODELS = ("attn_implementation", "experts_implementation")


def _build_only(cls: Any, path: Any, *args: Any, config: Any = None, dtype: Any = None, **options: Any) -> Any:
    """Run `from_pretrained` without reading: build a model of the class, in evaluation mode."""
    files = {key: options.pop(key) for key in _OF_FILES if options.get(key) is not None}
    for key in (*_OF_FILES, *_OF_AUTO_CLASSES, *_EITHER_WAY):
        options.pop(key, None)
    of_model = {key: options.pop(key) for key in _OF_MODELS if options.get(key) is not None}
    dtype = options.pop("torch_dtype", None) if dtype is None else dtype
    if not hasattr(config, "to_dict"):
        where = path if config is None else config
        config, options = cls.config_class.from_pretrained(where, return_unused_kwargs=True, **files, **options)
    if options or args:
        given = ", ".join((*map(repr, args), *(f"{key}={value!r}" for key, value in options.items())))
        raise CheckpointError(
            f"{cls.__name__}.from_pretrained was given {given} inside a LazyInitContext, which makes the model and "
            "leaves reading to shard_model. Say it of the config, or read the model outside."
        )
    of_model |= {} if dtype in (None, "auto") else {"dtype": dtype}
    model = cls._from_config(config, **of_model).eval()
    folder = _folder(path, files)
    if model.can_generate():
        with suppress(OSError):  # the model has no generation config
            model.generation_config = type(model.generation_config).from_pretrained(folder)
    _sources[model] = folder
    return model


def _folder(path: Any, files: Mapping[str, Any]) -> str:
    """Return the folder of the files, which are downloaded from the hub if they are not on this machine."""
    if os.path.isdir(path):
        return os.path.join(path, files.get("subfolder", ""))
    from huggingface_hub import snapshot_download

    options = {key: value for key, value in files.items() if key != "subfolder"}
    folder = snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors"], **options)
    return os.path.join(folder, files.get("subfolder", ""))

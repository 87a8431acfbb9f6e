"""A model from what one can type: a factory or class in a module, a Hugging Face folder, a safetensors file.

Names and shapes are enough for a plan: models are built on `meta`, unless another device is asked for. Values of files
are never loaded.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from shardlib.cli.attributes import find_attribute
from shardlib.cli.usage import FORMS, UsageError, cause_of

__all__ = ["known_models", "load_model"]

_INDEX = ".safetensors.index.json"
_KNOWN = Path(__file__).with_name("known_models.toml")


def load_model(spec: str, device: str = "meta") -> nn.Module:
    """Build the model that `spec` names, on `meta` or with the values that its own code draws.

    Raises:
        UsageError: nothing can be found or built there.
    """
    path = Path(spec)
    if path.exists():
        return _from_path(path, device)
    if spec in (known := known_models()):
        return _from_sizes(known[spec], device)
    if spec.endswith((".json", ".safetensors")) or ("/" in spec and ".py:" not in spec):
        raise UsageError(f'There is no file or folder "{spec}". A model is {FORMS}.')
    return _from_python(spec, device)


@functools.cache
def known_models() -> dict[str, dict[str, Any]]:
    """Return the sizes of well-known models, by name."""
    return tomllib.loads(_KNOWN.read_text(encoding="utf-8"))


def _from_sizes(sizes: dict[str, Any], device: str) -> nn.Module:
    transformers = _transformers(_KNOWN)
    model_class = getattr(transformers, sizes["class"])
    given = {key: value for key, value in sizes.items() if key != "class"}
    with torch.device(device):
        made: nn.Module = model_class(model_class.config_class(use_cache=False, **given))
    return made


def _from_path(path: Path, device: str) -> nn.Module:
    if path.is_dir():
        found = [path / "config.json", *sorted(path.glob(f"*{_INDEX}")), *sorted(path.glob("*.safetensors"))]
        files = [file for file in found if file.is_file()]
        if not files:
            raise UsageError(f'Folder "{path}" holds neither config.json nor safetensors files. A model is {FORMS}.')
        path = files[0]
    if path.name.endswith(_INDEX):
        return _skeleton(_indexed_files(path))
    if path.suffix == ".safetensors":
        return _skeleton([path])
    if path.suffix == ".json":
        return _from_config(path, device)
    raise UsageError(f'File "{path}" is of no kind that names a model. A model is {FORMS}.')


def _from_config(path: Path, device: str) -> nn.Module:
    """Build the class that a Hugging Face config names, else the base model of its type."""
    transformers = _transformers(path)
    try:
        config = transformers.AutoConfig.from_pretrained(path.parent if path.name == "config.json" else path)
    except ImportError as error:
        raise UsageError(f'"{path}": transformers is installed and cannot be used: {cause_of(error)}.') from error
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f'"{path}" is not a Hugging Face configuration: {error}') from error
    classes = (getattr(transformers, name, None) for name in config.architectures or ())
    model_class = next((found for found in classes if found is not None), None)
    with torch.device(device), _default_dtype(getattr(config, "dtype", None)):
        return model_class(config) if model_class else transformers.AutoModel.from_config(config)


def _transformers(path: Path) -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise UsageError(
            f'"{path}" is a Hugging Face configuration, and transformers is not installed. '
            "Run `pip install 'shardlib[hf]'`."
        ) from error


def _from_python(spec: str, device: str) -> nn.Module:
    made = _called(spec, find_attribute(spec, f"A model is {FORMS}."), device)
    if not isinstance(made, nn.Module):
        raise UsageError(f'"{spec}" returned {type(made).__name__}; give something that returns a torch.nn.Module.')
    return made


def _called(spec: str, factory: Any, device: str) -> Any:
    """Call a factory with a default device; one that needs values and got `meta` is called again on the CPU."""
    if isinstance(factory, nn.Module):
        return factory
    if not callable(factory):
        raise UsageError(f'"{spec}" is of type {type(factory).__name__}; give a class or a function without arguments.')
    config_class = getattr(factory, "config_class", None)
    arguments = (config_class(),) if isinstance(factory, type) and config_class is not None else ()
    try:
        with torch.device(device):
            return factory(*arguments)
    except (NotImplementedError, RuntimeError) as error:
        if device != "meta":
            raise
        print(f"{spec} cannot be built on meta ({_first_line(error)}); building it with values", file=sys.stderr)
        return factory(*arguments)
    except TypeError as error:
        raise UsageError(
            f'"{spec}" cannot be called without arguments: {error}. Write a function that returns the model, in a file '
            "of your own, and give its module:function."
        ) from error


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f'"{index}" is not a safetensors index: it has no "weight_map" of names to files.') from error
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise UsageError(
            f'"{index}" names {len(names)} files, of which {len(missing)} are not beside it: {", ".join(missing[:3])}. '
            "Shapes are read from the files' headers, so they must be there."
        )
    return [index.parent / name for name in names]


def _skeleton(files: list[Path]) -> nn.Module:
    """Build plain modules with meta parameters under the names in the files."""
    made = {"": nn.Module()}
    for name, tensor in (item for file in files for item in _tensors(file)):
        path, _, leaf = name.rpartition(".")
        owner = _module_at(path, made)
        owner.register_parameter(leaf, nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))
    return made[""]


def _module_at(path: str, made: dict[str, nn.Module]) -> nn.Module:
    if path not in made:
        parent, _, name = path.rpartition(".")
        made[path] = nn.Module()
        _module_at(parent, made).add_module(name, made[path])
    return made[path]


def _tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(str(file), framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 (safe_open is not a mapping)
            view = opened.get_slice(name)
            yield name, torch.empty(view.get_shape(), dtype=_dtype(file, view.get_dtype()), device="meta")


_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def _dtype(file: Path, name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise UsageError(f'"{file}" holds tensors of dtype {name}; known are {", ".join(_DTYPES)}.')
    return _DTYPES[name]


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]

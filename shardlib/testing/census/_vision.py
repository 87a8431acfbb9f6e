"""Models of timm and torchvision: a small one of each family, and images."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardlib.testing.census._inputs import ROWS
from shardlib.testing.census._shrink import facts

__all__ = ["families", "images", "small_model"]

_CLASSES = 10


def families(library: str) -> Iterator[tuple[str, str]]:
    """Iterate over the families of a library, which are its modules, with the name of a small model of each."""
    if library == "timm":
        timm = importlib.import_module("timm")
        for family in timm.list_modules():
            if names := timm.list_models(module=family):
                yield family, _smallest(names)
        return
    models = importlib.import_module("torchvision.models")
    by_family: dict[str, list[str]] = {}
    for name in models.list_models(module=models):
        by_family.setdefault(models.get_model_builder(name).__module__.rpartition(".")[2], []).append(name)
    for family, names in by_family.items():
        yield family, _smallest(names)


def _smallest(names: Sequence[str]) -> str:
    """Return the name with the smallest size among the words in it; of several, the shortest."""
    words = facts()["small"]["words"]

    def size(name: str) -> int:
        return min((words.index(part) for part in name.split("_") if part in words), default=len(words))

    return min(names, key=lambda name: (size(name), len(name), name))


def small_model(library: str, name: str) -> nn.Module:
    """Build a model with the first of the settings in `census.toml` that it takes."""
    create, cls = _creator(library), _class_of(library, name)
    fixed = facts()["small"]["arguments"][library].get(cls.__name__)
    refused: Exception | None = None
    for sizes in facts()["small"]["settings"] if fixed is None else [{}]:
        for image in ({facts()["small"]["image"][library]: 64}, {}):
            try:
                with _built_with(cls, fixed or {}):
                    model = create(name, num_classes=_CLASSES, **sizes, **image)
            except Exception as error:  # each family refuses arguments in its own way
                refused = error
                continue
            return model
    assert refused is not None
    raise refused


def _creator(library: str) -> Any:
    if library == "timm":
        return importlib.import_module("timm").create_model
    return importlib.import_module("torchvision.models").get_model


def _class_of(library: str, name: str) -> type[nn.Module]:
    if library == "timm":
        build = importlib.import_module("timm").model_entrypoint(name)
    else:
        build = importlib.import_module("torchvision.models").get_model_builder(name)
    found: type[nn.Module] = inspect.get_annotations(build, eval_str=True).get("return", nn.Module)
    return found


@contextlib.contextmanager
def _built_with(cls: type[nn.Module], arguments: Mapping[str, Any]) -> Iterator[None]:
    """Give a class these arguments in the block, whatever the function that builds a model of it gives."""
    if not arguments:
        yield
        return
    own = cls.__init__

    @functools.wraps(own)
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        given = dict(inspect.signature(own).bind_partial(self, *args, **kwargs).arguments)
        del given["self"]
        own(self, **{**given.pop("kwargs", {}), **given, **arguments})

    cls.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        cls.__init__ = own  # type: ignore[method-assign]


def images(model: nn.Module, extra: str, step: int) -> dict[str, torch.Tensor]:
    """Return images for a model, by the name of the first argument of its forward.

    Args:
        model: a model of timm or torchvision.
        extra: "" for 64 pixels each side, or what the model is fixed to; "larger" for 128; "usual" for what its
            pretrained weights take.
        step: the seed.
    """
    draw = torch.Generator().manual_seed(step)
    fixed = getattr(getattr(model, "patch_embed", None), "img_size", None) or getattr(model, "image_size", None)
    usual = (getattr(model, "default_cfg", None) or {}).get("input_size", (3, 224, 224))[-1]
    size = fixed or {"": 64, "larger": 128, "usual": usual}[extra]
    height, width = (size, size) if isinstance(size, int) else size
    name = next(iter(inspect.signature(model.forward).parameters))
    return {name: torch.randn(ROWS, 3, height, width, generator=draw)}

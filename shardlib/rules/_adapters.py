"""Adapters of peft in a model: what rules call its modules, and how adapters lie.

peft puts a module in the place of a layer, which holds the layer and, by adapter, the factors of a matrix of low rank
that is added to the layer's (Hu et al., "LoRA", 2021, https://arxiv.org/abs/2106.09685). The model becomes a part of
another one. Rules are written for the model without all that: they find a layer under the name that it had, and what
they say of its weight, `out in`, says how the factors lie:

    lora_A   rank in    its `in` as the layer's: whole for a column-parallel layer
    lora_B   out rank   its `out` as the layer's: whole for a row-parallel layer

A rule that names a factor itself comes before that. peft is not imported: its classes are known by their names.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import nn

from shardlib._mesh import MeshShape
from shardlib.layout import Dim, Factor, Layout
from shardlib.rules._model import ModelIndex
from shardlib.rules.dims import dims_of

__all__ = ["following", "has_adapters", "renamed", "without_adapters"]

_MODEL = "peft.peft_model.PeftModel"
_ADAPTED = "peft.tuners.tuners_utils.BaseTunerLayer"
_COPIED = "peft.utils.other.ModulesToSaveWrapper"
_COPIES = "modules_to_save"


def without_adapters(model: nn.Module) -> nn.Module:
    """The model that adapters were added to: it has the class that it had, and adapters inside."""
    return model.get_base_model() if _is_a(model, _MODEL) else model  # type: ignore[operator,no-any-return]


def has_adapters(model: nn.Module) -> bool:
    """Whether peft has put modules of its own in the place of others."""
    return "peft" in sys.modules and any(_is_a(module, _MODEL, _ADAPTED, _COPIED) for module in model.modules())


def renamed(index: ModelIndex) -> tuple[dict[str, str], set[str]]:
    """What modules and tensors were called before peft renamed them, and those that stand inside of their own place.

    Of what peft has added there is nothing.
    """
    if not has_adapters(index.model):
        return {}, set()
    before: dict[str, str | None] = {}
    for name in index.modules:
        before[name] = _before(index, name, before)
    own = {name: plain for name, plain in before.items() if name and plain is not None}
    inner = {name for name, plain in own.items() if plain == before[name.rpartition(".")[0]]}
    for name in index.leaf:
        owner, _, attribute = name.rpartition(".")
        before[name] = _joined(before[owner], attribute)
    return {name: plain for name, plain in before.items() if plain and plain != name}, inner


def _before(index: ModelIndex, name: str, before: dict[str, str | None]) -> str | None:
    """What a module was called, or rather the one in whose place it is; None of what peft has added."""
    wrapped = _is_a(index.model, _MODEL)
    if not name:
        return None if wrapped else ""
    if wrapped and name == "base_model.model":
        return ""
    outer, _, last = name.rpartition(".")
    holder = index.modules[outer]
    if _is_a(holder, _ADAPTED):
        return before[outer] if last == "base_layer" else None
    if _is_a(holder, _COPIED) or (outer.endswith(f".{_COPIES}") and _is_a(_holder(index, outer), _COPIED)):
        return before[outer]
    return _joined(before[outer], last)


def _holder(index: ModelIndex, name: str) -> nn.Module:
    return index.modules[name.rpartition(".")[0]]


def _joined(outer: str | None, last: str) -> str | None:
    return None if outer is None else f"{outer}.{last}".lstrip(".")


def following(index: ModelIndex, name: str, layout: Layout, mesh: MeshShape) -> Iterator[tuple[str, Layout]]:
    """The tensors of adapters whose layouts follow from that of a tensor, if it is the weight of a layer with some.

    Args:
        index: the model.
        name: of any tensor.
        layout: of it, concrete.
        mesh: that it is concrete on.
    """
    layer_name, layer, attribute = index.owner(name)
    outer, _, last = layer_name.rpartition(".")
    if last != "base_layer" or not _is_a(index.modules[outer], _ADAPTED):
        return
    meant = dims_of(layer)
    named = meant.dims(attribute, len(layout.dims)) if meant is not None else None
    if meant is None or named is None or len(named) < 2:
        return
    of_layer = {word: dim for word, dim in zip(named, layout.dims, strict=True) if isinstance(dim, Dim)}
    into = next((of_layer[word] for word in meant.contracted if word in of_layer), None)
    factors = {"lora_A": into, "lora_B": of_layer.get(meant.output or "")}
    for own, _ in index.modules[outer].named_parameters(remove_duplicate=False):
        tensor, kind = f"{outer}.{own}", own.split(".")[0]
        if kind != "base_layer":
            shape = tuple(index.leaf[tensor].tensor.shape)
            dims = _dims_of_factor(index, tensor, len(shape), kind, factors.get(kind))
            yield tensor, Layout(dims).resolve(shape, mesh)


def _dims_of_factor(index: ModelIndex, tensor: str, ndim: int, kind: str, shared: Dim | None) -> tuple[Dim, ...]:
    """Dims with the one that a factor shares with the layer as it lies there. What else an adapter has is whole."""
    _, module, attribute = index.owner(tensor)
    meant = dims_of(module)
    named = meant.dims(attribute, ndim) if meant is not None else None
    if meant is None or named is None or shared is None:
        return (_whole("_"),) * ndim
    where = meant.contracted if kind == "lora_A" else (meant.output,)
    rank = "_" if any(factor.name == "rank" for factor in shared.factors) else "rank"
    return tuple(shared if word in where else _whole("_" if word == "_" else rank) for word in named)


def _whole(name: str) -> Dim:
    return Dim((Factor(name),))


def _is_a(module: nn.Module, *names: str) -> bool:
    return any(f"{cls.__module__}.{cls.__qualname__}" in names for cls in type(module).__mro__)

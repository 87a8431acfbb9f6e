"""peft adapters in a model: the names of adapted layers in rules, and the layouts of adapters.

peft replaces a layer by a wrapper. It holds the layer and, by adapter, the factors of a low-rank matrix that is added
to the layer's weight (Hu et al., "LoRA", 2021, https://arxiv.org/abs/2106.09685). The model is wrapped too. Rules are
written for the model without adapters: they match a layer by its former name, and the layout that they give its weight,
`out in`, determines those of the factors:

    lora_A   rank in    `in` is split as the layer's: replicated for a column-parallel layer
    lora_B   out rank   `out` is split as the layer's: replicated for a row-parallel layer

Factors of a module's parameters, such as those of experts, are replicated, and so are rows of an embedding that are
trained. A rule that names a factor takes precedence. peft is not imported: its classes are recognised by their names.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shardlib._mesh_shape import MeshShape
from shardlib.layout import Dim, Factor, Layout
from shardlib.rules._model import ModelIndex
from shardlib.rules.dims import dims_of

if TYPE_CHECKING:
    from torch import nn

__all__ = ["adapts_parameters", "following", "has_adapters", "renamed", "without_adapters"]

_MODEL = "peft.peft_model.PeftModel"
_ADAPTED = "peft.tuners.tuners_utils.BaseTunerLayer"
_COPIED = "peft.utils.other.ModulesToSaveWrapper"
_OF_TOKENS = "peft.utils.other.TrainableTokensWrapper"  # it holds an adapter that holds the layer
_OF_PARAMETERS = "peft.tuners.lora.layer.ParamWrapper"  # one around the other for each parameter of a module
_COPIES = "modules_to_save"


def without_adapters(model: nn.Module) -> nn.Module:
    """Return the model that adapters were added to; its modules include the adapters."""
    return model.get_base_model() if _is_a(model, _MODEL) else model  # type: ignore[operator,no-any-return]


def has_adapters(model: Any) -> bool:
    """Return whether peft has wrapped modules of the model."""
    return "peft" in sys.modules and any(
        _is_a(module, _MODEL, _ADAPTED, _COPIED, _OF_TOKENS) for module in model.modules()
    )


def adapts_parameters(model: nn.Module, name: str) -> bool:
    """Return whether peft adapts parameters of a module as a whole, which it replaces while the module runs."""
    outer, _, last = name.rpartition(".")
    return last == "base_layer" and _is_a(model.get_submodule(outer), _OF_PARAMETERS)


def renamed(index: ModelIndex) -> tuple[dict[str, str], set[str]]:
    """Return the former names of modules and tensors that peft renamed, and the names of modules that a wrapper
    contains under its own former name. Modules that peft added have no former name.

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
    """Return the former name of a module, or of the layer that it wraps; None for a module that peft added."""
    wrapped = _is_a(index.model, _MODEL)
    if not name:
        return None if wrapped else ""
    if wrapped and name == "base_model.model":
        return ""
    outer, _, last = name.rpartition(".")
    holder = index.modules[outer]
    if _is_a(holder, _ADAPTED):
        return before[outer] if last == "base_layer" else None
    if _is_a(holder, _COPIED, _OF_TOKENS) or (outer.endswith(f".{_COPIES}") and _is_a(_holder(index, outer), _COPIED)):
        return before[outer]
    return _joined(before[outer], last)


def _holder(index: ModelIndex, name: str) -> nn.Module:
    return index.modules[name.rpartition(".")[0]]


def _joined(outer: str | None, last: str) -> str | None:
    return None if outer is None else f"{outer}.{last}".lstrip(".")


def following(index: ModelIndex, name: str, layout: Layout, mesh: MeshShape) -> Iterator[tuple[str, Layout]]:
    """Iterate over the adapter tensors whose layouts follow from that of the layer's weight `name`; none for other
    tensors.

    Args:
        index: the model.
        name: the name of any tensor.
        layout: the concrete layout of that tensor.
        mesh: the mesh of that layout.
    """
    layer_name, layer, attribute = index.owner(name)
    outer, _, last = layer_name.rpartition(".")
    if last != "base_layer" or not _is_a(index.modules[outer], _ADAPTED):
        return
    registered = dims_of(layer)
    named = registered.dims(attribute, len(layout.dims)) if registered is not None else None
    if registered is None or named is None or len(named) < 2:
        yield from _factors_of_parameters(index, layer_name, mesh)
        return
    of_layer = {word: dim for word, dim in zip(named, layout.dims, strict=True) if isinstance(dim, Dim)}
    into = next((of_layer[word] for word in registered.contracted if word in of_layer), None)
    factors = {"lora_A": into, "lora_B": of_layer.get(registered.output or "")}
    for own, _ in index.modules[outer].named_parameters(remove_duplicate=False):
        tensor, kind = f"{outer}.{own}", own.split(".")[0]
        if kind != "base_layer":
            shape = tuple(index.leaf[tensor].tensor.shape)
            dims = _dims_of_factor(index, tensor, len(shape), kind, factors.get(kind))
            yield tensor, Layout(dims).resolve(shape, mesh)


def _factors_of_parameters(index: ModelIndex, layer_name: str, mesh: MeshShape) -> Iterator[tuple[str, Layout]]:
    """Iterate over the factors that peft adds to parameters of a module, such as those of experts: replicated."""
    outer, _, last = layer_name.rpartition(".")
    while last == "base_layer" and _is_a(index.modules[outer], _OF_PARAMETERS):
        for own, factor in index.modules[outer].named_parameters(remove_duplicate=False):
            if not own.startswith("base_layer."):
                shape = tuple(factor.shape)
                yield f"{outer}.{own}", Layout((_unsplit("_"),) * len(shape)).resolve(shape, mesh)
        outer, _, last = outer.rpartition(".")


def _dims_of_factor(index: ModelIndex, tensor: str, ndim: int, kind: str, shared: Dim | None) -> tuple[Dim, ...]:
    """Return the dims of an adapter's factor: the shared one is split as in the layer, all others are replicated."""
    _, module, attribute = index.owner(tensor)
    registered = dims_of(module)
    named = registered.dims(attribute, ndim) if registered is not None else None
    if registered is None or named is None or shared is None:
        return (_unsplit("_"),) * ndim
    where = registered.contracted if kind == "lora_A" else (registered.output,)
    rank = "_" if any(factor.name == "rank" for factor in shared.factors) else "rank"
    return tuple(shared if word in where else _unsplit("_" if word == "_" else rank) for word in named)


def _unsplit(name: str) -> Dim:
    return Dim((Factor(name),))


def _is_a(module: Any, *names: str) -> bool:
    return any(f"{cls.__module__}.{cls.__qualname__}" in names for cls in type(module).__mro__)

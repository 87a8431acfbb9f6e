"""Suggested rules for convolutions and for linear layers in a row: pairs that follow each other in one block.

The first of a pair is sharded over its output channels, which the second sums over. Norms and depthwise or grouped
convolutions between them compute each channel, or group of channels, by itself, and are sharded likewise. A convolution
that is in no pair is sharded alone: its input and its output are replicated.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from shardlib.rules._model import ModelIndex, is_layer
from shardlib.rules.dims import CONVS, dims_of

if TYPE_CHECKING:
    from torch import nn

__all__ = ["FACTORS", "Chained", "alone", "chains"]

FACTORS: dict[str, int | str] = {"groups": "groups", "gate_up": 2}  # the sizes of the factors in the values below
_BATCH_NORMS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")
_CONTAINERS = ("Sequential", "ModuleList", "ModuleDict")
_BESIDE = re.compile(r"shortcut|downsample|residual|skip|identity")  # a branch beside the others
_DIGIT = re.compile(r"\d")
_CHANNELS = 4  # of an image, or of its latents
_RATIO = 16  # of widths: a layer outside of the blocks of a net, such as one that embeds patches, may be as uneven
_IN_A_BLOCK = re.compile(r"\.\d+\.")

Chained = tuple[str, str]  # the value of a rule, and its reason


@dataclass(frozen=True)
class _Layer:
    name: str
    module: Any
    inputs: int
    outputs: int
    groups: int

    @property
    def last(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def weight_norm(self) -> bool:
        return hasattr(self.module, "weight_v")

    @property
    def keeps_channels(self) -> bool:
        return self.groups > 1 and self.inputs == self.outputs

    def halves(self, after: _Layer) -> tuple[int, ...]:
        """Return the channels that this layer has if `after` takes one half of them, which the other half gates."""
        alone = self.groups == self.inputs  # each channel, so that a rank can have some of either half
        return (2 * after.inputs,) if alone else ()


def chains(index: ModelIndex, other: Collection[str], not_chained: Collection[str]) -> dict[str, Chained]:
    """Return rules for layers in a row, by the full name of a module.

    Args:
        index: the model.
        other: full names of modules that have rules already.
        not_chained: last names of layers, such as queries and keys, that are paired with none, nor others around them.
    """
    found: dict[str, Chained] = {}
    for block in _blocks(index).values():
        free = [
            layer for layer in block if layer.name not in other and not (layer.weight_norm or layer.last in not_chained)
        ]
        for up, between, downs in _pairs(free):
            if not _apart(index, up, downs[0], not_chained):
                found |= _shard(index, up, between, downs)
    return found


def alone(index: ModelIndex, other: Collection[str]) -> dict[str, Chained]:
    """Return rules for convolutions that are in no pair, and for linear layers before a batch norm, which are
    convolutions of tokens; by the full name of a module.

    Args:
        index: the model.
        other: full names of modules that have rules already.
    """
    found = {}
    for name, after in pairwise([*index.modules, ""]):
        layer = None if name in other else _layer(index, name, index.modules[name])
        if layer is not None and _is_wide(index, layer) and _convolves(layer, index.modules[after]):
            found[name] = _shard_alone(layer)
    return found


def _is_wide(index: ModelIndex, layer: _Layer) -> bool:
    """Return whether a layer has a weight of its own, and sums over channels, many of them on both sides."""
    narrow, wide = sorted((layer.inputs, layer.outputs))
    many = narrow > _CHANNELS and (_IN_A_BLOCK.search(layer.name) is not None or narrow * _RATIO > wide)
    own = layer.weight_norm or "weight" in index.own[layer.name]
    return many and own and layer.inputs > layer.groups


def _convolves(layer: _Layer, after: Any) -> bool:
    """Return whether a layer is a convolution: of tokens, if it is a linear layer before its batch norm."""
    norm = is_layer(after, *_BATCH_NORMS) and after.num_features == layer.outputs
    return norm or not is_layer(layer.module, "Linear")


def _shard_alone(layer: _Layer) -> Chained:
    if layer.groups > 1:
        return _by_group(layer), "guess: alone; each group of channels by itself, the output is gathered"
    if is_layer(layer.module, "Linear"):
        return "out channel", "guess: alone; its input features are sharded, and summed over"
    if type(layer.module).forward.__module__ != "torch.nn.modules.conv" or (
        layer.weight_norm and not layer.module.transposed
    ):
        # It may compute with all of a channel's weight, as for its norm; that of a transposed one is of input channels.
        return "channel", "guess: alone; each output channel by itself, the output is gathered"
    value = "channel out ..." if layer.module.transposed else "out channel ..."
    return value, "guess: alone; its input channels are sharded, and summed over"


def _blocks(index: ModelIndex) -> dict[str, list[_Layer]]:
    """Return the layers by block: by the innermost module, not counting containers, that holds several of them."""
    layers = {name: layer for name, module in index.modules.items() if (layer := _layer(index, name, module))}
    held: dict[str, int] = {}
    for name in layers:
        for around in _around(name):
            held[around] = held.get(around, 0) + 1
    blocks: dict[str, list[_Layer]] = {}
    for name, layer in layers.items():
        block = next((a for a in _around(name) if held[a] > 1 and not is_layer(index.modules[a], *_CONTAINERS)), "")
        if not _BESIDE.search(name.removeprefix(block)):
            blocks.setdefault(block, []).append(layer)
    return blocks


def _layer(index: ModelIndex, name: str, module: Any) -> _Layer | None:
    """Return a layer whose parameters are all known, under its first name. A module called "output" is left out: a rule
    of that name would mean what the module around it returns."""
    registered = dims_of(module)
    if registered is None or not registered.tensors.keys() >= index.own[name].keys():
        return None
    if index.module_name(module) != name or name.rpartition(".")[2] in ("input", "output"):
        return None
    if is_layer(module, *CONVS):
        return _Layer(name, module, module.in_channels, module.out_channels, module.groups)
    if is_layer(module, "Linear"):
        return _Layer(name, module, module.in_features, module.out_features, 1)
    return None


def _around(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


def _pairs(layers: list[_Layer]) -> Iterator[tuple[_Layer, list[_Layer], list[_Layer]]]:
    """Iterate over layers that widen, those after them that keep each channel by itself or join it, and those that
    sum."""
    at = 0
    while at < len(layers):
        up, last = layers[at], at + 1
        while last < len(layers) and (_keeps(up, layers[last]) or _joins(up, layers[last])):
            last += 1
        between, end = layers[at + 1 : last], last
        while end < len(layers) and _sums(up, between, layers[last:end], layers[end]):
            end += 1
        if end > last:
            yield up, between, layers[last:end]
        at = end if end > last else at + 1


def _sums(up: _Layer, between: list[_Layer], downs: list[_Layer], layer: _Layer) -> bool:
    """Return whether a layer sums over the channels of `up` too, beside `downs` and not after one of them."""
    beside = all(each.outputs != layer.inputs for each in downs)
    grouped = next((each for each in between if each.keeps_channels), None)
    same = grouped.outputs in (layer.inputs, *grouped.halves(layer)) if grouped else _follows(up, layer)
    return up.groups == layer.groups == 1 and beside and same and _in_a_row(up, layer)


def _keeps(up: _Layer, after: _Layer) -> bool:
    return after.keeps_channels and _follows(up, after)


def _joins(up: _Layer, after: _Layer) -> bool:
    """Return whether a linear layer gives a value for each channel of a convolution, such as one of the time."""
    return is_layer(up.module, *CONVS) and is_layer(after.module, "Linear") and up.outputs == after.outputs


def _follows(up: _Layer, after: _Layer) -> bool:
    """Return whether a layer takes as many channels as `up` has, or half as many (of a signal over time: a gate)."""
    return up.outputs == after.inputs or (is_layer(up.module, "Conv1d") and up.outputs == 2 * after.inputs)


def _in_a_row(up: _Layer, down: _Layer) -> bool:
    """Return whether two layers follow each other: convolutions of a block; linear layers by their names alone."""
    if is_layer(up.module, "Linear") or is_layer(down.module, "Linear"):
        same = up.name.rpartition(".")[0] == down.name.rpartition(".")[0] and type(up.module) is type(down.module)
        return same and _DIGIT.sub("", up.last) == _DIGIT.sub("", down.last) and up.last != down.last
    return True


def _shard(index: ModelIndex, up: _Layer, between: list[_Layer], downs: list[_Layer]) -> dict[str, Chained]:
    found: dict[str, Chained] = {}
    down = downs[0]
    halved = up.outputs == 2 * down.inputs
    why = f'guess: followed by "{_short(down, up)}"{", after one half gates the other" if halved else ""}'
    found[up.name] = "(gate_up channel)" if halved else "channel", why
    for layer in between:
        if layer.keeps_channels and halved:
            found[layer.name] = "(gate_up channel)", "each channel of both halves by itself"
        elif layer.keeps_channels:
            found[layer.name] = _by_group(layer), "each group of channels by itself"
        else:
            found[layer.name] = "channel", f'as wide as "{_short(up, layer)}", whose channels it joins'
    for name in _norms_between(index, up, down):
        found[name] = "channel", "each channel by itself"
    for layer in downs:
        found[layer.name] = "rowwise", f'sums over the channels of "{_short(up, layer)}"'
    return found


def _by_group(layer: _Layer) -> str:
    return "(groups group) ..." if getattr(layer.module, "transposed", False) else "(groups group)"


def _apart(index: ModelIndex, up: _Layer, down: _Layer, not_chained: Collection[str]) -> bool:
    """Return whether a list of modules stands between two layers, as the blocks of a net do between its first and its
    last layer, or a layer that is not chained, as attention does."""
    return any(
        is_layer(module, "ModuleList") or (index.own[name] and name.rpartition(".")[2] in not_chained)
        for name, module in _between(index, up, down).items()
    )


def _between(index: ModelIndex, up: _Layer, down: _Layer) -> dict[str, nn.Module]:
    """Return the modules that are listed between two layers, by name."""
    names = list(index.modules)
    return {name: index.modules[name] for name in names[names.index(up.name) + 1 : names.index(down.name)]}


def _norms_between(index: ModelIndex, up: _Layer, down: _Layer) -> Iterator[str]:
    """Iterate over modules, listed between two layers, that compute each of their channels by itself."""
    for name, module in _between(index, up, down).items():
        registered = dims_of(module)
        shapes = [index.leaf[full].tensor.shape for full in index.own[name].values()]
        per_channel = registered is not None and registered.output == "channel"
        if per_channel and any(shape == (down.inputs,) for shape in shapes):
            yield name


def _short(layer: _Layer, other: _Layer) -> str:
    """Return the name of a layer from where it differs from another one."""
    own, others = layer.name.split("."), other.name.split(".")
    same = next((i for i, pair in enumerate(zip(own, others, strict=False)) if pair[0] != pair[1]), 0)
    return ".".join(own[same:])

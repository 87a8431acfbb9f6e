"""Conversion of foreign rules: the `tp_plan` of Hugging Face models, and plans for torch's `parallelize_module`.

Both describe local tensors: where inputs are gathered, where outputs are scattered, which gradients are summed by hand.
Here activations have global shapes, so most of that follows from the parameter layouts. The conversion keeps the splits
of parameters, and the module borders where a plan requires an activation replicated or split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed.tensor.parallel as torch_parallel
from torch.distributed.tensor import Placement, Replicate, Shard

from shardlib.errors import RuleError, nearest
from shardlib.rules._model import ModelIndex
from shardlib.rules.patterns import NameIndex, compile_pattern

if TYPE_CHECKING:
    from torch import nn

__all__ = ["has_tp_plan", "read_parallelize_plan", "read_tp_plan"]

_KV_NAMES = ("k_proj", "v_proj", "k", "v", "key", "value")
_Q_NAMES = ("q_proj", "q", "query")


@dataclass
class _Draft:
    """Arguments of `Rules` under construction."""

    axis: str
    rules: dict[str, Any] = field(default_factory=dict)
    activations: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int | str] = field(default_factory=dict)
    optional: list[str] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        return {**vars(self), "optional": tuple(self.optional), "unmatched": "replicate"}


# Hugging Face.


def has_tp_plan(model: nn.Module) -> bool:
    """Return whether a model carries a tensor-parallel plan in Hugging Face's form. One that leaves out the repeated
    blocks, and names the output layer alone, does not count."""
    plan = _tp_plan(model)
    return any("*" in key for key in plan) or (bool(plan) and not _has_blocks(model))


def _has_blocks(model: nn.Module) -> bool:
    return any(name.rpartition(".")[2].isdigit() for name, _ in model.named_modules())


def read_tp_plan(model: nn.Module, axis: str = "tp") -> dict[str, Any]:
    """Return the arguments of `Rules` that express a model's `tp_plan`.

    The styles are those of transformers 5.23 (`distributed/tensor_parallel.py`, `distributed/expert_parallel.py`) and
    of 4.50 to 5.22, and those of diffusers 0.42 (`hooks/tensor_parallel.py`), where a style may be an object. Query,
    key and value projections are split by whole heads where the attention knows its `head_dim`; key and value heads
    fewer than the axis are then replicated. Entries that match nothing in this model (plans are written for a family)
    become optional.

    Raises:
        RuleError: the model carries no plan, or the plan has a style that is unknown or that no layout can express.
    """
    plan, index = _tp_plan(model), ModelIndex(model)
    if not plan:
        raise RuleError(
            f"{type(model).__qualname__} carries no tp_plan (looked at _tp_plan and config.base_model_tp_plan). Write "
            "rules for it, load a layout file, or let shardlib.rules.suggest(model) propose some."
        )
    draft = _Draft(axis)
    names = NameIndex([*index.leaf, *index.modules])
    for key, style in plan.items():
        _read_style(draft, index, key, style, names.select(compile_pattern(f"^{key}")))
    return draft.arguments()


def _tp_plan(model: nn.Module) -> dict[str, Any]:
    own = getattr(model, "_tp_plan", None)
    if own:
        return dict(own)
    base = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    prefix = getattr(model, "base_model_prefix", "")
    inside = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    return {f"{inside}{key}": style for key, style in base.items()}


@dataclass(frozen=True)
class _Target:
    """The target of a plan entry: a raw parameter of `ndim` dims, or (None) a module; and the widths of its blocks."""

    key: str
    name: str
    ndim: int | None
    blocks: Sequence[int] = ()


_Read = Callable[[_Draft, ModelIndex, _Target], None]


def _read_style(draft: _Draft, index: ModelIndex, key: str, given: Any, found: list[str]) -> None:
    style = given if isinstance(given, str) else type(given).__name__
    if style in _REFUSED:
        raise RuleError(
            f'tp_plan gives "{key}" the style "{style}", which {_REFUSED[style]}. Write rules for this model instead.'
        )
    if style not in _STYLES:
        raise RuleError(
            f'tp_plan gives "{key}" the style "{style}", which is not known; known are {_listed(_STYLES)}. Write rules '
            f"for this model instead.{nearest(style, _STYLES)}"
        )
    if not found:
        draft.rules[f"^{key}"] = "replicate"
        draft.optional.append(f"^{key}")
        draft.notes[f"^{key}"] = f'tp_plan: "{style}"; nothing in this model is called so'
        return
    leaf = index.leaf.get(found[0])
    blocks = _blocks_of(given, index.modules.get(found[0]))
    _STYLES[style](draft, index, _Target(f"^{key}", found[0], leaf.tensor.ndim if leaf else None, blocks))
    if f"^{key}" in draft.rules:
        draft.notes[f"^{key}"] = f'tp_plan: "{style}"'


def _blocks_of(style: Any, module: nn.Module | None) -> Sequence[int]:
    """Return the widths of the blocks that a style of diffusers splits each for itself: its own, or its module's."""
    own = getattr(style, "blocks", None)
    attributes = ("_tp_packed_col_blocks", "_tp_packed_row_blocks")
    return own or next((found for name in attributes if (found := getattr(module, name, None))), ())


def _column(draft: _Draft, index: ModelIndex, target: _Target) -> None:
    if target.ndim is not None:
        draft.rules[target.key] = Shard(max(target.ndim - 2, 0))
    elif _knows_head_dim(index, target.name):
        optional = "?" if target.name.rpartition(".")[2] in _KV_NAMES else ""
        draft.rules[target.key] = f"(heads@{draft.axis}{optional} head_dim)"
        draft.sizes["head_dim"] = "head_dim"
    else:
        draft.rules[target.key] = "colwise"


def _knows_head_dim(index: ModelIndex, name: str) -> bool:
    width = getattr(index.modules[name], "out_features", 0)
    parent = index.modules[name.rpartition(".")[0]]
    head_dim = getattr(parent, "head_dim", None)
    named = name.rpartition(".")[2] in (*_Q_NAMES, *_KV_NAMES)
    return named and isinstance(head_dim, int) and head_dim > 0 and width % head_dim == 0


def _row(draft: _Draft, index: ModelIndex, target: _Target) -> None:
    draft.rules[target.key] = "rowwise" if target.ndim is None else Shard(target.ndim - 1)


def _packed_column(draft: _Draft, index: ModelIndex, target: _Target) -> None:
    # Two halves of equal width, such as gate and up, lie one after the other; each is split.
    draft.sizes["packed"] = 2
    inner = " _" if target.ndim is not None and target.ndim > 1 else ""
    leading = "... " if target.ndim is not None and target.ndim > 2 else ""
    draft.rules[target.key] = f"{leading}(packed features@{draft.axis}){inner}"


def _packed_row(draft: _Draft, index: ModelIndex, target: _Target) -> None:
    if target.ndim == 1:
        draft.rules[target.key] = "replicate"
    else:
        draft.sizes["packed"] = 2
        draft.rules[target.key] = f"... (packed features@{draft.axis})"


def _block_column(draft: _Draft, index: ModelIndex, target: _Target) -> None:
    draft.rules[target.key] = _in_parts(draft, target.blocks) if len(target.blocks) > 1 else "colwise"


def _block_row(draft: _Draft, index: ModelIndex, target: _Target) -> None:
    if len(target.blocks) < 2:
        draft.rules[target.key] = "rowwise"
        return
    draft.rules[f"{target.key}.weight"] = f"_ {_in_parts(draft, target.blocks)}"
    if "bias" in index.own[target.name]:
        draft.rules[f"{target.key}.bias"] = "replicate"


def _in_parts(draft: _Draft, blocks: Sequence[int]) -> str:
    """Return a dim of blocks that lie one after the other: of the parts of equal width that they consist of, each is
    split, and so is each block."""
    parts = sum(blocks) // math.gcd(*blocks)
    draft.sizes[f"parts{parts}"] = parts
    return f"(parts{parts} features@{draft.axis})"


def _replicate(draft: _Draft, index: ModelIndex, target: _Target) -> None:
    if target.ndim is not None or index.own.get(target.name):  # else a norm without weights: nothing to lay out
        draft.rules[target.key] = "replicate"


def _replicated_output(draft: _Draft, index: ModelIndex, target: _Target) -> None:
    draft.activations[f"{target.key}.output"] = "replicate"


def _sequence(draft: _Draft, index: ModelIndex, target: _Target) -> None:
    draft.rules[target.key] = "replicate"
    for side in ("input", "output"):
        draft.activations[f"{target.key}.{side}"] = Shard(1)


def _experts(draft: _Draft, index: ModelIndex, target: _Target) -> None:
    draft.rules[target.key] = Shard(0)


def _nothing(draft: _Draft, index: ModelIndex, target: _Target) -> None:
    """Do nothing: the style corrects local arithmetic, which a global view does not need."""


def _both(first: _Read, second: _Read) -> _Read:
    def read(draft: _Draft, index: ModelIndex, target: _Target) -> None:
        first(draft, index, target)
        second(draft, index, target)

    return read


_STYLES: dict[str, _Read] = {
    "colwise": _column,
    "local_colwise": _column,
    "colwise_rep": _both(_column, _replicated_output),
    "colwise_gather_output": _both(_column, _replicated_output),
    "rowwise": _row,
    "local_rowwise": _row,
    "rowwise_rep": _row,
    "rowwise_split_input": _row,
    "embedding_rowwise": _row,
    "embedding_colwise": _both(_column, _replicated_output),
    "packed_colwise": _packed_column,
    "local_packed_colwise": _packed_column,
    "packed_rowwise": _packed_row,
    "local_packed_rowwise": _packed_row,
    "PackedColwiseParallel": _block_column,
    "PackedRowwiseParallel": _block_row,
    "sequence_parallel": _sequence,
    "replicate": _replicate,
    "replicated_with_grad_allreduce": _replicate,
    "mla_kv_a_proj": _replicate,
    "all_reduce": _replicated_output,
    "gather": _replicated_output,
    "moe_tp_experts": _replicated_output,
    "ep_dispatch_experts": _replicated_output,
    "grouped_gemm": _experts,
    "moe_identity_expert": _nothing,
    "local_params": _nothing,
    "local": _nothing,
}
_REFUSED = {
    "ep_router": "rewrites the router's choice of experts per rank and is not a layout",
    "isolated": "runs a module on its own local tensors and sums by hand, which is not a layout",
}


# torch.


def read_parallelize_plan(plan: Mapping[str, Any], axis: str = "tp") -> dict[str, Any]:
    """Return the arguments of `Rules` that express a plan for `parallelize_module`: paths from the root, `*` included.

    Raises:
        RuleError: a style that is not torch's, or one that lays out several tensors of one border differently.

    >>> read_parallelize_plan({"mlp.up": torch_parallel.ColwiseParallel()})["rules"]
    {'^mlp.up': 'colwise'}
    """
    draft = _Draft(axis)
    for path, style in plan.items():
        for kind, read in _TORCH_STYLES.items():
            if isinstance(style, kind):
                read(draft, f"^{path}", style)
                break
        else:
            known = _listed(kind.__name__ for kind in _TORCH_STYLES)
            raise RuleError(
                f'The plan gives "{path}" {style!r}; known are torch\'s own {known}. Write a rule for it instead.'
            )
    return draft.arguments()


def _torch_column(draft: _Draft, key: str, style: Any) -> None:
    draft.rules[key] = "colwise"
    if style.output_layouts != (Shard(-1),):
        _border(draft, key, "output", style.output_layouts)
    if style.input_layouts != (Replicate(),):
        _border(draft, key, "input", (Replicate(),))


def _torch_row(draft: _Draft, key: str, style: Any) -> None:
    draft.rules[key] = "rowwise"
    if style.output_layouts != (Replicate(),):
        _border(draft, key, "output", style.output_layouts)


def _torch_sequence(draft: _Draft, key: str, style: Any) -> None:
    draft.rules[key] = "replicate"
    for side in ("input", "output"):
        _border(draft, key, side, style.sequence_sharding)


def _torch_input(draft: _Draft, key: str, style: Any) -> None:
    desired = (*(style.desired_input_layouts or ()), *style.desired_input_kwarg_layouts.values())
    _border(draft, key, "input", desired)


def _torch_output(draft: _Draft, key: str, style: Any) -> None:
    _border(draft, key, "output", style.desired_output_layouts)


def _torch_both(draft: _Draft, key: str, style: Any) -> None:
    _torch_input(draft, key, style.prepare_module_input)
    _torch_output(draft, key, style.prepare_module_output)


def _border(draft: _Draft, key: str, side: str, layouts: Iterable[Placement | None]) -> None:
    """Lay out the first tensor that crosses a border; the plan must leave the others alone or treat them in the same
    way."""
    given = list(dict.fromkeys(each for each in layouts if each is not None))
    if len(given) > 1 or not all(isinstance(each, Shard | Replicate) for each in given):
        what = ", ".join(map(repr, given))
        raise RuleError(
            f'The plan wants the {side}s of "{key.removeprefix("^")}" as {what}; the input and the output of a module '
            "have one layout each, replicated or sharded. Give layouts to the modules that these tensors come from or "
            "go to instead."
        )
    if given:
        draft.activations[f"^{side}" if key == "^" else f"{key}.{side}"] = given[0]


_TORCH_STYLES: dict[type, Callable[[_Draft, str, Any], None]] = {
    torch_parallel.ColwiseParallel: _torch_column,
    torch_parallel.RowwiseParallel: _torch_row,
    torch_parallel.SequenceParallel: _torch_sequence,
    torch_parallel.PrepareModuleInputOutput: _torch_both,
    torch_parallel.PrepareModuleInput: _torch_input,
    torch_parallel.PrepareModuleOutput: _torch_output,
}


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)

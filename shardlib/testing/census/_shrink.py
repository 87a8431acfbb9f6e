"""Tiny configurations: one walk over the fields of a configuration, by their names."""

from __future__ import annotations

import functools
import inspect
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["VOCABULARY", "facts", "shrunk"]

VOCABULARY = 96
_FIRST_SPECIAL = 80  # ids of special tokens are this and above: text is drawn below
_LAYERS = re.compile(r"num_hidden_layers|n_layers?|num_layers|num_decoder_layers|layers|num_blocks")
_SEVERAL_POSITIONS = re.compile("glm4|glm_|glmga|glm5v|vl|omni")
_STAGES = r"depths|.*_dims|.*sizes|.*strides|.*ratios|num_heads"
_BASES = {4: 2, 32: 16, 48: 32}  # of lists of heads, widths and feed-forward widths, which keep their ratios
_SHARED = (4, 8, 32, 48, "kv_heads", "window")  # sizes that divided configurations do not take
_SHALLOW = 8  # from this divisor on stages have two layers at most
_TOKEN = re.compile(r".*(token_id|token_index|token_ids|_id|_index)")
_USUAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "pad_token_index": 0}
_DROPOUT = re.compile(
    r".*(drop|dropout|dropout_prob|dropout_rate|layerdrop|pdrop|drop_path_rate|drop_rate|dropout_p|mask_(time|feature)_prob)"
)
_SET = {"use_cache": False, "apply_spec_augment": False, "ctc_loss_reduction": "mean"}


@functools.cache
def facts() -> dict[str, Any]:
    """Return the tables of `census.toml`."""
    return tomllib.loads((Path(__file__).parent / "census.toml").read_text(encoding="utf-8"))


def shrunk(config: Any, share: int = 0) -> dict[str, Any]:
    """Return the arguments that make a configuration of this class tiny: the fields that change.

    Args:
        config: a configuration of Hugging Face's kind; its model type may have settings of its own in `census.toml`.
        share: 0 gives widths and numbers of heads the sizes of `census.toml`. Another number divides every width by it
            and leaves numbers of heads: fields that have to fit each other still do.
    """
    return _walk(config, _Ids(share))


class _Ids(dict[str, int]):
    """Small ids of special tokens: the same for a name everywhere in one configuration; and what divides its widths."""

    def __init__(self, share: int) -> None:
        super().__init__()
        self.share = share

    def __missing__(self, name: str) -> int:
        free = [i for i in range(VOCABULARY - 1, _FIRST_SPECIAL - 1, -1) if i not in self.values()]
        self[name] = _USUAL.get(name, free[0] if free else VOCABULARY - 1)
        return self[name]


def _walk(config: Any, ids: _Ids) -> dict[str, Any]:
    """Return the changed arguments of one configuration; those of its sub-configurations with their model types."""
    names = inspect.signature(type(config).__init__).parameters
    fields = {name: _get(config, name) for name in names if name not in facts()["derived"]["names"]}
    layers = max(2, *(len(dict.fromkeys(kinds)) for kinds in _by_layer(fields)), 2)
    made = {}
    for name, value in fields.items():
        new = _field(name, value, fields, ids, layers)
        if new is not value:
            made[name] = new
    if "rope_parameters" in fields and _SEVERAL_POSITIONS.search(config.model_type):
        made["rope_parameters"] = _sections(fields["rope_parameters"] or {})
    if ids.share:
        _maps(config, made)
    _heads(fields, made)
    for path, value in facts()["settings"].get(config.model_type, {}).items():
        _assign(made, path.split("."), value)
    return made


def _maps(config: Any, made: dict[str, Any]) -> None:
    """Let a backbone give as many feature maps as it usually does."""
    maps, stages = getattr(config, "out_features", None), getattr(config, "stage_names", None)
    if not maps or not stages or len(maps) >= len(stages):
        return
    last = len(stages) - 1
    if isinstance(made.get("num_hidden_layers"), int):
        last = made["num_hidden_layers"] = max(made["num_hidden_layers"], len(maps))
    made["out_features"] = [f"stage{i}" for i in range(last - len(maps) + 1, last + 1)]


def _heads(fields: Mapping[str, Any], made: dict[str, Any]) -> None:
    """Give the width of a head where a configuration leaves it to others, and some models do not look there."""
    if "head_dim" not in fields or fields["head_dim"] is not None:
        return
    width, heads = (
        next((now[name] for now in (made, fields) if type(now.get(name)) is int), 0)
        for name in ("hidden_size", "num_attention_heads")
    )
    if heads and width % heads == 0:
        made["head_dim"] = width // heads


def _get(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # a field that differs between layers
        return None


def _by_layer(fields: Mapping[str, Any]) -> Iterator[list[str]]:
    """Iterate over lists of kinds with one entry a layer."""
    depth = _depth(fields)
    for value in fields.values():
        if isinstance(value, list | tuple) and len(value) == depth and all(isinstance(each, str) for each in value):
            yield list(value)


def _depth(fields: Mapping[str, Any]) -> int:
    return next((fields[key] for key in fields if _LAYERS.fullmatch(key) and type(fields[key]) is int), 0)


def _field(name: str, value: Any, fields: Mapping[str, Any], ids: _Ids, layers: int) -> Any:
    if hasattr(type(value), "model_type"):
        return {**_walk(value, ids), **({"model_type": value.model_type} if value.model_type else {})}
    if isinstance(value, Mapping):
        return _sections(value) if name == "rope_parameters" and "mrope_section" in value else value
    if name in _SET:
        return _SET[name]
    if isinstance(value, float):
        return 0.0 if _DROPOUT.fullmatch(name) and value else value
    if isinstance(value, list | tuple):
        shared = ids.share and not (value and isinstance(value[0], str))
        return _shared(name, list(value), ids.share) if shared else _list(name, list(value), fields, layers)
    return _number(name, value, fields, ids, layers) if type(value) is int else value


def _sections(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters of positions whose sections, for several kinds of positions, fit a head of 8."""
    usual = {"rope_type": "default", "rope_theta": 10000.0}
    turned = int(4 * (rope.get("partial_rotary_factor") or 1.0))
    return {**usual, **rope, "mrope_section": _summing(rope.get("mrope_section") or [2, 1, 1], turned)}


def _summing(parts: list[int], total: int) -> list[int]:
    """Return parts with the sum `total`, each at least one.

    >>> _summing([24, 20, 20], 4)
    [2, 1, 1]
    """
    made = [max(1, part * total // sum(parts)) for part in parts]
    return [made[0] + total - sum(made), *made[1:]]


def _list(name: str, value: list[Any], fields: Mapping[str, Any], layers: int) -> Any:
    if not value:
        return value
    if len(value) == _depth(fields) and not re.fullmatch(_STAGES, name):  # one entry a layer
        kinds = list(dict.fromkeys(map(str, value)))
        strings = isinstance(value[0], str)
        return (kinds + kinds[-1:] * layers)[:layers] if strings else value[:layers]
    rule = _rule(name)
    if not all(type(each) is int for each in value) or not isinstance(rule, int):
        return value
    if value[0] == 3 and rule == 32 and len(value) > 1:  # the channels of an image
        return [3, *_list(name, value[1:], {}, layers)]
    if rule in _BASES and (least := min(value)) > 0:
        return [_BASES[rule] * max(1, min(8, round(each / least))) for each in value]
    return [min(each, rule) for each in value]


def _number(name: str, value: int, fields: Mapping[str, Any], ids: _Ids, layers: int) -> int:
    if _TOKEN.fullmatch(name):
        return value if value < 0 or (name not in _USUAL and value < VOCABULARY - 16) else ids[name]
    rule = _rule(name)
    if rule is None or rule == "keep" or value <= 0:
        return value
    if ids.share and (rule in _SHARED or "image_size" in name):
        return _shared(name, value, ids.share)
    if rule == "window":
        return min(value, 4) if value > 4 else value
    if rule == "kv_heads":
        heads = next((fields[key] for key in ("num_attention_heads", "n_head", "num_heads") if key in fields), None)
        return value if value == 1 else 4 if value == heads else 2
    if rule == 2 and _LAYERS.fullmatch(name):
        return min(value, layers)
    return min(value, int(rule))


def _shared(name: str, value: Any, share: int) -> Any:
    """Return a width, or nested lists with widths, divided; numbers below 16 count something else."""
    if isinstance(value, list | tuple):
        return [_shared(name, each, share) for each in value]
    if type(value) is not int or _rule(name) == "keep":
        return value
    if _rule(name) in (2, "window") or "patch" in name:
        return min(value, 2) if _rule(name) == 2 and share >= _SHALLOW else value
    if "image_size" in name:
        return min(value, 64)
    return max(value // share, 4) if value >= 16 else value


def _rule(name: str) -> int | str | None:
    for pattern, rule in facts()["sizes"].items():
        if re.fullmatch(pattern, name):
            return rule  # type: ignore[no-any-return]
    return None


def _assign(fields: dict[str, Any], path: list[str], value: Any) -> None:
    *parents, last = path
    for parent in parents:
        fields = fields.setdefault(parent, {})
    if value == "default":
        fields.pop(last, None)
    else:
        fields[last] = value

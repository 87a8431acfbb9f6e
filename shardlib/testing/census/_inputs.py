"""Batches for a model whose class is only known by its signature and its configuration."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardlib.testing.census._shrink import VOCABULARY, facts

__all__ = ["NoInputs", "batch_of", "rows_of"]

ROWS = 4
_SEQ = 8
_FIRST, _LAST = 3, VOCABULARY - 18  # ids of ordinary tokens


_AUDIO = ("input_values", "input_features", "audio_features", "spectrogram")
_OPTIONAL = ("pixel_values", "input_features", "bbox", "attention_mask")
_GRID = 4  # patches of an image along each side, where the model takes a list of patches
_TOGETHER = {  # arguments that have a default and are needed all the same
    "states": ("actions", "rewards", "returns_to_go", "timesteps"),
    "past_values": ("past_time_features", "past_observed_mask", "future_values", "future_time_features"),
}


class NoInputs(Exception):
    """The census does not know what a model takes."""


def batch_of(model: nn.Module, labels: str, extra: str, step: int) -> dict[str, Any]:
    """Return arguments by name for a model: its main input, what its forward requires, and labels.

    Args:
        model: a model of Hugging Face's kind, with `config` and `main_input_name`.
        labels: "tokens", "few tokens", "class", "token classes", or "" for none.
        extra: "all" gives every argument that there are values for, "transposed" audio features with time last, and
            patches as images.
        step: the seed.

    Raises:
        NoInputs: a required argument has no generator.
    """
    draw = torch.Generator().manual_seed(step)
    parameters = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    main = main if isinstance(main, str) else main[0]
    names = [name for name, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if main not in names and (main in parameters or not names):
        names.insert(0, main)
    text = "input_ids" in names
    encoder_decoder = getattr(model.config, "is_encoder_decoder", False)
    if encoder_decoder and "decoder_input_ids" in parameters and "decoder_input_ids" not in names:
        names.append("decoder_input_ids")
    if extra == "all":
        names += [name for name in ("input_ids", *_OPTIONAL) if name in parameters and name not in names]
    names += [name for name in _TOGETHER.get(names[0] if names else "", ()) if name in parameters and name not in names]
    made = {name: _value(name, model, draw) for name in names}
    if extra == "transposed":
        made = {name: _transposed(name, x, model) for name, x in made.items()}
    if labels and "labels" in parameters:
        ids = made.get("decoder_input_ids", made.get("input_ids")) if labels == "tokens" else None
        made["labels"] = _labels(labels, model, draw) if ids is None or (not text and not encoder_decoder) else ids
    return made


def _transposed(name: str, x: torch.Tensor, model: nn.Module) -> torch.Tensor:
    if name in _AUDIO:
        return x.transpose(-1, -2).contiguous()
    if name in ("hidden_states", "pixel_values") and x.ndim == 2:
        side: int = model.config.patch_size  # type: ignore[union-attr, assignment]
        return x.view(len(x), -1, side, side)
    return x


def rows_of(batch: Any, index: int, count: int) -> Any:
    """Return the rows of a batch for one of `count` data ranks: of each tensor with `ROWS` rows, or so many of each."""
    return {name: x.chunk(count)[index] if _has_rows(x) else x for name, x in batch.items()}


def _has_rows(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.ndim > 0 and len(x) % ROWS == 0


def _value(name: str, model: nn.Module, draw: torch.Generator) -> torch.Tensor:
    config: Any = model.config
    if name in ("input_ids", "decoder_input_ids"):
        books = getattr(config, "num_codebooks", 1)
        shape = (ROWS, _SEQ, books) if books > 1 and "audio" in config.model_type else (ROWS, _SEQ)
        shape = (ROWS * books, _SEQ) if "musicgen" in config.model_type else shape  # a row for each codebook
        return torch.randint(_FIRST, _LAST, shape, generator=draw)
    if name in ("attention_mask", "decoder_attention_mask"):
        return torch.ones(ROWS, _SEQ, dtype=torch.int64)
    if name in ("hidden_states", "pixel_values") and "grid_thw" in inspect.signature(model.forward).parameters:
        return torch.randn(ROWS * _GRID * _GRID, _patch(config), generator=draw)
    if name == "grid_thw":
        return torch.tensor([1, _GRID, _GRID]).repeat(ROWS, 1)
    if name in ("pixel_values", "pixel_values_videos", "pixels"):
        return torch.randn(_image(config, name), generator=draw)
    if name == "bbox":
        return torch.arange(4).expand(ROWS, _SEQ, 4).contiguous()
    if name in ("input_values", "audio_values", "audio", "waveform") and not hasattr(config, "num_mel_bins"):
        channels = (getattr(config, "audio_channels", 1),) if hasattr(config, "codebook_size") else ()
        return torch.randn(ROWS, *channels, 4000, generator=draw)
    if name in _AUDIO:
        return torch.randn(_spectrogram(config), generator=draw)
    if name.endswith("features_mask") and any(audio in inspect.signature(model.forward).parameters for audio in _AUDIO):
        *_, longest, _ = _spectrogram(config)
        return torch.ones(ROWS, longest, dtype=torch.int64)
    if name in facts()["inputs"]:
        return _declared(facts()["inputs"][name], config, draw)
    raise NoInputs(f'its forward requires "{name}", for which the census has no values')


def _patch(config: Any) -> int:
    """Return the number of values of one patch of an image, over its times."""
    channels = getattr(config, "in_channels", None) or getattr(config, "num_channels", None) or 3
    times = getattr(config, "temporal_patch_size", None) or getattr(config, "patch_temporal", None) or 1
    return int(channels * times * config.patch_size**2)


def _declared(given: Mapping[str, Any], config: Any, draw: torch.Generator) -> torch.Tensor:
    """Return a tensor of `census.toml`: its dims are numbers, "rows", "seq", or sums of fields of the configuration.

    A field that a configuration lacks counts as none; a dim of such fields is left out.
    """
    shape = [size for dim in given["shape"] if (size := _size(dim, config)) is not None]
    if given["values"] == "normal":
        return torch.randn(shape, generator=draw)
    if given["values"] == "ids":
        return torch.randint(_FIRST, 8, shape, generator=draw)
    return {"zeros": torch.zeros(shape).long(), "ones": torch.ones(shape).long(), "true": torch.ones(shape)}[
        given["values"]
    ]


def _size(dim: int | str, config: Any) -> int | None:
    if isinstance(dim, int):
        return dim
    known = {"rows": ROWS, "seq": _SEQ}
    found = [known.get(each, getattr(config, each, None)) for each in dim.split(" + ")]
    sizes = [max(each) if isinstance(each, list) else int(each) for each in found if each is not None]
    return sum(sizes) if sizes else None


def _image(config: Any, name: str) -> tuple[int, ...]:
    vision = getattr(config, "vision_config", None) or getattr(config, "backbone_config", None) or config
    size = getattr(config, "image_size", None) or getattr(vision, "image_size", None) or 64
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    channels = getattr(config, "num_channels", None) or getattr(vision, "num_channels", None) or 3
    frames = getattr(config, "num_frames", None) or (4 if name == "pixel_values_videos" else None)
    return (ROWS, frames, channels, height, width) if frames else (ROWS, channels, height, width)


def _spectrogram(config: Any) -> tuple[int, ...]:
    """Return rows, times and features, or, as Whisper takes them, features and times."""
    of = getattr(config, "audio_config", None) or getattr(config, "encoder_config", None) or config
    widths = ("feature_projection_input_dim", "input_feat_per_channel", "feat_dim", "input_dim", "input_size")
    width = next((getattr(of, name) for name in widths if getattr(of, name, None)), None)
    longest = getattr(of, "max_source_positions", None)
    if longest and width is None:
        return ROWS, getattr(of, "num_mel_bins", 80), 2 * longest
    width = width or getattr(of, "num_mel_bins", None) or getattr(of, "hidden_size", None) or 80
    return ROWS, int(getattr(of, "max_length", None) or 64), int(width)


def _labels(kind: str, model: nn.Module, draw: torch.Generator) -> torch.Tensor:
    classes = getattr(model.config, "num_labels", 2)
    shape = {"class": (ROWS,), "few tokens": (ROWS, 3)}.get(kind, (ROWS, _SEQ))
    vocabulary = getattr(model.config, "vocab_size", None) or VOCABULARY
    low, high = (0, classes) if "class" in kind else (_FIRST, min(_LAST, vocabulary))
    return torch.randint(low, high, shape, generator=draw)

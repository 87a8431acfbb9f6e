"""Training runs of tiny models of many families, whose configurations and batches the census makes. Importable on
ranks."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import shardlib as sl
from shardlib.testing import Report, equivalent
from shardlib.testing.census import _models
from shardlib.testing.census._run import mean_loss
from tests.families.transformer_models import transformers  # noqa: F401  with a torchvision that fits

__all__ = ["Kin"]

_ODD = 7  # a length of texts that no mesh divides


@dataclass(frozen=True)
class Kin:
    """One training run.

    Attributes:
        name: the architecture, as transformers calls it (`config.model_type`).
        mode: of its layout file; the file's own rules without one.
        extra: of `batch_of`: "all" gives a model of texts and images both.
        cls: a class other than the first of the architecture.
    """

    name: str
    mesh: str
    mode: str | None = None
    extra: str = ""
    cls: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.cls or self.name, self.mesh, self.mode, self.extra)))

    @functools.cached_property
    def entry(self) -> _models.Entry:
        entry = next(each for each in _models.entries("transformers") if each.name == self.name)
        return dataclasses.replace(entry, cls=self.cls or entry.cls)

    def make_model(self) -> nn.Module:
        return _models.build(self.entry)

    def make_batch(self, step: int) -> Any:
        made = _models.batch(self.entry, self.entry.labels, self.extra, step)
        made = {name: x[:, :_ODD].contiguous() if x.dtype == torch.int64 and x.ndim == 2 else x for name, x in made.items()}
        return self._with_places_of_images(made) if self.extra else made

    def _with_places_of_images(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Put an image's tokens before each text; the model takes the rest of its inputs from these."""
        config = _models.build(self.entry).config
        of = config.vision_config
        ids = batch["input_ids"]
        places = ids.new_full((len(ids), (of.image_size // of.patch_size) ** 2), config.image_token_id)
        ids = torch.cat([places, ids], 1)
        return {"input_ids": ids, "pixel_values": batch["pixel_values"], "labels": ids}

    def report(self, **changes: Any) -> Report:
        rules = sl.layouts.for_model(self.make_model(), self.mode)
        given = {"mesh": self.mesh, "rules": rules, "loss": mean_loss, "steps": 1}
        return equivalent(self.make_model, self.make_batch, **{**given, **changes})

"""Training runs of tiny models of many families, whose configurations and batches the census makes. Importable on
ranks."""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardlib.testing.census import Entry, entries
from shardlib.testing.census._diffusion import batch_of, class_of
from shardlib.testing.census._models import batch, build
from shardlib.testing.census._run import mean_loss
from tests.families.transformer_models import transformers  # noqa: F401  with a torchvision that fits

__all__ = ["Diffusion", "Kin", "Timm", "kin_of"]

_ODD = 7  # a length of texts that no mesh divides; modes get one that meshes divide, so that they do what they are for


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

    @property
    def entry(self) -> Entry:
        entry = next(each for each in entries("transformers") if each.name == self.name)
        return dataclasses.replace(entry, cls=self.cls or entry.cls)

    def make_model(self) -> nn.Module:
        return build(self.entry)

    def make_batch(self, step: int) -> Any:
        made = batch(self.entry, self.entry.labels, self.extra, step)
        if not self.mode:
            texts = {name: x for name, x in made.items() if x.dtype == torch.int64 and x.ndim == 2}
            made |= {name: x[:, :_ODD].contiguous() for name, x in texts.items()}
        return self._with_places_of_images(made) if self.extra else made

    def _with_places_of_images(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Put an image's tokens before each text; the model takes the rest of its inputs from these."""
        config = build(self.entry).config
        of = config.vision_config
        ids = batch["input_ids"]
        places = ids.new_full((len(ids), (of.image_size // of.patch_size) ** 2), config.image_token_id)
        ids = torch.cat([places, ids], 1)
        return {"input_ids": ids, "pixel_values": batch["pixel_values"], "labels": ids}

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return mean_loss(model, batch)


def kin_of(family: str, mesh: str, mode: str | None = None) -> Kin:
    """Return the run of a family, "NAME", "NAME/CLASS" or "NAME/CLASS+EXTRA"."""
    name, _, more = family.partition("/")
    cls, _, extra = more.partition("+")
    return Kin(name, mesh, mode, extra, cls)


@dataclass(frozen=True)
class Timm:
    """One training run of timm's VisionTransformer.

    Attributes:
        settings: arguments of the class, beside those that make it small.
    """

    mesh: str
    mode: str | None = None
    settings: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return " ".join(filter(None, ("timm", self.mesh, self.mode, *(name for name, _ in self.settings))))

    def make_model(self) -> nn.Module:
        timm = importlib.import_module("timm.models.vision_transformer")
        made: nn.Module = timm.VisionTransformer(
            img_size=8,
            patch_size=4,
            embed_dim=16,
            depth=2,
            num_heads=4,
            mlp_ratio=2.0,
            num_classes=3,
            **dict(self.settings),
        )
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        return made.train()

    def make_batch(self, step: int) -> torch.Tensor:
        return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step))


_UNET = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4, "attention_head_dim": 8}
_DIT = {"sample_size": 8, "num_attention_heads": 4, "attention_head_dim": 4, "num_layers": 2, "in_channels": 4}
_DIFFUSION: dict[str, dict[str, Any]] = {
    "UNet2DModel": {
        **_UNET,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    },
    "UNet2DConditionModel": {
        **_UNET,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": 16,
        "attention_head_dim": 2,
    },
    "DiTTransformer2DModel": {**_DIT, "num_embeds_ada_norm": 10},
    "PixArtTransformer2DModel": {**_DIT, "cross_attention_dim": 16, "caption_channels": 16},
}


@dataclass(frozen=True)
class Diffusion:
    """One training run of a model of diffusers.

    Attributes:
        settings: arguments of the class, beside those that make it small.
    """

    name: str
    mesh: str
    mode: str | None = None
    settings: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return " ".join(filter(None, (self.name, self.mesh, self.mode, *(name for name, _ in self.settings))))

    def make_model(self) -> nn.Module:
        made: nn.Module = class_of(self.name)(**{**_DIFFUSION[self.name], **dict(self.settings)})
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return made.train()

    def make_batch(self, step: int) -> Any:
        extra = "image" if self.name.startswith("UNet") else "image, all"
        return batch_of(self._skeleton, extra, step)

    @property
    def _skeleton(self) -> nn.Module:
        with torch.device("meta"):
            return self.make_model()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return mean_loss(model, batch)

"""Training runs of Hugging Face models: a class, its kind of attention, a mesh, a batch. Importable on ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import shardlib as sl
from shardlib.testing import Report, assert_equivalent
from tests.families.transformer_models import build, images, text

__all__ = ["BERT", "GPT2", "LAYOUTS", "LLAMA", "MISTRAL", "VIT", "Case", "prove"]

LAYOUTS = {
    "GPT2LMHeadModel": "gpt2",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "BertForMaskedLM": "bert",
    "ViTForImageClassification": "vit",
}
GPT2, LLAMA, MISTRAL, BERT, VIT = LAYOUTS
_DROPOUT: dict[str, dict[str, Any]] = {
    "GPT2": {"attn_pdrop": 0.2, "embd_pdrop": 0.2, "resid_pdrop": 0.2},
    "Llama": {"attention_dropout": 0.2},
    "Bert": {"attention_probs_dropout_prob": 0.2, "hidden_dropout_prob": 0.2},
    "ViT": {"attention_probs_dropout_prob": 0.2, "hidden_dropout_prob": 0.2},
}


@dataclass(frozen=True)
class Case:
    """One training run: a model class, its kind of attention, a mesh, a batch.

    Texts are 10 tokens long and images 5 patches, which four ranks share unevenly.

    Attributes:
        mode: of the layout file; the file's own rules without one.
        padding: of texts, "left" or "right".
        labels: "tokens" or "class": the model computes its loss.
        dropout: with the random numbers of PyTorch, in every place that the model has for it.
        settings: of the model's configuration.
        gathers: names of the ops that have no sharding rule for what they meet.
        layers: one by default, or two of a model whose blocks are compiled, which run one program.
    """

    model: str
    attention: str
    mesh: str
    mode: str | None = None
    padding: str | None = None
    labels: str | None = None
    compile: str | None = None
    dropout: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    gathers: tuple[str, ...] = ()
    layers: int | None = None

    def __str__(self) -> str:
        dropout = "dropout" if self.dropout else None
        layers = f"{self.layers} layers" if self.layers else None
        parts = (self.model, self.mode, self.attention, self.mesh, self.padding, self.labels, self.compile, dropout)
        return " ".join(str(part) for part in (*parts, *self.settings, layers) if part)

    @property
    def world_size(self) -> int:
        return sl.MeshShape(self.mesh).world_size

    @property
    def rules(self) -> sl.Rules | None:
        return sl.layouts.load(LAYOUTS[self.model], self.mode) if self.mode else None

    def make_model(self) -> nn.Module:
        dropped = [of for family, of in _DROPOUT.items() if self.dropout and self.model.startswith(family)]
        name = "n_layer" if self.model.startswith("GPT2") else "num_hidden_layers"
        layers = {name: self.layers or (2 if self.compile else 1)}
        return build(self.model, self.attention, **{**dict(*dropped), **layers, **self.settings})

    def make_batch(self, step: int) -> Any:
        if self.model.startswith("ViT"):
            return images(step, labels=self.labels)
        # A compiled block fills no cache; see `test_a_cache_is_filled_by_eager_blocks`.
        more: dict[str, Any] = {"use_cache": False} if self.compile and not self.model.startswith("Bert") else {}
        if self.settings.get("add_cross_attention"):
            draw = torch.Generator().manual_seed(step)
            more["encoder_hidden_states"] = torch.randn(4, 5, 32, generator=draw)
        return text(step, padding=self.padding, labels=self.labels, **more)


def prove(case: Case, **changes: Any) -> Report:
    """Compare with one device, and the ops that ranks gather with those of the case.

    In a mode, sequences are split that no number of ranks divides: there any op may be gathered.

    Args:
        case: what to train.
        **changes: arguments of `equivalent`.
    """
    given = {
        "model": case.make_model,
        "batch": case.make_batch,
        "mesh": case.mesh,
        "rules": case.rules,
        "compile": case.compile,
        "rng": "fast",
        "steps": 2,
    }
    report = assert_equivalent(**{**given, **changes})
    assert case.mode or report.gathered == case.gathers, report.gathered
    return report

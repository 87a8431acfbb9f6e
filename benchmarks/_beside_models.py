"""Models and configurations whose memory `planner_beside.py` predicts and measures.

Every model returns its loss, so that one call is what a tool and a run count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import _models
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Inputs = tuple[Tensor, Tensor]
SHARDINGS = "replicate", "zero1", "zero2", "zero3", "fsdp"


@dataclass(frozen=True)
class Decoder:
    """The sizes from which formulas for decoders compute memory."""

    layers: int
    embed: int
    heads: int
    kv_heads: int
    ff: int
    vocab: int
    seq: int
    gated: bool = False
    rms_norm: bool = False
    tied: bool = False


@dataclass(frozen=True)
class Subject:
    """A model that several tools are asked about.

    Attributes:
        build: makes the network, on one device.
        blocks: lists the modules that are sharded, and recomputed, as units.
        example: makes inputs and targets, of some number of rows.
        rows: is the batch of one rank.
        decoder: has its sizes if it is a decoder; formulas know no other model.
    """

    build: Callable[[], nn.Module]
    blocks: Callable[[Any], list[nn.Module]]
    example: Callable[[int], Inputs]
    rows: int
    decoder: Decoder | None = None


@dataclass(frozen=True)
class Case:
    """One configuration of a training step."""

    model: str
    ranks: int
    sharding: str
    recompute: bool = False
    dtype: str = "fp32"

    def __str__(self) -> str:
        more = ", recomputed" if self.recompute else ""
        return f"{self.model}, {self.ranks} ranks, {self.sharding}, {self.dtype}{more}"


class Training(nn.Module):
    """A network that returns its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        out = self.net(inputs)
        logits = out if isinstance(out, Tensor) else out.logits
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def build(case: Case) -> Training:
    """Return the model of a case on one device, the same on every rank."""
    torch.manual_seed(0)
    return Training(MODELS[case.model].build())


def units(case: Case, model: Training) -> list[nn.Module]:
    """Return the modules of a model that are sharded and recomputed as units."""
    return MODELS[case.model].blocks(model.net)


def unit_names(case: Case) -> list[str]:
    """Return the names of these modules."""
    with torch.device("meta"):
        model = build(case)
    blocks = {id(block) for block in units(case, model)}
    return [name for name, module in model.named_modules() if id(module) in blocks]


def example(case: Case) -> Inputs:
    """Return the batch of one rank."""
    subject = MODELS[case.model]
    return subject.example(subject.rows)


def cases(quick: bool) -> Iterator[Case]:
    """Yield the configurations. Formulas for bf16 know decoders only, and so does that part of the list."""
    for ranks in (2,) if quick else (2, 4):
        for name in ("gpt-256", "resnet") if quick else MODELS:
            for dtype in ("fp32", "bf16") if MODELS[name].decoder else ("fp32",):
                for sharding in SHARDINGS:
                    yield from (Case(name, ranks, sharding, recompute, dtype) for recompute in (False, True))


def _gpt(embed: int, layers: int, vocab: int, seq: int, rows: int) -> Subject:
    size = _models.Size(embed, layers, 8, vocab, seq, rows, rounds=0)
    sizes = Decoder(layers, embed, 8, 8, 4 * embed, vocab, seq)
    return Subject(lambda: _models.GPT(size), _repeated, _tokens(vocab, seq), rows, sizes)


def _llama() -> Subject:
    """A small Llama with grouped key heads and tied embeddings, as Llama 3.2 has them."""
    size = Decoder(6, 384, 6, 2, 1024, 4096, 256, gated=True, rms_norm=True, tied=True)

    def net() -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=size.vocab,
            hidden_size=size.embed,
            intermediate_size=size.ff,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.kv_heads,
            max_position_embeddings=size.seq,
            tie_word_embeddings=size.tied,
            use_cache=False,
        )
        return LlamaForCausalLM(config)

    return Subject(net, _repeated, _tokens(size.vocab, size.seq), 2, size)


def _vit() -> Subject:
    def net() -> nn.Module:
        from transformers import ViTConfig, ViTForImageClassification

        config = ViTConfig(
            hidden_size=256,
            num_hidden_layers=6,
            num_attention_heads=4,
            intermediate_size=1024,
            image_size=64,
            patch_size=8,
        )
        config.num_labels = 100
        return ViTForImageClassification(config)

    return Subject(net, _repeated, _images(64, 100), 8)


def _resnet() -> Subject:
    def net() -> nn.Module:
        from torchvision.models import resnet18

        return resnet18(num_classes=100)

    def blocks(net: Any) -> list[nn.Module]:
        return [block for layer in (net.layer1, net.layer2, net.layer3, net.layer4) for block in layer]

    return Subject(net, blocks, _images(64, 100), 8)


def _repeated(net: nn.Module) -> list[nn.Module]:
    """Return the modules of the only ModuleList."""
    (blocks,) = (module for module in net.modules() if isinstance(module, nn.ModuleList))
    return list(blocks)


def _tokens(vocab: int, seq: int) -> Callable[[int], Inputs]:
    return lambda rows: (torch.randint(vocab, (rows, seq)), torch.randint(vocab, (rows, seq)))


def _images(side: int, classes: int) -> Callable[[int], Inputs]:
    return lambda rows: (torch.randn(rows, 3, side, side), torch.randint(classes, (rows,)))


MODELS = {
    "gpt-256": _gpt(256, 4, 2048, 128, 4),
    "gpt-512": _gpt(512, 8, 4096, 256, 2),
    "llama": _llama(),
    "vit": _vit(),
    "resnet": _resnet(),
}

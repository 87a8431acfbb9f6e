"""Small models and their batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from shardlib._mesh_shape import MeshLike, MeshShape
from shardlib.testing.models import MLP, ConvNet, Tokens, Transformer, batch_for
from shardlib.testing.strategies._draws import among, often, seldom

__all__ = ["ModelFactory", "batch_sizes", "batches", "convnets", "draw_batch", "mlps", "transformers"]


@dataclass(frozen=True, repr=False)
class ModelFactory:
    """Makes a model; a value that can be pickled, so that ranks make the same one.

    Attributes:
        cls: the class, or any function that returns a module.
        arguments: its keyword arguments, as pairs.
        frozen: names of parameters that are not trained.
        thaw: whether they are from the second step on; for that give `before_step` to `equivalent`.

    >>> factory = ModelFactory(nn.Linear, (("in_features", 2), ("out_features", 3)), frozen=("bias",))
    >>> factory
    ModelFactory(Linear(in_features=2, out_features=3), frozen=('bias',))
    >>> factory().bias.requires_grad
    False
    """

    cls: Callable[..., nn.Module]
    arguments: tuple[tuple[str, Any], ...] = ()
    frozen: tuple[str, ...] = ()
    thaw: bool = False

    def __call__(self) -> nn.Module:
        model = self.cls(**dict(self.arguments))
        self.before_step(model, 0)
        return model

    def before_step(self, model: nn.Module, step: int) -> None:
        """Freeze and thaw the parameters for this step."""
        parameters = dict(model.named_parameters())
        for name in self.frozen:
            parameters[name].requires_grad_(self.thaw and step > 0)

    def __repr__(self) -> str:
        named = getattr(self.cls, "__qualname__", repr(self.cls))
        shown = [f"{named}({', '.join(f'{name}={value!r}' for name, value in self.arguments)})"]
        shown += [f"frozen={self.frozen!r}"] if self.frozen else []
        shown += ["thaw=True"] if self.thaw else []
        return f"ModelFactory({', '.join(shown)})"


# Sizes of one head and numbers of heads, the narrowest first. At least four features: a LayerNorm of two gives +1 and
# -1 whatever it is given, and its gradient is rounding alone.
_HEADS = ((2, 2), (1, 4), (3, 2), (2, 3), (4, 2), (2, 4), (3, 3), (4, 3))


def transformers(*, dropout: bool = False, min_layers: int = 1, max_layers: int = 2) -> st.SearchStrategy[ModelFactory]:
    """Generate transformers of `shardlib.testing.models`: fused or separate q, k and v, grouped queries, tied
    embeddings, uneven vocabularies, LayerNorm or RMSNorm, learned or rotary positions, with and without biases, frozen
    parameters.

    Shrinks towards one layer of two heads of two features, five tokens.

    >>> from hypothesis import find
    >>> find(transformers(), lambda factory: True)
    ModelFactory(Transformer(vocab=5, heads=2, head=2))
    """
    return _transformers(dropout, min_layers, max_layers)


@st.composite
def _transformers(draw: st.DrawFn, dropout: bool, min_layers: int, max_layers: int) -> ModelFactory:
    heads, head = draw(st.sampled_from(_HEADS))
    arguments = {"vocab": draw(st.integers(5, 9)), "heads": heads, "head": head}
    layers = draw(st.integers(min_layers, max_layers))
    fewer = [None, *(n for n in range(heads - 1, 0, -1) if heads % n == 0)]
    choices: dict[str, st.SearchStrategy[Any]] = {
        "kv_heads": st.integers(0, 2).map(lambda at: fewer[at % len(fewer)]),
        "fused": st.sampled_from([True, False]),
        "tied": st.booleans(),
        "dropout": _dropout(dropout),
        "norm": st.sampled_from(["layer", "rms"]),
        "position": st.sampled_from(["learned", "rotary"]).map(lambda p: "learned" if head % 2 else p),
        "bias": st.sampled_from([True, False]),
    }
    simplest = {"layers": 1, "kv_heads": None, "fused": True, "tied": False, "dropout": 0.0, "norm": "layer"}
    simplest |= {"position": "learned", "bias": True}
    return _factory(draw, Transformer, arguments, {"layers": layers}, choices, simplest)


def mlps(*, dropout: bool = False) -> st.SearchStrategy[ModelFactory]:
    """Generate MLPs of `shardlib.testing.models`, of any widths from one to nine: a layer or its weight used twice,
    buffers that change, an unused layer, frozen parameters.

    Shrinks towards widths of one.

    >>> from hypothesis import find
    >>> find(mlps(), lambda factory: True)
    ModelFactory(MLP(ins=1, width=1, outs=1))
    """
    return _mlps(dropout)


@st.composite
def _mlps(draw: st.DrawFn, dropout: bool) -> ModelFactory:
    arguments = {name: draw(st.integers(1, 9)) for name in ("ins", "width", "outs")}
    choices: dict[str, st.SearchStrategy[Any]] = {
        "bias": st.sampled_from([True, False]),
        "shared": st.sampled_from(["", "weight", "module"]),
        "dropout": _dropout(dropout),
        "buffers": st.booleans(),
        "unused": st.booleans(),
    }
    simplest = {"bias": True, "shared": "", "dropout": 0.0, "buffers": False, "unused": False}
    return _factory(draw, MLP, arguments, {}, choices, simplest)


def convnets(*, dropout: bool = False) -> st.SearchStrategy[ModelFactory]:
    """Generate convolutional nets of `shardlib.testing.models`, of one to seven channels, with BatchNorm or GroupNorm.

    Shrinks towards one channel and windows of one pixel.

    >>> from hypothesis import find
    >>> find(convnets(), lambda factory: True)
    ModelFactory(ConvNet(channels=1, outs=1, kernel=1))
    """
    return _convnets(dropout)


@st.composite
def _convnets(draw: st.DrawFn, dropout: bool) -> ModelFactory:
    arguments = {
        "channels": draw(st.integers(1, 7)),
        "outs": draw(st.integers(1, 5)),
        "kernel": draw(st.sampled_from([1, 3])),
    }
    choices: dict[str, st.SearchStrategy[Any]] = {
        "norm": st.sampled_from(["batch", "group"]),
        "dropout": _dropout(dropout),
    }
    return _factory(draw, ConvNet, arguments, {}, choices, {"norm": "batch", "dropout": 0.0})


def _dropout(wanted: bool) -> st.SearchStrategy[float]:
    return st.sampled_from([0.0, 0.3]) if wanted else st.just(0.0)


def _factory(
    draw: st.DrawFn,
    cls: Callable[..., nn.Module],
    arguments: Mapping[str, Any],
    drawn: Mapping[str, Any],
    choices: Mapping[str, st.SearchStrategy[Any]],
    simplest: Mapping[str, Any],
) -> ModelFactory:
    """Draw a factory and its arguments, without those that are the simplest; some of its parameters are frozen.

    Three in four models have choices at all. So the simplest one takes few draws, which is what hypothesis shrinks to.
    """
    if draw(often):
        drawn = {**drawn, **{name: draw(strategy) for name, strategy in choices.items()}}
    more = {name: value for name, value in drawn.items() if value != simplest[name]}
    factory = ModelFactory(cls, (*arguments.items(), *more.items()))
    if not draw(seldom):
        return factory
    names = _parameters(factory)
    frozen = draw(st.lists(among(names), min_size=1, max_size=2, unique=True))
    return ModelFactory(cls, factory.arguments, tuple(frozen), draw(st.booleans()))


@lru_cache(maxsize=256)
def _parameters(factory: Callable[[], nn.Module]) -> tuple[str, ...]:
    with torch.random.fork_rng(devices=[]):
        return tuple(name for name, _ in factory().named_parameters())


def batches(model: nn.Module, mesh: MeshLike | None = None) -> st.SearchStrategy[Callable[[int], Any]]:
    """Generate batches for a model of `shardlib.testing.models`: functions of the step that can be pickled.

    The number of rows is a multiple of the mesh's data ranks. Shrinks towards two rows (of two data ranks, one each),
    of one token.

    Raises:
        InputError: another model.

    >>> from hypothesis import find
    >>> find(batches(MLP(ins=3)), lambda batch: True)
    Numbers(shape=(2, 3))
    """
    ranks = 1 if mesh is None else MeshShape.of(mesh).data_ranks
    return draw_batch(batch_for(model), getattr(model, "context", 1), ranks)


@lru_cache(maxsize=256)
def batch_sizes(factory: Callable[[], nn.Module]) -> tuple[Any, int]:
    with torch.random.fork_rng(devices=[]):
        model = factory()
    return batch_for(model), getattr(model, "context", 1)


@st.composite
def draw_batch(draw: st.DrawFn, made: Any, context: int, ranks: int) -> Callable[[int], Any]:
    rows = ranks * draw(st.integers(2 if ranks == 1 else 1, 6 if ranks == 1 else 3))
    if isinstance(made, Tokens):
        return Tokens(rows, draw(st.integers(1, context)), made.vocab)
    return type(made)((rows, *made.shape[1:]))

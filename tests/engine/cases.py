"""Generated models, meshes and rule sets. They shrink towards one axis, small models, nothing split, nothing frozen.

A case is a value: what it says is built on every rank, alike. Any assignment of model axes to the dims of parameters,
buffers and activations is drawn, sensible or not (a bias split apart from its weight's rows, a norm whose features are
split, both axes on one dim, more ranks than a dim has indices, each block by rules of its own): the numbers have to be
those of one device all the same. Not drawn is what shardlib refuses, which `test_refusals.py` holds: a fused dim split
over two axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

import shardlib as sl
from tests.engine import models

MESHES = (
    "tp=2", "dp=2", "tp=3", "dp=1,tp=2", "dp=2,tp=2", "tp=2,dp=2", "tp=2,sp=2", "sp=2,dp=2", "dp=3,tp=1", "tp=4",
    "sp=2,tp=2", "sp=2,dp=1,tp=2", "dp=2,tp=1,sp=2", "tp=3", "tp=2", "sp=2,dp=2,tp=2",
)  # fmt: skip
ROWS = 6  # of a global batch: as many as every number of data ranks divides

Batch = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A model by the name of its factory and that factory's arguments; rules; how it is trained.

    Attributes:
        frozen: indices of parameters that are not trained.
        thaw: whether they are from the second step on.
        no_sync: whether only the last of the accumulated backward passes reduces gradients.
        clip: the gradient norm that steps are clipped to.
    """

    mesh: str
    model: str
    sizes: tuple[tuple[str, Any], ...]
    rules: tuple[tuple[str, str], ...]
    fused: tuple[tuple[str, int], ...] = ()
    frozen: tuple[int, ...] = ()
    thaw: bool = False
    accumulate: int = 1
    no_sync: bool = False
    clip: float | None = None

    @property
    def world_size(self) -> int:
        return sl.MeshShape(self.mesh).world_size

    def make_model(self) -> nn.Module:
        model = _FACTORIES[self.model](**dict(self.sizes))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
        self.before_step(model, 0)
        return model

    def before_step(self, model: nn.Module, step: int) -> None:
        parameters = list(model.parameters())
        for index in self.frozen:
            parameters[index % len(parameters)].requires_grad_(self.thaw and step > 0)

    def make_rules(self) -> sl.Rules:
        return sl.Rules(dict(self.rules), sizes=dict(self.fused), unmatched="replicate")

    def make_batch(self, step: int) -> Batch:
        if self.model == "transformer":
            return _tokens(step)
        return _images(step) if self.model == "conv" else _rows(dict(self.sizes)["ins"], step)


# --- layouts --------------------------------------------------------------------------------------------------------

Fused = tuple[tuple[str, int], ...]
Dims = tuple[tuple[str, int] | Fused, ...]


@st.composite
def layouts(draw: st.DrawFn, mesh: str, *dims: tuple[str, int] | Fused) -> str:
    """The text of a layout: each model axis on a dim, or on none. A dim is a name and a size, or factors of both."""
    shape = sl.MeshShape(mesh)
    held: dict[str, list[str]] = {name: [] for dim in dims for name, _ in _factors(dim)}
    left = {name: size for dim in dims for name, size in _factors(dim)}
    fused = {name for dim in dims if not isinstance(dim[0], str) for name, _ in _factors(dim)}
    for axis in shape.model_axes:
        # A fused dim divides exactly, and is split by one axis.
        taken = any(held[name] for name in fused)
        chosen = draw(
            st.sampled_from(
                ["", *(n for n in held if n not in fused or (not taken and left[n] % shape[axis] == 0))],
            )
        )
        if chosen:
            held[chosen].append(axis)
            left[chosen] //= shape[axis]
    return " ".join(_text(dim, held) for dim in dims)


def _factors(dim: tuple[str, int] | Fused) -> Sequence[tuple[str, int]]:
    return (dim,) if isinstance(dim[0], str) else dim  # type: ignore[return-value]


def _text(dim: tuple[str, int] | Fused, held: dict[str, list[str]]) -> str:
    parts = [name + (f"@({','.join(held[name])})" if held[name] else "") for name, _ in _factors(dim)]
    return parts[0] if isinstance(dim[0], str) else f"({' '.join(parts)})"


@st.composite
def cases(
    draw: st.DrawFn, model: str, sizes: dict[str, Any], tensors: dict[str, Dims], borders: dict[str, Dims], **more: Any
) -> Case:
    """A case of a model whose parameters and activations have these dims, by the pattern of a rule."""
    mesh = draw(st.sampled_from(MESHES))
    rules = {key: draw(_rule(mesh, key, dims)) for key, dims in tensors.items()}
    laid_out = draw(st.lists(st.sampled_from(sorted(borders)), max_size=2, unique=True)) if draw(st.booleans()) else []
    rules |= {key: draw(layouts(mesh, *borders[key])) for key in laid_out}
    frozen = tuple(draw(st.lists(st.integers(0, 9), max_size=2, unique=True)))
    accumulate = draw(st.integers(1, 2))
    if "dropout" in sizes and _one_example_each(mesh):
        sizes["dropout"] = draw(st.sampled_from([0.0, 0.3]))
    return Case(
        mesh,
        model,
        tuple(sizes.items()),
        tuple(rules.items()),
        frozen=frozen,
        thaw=bool(frozen) and draw(st.booleans()),
        accumulate=accumulate,
        no_sync=accumulate > 1 and draw(st.booleans()),
        clip=draw(st.sampled_from([None, 0.5])),
        **more,
    )


@st.composite
def _rule(draw: st.DrawFn, mesh: str, key: str, dims: Dims) -> str:
    """A layout, or the name of a role where a module's dims are known and the axis it splits over is there."""
    roles = ["colwise", "rowwise"] if dims[0][0] in ("out", "vocab") and len(dims) == 2 and "tp" in mesh else []
    return draw(st.one_of(layouts(mesh, *dims), *map(st.just, roles)))


def _one_example_each(mesh: str) -> bool:
    """Whether all ranks see the whole batch, and so can draw the random numbers of one device."""
    shape = sl.MeshShape(mesh)
    return all(shape[axis] == 1 for axis in shape.data_axes)


# --- a transformer --------------------------------------------------------------------------------------------------


@st.composite
def transformers(draw: st.DrawFn, n_layer: int | None = None) -> Case:
    """The example GPT, its vocabulary uneven; q, k and v split by heads, inside them, or across their borders.

    At least four features: a LayerNorm of two gives +1 and -1, whatever it is given, and its gradient is rounding.
    """
    heads, head, vocab = draw(st.sampled_from([2, 4, 3])), draw(st.integers(2, 3)), draw(st.integers(5, 9))
    width, tied = heads * head, draw(st.booleans())
    n_layer = n_layer or draw(st.integers(1, 2))
    fused = (("qkv", 3), ("heads", heads), ("head", head))
    features: tuple[str, int] | Fused = draw(st.sampled_from([fused, ("out", 3 * width)]))
    block: dict[str, Dims] = {
        "norm1": (("embed", width),),
        "attn.qkv": (features, ("in", width)),
        "attn.proj": (("out", width), ("in", width)),
        "mlp.up": (("out", 4 * width), ("in", width)),
        "mlp.down": (("out", width), ("in", 4 * width)),
    }
    blocks = [f"blocks.{i}" for i in range(n_layer)] if draw(st.booleans()) else ["blocks.*"]
    tensors: dict[str, Dims] = {
        "embed": (("vocab", vocab), ("embed", width)),
        "position": (("vocab", 8), ("embed", width)),
        **{f"{prefix}.{key}": dims for prefix in blocks for key, dims in block.items()},
        "^norm": (("embed", width),),
    }
    if not tied:
        tensors["head"] = (("out", vocab), ("in", width))
    stream: Dims = (("batch", ROWS), ("seq", 5), ("embed", width))
    within = [
        ".output",
        ".input",
        ".attn.output",
        ".mlp.input",
        ".mlp.down.output",
        ".attn.proj.output",
        ".norm2.output",
    ]
    named = [f"{prefix}{key}" for prefix in blocks for key in within]
    borders = dict.fromkeys([*named, "embed.output", "^norm.output", "^norm.input"], stream)
    sizes = {"n_layer": n_layer, "n_head": heads, "d_model": width, "vocab_size": vocab, "tied": tied, "dropout": 0.0}
    return draw(cases("transformer", sizes, tensors, borders, fused=fused if features is fused else ()))


def _tokens(step: int) -> Batch:
    return (torch.randint(5, (ROWS, 5), generator=torch.Generator().manual_seed(step)),), {}


# --- an MLP ---------------------------------------------------------------------------------------------------------


class MLP(nn.Module):
    """Layers of any widths; buffers that change, that are not saved, that count; a layer or its weight used twice."""

    offset: torch.Tensor
    shift: torch.Tensor
    calls: torch.Tensor

    def __init__(self, ins: int, width: int, outs: int, bias: bool, shared: str, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(ins, width, bias=bias), nn.Linear(width, outs, bias=bias)
        self.mix = nn.Linear(width, width, bias=bias)
        self.again = self.mix if shared == "module" else nn.Linear(width, width, bias=bias)
        if shared == "weight":
            self.again.weight = self.mix.weight
        self.scale = nn.Parameter(torch.ones(width))
        self.unused = nn.Linear(width, 3)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("offset", torch.linspace(0, 1, width))
        self.register_buffer("shift", torch.linspace(1, 2, width), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.offset.mul_(0.9).add_(self.shift, alpha=0.1)
            self.calls.add_(1)
        x = F.gelu(self.up(x) * self.scale + self.offset) - self.shift / (1 + self.calls)
        x = x + self.dropout(self.again(torch.tanh(self.mix(x))))
        return self.down(x / (1 + x.square().mean(-1, keepdim=True)))


@st.composite
def mlps(draw: st.DrawFn) -> Case:
    ins, width, outs = (draw(st.integers(1, 9)) for _ in range(3))
    shared = draw(st.sampled_from(["", "weight", "module"]))
    square: Dims = (("out", width), ("in", width))
    tensors: dict[str, Dims] = {
        "up": (("out", width), ("in", ins)),
        "mix": square,
        "down": (("out", outs), ("in", width)),
        "scale": (("width", width),),
        "offset": (("width", width),),
        "shift": (("width", width),),
        "unused": (("out", 3), ("in", width)),
    }
    if not shared:
        tensors["again"] = square
    hidden: Dims = (("batch", ROWS), ("width", width))
    named = ["up.output", "mix.input", "mix.output", "dropout.output", "down.input"]
    borders = {**dict.fromkeys(named, hidden), "down.output": (("batch", ROWS), ("out", outs))}
    sizes = {"ins": ins, "width": width, "outs": outs, "bias": draw(st.booleans()), "shared": shared, "dropout": 0.0}
    return draw(cases("mlp", sizes, tensors, borders))


def _rows(ins: int, step: int) -> Batch:
    return (torch.randn(ROWS, ins, generator=torch.Generator().manual_seed(step), dtype=torch.float64),), {}


# --- a convolutional net --------------------------------------------------------------------------------------------


class ConvNet(nn.Module):
    """Two convolutions with a norm between, pooled and classified."""

    def __init__(self, channels: int, outs: int, kernel: int, norm: str, dropout: float) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, kernel, padding=kernel // 2)
        self.norm = nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(1, channels)
        self.second = nn.Conv2d(channels, outs, kernel, stride=2)
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(outs * 4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.dropout(torch.relu(self.norm(self.first(x)))))
        return self.last(F.adaptive_avg_pool2d(x, 2).flatten(1))


@st.composite
def conv_nets(draw: st.DrawFn) -> Case:
    channels, outs, kernel = draw(st.integers(1, 7)), draw(st.integers(1, 5)), draw(st.sampled_from([1, 3]))
    window = (("height", kernel), ("width", kernel))
    tensors: dict[str, Dims] = {
        "first": (("out", channels), ("in", 3), *window),
        "norm": (("channel", channels),),
        "second": (("out", outs), ("in", channels), *window),
        "last": (("out", 5), ("in", outs * 4)),
    }
    image: Dims = (("batch", ROWS), ("channel", channels), ("height", 6), ("width", 6))
    borders = dict.fromkeys(["first.output", "norm.input", "norm.output", "second.input"], image)
    sizes = {
        "channels": channels,
        "outs": outs,
        "kernel": kernel,
        "norm": draw(st.sampled_from(["batch", "group"])),
        "dropout": 0.0,
    }
    return draw(cases("conv", sizes, tensors, borders))


def _images(step: int) -> Batch:
    return (torch.randn(ROWS, 3, 6, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64),), {}


_FACTORIES: dict[str, Callable[..., nn.Module]] = {"transformer": models.gpt, "mlp": MLP, "conv": ConvNet}

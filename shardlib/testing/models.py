"""Small plain models with the field's awkward features, for one device; rules and batches for them. Needs torch alone.

Nothing in the models knows of shardlib, and each argument that is left out takes the simplest choice. All parameters
start at values of their own (`perturb`): with the biases of zero and norm weights of one that PyTorch starts from, a
bias that is added twice, or a norm weight that is replaced by another rank's shard, changes nothing.

>>> model = Transformer(layers=2, heads=4, kv_heads=2)
>>> print(rules_for(model).resolve(model, "tp=2").tensors["blocks.0.attn.k.weight"].layout)
(kv_heads@tp head) in
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import nn

from shardlib.errors import InputError
from shardlib.rules import Rules

__all__ = ["MLP", "ConvNet", "Numbers", "Tokens", "Transformer", "batch_for", "perturb", "rules_for"]

Norm = Literal["layer", "rms"]
Position = Literal["learned", "rotary"]
Shared = Literal["", "weight", "module"]
ImageNorm = Literal["batch", "group"]


def perturb(model: nn.Module, seed: int = 0) -> nn.Module:
    """Add noise of size 0.3 to every parameter, and to the statistics that norms have seen; the same for the same seed.

    A tied parameter is moved once. Tables that a model makes for itself (rotary angles) stay as they are.

    >>> perturb(nn.LayerNorm(4)).weight.unique().numel()
    4
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(like: torch.Tensor) -> torch.Tensor:
        return (0.3 * torch.randn(like.shape, generator=generator, dtype=torch.float64)).to(like)

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(noise(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.add_(noise(buffer))
            elif name.endswith("running_var"):  # stays above zero
                buffer.add_(noise(buffer).abs())
    return model


# --- a transformer --------------------------------------------------------------------------------------------------


class Transformer(nn.Module):
    """A causal transformer before its loss: `(batch, seq)` ids to `(batch, seq, vocab)` logits.

    Args:
        vocab: number of tokens.
        heads: attention heads; the model is `heads * head` wide.
        head: features of a head; even where `position` is "rotary".
        layers: number of blocks.
        kv_heads: heads of keys and values, which divides `heads`; fewer than `heads` is grouped-query attention, one is
            multi-query. By default as many as heads.
        fused: q, k and v are one layer, whose rows are all of q, all of k, all of v. With fewer heads for keys than for
            queries they are three layers in any case.
        tied: the output layer's weight is the embedding's.
        dropout: probability, of attention weights and of what each half of a block adds to the residual stream.
        norm: "layer" or "rms".
        position: "learned", a table that is added; or "rotary", angles in a buffer that is not saved.
        bias: whether layers and norms have biases (RMSNorm has none).
        context: the longest sequence.

    Raises:
        InputError: a size that is not positive, `kv_heads` that do not divide `heads`, an odd `head` that rotates.

    >>> Transformer(vocab=11)(torch.zeros(2, 5, dtype=torch.int64)).shape
    torch.Size([2, 5, 11])
    """

    def __init__(
        self,
        *,
        vocab: int = 16,
        heads: int = 2,
        head: int = 4,
        layers: int = 1,
        kv_heads: int | None = None,
        fused: bool = True,
        tied: bool = False,
        dropout: float = 0.0,
        norm: Norm = "layer",
        position: Position = "learned",
        bias: bool = True,
        context: int = 8,
    ) -> None:
        super().__init__()
        _check_sizes("Transformer", vocab=vocab, heads=heads, head=head, layers=layers, context=context)
        _check_choice("Transformer", "norm", norm, Norm)
        _check_choice("Transformer", "position", position, Position)
        kv_heads = heads if kv_heads is None else kv_heads
        if kv_heads < 1 or heads % kv_heads:
            raise InputError(f"Transformer(heads={heads}, kv_heads={kv_heads}): give kv_heads that divide heads.")
        if position == "rotary" and head % 2:
            raise InputError(
                f'Transformer(head={head}, position="rotary") rotates pairs of features; give an even head.'
            )
        self.vocab, self.heads, self.head_width, self.kv_heads, self.context = vocab, heads, head, kv_heads, context
        width = heads * head
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Embedding(context, width) if position == "learned" else Rotary(context, head)
        self.blocks = nn.ModuleList(
            Block(heads, head, kv_heads, fused=fused, dropout=dropout, norm=norm, bias=bias) for _ in range(layers)
        )
        self.norm = _norm(norm, width, bias)
        self.head = nn.Linear(width, vocab, bias=bias)
        if tied:
            self.head.weight = self.embed.weight
        perturb(self)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, at = self.embed(ids), torch.arange(ids.shape[1], device=ids.device)
        angles = self.position(at)
        if isinstance(self.position, nn.Embedding):
            x, angles = x + angles, None
        for block in self.blocks:
            x = block(x, angles)
        return self.head(self.norm(x))


class Rotary(nn.Module):
    """Cosine and sine of every position's angles, `(context, head / 2)` each, as buffers that are not saved.

    Su et al., RoFormer, arXiv 2104.09864, section 3.4.2; features are paired half against half, as GPT-NeoX does.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, context: int, head: int) -> None:
        super().__init__()
        slow = 100.0 ** (-torch.arange(0, head, 2, dtype=torch.float64) / head)
        angles = torch.arange(context, dtype=torch.float64)[:, None] * slow
        self.register_buffer("cos", angles.cos().to(torch.get_default_dtype()), persistent=False)
        self.register_buffer("sin", angles.sin().to(torch.get_default_dtype()), persistent=False)

    def forward(self, at: torch.Tensor) -> torch.Tensor:
        """Return cosines and sines of these positions, `(2, seq, head / 2)`."""
        return torch.stack([self.cos[at], self.sin[at]])


def _rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    cos, sin = angles.unbind()
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Attention(nn.Module):
    """Causal self-attention; the global numbers of heads stand in its views."""

    def __init__(self, heads: int, head: int, kv_heads: int, *, fused: bool, dropout: float, bias: bool) -> None:
        super().__init__()
        self.heads, self.head, self.kv_heads, self.dropout = heads, head, kv_heads, dropout
        width = heads * head
        if fused and kv_heads == heads:
            self.qkv = nn.Linear(width, 3 * width, bias=bias)
        else:
            self.q = nn.Linear(width, width, bias=bias)
            self.k, self.v = (nn.Linear(width, kv_heads * head, bias=bias) for _ in range(2))
        self.proj = nn.Linear(width, width, bias=bias)

    def forward(self, x: torch.Tensor, angles: torch.Tensor | None) -> torch.Tensor:
        batch, seq, width = x.shape
        if hasattr(self, "qkv"):
            q, k, v = self.qkv(x).split(width, -1)
        else:
            q, k, v = self.q(x), self.k(x), self.v(x)
        q = q.view(batch, seq, self.heads, self.head).transpose(1, 2)
        k, v = (t.view(batch, seq, self.kv_heads, self.head).transpose(1, 2) for t in (k, v))
        if angles is not None:
            q, k = _rotated(q, angles), _rotated(k, angles)
        dropout = self.dropout if self.training else 0.0
        grouped = self.kv_heads != self.heads
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=grouped)
        return self.proj(y.transpose(1, 2).reshape(batch, seq, width))


class FeedForward(nn.Module):
    """Two layers, four times as wide between them."""

    def __init__(self, width: int, *, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=bias), nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Each half reads a normalised copy of the residual stream and adds to it, through a Dropout of its own."""

    def __init__(
        self, heads: int, head: int, kv_heads: int, *, fused: bool, dropout: float, norm: Norm, bias: bool
    ) -> None:
        super().__init__()
        width = heads * head
        self.norm1 = _norm(norm, width, bias)
        self.attn = Attention(heads, head, kv_heads, fused=fused, dropout=dropout, bias=bias)
        self.norm2 = _norm(norm, width, bias)
        self.mlp = FeedForward(width, bias=bias)
        self.dropout1, self.dropout2 = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, angles: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.dropout1(self.attn(self.norm1(x), angles))
        return x + self.dropout2(self.mlp(self.norm2(x)))


def _norm(kind: Norm, width: int, bias: bool) -> nn.Module:
    return nn.RMSNorm(width) if kind == "rms" else nn.LayerNorm(width, bias=bias)


# --- an MLP ---------------------------------------------------------------------------------------------------------


class MLP(nn.Module):
    """Layers of any widths, `(batch, ins)` to `(batch, outs)`; two of the hidden ones may be one.

    Args:
        ins, width, outs: features at the entry, between the layers, at the exit.
        bias: whether layers have biases.
        shared: two hidden layers that are apart (""), that share their weight ("weight"), or that are one module which
            is called twice ("module").
        dropout: probability, of what the hidden layers add.
        buffers: with a buffer that every forward changes, one that is not saved, and one that counts.
        unused: with a layer that no forward reads.

    Raises:
        InputError: a size that is not positive, or `shared` that is none of the three.

    >>> MLP(width=7)(torch.ones(3, 6)).shape
    torch.Size([3, 5])
    """

    offset: torch.Tensor
    shift: torch.Tensor
    calls: torch.Tensor

    def __init__(
        self,
        *,
        ins: int = 6,
        width: int = 8,
        outs: int = 5,
        bias: bool = True,
        shared: Shared = "",
        dropout: float = 0.0,
        buffers: bool = False,
        unused: bool = False,
    ) -> None:
        super().__init__()
        _check_sizes("MLP", ins=ins, width=width, outs=outs)
        _check_choice("MLP", "shared", shared, Shared)
        self.ins = ins
        self.up, self.down = nn.Linear(ins, width, bias=bias), nn.Linear(width, outs, bias=bias)
        self.mix = nn.Linear(width, width, bias=bias)
        self.again = self.mix if shared == "module" else nn.Linear(width, width, bias=bias)
        if shared == "weight":
            self.again.weight = self.mix.weight
        self.scale = nn.Parameter(torch.ones(width))
        self.dropout = nn.Dropout(dropout)
        self.buffers_change = buffers
        if unused:
            self.unused = nn.Linear(width, 3)
        if buffers:
            self.register_buffer("offset", torch.linspace(0, 1, width))
            self.register_buffer("shift", torch.linspace(1, 2, width), persistent=False)
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        perturb(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x) * self.scale
        if self.buffers_change:
            with torch.no_grad():
                self.offset.mul_(0.9).add_(self.shift, alpha=0.1)
                self.calls.add_(1)
            x = x + self.offset - self.shift / (1 + self.calls)
        x = F.gelu(x)
        x = x + self.dropout(self.again(torch.tanh(self.mix(x))))
        return self.down(x / (1 + x.square().mean(-1, keepdim=True)))


# --- a convolutional net --------------------------------------------------------------------------------------------


class ConvNet(nn.Module):
    """Two convolutions with a norm between, pooled and classified: `(batch, 3, 6, 6)` to `(batch, 5)`.

    Args:
        channels: channels between the convolutions.
        outs: channels after them.
        kernel: height and width of the convolutions' windows, at most 6.
        norm: "batch", whose statistics are those of all rows of the global batch; or "group".
        dropout: probability, between the convolutions.

    Raises:
        InputError: a size that is not positive, or a norm of another kind.

    >>> ConvNet(channels=3)(torch.ones(2, 3, 6, 6)).shape
    torch.Size([2, 5])
    """

    def __init__(
        self, *, channels: int = 4, outs: int = 4, kernel: int = 3, norm: ImageNorm = "batch", dropout: float = 0.0
    ) -> None:
        super().__init__()
        _check_sizes("ConvNet", channels=channels, outs=outs, kernel=kernel)
        _check_choice("ConvNet", "norm", norm, ImageNorm)
        self.first = nn.Conv2d(3, channels, kernel, padding=kernel // 2)
        self.norm = nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(1, channels)
        self.second = nn.Conv2d(channels, outs, kernel, stride=2)
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(outs * 4, 5)
        perturb(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.dropout(torch.relu(self.norm(self.first(x)))))
        return self.last(F.adaptive_avg_pool2d(x, 2).flatten(1))


# --- rules ----------------------------------------------------------------------------------------------------------


def rules_for(model: nn.Module, *, sequence: bool = False) -> Rules:
    """Return tensor-parallel rules for one of these models, over the axis "tp", as a user would write them.

    Heads that do not divide stay replicated; everything else may be uneven.

    Args:
        model: a `Transformer`, an `MLP` or a `ConvNet`.
        sequence: shard the residual stream of a transformer over the sequence (Korthikanti et al., arXiv 2205.05198).

    Raises:
        InputError: another model, or `sequence` for a model without one.

    >>> rules_for(MLP())
    Rules({"up": "colwise", "scale": "width@tp", "mix": "rowwise", "down": "replicate"}, unmatched='replicate')
    """
    if isinstance(model, Transformer):
        return _transformer_rules(model, sequence)
    if sequence:
        raise InputError(
            f"rules_for({type(model).__name__}, sequence=True): only a Transformer has a sequence to shard."
        )
    if isinstance(model, MLP):
        return Rules(_mlp_rules(model), unmatched="replicate")
    if isinstance(model, ConvNet):
        norm = "channel@tp" if isinstance(model.norm, nn.BatchNorm2d) else "replicate"
        return Rules({"first": "colwise", "norm": norm, "second": "rowwise", "last": "replicate"})
    raise _of_no_known_model("rules_for", model)


def _mlp_rules(model: MLP) -> dict[str, Any]:
    """Return column-, then row-parallel rules; the second hidden layer is replicated, unless it is the first one
    again."""
    rules: dict[str, Any] = {"up": "colwise", "scale": "width@tp", "mix": "rowwise", "down": "replicate"}
    if model.buffers_change:
        rules |= {"offset": "width@tp", "shift": "width@tp"}
    return rules


def _transformer_rules(model: Transformer, sequence: bool) -> Rules:
    """Return the rules of Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3."""
    rules: dict[str, Any] = {"embed": "rowwise", "head": "colwise", "position": "replicate", "norm*": "replicate"}
    if hasattr(model.blocks[0].attn, "qkv"):
        rules["attn.qkv"], sizes = "(qkv heads@tp? head)", {"qkv": 3, "heads": model.heads}
    else:
        kv, sizes = "(kv_heads@tp? head)", {"heads": model.heads, "kv_heads": model.kv_heads}
        rules |= {"attn.q": "(heads@tp? head)", "attn.k": kv, "attn.v": kv}
    rules |= {"attn.proj": "rowwise", "mlp.up": "colwise", "mlp.down": "rowwise"}
    if sequence:
        split = ("attn.proj", "mlp.down", "blocks.*")
        rules |= {f"{module}.output": "batch seq@tp embed" for module in split}
        rules |= {f"blocks.*.{norm}.output": "batch seq embed" for norm in ("norm1", "norm2")}
    return Rules(rules, sizes=sizes)


# --- batches --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokens:
    """A batch of ids for a step, `(rows, seq)`, from a generator of its own; it can be pickled.

    >>> Tokens(rows=4, seq=5, vocab=9)(0).shape
    torch.Size([4, 5])
    """

    rows: int
    seq: int
    vocab: int

    def __call__(self, step: int) -> torch.Tensor:
        return torch.randint(self.vocab, (self.rows, self.seq), generator=torch.Generator().manual_seed(step))


@dataclass(frozen=True)
class Numbers:
    """A batch of float64 numbers for a step, of that shape, from a generator of its own; it can be pickled.

    Magnitudes are all different, between 1 and 2, and signs are drawn. So no number is the negative of another, or
    twice another, or zero: a sum that a rank's part is missing from, or is in twice, cannot come out right, as it can
    where all numbers are alike and where positive and negative ones cancel.

    >>> x = Numbers((4, 6))(0)
    >>> x.abs().unique().numel(), bool((x > 0).any()), bool((x < 0).any())
    (24, True, True)
    """

    shape: tuple[int, ...]

    def __call__(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        count = torch.Size(self.shape).numel()
        order = torch.randperm(count, generator=generator)
        # A little apart from a grid, so that equal gaps between the numbers of two rows do not cancel either.
        place = order + 0.5 * torch.rand(count, generator=generator, dtype=torch.float64)
        signs = torch.randint(2, (count,), generator=generator) * 2 - 1
        return ((1 + place / count) * signs).view(self.shape)


def batch_for(model: nn.Module, rows: int = 8) -> Callable[[int], torch.Tensor]:
    """Return a function that creates the global batch of a step for one of these models, equal on every rank.

    Sequences are shorter than the longest that the model takes, by three eighths.

    Raises:
        InputError: another model, or `rows` that are not positive.

    >>> batch_for(Transformer(vocab=9), rows=4)
    Tokens(rows=4, seq=5, vocab=9)
    """
    _check_sizes("batch_for", rows=rows)
    if isinstance(model, Transformer):
        return Tokens(rows, max(1, model.context * 5 // 8), model.vocab)
    if isinstance(model, MLP):
        return Numbers((rows, model.ins))
    if isinstance(model, ConvNet):
        return Numbers((rows, 3, 6, 6))
    raise _of_no_known_model("batch_for", model)


def _of_no_known_model(function: str, model: nn.Module) -> InputError:
    return InputError(
        f"{function}() was given a {type(model).__qualname__}; it knows Transformer, MLP and ConvNet of "
        "shardlib.testing.models. Write the rules and batches of a model of your own by hand."
    )


def _check_sizes(function: str, **sizes: Any) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InputError(f"{function}({name}={size!r}): give an integer from 1 up.")


def _check_choice(function: str, name: str, value: Any, choices: Any) -> None:
    if value not in get_args(choices):
        raise InputError(f"{function}({name}={value!r}): give one of {', '.join(map(repr, get_args(choices)))}.")

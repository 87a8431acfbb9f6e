"""The models of the published measurements, on `meta`: Megatron's GPT, and Llama in transformers.

`megatron_gpt` computes what Megatron-LM computed when arXiv 2104.04473 and 2205.05198 were measured, op by op, with the
tensors that section 4.1 of the latter counts. Three things differ, and a prediction from its ops has to know them:

- Tensors are batch first; Megatron's are sequence first.
- The attention's scale multiplies the queries. Megatron's `baddbmm` multiplies by it at no cost.
- Scale, mask and softmax are one kernel in Megatron, and so are bias and GELU, and bias, dropout and sum (2104.04473,
  section 4.2). Here each is an op of its own. What is kept for the backward pass is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.torchvision_on_cpu import import_torchvision

import_torchvision()  # transformers imports it by the way

import transformers  # noqa: E402

__all__ = ["MEGATRON_RULES", "MegatronConfig", "MegatronGPT", "batch", "llama", "megatron_gpt", "parameters"]

MEGATRON_RULES = Path(__file__).parent / "megatron_gpt.toml"


@dataclass(frozen=True)
class MegatronConfig:
    """Sizes of a Megatron GPT. `tied`: the output layer's weight is that of the word embeddings."""

    hidden: int
    heads: int
    layers: int
    seq: int
    vocab: int
    dropout: float = 0.1
    tied: bool = True


class Dropout(nn.Module):
    """Dropout that keeps a mask of one byte an element on every device, as `torch.nn.Dropout` does on GPUs alone."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, self.p, self.training)[0] if self.training and self.p else x


class CoreAttention(nn.Module):
    """Attention of queries, keys and values `(batch, heads, seq, head)`; what selective recomputation computes again.

    Softmax output, dropout mask and dropout output are of 2, 1 and 2 bytes for each pair of tokens: the 5as²b of
    arXiv 2205.05198.
    """

    def __init__(self, config: MegatronConfig) -> None:
        super().__init__()
        self.attention_dropout = Dropout(config.dropout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, heads, seq, head = q.shape
        scores = torch.matmul(q * head**-0.5, k.transpose(2, 3))
        future = torch.ones(seq, seq, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, torch.finfo(scores.dtype).min)
        context = torch.matmul(self.attention_dropout(scores.softmax(-1)), v)
        return context.transpose(1, 2).reshape(batch, seq, heads * head)


class SelfAttention(nn.Module):
    """Self-attention; the rows of `query_key_value.weight` are query, key and value of the first head, and so on."""

    def __init__(self, config: MegatronConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query_key_value = nn.Linear(config.hidden, 3 * config.hidden)
        self.core_attention = CoreAttention(config)
        self.dense = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        fused = self.query_key_value(x).view(batch, seq, self.heads, 3 * hidden // self.heads)
        q, k, v = (t.transpose(1, 2) for t in fused.chunk(3, dim=-1))
        return self.dense(self.core_attention(q, k, v))


class MLP(nn.Module):
    def __init__(self, config: MegatronConfig) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.hidden, 4 * config.hidden)
        self.dense_4h_to_h = nn.Linear(4 * config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(x)))


class Layer(nn.Module):
    def __init__(self, config: MegatronConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.hidden)
        self.self_attention = SelfAttention(config)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden)
        self.mlp = MLP(config)
        self.hidden_dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.hidden_dropout(self.self_attention(self.input_layernorm(x)))
        return x + self.hidden_dropout(self.mlp(self.post_attention_layernorm(x)))


class MegatronGPT(nn.Module):
    """Tokens and labels, both `(batch, seq)`, to the mean cross entropy, in float32 over all logits."""

    def __init__(self, config: MegatronConfig) -> None:
        super().__init__()
        self.config = config
        self.word_embeddings = nn.Embedding(config.vocab, config.hidden)
        self.position_embeddings = nn.Embedding(config.seq, config.hidden)
        self.embedding_dropout = Dropout(config.dropout)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.final_layernorm = nn.LayerNorm(config.hidden)
        self.output_layer = nn.Linear(config.hidden, config.vocab, bias=False)
        if config.tied:
            self.output_layer.weight = self.word_embeddings.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding_dropout(self.word_embeddings(tokens) + self.position_embeddings(positions))
        for layer in self.layers:
            x = layer(x)
        logits = self.output_layer(self.final_layernorm(x))
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def megatron_gpt(
    hidden: int,
    heads: int,
    layers: int,
    seq: int = 2048,
    vocab: int = 51200,
    *,
    dropout: float = 0.1,
    tied: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "meta",
) -> MegatronGPT:
    """Build Megatron's GPT; its rules are in the file `MEGATRON_RULES`."""
    config = MegatronConfig(hidden, heads, layers, seq, vocab, dropout=dropout, tied=tied)
    with torch.device(device):
        return MegatronGPT(config).to(dtype)


# Hidden size, intermediate size, layers, heads, key heads, vocabulary: table 3 of The Llama 3 Herd of Models (arXiv
# 2407.21783) and the configurations of the released models, which have the vocabularies, and all of Llama 2.
_LLAMA = {
    "8B": (4096, 14336, 32, 32, 8, 128256),
    "70B": (8192, 28672, 80, 64, 8, 128256),
    "405B": (16384, 53248, 126, 128, 8, 128256),
    "2-13B": (5120, 13824, 40, 40, 40, 32000),
    "2-70B": (8192, 28672, 80, 64, 8, 32000),
}


def llama(
    size: str,
    *,
    seq: int = 8192,
    layers: int | None = None,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.bfloat16,
    device: str = "meta",
) -> nn.Module:
    """Build Llama 3 ("8B", "70B", "405B") or Llama 2 ("2-13B", "2-70B") of transformers, with all layers or fewer."""
    hidden, intermediate, depth, heads, kv_heads, vocab = _LLAMA[size]
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers or depth,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        max_position_embeddings=seq,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0 if size.startswith("2-") else 500000.0},
        tie_word_embeddings=False,
        use_cache=False,
    )
    config._attn_implementation = attention
    with torch.device(device):
        return nn.Module.to(transformers.LlamaForCausalLM(config), dtype)


def parameters(model: nn.Module) -> int:
    """Count the elements of a model's parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def batch(rows: int, seq: int, vocab: int, *, step: int = 0, device: str = "meta") -> dict[str, Any]:
    """Make random tokens and labels of `megatron_gpt`."""
    if device == "meta":
        return {name: torch.empty(rows, seq, dtype=torch.int64, device=device) for name in ("tokens", "labels")}
    draw = torch.Generator().manual_seed(step)
    tokens, labels = torch.randint(vocab, (2, rows, seq), generator=draw)
    return {"tokens": tokens, "labels": labels}

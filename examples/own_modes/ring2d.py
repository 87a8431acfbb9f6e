"""A tensor mode of one's own, by name: features split over two rings of ranks, what is between blocks over one of them.

    torchrun --nproc_per_node 4 examples/own_modes/ring2d.py

Attention and MLP have their heads and features over both rings, as Megatron has them over one; the residual stream is
split by rows of the batch over the second ring, so that what is summed there comes out of a reduce-scatter. The mode
is a change of axes for rules that name all their dims, and so fits each layout file that has them.
"""

from __future__ import annotations

import dataclasses

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shardlib as sl

sl.axes.register_axis("down", kind="model")
sl.axes.register_axis("across", kind="model")
BOTH = ("down", "across")
SPLIT = {
    "batch": "across",
    "heads": BOTH,
    "kv_heads": ("down", "across?"),
    "ff": BOTH,
    "vocab": BOTH,
    "hidden_in": BOTH,
}


@sl.rules.register_tensor_mode(
    "ring2d", axes="down=q,across=q", description="features over two rings, the stream over one"
)
def ring2d(rules: sl.Rules) -> sl.Rules:
    named = rules.mode("grid")
    axes = {dim: axes for dim, axes in SPLIT.items() if dim in named.dim_names}
    return dataclasses.replace(named, axes={**named.axes, **axes})


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    sl.shard_model(model, sl.rules.tensor_mode("ring2d").mesh_shape(4), sl.layouts.for_model(model, "ring2d"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor(list(b"to be or not to be, that is the question: " * 4))
    for step in range(20):
        ids = torch.stack([text[at : at + 32] for at in range(step % 7, step % 7 + 64, 8)])
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if torch.distributed.get_rank() == 0:
        print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    main()

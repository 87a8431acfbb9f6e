"""probe"""
from __future__ import annotations
import functools
from typing import Any
import pytest, torch
from torch import nn
import shardlib as sl
from tests.torchvision_on_cpu import import_torchvision
import_torchvision()
import transformers
from shardlib.testing import equivalent

_S = {
    "vocab_size": 43, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_local_experts": 5, "num_experts_per_tok": 2, "max_position_embeddings": 32, "use_cache": False,
}
def make(impl):
    model = transformers.MixtralForCausalLM._from_config(transformers.MixtralConfig(**_S), experts_implementation=impl).train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    return model
def batch(i):
    g = torch.Generator().manual_seed(i)
    return {"input_ids": torch.randint(3, 43, (8, 6), generator=g)}
def loss(model, b):
    out = model(**b)
    return out.logits.sin().mean() + out.logits.square().mean()
EP = {"experts.gate_up_proj": "expert@ep x embed", "experts.down_proj": "expert@ep embed ff", }


@pytest.mark.parametrize("mesh, t", [("ep=2,tp=2", ()), ("ep=2,tp=2", (3,)), ("ep=2,tp=2", (1,))])
@pytest.mark.parametrize("impl", ["eager", "batched_mm"])
def test_it(mesh, t, impl):
    r = equivalent(functools.partial(make, impl), batch, mesh=mesh, rules="mixtral", transforms=[sl.zero(s) for s in t], loss=loss, steps=2, clip=0.5, optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-2, eps=1e-5))
    assert r, str(r)

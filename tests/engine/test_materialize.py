"""Models on `meta` become real shard by shard: from initialisers, checkpoints, or both."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import shardlib as sl
from shardlib.errors import CheckpointError, ShardingError
from shardlib.testing.models import Transformer, batch_for, rules_for
from tests.engine.whole import values

GPT = functools.partial(Transformer, vocab=15, heads=4, layers=2, tied=True, bias=False)
RULES = rules_for(GPT())


class Offset(nn.Module):
    """With a buffer that is not saved, and that no initialiser fills by itself."""

    offset: torch.Tensor

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, width), nn.Linear(width, 5)
        self.register_buffer("offset", torch.linspace(0, 1, 6), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x + self.offset)))


OFFSET_RULES = {"up": "colwise", "down": "rowwise"}


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return GPT()


def _initialise(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter, std=0.02)


def _equal(sharded: nn.Module, reference: nn.Module) -> None:
    got, want = values(sharded), values(reference)
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


def _by_function() -> None:
    torch.manual_seed(0)
    model = sl.shard_model(_on_meta(), "dp=2,tp=2", RULES, init=_initialise, compile=None)
    torch.manual_seed(0)
    reference = _on_meta().to_empty(device="cpu")
    reference.head.weight = reference.embed.weight
    for module in reference.modules():  # in the order in which shard_model meets them, the tied weight once
        if module is not reference.head:
            _initialise(module)
    _equal(model, reference)
    model(batch_for(reference)(0).chunk(2)[dist.get_rank() // 2]).square().mean().backward()
    assert model.head.weight is model.embed.weight and model.head.weight.grad is not None


def test_an_initialiser_fills_one_module_at_a_time(ranks):
    ranks(4).run(_by_function)


def _from_file(path: str) -> None:
    torch.manual_seed(0)
    reference = GPT()
    _equal(sl.shard_model(_on_meta(), "dp=2,tp=2", RULES, init=path), reference)


def _save(folder: Path, parts: int) -> Path:
    torch.manual_seed(0)
    state = GPT().state_dict()
    state.pop("head.weight")  # tied: it is saved once
    names = list(state)
    if parts == 1:
        save_file(state, folder / "model.safetensors")
        return folder
    index: dict[str, Any] = {"weight_map": {}}
    for i in range(parts):
        part = {name: state[name] for name in names[i::parts]}
        save_file(part, folder / f"model-{i}.safetensors")
        index["weight_map"] |= dict.fromkeys(part, f"model-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("parts", [1, 3])
def test_a_checkpoint_is_read_in_slices(ranks, tmp_path, parts):
    ranks(4).run(_from_file, str(_save(tmp_path, parts)))


def _from_mapping() -> None:
    torch.manual_seed(0)
    reference = GPT()
    _equal(sl.shard_model(_on_meta(), "tp=2", RULES, init=reference.state_dict()), reference)


def test_a_state_dict_is_cut(ranks):
    ranks(2).run(_from_mapping)


def _refused(init: Any) -> tuple[str, bool]:
    with torch.device("meta"):
        model = Offset()
    before = dict(model.named_parameters())
    with pytest.raises((ShardingError, CheckpointError)) as caught:
        sl.shard_model(model, "tp=2", OFFSET_RULES, init=init)
    return str(caught.value), all(before[name] is p for name, p in model.named_parameters())


def _unsaved_buffer(module: nn.Module) -> None:
    if isinstance(module, Offset):
        module.offset.copy_(torch.linspace(0, 1, 6))


def _both() -> None:
    torch.manual_seed(0)
    reference = Offset()
    with torch.device("meta"):
        model = Offset()
    model = sl.shard_model(model, "tp=2", OFFSET_RULES, init=(reference.state_dict(), _unsaved_buffer))
    _equal(model, reference)


def test_a_checkpoint_and_a_function_for_what_it_leaves_out(ranks):
    ranks(2).run(_both)


def test_meta_without_values(ranks):
    message, untouched = ranks(2).run(_refused, None)[0]
    assert untouched
    assert message == (
        '5 tensors of the model are on the meta device and have no values ("up.weight", "up.bias", "down.weight", '
        '"down.bias", "offset"). Say where they come from: shard_model(..., init="checkpoint.safetensors"), init=a '
        'function that initialises one module, or init="reset_parameters".'
    )


def test_a_buffer_that_nothing_fills(ranks):
    message, untouched = ranks(2).run(_refused, "reset_parameters")[0]
    assert untouched
    assert message == (
        'init= gave no values to 1 of 5 tensors on the meta device: "offset". Buffers that are not saved are not in a '
        "checkpoint: add a function that computes them, init=(checkpoint, function)."
    )


def test_a_checkpoint_of_another_model(ranks):
    wrong = Offset(width=8).state_dict()
    assert ranks(2).run(_refused, wrong)[0][0] == (
        'The checkpoint with 4 tensors has "up.weight" with shape (8, 6); the model has it with global shape (7, 6). '
        "Load a checkpoint of the same model configuration."
    )
    assert ranks(2).run(_refused, {"layers.up.weight": torch.zeros(1)})[0][0] == (
        'The checkpoint with 1 tensors holds none of the 5 tensors of the model, such as "up.weight"; it holds 1 '
        'others. Did you mean "layers.up.weight"? Load a checkpoint of this model, with its parameter names.'
    )


def _drawn_apart() -> str:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    torch.manual_seed(dist.get_rank())
    with pytest.raises(ShardingError) as caught:
        sl.shard_model(model, "tp=2", {"**": "colwise"}, init="reset_parameters")
    return str(caught.value)


def test_ranks_that_draw_different_values(ranks):
    assert ranks(2).run(_drawn_apart)[0] == (
        'The ranks drew different initial values for "weight", each from its own random state. Seed every rank alike '
        "before shard_model (torch.manual_seed(0)), and let init= not depend on the rank."
    )


def test_no_checkpoint_there(ranks, tmp_path):
    assert ranks(2).run(_refused, str(tmp_path))[0][0] == (
        f'No checkpoint at "{tmp_path / "model.safetensors"}". Give a .safetensors file, its .index.json, or a folder '
        'that holds "model.safetensors" or an index.'
    )


def _bytes_kept_of_a_file(folder: Path) -> list[bool]:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64))
    rules = {"0": "colwise", "1": "rowwise"}
    model = sl.shard_model(model, "dp=2,tp=2", rules, init=str(folder), transforms=[sl.zero(3)])
    local = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    return [t.is_contiguous() and t.untyped_storage().nbytes() == t.nbytes for t in local]


def test_what_is_read_of_a_file_does_not_keep_the_rest_of_it(ranks, tmp_path):
    torch.manual_seed(0)
    save_file(nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64)).state_dict(), tmp_path / "model.safetensors")
    assert all(all(kept) for kept in ranks(4).run(_bytes_kept_of_a_file, tmp_path))

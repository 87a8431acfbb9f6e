"""What is saved on any mesh under any rules goes on training on any other, with the numbers of the run that went on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import shardlib as sl
from shardlib import MeshShape, Rules, checkpoint
from shardlib.testing import Ranks, shared_pool, strategies
from shardlib.testing.models import Numbers, Tokens, Transformer
from shardlib.testing.strategies import Case, ModelFactory
from shardlib.transforms import fsdp, zero
from tests.checkpoint import training

_ALL = settings.default.max_examples
_MESHES = strategies.mesh_shapes(4, model_axes=("tp", "sp"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@st.composite
def _pairs(draw: st.DrawFn) -> tuple[Case, Case]:
    """One model on two meshes under two sets of rules."""
    models = st.one_of(strategies.transformers(dropout=True), strategies.mlps(), strategies.convnets())
    first = draw(strategies.cases(models, meshes=_MESHES))
    batch = _of_rows(first.batch, 12)  # to be shared by two, three or four
    second = draw(strategies.cases(first.model, batch, meshes=_MESHES))
    return dataclasses.replace(first, batch=batch, rng="exact"), dataclasses.replace(second, rng="exact")


def _of_rows(batch: Any, rows: int) -> Tokens | Numbers:
    if isinstance(batch, Tokens):
        return dataclasses.replace(batch, rows=rows)
    return Numbers((rows, *batch.shape[1:]))


def _same(pool: Ranks, folder: Path, first: Case, second: Case, **options: Any) -> None:
    path = str(folder / "checkpoint")
    at_save, at_end = pool(first.mesh.world_size).run(training.interrupted, first, path, **options)[0]
    at_load, resumed = pool(second.mesh.world_size).run(training.resumed, second, path)[0]
    assert {name: value for name, value in at_save.items() if not torch.equal(value, at_load[name])} == {}
    assert at_load.keys() == at_save.keys()
    assert training.differences(resumed, at_end) == {}


_GPT = ModelFactory(Transformer, (("vocab", 10), ("heads", 4), ("head", 4), ("tied", True)))
_TENSOR = Rules(
    {
        "embed": "rowwise",
        "attn.qkv": "(qkv=3 heads=4@tp head)",
        "attn.proj": "rowwise",
        "mlp.up": "colwise",
        "mlp.down": "rowwise",
    },
    unmatched="replicate",
)


def _gpt(mesh: str, *transforms: Any) -> Case:
    return Case(_GPT, Tokens(12, 5, 10), MeshShape(mesh), _TENSOR, transforms)


_ZERO = [
    (_gpt("dp=2,tp=2", zero(3)), _gpt("dp=2,tp=2", zero(1))),
    (_gpt("dp=4,tp=1", zero(2)), _gpt("dp=2,tp=2", fsdp())),
    (_gpt("dp=2,tp=2", zero(1)), _gpt("dp=1,tp=1")),
    pytest.param(_gpt("dp=1,tp=2"), _gpt("dp=3,tp=1", zero(3)), marks=pytest.mark.deep),
    (_gpt("dp=2,tp=2", fsdp()), _gpt("dp=1,tp=4")),
]


@pytest.mark.covering
@pytest.mark.parametrize("weights", ["pieces", "huggingface"])
@pytest.mark.parametrize(("first", "second"), _ZERO)
def test_any_stage_of_zero_loads_into_any_other(tmp_path: Path, first: Case, second: Case, weights: str):
    _same(shared_pool(4), tmp_path, first, second, weights=weights)


class Hollow(nn.Module):
    """A weight of one dim, split, beside one without elements, split too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.none = nn.Parameter(torch.arange(4.0)), nn.Parameter(torch.zeros(3, 0))


def _hollow(path: str, weights: str) -> tuple[list[float], tuple[int, ...]]:
    checkpoint.save(path, sl.shard_model(Hollow(), "tp=2", {"*": sl.Shard(0)}), weights=weights)
    model = Hollow()
    with torch.no_grad():
        model.weight.zero_()
    checkpoint.load(path, model)
    return model.weight.tolist(), tuple(model.none.shape)


@pytest.mark.parametrize("weights", ["pieces", "huggingface"])
def test_a_tensor_without_elements_is_saved_however_it_is_split(tmp_path: Path, weights: str):
    assert shared_pool(2).run(_hollow, str(tmp_path / "here"), weights) == [([0.0, 1.0, 2.0, 3.0], (3, 0))] * 2


@settings(max_examples=_ALL // 4)
@given(pair=_pairs(), weights=st.sampled_from(["pieces", "huggingface"]), shard_mb=st.sampled_from([5000, 1e-4]))
def test_any_mesh_and_rules_load_into_any_other(folder: Path, pair: tuple[Case, Case], weights: str, shard_mb: float):
    _same(shared_pool(4), folder, *pair, weights=weights, shard_mb=shard_mb)

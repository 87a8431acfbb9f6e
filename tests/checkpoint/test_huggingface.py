"""Plain Hugging Face checkpoints, written and read; and what plain `torch.distributed.checkpoint` reads of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn

import shardlib as sl
from shardlib import checkpoint
from shardlib.errors import CheckpointError
from shardlib.testing import shared_pool
from tests.families.transformer_models import build, transformers

_FAMILIES = ["GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM", "ViTForImageClassification"]
_TEXT = {"vocab_size": 67, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_MORE: dict[str, dict[str, Any]] = {
    "T5ForConditionalGeneration": {**_TEXT, "d_model": 32, "d_kv": 8, "d_ff": 52, "num_layers": 2, "num_heads": 4}
    | {"decoder_start_token_id": 0},
    "MixtralForCausalLM": {**_TEXT, "hidden_size": 32, "intermediate_size": 52, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "max_position_embeddings": 32},
}
_MESHES = [("dp=2,tp=2", 4), ("tp=2", 2)]


def _made(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    if name not in _MORE:
        return build(name)
    cls = getattr(transformers, name)
    return cls(cls.config_class(**_MORE[name]))


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _saves(name: str, mesh: str, path: str, shard_mb: float) -> None:
    model = sl.shard_model(_made(name, 0), mesh, compile=None)
    checkpoint.save(path, model, weights="huggingface", shard_mb=shard_mb)


@pytest.mark.covering
@pytest.mark.parametrize(("mesh", "world"), _MESHES)
@pytest.mark.parametrize("name", [*_FAMILIES, *_MORE])
@pytest.mark.parametrize("shard_mb", [5000, 0.02])
def test_from_pretrained_reads_what_a_sharded_model_saves(
    tmp_path: Path, name: str, mesh: str, world: int, shard_mb: float
):
    path = tmp_path / "saved"
    shared_pool(world).run(_saves, name, mesh, str(path), shard_mb)
    assert (path / "model.safetensors.index.json").exists() == (shard_mb < 1)
    model, info = getattr(transformers, name).from_pretrained(path, output_loading_info=True)
    assert {key: names for key, names in info.items() if names} == {}
    _equal(_state(model), _state(_made(name, 0)))


def _saves_stages(name: str, mesh: str, transforms: tuple[Any, ...], path: str) -> None:
    model = _made(name, 0)
    rules = sl.layouts.for_model(model).with_stages(sl.rules.Balanced())
    sl.shard_model(model, mesh, rules, transforms=transforms, compile=None)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint.save(f"{path}/many", model, optimizer, weights="huggingface", shard_mb=0.02)
    checkpoint.save(f"{path}/one.safetensors", model, weights="file", background=True).wait()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.zero_()
    checkpoint.load(f"{path}/many", model, optimizer)
    checkpoint.save(f"{path}/again.safetensors", model, weights="file")


@pytest.mark.parametrize(
    ("name", "mesh", "transforms"),
    [
        ("GPT2LMHeadModel", "pp=2", ()),  # its output layer is the embedding, on the other stage
        ("LlamaForCausalLM", "pp=2,tp=2", ()),
        ("LlamaForCausalLM", "dp=2,pp=2", (sl.zero(3),)),
    ],
)
def test_stages_of_a_pipeline_save_one_whole_model(tmp_path: Path, name: str, mesh: str, transforms: tuple[Any, ...]):
    shared_pool(sl.MeshShape(mesh).world_size).run(_saves_stages, name, mesh, transforms, str(tmp_path))
    want = _state(_made(name, 0))
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    model, info = getattr(transformers, name).from_pretrained(tmp_path / "many", output_loading_info=True)
    assert {key: names for key, names in info.items() if names} == {}
    _equal(_state(model), want)
    tied = {"lm_head.weight"} if name.startswith("GPT2") else set()
    for file in ("one", "again"):
        got = load_file(tmp_path / f"{file}.safetensors")
        _equal(got, {name: tensor for name, tensor in want.items() if name not in tied})


def _saves_a_variant(path: str) -> dict[str, torch.Tensor]:
    model = sl.shard_model(_made("LlamaForCausalLM", 0), "dp=2,tp=2", compile=None)
    for shard_mb, folder in ((0.02, "many"), (5000, "one")):
        checkpoint.save(f"{path}/{folder}", model, weights="huggingface", shard_mb=shard_mb, variant="ema")
    return _loads("LlamaForCausalLM", "dp=4", f"{path}/many", rules={"**": None})


def test_a_variant_is_read_by_its_name(tmp_path: Path):
    got = shared_pool(4).run(_saves_a_variant, str(tmp_path))[0]
    want = _state(_made("LlamaForCausalLM", 0))
    _equal(got, want)
    assert (tmp_path / "many" / "model.safetensors.index.ema.json").exists()
    assert (tmp_path / "one" / "model.ema.safetensors").exists()
    for folder in ("many", "one"):
        _equal(_state(transformers.LlamaForCausalLM.from_pretrained(tmp_path / folder, variant="ema")), want)


def test_a_variant_that_has_no_place_is_refused(tmp_path: Path):
    for weights, variant in (("pieces", "ema"), ("huggingface", "../ema")):
        with pytest.raises(CheckpointError) as raised:
            checkpoint.save(tmp_path / "no", nn.Linear(2, 2), weights=weights, variant=variant)
        assert (
            f'variant={variant!r} was given with weights="{weights}"; give a word of letters, digits, "_" and "-", and '
            'weights="huggingface", whose files have it in their names.'
        ) in str(raised.value)
    assert not (tmp_path / "no").exists()


def _equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    assert {name for name in want if not torch.equal(got[name], want[name])} == set()


def _loads(name: str, mesh: str, path: str, *, rules: Any = None, **options: Any) -> dict[str, torch.Tensor]:
    model = sl.shard_model(_made(name, 1), mesh, rules, compile=None)
    checkpoint.load(path, model, **options)
    return sl.full_state_dict(model)


@pytest.mark.covering
@pytest.mark.parametrize(("mesh", "world"), _MESHES)
@pytest.mark.parametrize("name", [*_FAMILIES, *_MORE])
def test_a_sharded_model_loads_what_save_pretrained_wrote(tmp_path: Path, name: str, mesh: str, world: int):
    saved = _made(name, 0)
    for folder, size in (("one", "5GB"), ("many", "20KB")):
        saved.save_pretrained(tmp_path / folder, max_shard_size=size)  # type: ignore[operator]
        got = shared_pool(world).run(_loads, name, mesh, str(tmp_path / folder))[0]
        _equal(got, _state(saved))
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2


def _begins_on_meta(name: str, mesh: str, path: str) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = _made(name, 1)
    return sl.full_state_dict(sl.shard_model(model, mesh, compile=None, init=(path, _counters)))


def _counters(module: nn.Module) -> None:
    """Buffers that no file has: positions, frequencies."""
    fresh = type(module)(module.config) if hasattr(module, "inv_freq") else None  # type: ignore[call-arg]
    for name, buffer in module.named_buffers(recurse=False):
        buffer.copy_(getattr(fresh, name) if fresh is not None else torch.arange(buffer.numel()).view_as(buffer))


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MixtralForCausalLM", "ViTForImageClassification"])
def test_a_model_on_meta_begins_with_what_save_pretrained_wrote(tmp_path: Path, name: str):
    saved = _made(name, 0)
    saved.save_pretrained(tmp_path, max_shard_size="20KB")  # type: ignore[operator]
    got = shared_pool(4).run(_begins_on_meta, name, "dp=2,tp=2", str(tmp_path))[0]
    _equal(got, _state(saved))


def test_a_file_that_lacks_an_expert_is_refused(tmp_path: Path):
    _made("MixtralForCausalLM", 0).save_pretrained(tmp_path)  # type: ignore[operator]
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.block_sparse_moe.experts.2.w1.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r'"model.layers.0.mlp.experts.gate_up_proj" is made of 7 tensors of the'):
        checkpoint.load(tmp_path, _made("MixtralForCausalLM", 1))


def test_a_base_model_loads_into_one_with_a_head_and_the_reverse(tmp_path: Path):
    head, base = _made("GPT2LMHeadModel", 0), _made("GPT2Model", 1)
    base.save_pretrained(tmp_path / "base")  # type: ignore[operator]
    head.save_pretrained(tmp_path / "head")  # type: ignore[operator]
    checkpoint.load(tmp_path / "base", head)
    _equal(_state(head.transformer), _state(base))  # type: ignore[arg-type]
    fresh = _made("GPT2Model", 2)
    checkpoint.load(tmp_path / "head", fresh)
    _equal(_state(fresh), _state(_made("GPT2LMHeadModel", 0).transformer))  # type: ignore[arg-type]


def test_the_configuration_is_kept_beside_the_weights(tmp_path: Path):
    checkpoint.save(tmp_path / "saved", _made("LlamaForCausalLM", 0), weights="huggingface")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["model_type"] == "llama"


# --- torch.distributed.checkpoint -----------------------------------------------------------------------------------


def _saves_for_dcp(path: str, mesh: str) -> dict[str, torch.Tensor]:
    model = sl.shard_model(_made("GPT2LMHeadModel", 0), mesh, compile=None)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.ones(4, 3, dtype=torch.long)).logits.square().mean().backward()
    optimizer.step()
    checkpoint.save(path, model, optimizer, shard_mb=0.02)
    moments = {f"state.{n}.exp_avg": _whole(optimizer.state[p]["exp_avg"]) for n, p in model.named_parameters()}
    return {**sl.full_state_dict(model), **moments}


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def _loads_by_dcp(path: str, want: dict[str, torch.Tensor]) -> None:
    """Into a plain model, and into parameters that `fully_shard` laid out."""
    from torch.distributed.fsdp import fully_shard

    for sharded in (False, True):
        model = _made("GPT2LMHeadModel", 1)
        if sharded:
            fully_shard(model)
        state = model.state_dict()
        state.pop("lm_head.weight")  # tied: saved under its first name
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(path))
        for name, tensor in state.items():
            assert torch.equal(_whole(tensor), want[name]), name
    moments = {name: torch.empty_like(value) for name, value in want.items() if name.startswith("state.")}
    dcp.load(moments, storage_reader=dcp.HuggingFaceStorageReader(f"{path}/optimizer"))
    assert all(torch.equal(moments[name], want[name]) for name in moments)


@pytest.mark.parametrize(("mesh", "world"), [("dp=2,tp=2", 4), ("tp=2", 2)])
def test_plain_dcp_reads_what_we_save(tmp_path: Path, mesh: str, world: int):
    """The columns of a fused dim that is split inside are several pieces on each rank: the reader knows one a file."""
    path = str(tmp_path / "saved")
    want = shared_pool(world).run(_saves_for_dcp, path, mesh)[0]
    shared_pool(2).run(_loads_by_dcp, path, want)


def _saved_by_dcp(path: str) -> dict[str, torch.Tensor]:
    model = _made("GPT2LMHeadModel", 3)
    writer = dcp.HuggingFaceStorageWriter(path, save_distributed=True, enable_consolidation=True)
    state = model.state_dict()
    state.pop("lm_head.weight")
    dcp.save(state, storage_writer=writer)
    return _state(model)


def test_we_read_what_dcp_consolidates(tmp_path: Path):
    want = shared_pool(2).run(_saved_by_dcp, str(tmp_path))[0]
    got = shared_pool(2).run(_loads, "GPT2LMHeadModel", "tp=2", str(tmp_path))[0]
    _equal(got, want)


def test_what_dcp_saves_by_default_is_a_pickle_and_is_not_read(tmp_path: Path):
    model = nn.Linear(2, 2)
    shared_pool(2).run(dcp.save, dict(model.state_dict()), checkpoint_id=tmp_path / "dcp")
    with pytest.raises(CheckpointError, match=r"Pickled files .* are never read"):
        checkpoint.load(tmp_path / "dcp", model)

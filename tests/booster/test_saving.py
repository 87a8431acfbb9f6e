"""What one plugin saves, any other loads: files, folders, optimizers, schedulers, beside Hugging Face's."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

import shardlib as sl
from shardlib.booster import Booster, LowLevelZeroPlugin, TorchDDPPlugin
from shardlib.errors import CheckpointError, PlanError, ShardingError
from tests.booster.plugins import OWN, TOLERANCE, made
from tests.booster.training import Run, Trained, gpt, plainly


def fp32(name: str) -> Any:
    return made(name, **({"precision": "fp32"} if name in OWN else {}))


def save(folder: str, run: Run, *, shard: bool = False, **options: Any) -> None:
    run.booster.save_model(run.model, f"{folder}/model.pt", shard=shard, **options)
    run.booster.save_optimizer(run.optimizer, f"{folder}/optimizer.pt", shard=shard)
    run.booster.save_lr_scheduler(run.scheduler, f"{folder}/scheduler.pt")


def load(folder: str, run: Run) -> Run:
    run.booster.load_model(run.model, f"{folder}/model.pt")
    run.booster.load_optimizer(run.optimizer, f"{folder}/optimizer.pt")
    run.booster.load_lr_scheduler(run.scheduler, f"{folder}/scheduler.pt")
    return run


def train_and_save(name: str, folder: str, dtype: torch.dtype, **options: Any) -> Trained:
    run = Run(fp32(name), dtype)
    trained = run.train()
    save(folder, run, **options)
    return trained


def go_on(name: str, folder: str, dtype: torch.dtype) -> Trained:
    return load(folder, Run(fp32(name), dtype, seed=1)).train(first=4)


def twice(name: str, dtype: torch.dtype) -> Trained:
    run = Run(fp32(name), dtype)
    run.train()
    return run.train(first=4)


PAIRS = [("ddp", "zero 2"), ("zero 2", "fsdp"), ("fsdp", "hybrid, zero 3"), ("hybrid", "gemini"), ("gemini", "ddp")]


@pytest.mark.covering
@pytest.mark.parametrize("shard", [False, True], ids=["a file", "a folder"])
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_what_one_plugin_saves_another_goes_on_from(ranks, tmp_path, first, second, shard):
    folder, size = str(tmp_path), {"hybrid": 4, "hybrid, zero 3": 4}
    straight = ranks(1).run(twice, "ddp", torch.float64)[0]
    ranks(size.get(first, 2)).run(train_and_save, first, folder, torch.float64, shard=shard, size_per_shard=0.02)
    run = ranks(size.get(second, 2)).run(go_on, second, folder, torch.float64)[0]
    assert run.error(straight) < TOLERANCE
    assert run.rates == straight.rates
    assert os.path.isdir(f"{folder}/model.pt") == shard
    if shard:
        assert len(json.loads((tmp_path / "model.pt" / "model.safetensors.index.json").read_text())["weight_map"]) > 3
        assert len(list((tmp_path / "model.pt").glob("model-*.safetensors"))) > 1  # 0.02 MB each
    else:
        alone = plainly(torch.float64).weights
        for key, value in load_file(f"{folder}/model.pt").items():
            torch.testing.assert_close(value, alone[key], rtol=TOLERANCE, atol=TOLERANCE)


def _precisions(folder: str) -> list[float]:
    """bf16 with copies, saved; loaded into float32, and back into bf16."""
    bf16 = Run(LowLevelZeroPlugin(stage=2, precision="bf16"))
    bf16.train()
    save(f"{folder}/low", bf16, use_async=True)
    wide = load(f"{folder}/low", Run(TorchDDPPlugin(), seed=1))
    save(f"{folder}/wide", wide)
    again = load(f"{folder}/wide", Run(LowLevelZeroPlugin(stage=1, precision="bf16"), seed=2))
    masters = [run.optimizer.state_dict()["state"]["blocks.0.attn.qkv.weight"] for run in (bf16,)]
    master = masters[0]["master_parameter"].full_tensor()
    ours = sl.full_state_dict(wide.model)["blocks.0.attn.qkv.weight"]
    return [
        (ours - master).abs().max().item(),
        abs(again.train(first=4).losses[-1] - bf16.train(first=4).losses[-1]),
        float((master.bfloat16().float() != master).sum()),
    ]


def test_another_precision_gets_all_bits_that_were_saved(ranks, tmp_path):
    name = next(name for name, p in gpt().named_parameters() if p.ndim == 2 and "qkv" in name)
    assert name == "blocks.0.attn.qkv.weight"
    for lost, later, rounded in ranks(2).run(_precisions, str(tmp_path)):
        assert lost == 0 and later == 0 and rounded > 0


def _refusals(folder: str) -> None:
    run = Run(TorchDDPPlugin())
    booster = run.booster
    booster.save_model(run.model, f"{folder}/all", shard=True)
    with pytest.raises(CheckpointError, match="holds the checkpoint of a model"):
        booster.save_optimizer(run.optimizer, f"{folder}/all", shard=True)
    if dist.get_rank() == 0:
        with open(f"{folder}/all/tokenizer.json", "w") as file:
            file.write("{}")
    dist.barrier()
    booster.save_model(run.model, f"{folder}/all", shard=True)
    assert os.path.exists(f"{folder}/all/tokenizer.json")
    with pytest.raises(CheckpointError, match="is a folder"):
        booster.save_model(run.model, f"{folder}/all")
    with pytest.raises(CheckpointError, match="there is nothing"):
        booster.load_model(run.model, f"{folder}/nowhere")
    with pytest.raises(CheckpointError, match="no state of an optimizer"):
        booster.load_optimizer(run.optimizer, f"{folder}/all")
    with pytest.raises(PlanError, match="gather_dtensor"):
        booster.save_model(run.model, f"{folder}/other", gather_dtensor=False)
    with pytest.raises(
        PlanError,
        match=r"^save_model\(prefix='ema'\): one file has .*; prefix needs shard=True\.",
    ):
        booster.save_model(run.model, f"{folder}/other", prefix="ema")
    booster.save_model(run.model, f"{folder}/ema", shard=True, prefix="ema").wait()
    assert os.path.exists(f"{folder}/ema/model.ema.safetensors")
    booster.load_model(run.model, f"{folder}/ema")
    booster.save_model(run.model, f"{folder}/plain", True, True, "", 10)
    booster.save_optimizer(run.optimizer, f"{folder}/state", True, True, "", 10)
    booster.save_model(run.model, f"{folder}/alone", prefix="")
    assert os.path.exists(f"{folder}/plain/model.safetensors") and os.path.isfile(f"{folder}/alone")
    with pytest.raises(ShardingError, match="the one that boost returned"):
        booster.save_optimizer(run.optimizer.unwrap(), f"{folder}/optimizer")
    if dist.get_rank() == 0:
        torch.save(gpt().state_dict(), f"{folder}/pickle.pt")
    dist.barrier()
    with pytest.raises(CheckpointError, match="safetensors"):
        booster.load_model(run.model, f"{folder}/pickle.pt")


def test_what_cannot_be_saved_or_loaded_is_refused(ranks, tmp_path):
    ranks(2).run(_refusals, str(tmp_path))


def _files_of_others(folder: str) -> list[bool]:
    booster, model = Booster(plugin=LowLevelZeroPlugin(precision="fp32")), nn.Linear(3, 2)
    booster.boost(model)
    booster.load_model(model, f"{folder}/hub")
    found = [torch.equal(model.weight, torch.full((2, 3), 7.0))]
    booster.load_model(model, f"{folder}/hub/model.safetensors.index.json")
    booster.save_model(model, f"{folder}/alone.bin")
    dist.barrier()
    booster.save_model(model, f"{folder}/alone.bin", use_async=True).wait()  # replaced
    return [*found, sorted(os.listdir(folder)) == ["alone.bin", "hub"]]


def test_a_folder_of_hugging_face_is_read_and_a_file_stands_alone(ranks, tmp_path):
    hub = tmp_path / "hub"
    hub.mkdir()
    save_file({"weight": torch.full((2, 3), 7.0)}, hub / "a.safetensors")
    save_file({"bias": torch.ones(2)}, hub / "b.safetensors")
    index = {"weight_map": {"weight": "a.safetensors", "bias": "b.safetensors"}}
    (hub / "model.safetensors.index.json").write_text(json.dumps(index))
    assert ranks(2).run(_files_of_others, str(tmp_path)) == [[True, True]] * 2
    assert torch.equal(load_file(tmp_path / "alone.bin")["weight"], torch.full((2, 3), 7.0))

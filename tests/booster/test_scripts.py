"""Scripts as ColossalAI's users have them: nothing but the import lines is ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.booster.script import NET_AND_IMAGES
from tests.main_on_ranks import run_script

IMPORTS = """
from shardlib.booster import Booster
from shardlib.booster import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from shardlib.booster import launch_from_torch
from shardlib.booster import FP16TorchMixedPrecision
"""

SCRIPT = """
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.optim import SGD
from torch.optim.lr_scheduler import MultiStepLR

parser = argparse.ArgumentParser()
parser.add_argument("-c", "--checkpoint", type=str, required=True)
args = parser.parse_args()

EPOCHS = 3


# what is trained


def build(plugin, booster):
    model = Net()
    criterion = nn.CrossEntropyLoss()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    lr_scheduler = MultiStepLR(optimizer, milestones=[8], gamma=1 / 3)
    train_dataloader = plugin.prepare_dataloader(images(), batch_size=8, shuffle=True, drop_last=True)
    return booster.boost(
        model, optimizer, criterion=criterion, dataloader=train_dataloader, lr_scheduler=lr_scheduler
    )


def train(plugin, booster, path):
    model, optimizer, criterion, train_dataloader, lr_scheduler = build(plugin, booster)
    model.train()
    first = None
    for epoch in range(EPOCHS):
        train_dataloader.sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(train_dataloader):
            output = model(x)
            loss = criterion(output, y)
            first = loss.item() if first is None else first
            if i % 2 == 0:
                with booster.no_sync(model, optimizer):
                    booster.backward(loss, optimizer)
                continue
            booster.backward(loss, optimizer)
            optimizer.clip_grad_by_norm(5.0)
            optimizer.step()
            optimizer.zero_grad()
            lr_scheduler.step()
    assert loss.item() < 0.7 * first, (first, loss.item())
    assert len(lr_scheduler.get_last_lr()) == 1

    booster.save_model(model, f"{path}/modeling", shard=True, size_per_shard=10, use_safetensors=True)
    booster.save_optimizer(optimizer, f"{path}/optimizer", shard=True, size_per_shard=10)
    booster.save_lr_scheduler(lr_scheduler, f"{path}/lr_scheduler")
    booster.save_model(model, f"{path}/model.pth")
    model.eval()
    with torch.no_grad():
        expected = model(images()[:8][0])
    assert isinstance(model.unwrap(), Net)

    model, optimizer, criterion, train_dataloader, lr_scheduler = build(plugin, booster)
    booster.load_model(model, f"{path}/modeling")
    booster.load_optimizer(optimizer, f"{path}/optimizer")
    booster.load_lr_scheduler(lr_scheduler, f"{path}/lr_scheduler")
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(images()[:8][0]), expected)
    booster.load_model(model, f"{path}/model.pth")
    model.train()
    loss = criterion(model(x), y)
    booster.backward(loss, optimizer)
    optimizer.step()


launch_from_torch(seed=42)
runs = {
    "torch_ddp": (TorchDDPPlugin(), {}),
    "torch_ddp_fp16": (TorchDDPPlugin(), {"mixed_precision": FP16TorchMixedPrecision(init_scale=2**5)}),
    "low_level_zero": (LowLevelZeroPlugin(initial_scale=2**5), {}),
    "low_level_zero_2": (LowLevelZeroPlugin(stage=2, precision="bf16", max_norm=1.0), {}),
    "torch_fsdp": (TorchFSDPPlugin(), {}),
    "gemini": (GeminiPlugin(placement_policy="static", strict_ddp_mode=True, initial_scale=2**5), {}),
    "hybrid": (HybridParallelPlugin(tp_size=1, pp_size=1, zero_stage=1, precision="fp16", initial_scale=2**5), {}),
}
for name, (plugin, options) in runs.items():
    torch.manual_seed(42)
    booster = Booster(plugin=plugin, **options)
    train(plugin, booster, f"{args.checkpoint}/{name}")
    if dist.get_rank() == 0:
        print(f"{name}: trained")
dist.destroy_process_group()
"""


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.deep), 2])
def test_a_script_of_every_plugin_runs_with_only_its_imports_changed(tmp_path: Path, processes: int):
    script = tmp_path / "train.py"
    script.write_text(IMPORTS + SCRIPT.replace("# what is trained", NET_AND_IMAGES))
    printed = run_script(script, "-c", str(tmp_path / "checkpoints"), processes=processes)
    assert printed.out.count("trained") == 7

"""`shardlib migrate`: what it rewrites, what it leaves and says, and that what it wrote runs."""

from __future__ import annotations

import importlib
import json
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardlib.cli import main
from shardlib.cli.rewrite import rewrite
from tests.house.source import ROOT
from tests.main_on_ranks import run_script

SCRIPT = '''\
"""Fine-tune."""
import torch, colossalai
from colossalai.booster import Booster  # the door
from colossalai.booster.plugin import (
    LowLevelZeroPlugin,
    TorchDDPPlugin as DDP,
)
try:
    from colossalai.nn.optimizer import HybridAdam
except ImportError:
    HybridAdam = torch.optim.AdamW


def train(steps):
    from colossalai.cluster import DistCoordinator

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = HybridAdam(model.parameters(), lr=0.1)
    booster = Booster(plugin=LowLevelZeroPlugin(stage=1, precision="fp32"))
    criterion = torch.nn.MSELoss()
    model, optimizer, criterion, _, _ = booster.boost(model, optimizer, criterion)
    losses = []
    for _ in range(steps):
        loss = criterion(model(torch.ones(2, 4)), torch.zeros(2, 2))
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, DistCoordinator().world_size
'''


def _offered() -> Iterator[tuple[str, str]]:
    """Every module of ours and name that scripts are sent to."""
    tables: list[Any] = [tomllib.loads((ROOT / "shardlib/cli/migrate.toml").read_text())]
    while tables:
        for key, value in tables.pop().items():
            if isinstance(value, list):
                yield from ((key, name) for name in value)
            elif key != "refused":
                tables.append(value)


def test_scripts_are_sent_to_names_that_are_there():
    offered = list(_offered())
    assert len(offered) > 100
    assert [f"{module}.{name}" for module, name in offered if not hasattr(importlib.import_module(module), name)] == []


def _trained(source: str) -> Any:
    scope: dict[str, Any] = {"__name__": "script"}
    exec(compile(source, "script.py", "exec"), scope)
    return scope["train"](4)


def test_what_it_wrote_trains_and_other_lines_are_kept(ranks: Callable):
    after = rewrite(SCRIPT)
    assert not after.remarks and "colossalai" not in after.text.replace(" as colossalai", "")
    told = [line for line in SCRIPT.splitlines() if "colossalai" not in line and "Plugin" not in line]
    kept = iter(after.text.splitlines())
    assert [line for line in told if line not in kept] == []  # each, in this order
    assert "Booster  # the door" in after.text and "TorchDDPPlugin as DDP" in after.text
    assert rewrite(after.text).text == after.text
    (losses, world), other = ranks(2).run(_trained, after.text)
    assert world == 2 and losses == other[0] and losses[-1] < losses[0]


FINE_TUNING = """\
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn

import colossalai
from colossalai.accelerator import get_accelerator
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.cluster import DistCoordinator
from colossalai.logging import disable_existing_loggers, get_dist_logger
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossalai.nn.optimizer import HybridAdam

EPOCHS, BATCH_SIZE = 3, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + nn.functional.gelu(self.linear(self.norm(x)))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 4)

    def forward(self, x, labels):
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def examples(count):
    labels = torch.arange(count) % 4
    noise = torch.randn(count, 8, generator=torch.Generator().manual_seed(count))
    return [{"x": x, "labels": y} for x, y in zip(nn.functional.one_hot(labels, 8) + 0.1 * noise, labels)]


def plugin_of(name):
    if name == "torch_ddp":
        return TorchDDPPlugin(static_graph=True)
    if name == "low_level_zero":
        return LowLevelZeroPlugin(stage=2, precision="fp32", max_norm=1e6)
    if name == "gemini":
        return GeminiPlugin(precision="fp32", search_range_m=128, hidden_dim=8)
    return HybridParallelPlugin(
        tp_size=1, pp_size=2, num_microbatches=None, microbatch_size=4, enable_all_optimization=True, precision="fp32"
    )


def step(batches, model, criterion, optimizer, booster, train):
    if isinstance(booster.plugin, HybridParallelPlugin) and booster.plugin.pp_size > 1:
        loss = booster.execute_pipeline(batches, model, criterion, optimizer, return_loss=True)["loss"]
    else:
        batch = {name: value.to(get_accelerator().get_current_device()) for name, value in next(batches).items()}
        loss = criterion(model(**batch), None)
        if train:
            booster.backward(loss, optimizer)
    return loss.detach()


def mean(losses):
    total = torch.stack(losses).mean()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("-p", "--plugin", choices=["torch_ddp", "low_level_zero", "gemini", "hybrid_parallel"])
    parser.add_argument("-c", "--checkpoint")
    args = parser.parse_args()
    disable_existing_loggers()
    colossalai.launch_from_torch(seed=42)
    coordinator, logger = DistCoordinator(), get_dist_logger()
    plugin = plugin_of(args.plugin)
    booster = Booster(plugin=plugin)
    of_rank = BATCH_SIZE // plugin.dp_size
    train_dataloader = plugin.prepare_dataloader(examples(64), batch_size=of_rank, drop_last=True)
    eval_dataloader = plugin.prepare_dataloader(examples(32), batch_size=of_rank, drop_last=True)

    def boosted(seed):
        torch.manual_seed(seed)
        model = Classifier()
        no_decay = [p for p in model.parameters() if p.ndim < 2]
        decay = [p for p in model.parameters() if p.ndim > 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
        optimizer = HybridAdam(groups, lr=4e-2, eps=1e-4)
        scheduler = CosineAnnealingWarmupLR(optimizer, total_steps=EPOCHS * len(train_dataloader), warmup_steps=2)
        return booster.boost(model, optimizer, lambda outputs, inputs: outputs["loss"], None, scheduler)

    def evaluated(model, criterion):
        model.eval()
        with torch.no_grad():
            batches = iter(eval_dataloader)
            return mean([step(batches, model, criterion, None, booster, train=False) for _ in eval_dataloader])

    model, optimizer, criterion, _, lr_scheduler = boosted(seed=1)
    for epoch in range(EPOCHS):
        model.train()
        batches = iter(train_dataloader)
        losses = []
        for _ in range(len(train_dataloader)):
            losses.append(step(batches, model, criterion, optimizer, booster, train=True))
            optimizer.step()
            optimizer.zero_grad()
            lr_scheduler.step()
        logger.info(f"epoch {epoch} done", ranks=[0])
        loss, other = mean(losses), evaluated(model, criterion)
        if coordinator.is_master():
            print(f"epoch {epoch}: {loss} {other}")
    booster.save_model(model, f"{args.checkpoint}/model", shard=True)
    booster.save_optimizer(optimizer, f"{args.checkpoint}/optimizer", shard=True)
    booster.save_lr_scheduler(lr_scheduler, f"{args.checkpoint}/lr_scheduler")
    again, optimizer, criterion, _, lr_scheduler = boosted(seed=2)
    before = evaluated(again, criterion)
    booster.load_model(again, f"{args.checkpoint}/model")
    booster.load_optimizer(optimizer, f"{args.checkpoint}/optimizer")
    booster.load_lr_scheduler(lr_scheduler, f"{args.checkpoint}/lr_scheduler")
    assert evaluated(again, criterion) == evaluated(model, criterion) < before
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""


def test_a_script_for_fine_tuning_is_rewritten_and_trains_alike_with_each_plugin(tmp_path: Path):
    """On one device, too: batches are the same, so that losses are but for roundings."""
    script = tmp_path / "finetune.py"
    script.write_text(FINE_TUNING)
    assert main(["migrate", str(script), "--write"]) == 0
    runs = [("torch_ddp", 1), *((name, 2) for name in ("torch_ddp", "low_level_zero", "gemini", "hybrid_parallel"))]
    printed = [run_script(script, "-p", name, "-c", str(tmp_path / f"{name}-{n}"), processes=n).out for name, n in runs]
    losses = [[float(word) for line in out.splitlines() for word in line.split()[2:]] for out in printed]
    alone = losses[0]
    assert len(alone) == 6 and alone[4] < 0.7 * alone[0] and alone[5] < 0.7 * alone[1]
    for each in losses[1:]:
        assert each == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("from colossalai.shardformer import ShardConfig", "colossalai.shardformer.ShardConfig: "),
        ("from colossalai.inference import InferenceEngine", "has nothing for serving"),
        ("from colossalai.booster import *", "*"),
        ("from fairscale.optim.oss import OSS", "transforms=[shardlib.zero(1)]"),
        ("from colossalai.booster import Bosster", "colossalai.booster.Bosster"),
    ],
)
def test_what_is_left_is_named_with_its_line_and_advice(
    line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "train.py"
    path.write_text(f"import os\n\n{line}\n")
    assert main(["migrate", str(path)]) == 1
    out, err = capsys.readouterr()
    assert f"{path}:3: " in err and said in err and "1 line is left to you." in err
    assert line not in out.replace("\n+", "\n-") and path.read_text() == f"import os\n\n{line}\n"


def test_files_are_written_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "deep").mkdir()
    script, other = tmp_path / "deep" / "train.py", tmp_path / "own.py"
    script.write_bytes(SCRIPT.replace("\n", "\r\n").encode())
    other.write_text("import torch\n")
    assert main(["migrate", str(tmp_path)]) == 0 and b"import Booster" in script.read_bytes()
    out, err = capsys.readouterr()
    assert "+from shardlib.booster import Booster" in out and "1 of 2 files changes." in err
    assert main(["migrate", str(tmp_path), "--write"]) == 0
    assert script.read_bytes() == rewrite(SCRIPT).text.replace("\n", "\r\n").encode()
    assert other.read_text() == "import torch\n" and sorted(path.name for path in tmp_path.rglob("*.py")) == [
        "own.py",
        "train.py",
    ]
    capsys.readouterr()
    assert main(["migrate", str(script), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"files": [{"file": str(script), "changes": False, "remarks": []}]}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "There is no file or folder"),
        (b"from colossalai import\n", "is not Python that can be read: line 1"),
        (b"# \xff\n", "is not UTF-8: byte 2 is 0xff"),
    ],
)
def test_what_cannot_be_read_is_said(
    content: bytes | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "train.py"
    if content is not None:
        path.write_bytes(content)
    assert main(["migrate", str(path)]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_is_searched_for_files_and_each_is_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("train.py", ".git/hook.py", "env/lib/seen.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("import colossalai\ncolossalai.launch()\n")
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "same.py").symlink_to("train.py")
    (tmp_path / "gone.py").symlink_to("nowhere.py")
    (tmp_path / "train.py").chmod(0o750)
    assert main(["migrate", str(tmp_path), "--write"]) == 0
    assert capsys.readouterr().err.endswith('train.py" was written.\n')
    assert (tmp_path / "train.py").read_text() == "import shardlib.booster as colossalai\ncolossalai.launch()\n"
    assert (tmp_path / "train.py").stat().st_mode & 0o777 == 0o750 and (tmp_path / "same.py").is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", ".git", "env", "same.py", "gone.py"}

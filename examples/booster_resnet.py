"""Train torchvision's ResNet-18 on real digits by a booster, as with ColossalAI: choose a plugin, boost, train.

    torchrun --nproc_per_node 1 examples/booster_resnet.py --plugin none
    torchrun --nproc_per_node 2 examples/booster_resnet.py --plugin torch_ddp
    torchrun --nproc_per_node 2 examples/booster_resnet.py --plugin gemini --interval 2 --checkpoint runs/resnet
    torchrun --nproc_per_node 1 examples/booster_resnet.py --plugin torch_fsdp --resume 4 --checkpoint runs/resnet

What is computed is the same with any plugin on any number of ranks that divides the global batch: BatchNorm takes its
statistics over all ranks' images. `--dtype float64` shows it; in float32 early steps make much of the last digits.
A run goes on from a checkpoint of any other.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from digits import accuracy, digits
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset
from torchvision.models import resnet18
from train_gpt import console_of_rank_0, over_ranks, progress

from shardlib.booster import (
    Booster,
    DataLoader,
    GeminiPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
    launch_from_torch,
)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("-p", "--plugin", default="torch_ddp", choices=["none", *PLUGINS])
    p.add_argument("--precision", default="fp32", choices=["fp32", "fp16", "bf16"])
    p.add_argument("--dtype", default="float32", choices=["float32", "float64"], help="of the model and the images")
    p.add_argument("--epochs", type=int, default=6)
    p.add_argument("--batch-size", type=int, default=64, help="images of a step, over all ranks")
    p.add_argument("--lr", type=float, default=0.05)
    p.add_argument("--size", type=int, default=16, help="to which images of 8 by 8 pixels are enlarged")
    p.add_argument("--images", type=int, help="to train on and to try it on, of 1437 and 360")
    p.add_argument("-c", "--checkpoint", type=Path, default=Path("checkpoint"), help="a folder that all ranks see")
    p.add_argument("-i", "--interval", type=int, default=0, help="save each so many epochs; 0 is never")
    p.add_argument("-r", "--resume", type=int, default=0, help="the epoch whose checkpoint to go on from")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--json", type=Path, help="write losses and accuracies to this file")
    return p


def booster_for(args: argparse.Namespace) -> Booster:
    """A precision is the booster's where the plugin has none of its own, else the plugin's."""
    if args.plugin in ("none", "torch_ddp"):
        plugin = TorchDDPPlugin() if args.plugin == "torch_ddp" else None
        return Booster(plugin=plugin, mixed_precision=None if args.precision == "fp32" else args.precision)
    return Booster(plugin=PLUGINS[args.plugin](args.precision))


PLUGINS: dict[str, Any] = {
    "torch_ddp": TorchDDPPlugin,
    "low_level_zero": lambda precision: LowLevelZeroPlugin(stage=2, precision=precision),
    "gemini": lambda precision: GeminiPlugin(precision=precision),
    "torch_fsdp": lambda precision: TorchFSDPPlugin(mixed_precision=precision),
}


def images(size: int, count: int | None, dtype: torch.dtype) -> tuple[TensorDataset, TensorDataset]:
    """Digits to train on and digits kept apart, enlarged and in the three channels that the model expects."""

    def enlarged(data: TensorDataset, count: int | None) -> TensorDataset:
        pictures, labels = data.tensors
        large = nn.functional.interpolate(pictures[:count], size=(size, size), mode="bilinear", align_corners=False)
        return TensorDataset(large.to(dtype).expand(-1, 3, -1, -1), labels[:count])

    train, test = digits()
    return enlarged(train, count), enlarged(test, count)


def loaders(plugin: Plugin, args: argparse.Namespace) -> tuple[DataLoader, DataLoader]:
    train, test = images(args.size, args.images, getattr(torch, args.dtype))
    mine = args.batch_size // dist.get_world_size()
    return (
        plugin.prepare_dataloader(train, batch_size=mine, shuffle=True, drop_last=True, seed=args.seed),
        plugin.prepare_dataloader(test, batch_size=mine),
    )


def run(args: argparse.Namespace, device: torch.device) -> dict[str, list[float]]:
    """The loss of each step, and the accuracy after each epoch."""
    torch.manual_seed(args.seed)
    console = console_of_rank_0()
    booster = booster_for(args)
    train_dataloader, test_dataloader = loaders(booster.plugin, args)

    model = resnet18(num_classes=10).to(getattr(torch, args.dtype))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    lr_scheduler = StepLR(optimizer, step_size=max(1, args.epochs // 3), gamma=0.3)
    model, optimizer, criterion, train_dataloader, lr_scheduler = booster.boost(
        model, optimizer, criterion, train_dataloader, lr_scheduler
    )
    if args.resume:
        booster.load_model(model, args.checkpoint / f"model_{args.resume}.pth")
        booster.load_optimizer(optimizer, args.checkpoint / f"optimizer_{args.resume}")
        booster.load_lr_scheduler(lr_scheduler, args.checkpoint / f"lr_scheduler_{args.resume}")

    losses, accuracies = [], []
    for epoch in range(args.resume, args.epochs):
        model.train()
        train_dataloader.sampler.set_epoch(epoch)
        with progress(console) as bar:
            task = bar.add_task(f"epoch {epoch + 1}/{args.epochs}", total=len(train_dataloader), loss="")
            for pictures, labels in bar.track(train_dataloader, task_id=task):
                loss = criterion(model(pictures.to(device)), labels.to(device))
                booster.backward(loss, optimizer)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(over_ranks(loss.detach()))
                bar.update(task, loss=f"loss {losses[-1]:.4f}")
        lr_scheduler.step()
        accuracies.append(accuracy(model, test_dataloader, device))
        console.print(f"epoch {epoch + 1}: accuracy on digits never trained on {accuracies[-1]:.2%}")
        if args.interval and (epoch + 1) % args.interval == 0:
            booster.save_model(model, args.checkpoint / f"model_{epoch + 1}.pth")
            booster.save_optimizer(optimizer, args.checkpoint / f"optimizer_{epoch + 1}", shard=True, size_per_shard=10)
            booster.save_lr_scheduler(lr_scheduler, args.checkpoint / f"lr_scheduler_{epoch + 1}")
    return {"losses": losses, "accuracies": accuracies}


def main() -> None:
    args = parser().parse_args()
    device = launch_from_torch(seed=args.seed, verbose=False).device
    result = run(args, device)
    if args.json and dist.get_rank() == 0:
        args.json.write_text(json.dumps(result) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Train a small ViT of transformers on real digits in any precision, with a linear warm-up, by a booster.

    torchrun --nproc_per_node 1 examples/booster_vit_amp.py --precision fp32
    torchrun --nproc_per_node 2 examples/booster_vit_amp.py --precision fp16 --plugin gemini
    torchrun --nproc_per_node 2 examples/booster_vit_amp.py --precision fp32 fp16 bf16 fp8 fp16_naive

fp16 is autocast with a loss scale, fp16_naive is parameters in float16 with copies in float32, in fp8 linear modules
multiply in float8. The global batch is the same on any number of ranks that divides it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from digits import accuracy, digits
from rich.console import Console
from torch import nn
from torch.utils.data import TensorDataset
from train_gpt import console_of_rank_0, over_ranks, progress
from transformers import ViTConfig, ViTForImageClassification

from shardlib.booster import (
    Booster,
    FP16TorchMixedPrecision,
    GeminiPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    launch_from_torch,
)
from shardlib.optim import HybridAdam
from shardlib.optim.lr_scheduler import LinearWarmupLR

PRECISIONS = "fp32", "fp16", "bf16", "fp8", "fp16_naive"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--precision", nargs="+", default=["bf16"], choices=PRECISIONS, help="one run for each")
    p.add_argument("-p", "--plugin", default="torch_ddp", choices=["torch_ddp", "low_level_zero", "gemini"])
    p.add_argument("--epochs", type=int, default=6)
    p.add_argument("--batch-size", type=int, default=64, help="images of a step, over all ranks")
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--warmup", type=float, default=0.2, help="the part of all steps in which the rate rises")
    p.add_argument("--width", type=int, default=64)
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--json", type=Path, help="write losses, rates and accuracies to this file")
    return p


def booster_for(plugin: str, precision: str) -> Booster:
    """DDP takes the booster's precision by name or as an object; the other plugins have one of their own."""
    if plugin == "torch_ddp":
        named: dict[str, Any] = {"fp32": None, "fp16": FP16TorchMixedPrecision(init_scale=2.0**12)}
        return Booster(plugin=TorchDDPPlugin(), mixed_precision=named.get(precision, precision))
    eight = {"precision": "bf16", "use_fp8": True}  # parameters in bfloat16 with copies in float32
    options: dict[str, Any] = eight if precision == "fp8" else {"precision": precision}
    return Booster(plugin=LowLevelZeroPlugin(**options) if plugin == "low_level_zero" else GeminiPlugin(**options))


def vit(width: int, layers: int) -> ViTForImageClassification:
    config = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, id2label={digit: str(digit) for digit in range(10)},
        hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, num_attention_heads=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.1,
    )  # fmt: skip
    return ViTForImageClassification(config)


def images() -> tuple[TensorDataset, TensorDataset]:
    """Digits to train on and digits kept apart, moved and scaled as those to train on ask for."""
    train, test = digits()
    pixels = train.tensors[0]

    def scaled(data: TensorDataset) -> TensorDataset:
        pictures, labels = data.tensors
        return TensorDataset((pictures - pixels.mean()) / pixels.std(), labels)

    return scaled(train), scaled(test)


def train(args: argparse.Namespace, precision: str, device: torch.device, console: Console) -> dict[str, Any]:
    """Losses, rates and the accuracy of a run from the beginning."""
    torch.manual_seed(args.seed)
    booster, ranks = booster_for(args.plugin, precision), dist.get_world_size()
    train_data, test_data = images()
    mine = args.batch_size // ranks
    dataloader = booster.plugin.prepare_dataloader(train_data, mine, shuffle=True, drop_last=True, seed=args.seed)

    model = vit(args.width, args.layers)
    optimizer = HybridAdam(model.parameters(), lr=args.lr, weight_decay=0.05)
    steps = args.epochs * len(dataloader)
    lr_scheduler = LinearWarmupLR(optimizer, total_steps=steps, warmup_steps=int(args.warmup * steps))
    model, optimizer, criterion, dataloader, lr_scheduler = booster.boost(
        model, optimizer, nn.CrossEntropyLoss(), dataloader, lr_scheduler
    )

    losses, rates = [], []
    model.train()
    with progress(console) as bar:
        task = bar.add_task(f"ViT in {precision}", total=steps, loss="")
        for epoch in range(args.epochs):
            dataloader.sampler.set_epoch(epoch)
            for pictures, labels in dataloader:
                loss = criterion(model(pictures.to(device)).logits, labels.to(device))
                booster.backward(loss, optimizer)
                optimizer.clip_grad_by_norm(1.0)
                rates.append(optimizer.param_groups[0]["lr"])
                optimizer.step()
                optimizer.zero_grad()
                lr_scheduler.step()
                losses.append(over_ranks(loss.detach()))
                bar.update(task, advance=1, loss=f"loss {losses[-1]:.4f}")

    right = accuracy(model, booster.plugin.prepare_dataloader(test_data, mine), device, lambda output: output.logits)
    console.print(f"{precision}: accuracy on digits never trained on {right:.2%}, loss {losses[-1]:.4f}")
    return {"losses": losses, "rates": rates, "accuracy": right}


def run(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    console = console_of_rank_0()
    return {precision: train(args, precision, device, console) for precision in args.precision}


def main() -> None:
    args = parser().parse_args()
    device = launch_from_torch(seed=args.seed, verbose=False).device
    result = run(args, device)
    if args.json and dist.get_rank() == 0:
        args.json.write_text(json.dumps(result) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

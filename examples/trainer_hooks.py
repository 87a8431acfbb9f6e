"""Train a small convolutional network on real digits in the older manner: a config, an engine, a trainer with hooks.

    python examples/trainer_hooks.py
    torchrun --nproc_per_node 2 examples/trainer_hooks.py
    torchrun --nproc_per_node 2 examples/trainer_hooks.py --checkpoints runs/digits --epochs 10

Called again with more epochs, the last one goes on where it was, on another number of ranks too.

The global batch, and so every number but the times, is the same on any number of ranks that divides it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from digits import digits
from torch import nn

from shardlib.trainer import (
    Accuracy,
    MultiTimer,
    ParallelMode,
    Trainer,
    free_port,
    get_dataloader,
    get_default_parser,
    get_dist_logger,
    gpc,
    hooks,
    initialize,
    launch,
    launch_from_torch,
)

CONFIG = {
    "parallel": {"pipeline": 1, "tensor": {"size": 1, "mode": None}},
    "zero": {"stage": 1},
    "gradient_accumulation": 2,
    "clip_grad_norm": 1.0,
    "BATCH_SIZE": 32,  # of all ranks, for one of the two passes of a step
    "LEARNING_RATE": 3e-3,
}


class Net(nn.Module):
    """Two convolutions with BatchNorm, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Linear(32 * 4 * 4, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images).flatten(1))


def main() -> None:
    parser = get_default_parser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--checkpoints", help="a folder to save each epoch to, and to go on from")
    parser.add_argument("--json", help="a file for the numbers")
    args = parser.parse_args()
    if "RANK" in os.environ:
        launch_from_torch(args.config or CONFIG)
    else:
        launch(args.config or CONFIG, 0, 1, "localhost", args.port or free_port())
    logger = get_dist_logger()

    train_data, test_data = digits()
    batch_size = gpc.config.BATCH_SIZE // gpc.get_world_size(ParallelMode.DATA)
    train_dataloader = get_dataloader(train_data, shuffle=True, drop_last=True, batch_size=batch_size)
    test_dataloader = get_dataloader(test_data, batch_size=batch_size)

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=gpc.config.LEARNING_RATE)
    lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    engine, train_dataloader, test_dataloader, lr_scheduler = initialize(
        model, optimizer, nn.CrossEntropyLoss(), train_dataloader, test_dataloader, lr_scheduler
    )

    timer = MultiTimer()
    trainer = Trainer(engine, timer=timer, logger=logger)
    losses = Losses()
    hook_list: list[hooks.BaseHook] = [
        hooks.LossHook(),
        hooks.AccuracyHook(Accuracy()),
        hooks.LRSchedulerHook(lr_scheduler, by_epoch=True),
        hooks.ThroughputHook(ignored_steps=2),
        hooks.LogMetricByStepHook(),
        hooks.LogMetricByEpochHook(logger),
        hooks.LogTimingByEpochHook(timer, logger),
        losses,
    ]
    if args.checkpoints:
        hook_list.append(hooks.SaveCheckpointHook(checkpoint_dir=args.checkpoints, resume=True))
    trainer.fit(train_dataloader, args.epochs, test_dataloader=test_dataloader, hooks=hook_list, display_progress=True)

    if gpc.get_global_rank() == 0 and losses.accuracies:
        print(f"accuracy on {len(test_data)} digits: {losses.accuracies[-1]:.2%}")
        if args.json:
            Path(args.json).write_text(json.dumps({"losses": losses.losses, "accuracies": losses.accuracies}))
    dist.destroy_process_group()


class Losses(hooks.BaseHook):
    """A hook of one's own: what each epoch came to. It comes after those that measure, whose priority is 0."""

    def __init__(self) -> None:
        super().__init__(priority=20)
        self.losses: list[float] = []
        self.accuracies: list[float] = []

    def after_train_epoch(self, trainer: Trainer) -> None:
        self.losses.append(trainer.states["metrics"]["train"]["Loss"].get_accumulated_value())

    def after_test_epoch(self, trainer: Trainer) -> None:
        self.accuracies.append(trainer.states["metrics"]["test"]["Accuracy"].get_accumulated_value())


if __name__ == "__main__":
    main()

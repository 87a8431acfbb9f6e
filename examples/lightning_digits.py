"""Train a classifier of digits by Lightning's `Trainer`, sharded. Lines with `# was` or `# new` are changed.

torchrun --nproc_per_node 4 examples/lightning_digits.py
"""

from __future__ import annotations

import os
from typing import Any

import torch
from digits import digits
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from shardlib.integrations.lightning import ShardlibStrategy  # new

RULES = {"1": "colwise", "3": "rowwise"}  # new


class Digits(LightningModule):
    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))

    def training_step(self, batch: Any, index: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        images, labels = batch
        right = (self.model(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])


def main() -> None:
    train, test = digits()
    seed_everything(0, verbose=False)
    trainer = Trainer(
        accelerator="auto",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        strategy=ShardlibStrategy("dp=-1,tp=2", RULES, transforms="zero(2)"),  # was: strategy="ddp",
        max_epochs=3,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Digits()
    trainer.fit(model, DataLoader(train, batch_size=16, shuffle=True), DataLoader(test, batch_size=20))
    trainer.save_checkpoint("digits_run.ckpt")
    if trainer.is_global_zero:
        metrics = {name: round(value.item(), 3) for name, value in trainer.callback_metrics.items()}
        print(f"after {trainer.global_step} steps: {metrics}")


if __name__ == "__main__":
    main()

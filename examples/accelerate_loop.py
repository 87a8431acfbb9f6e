"""Train a classifier of digits in a loop for Accelerate, sharded. Lines with `# was` or `# new` are changed.

torchrun --nproc_per_node 4 examples/accelerate_loop.py
"""

from __future__ import annotations

import torch
from accelerate.utils import DataLoaderConfiguration
from digits import digits
from torch import nn
from torch.utils.data import DataLoader

from shardlib.integrations.accelerate import Accelerator  # was: from accelerate import Accelerator

EPOCHS = 3


def main() -> None:
    accelerator = Accelerator(
        mesh="dp=-1,tp=2", rules={"1": "colwise", "3": "rowwise"}, transforms="zero(2)",  # new
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True),
    )  # fmt: skip
    train, test = digits()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = EPOCHS * (-(-len(train) // 32) // 2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    train_loader = DataLoader(train, batch_size=32, shuffle=True, drop_last=True)
    test_loader = DataLoader(test, batch_size=32)
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )
    for epoch in range(EPOCHS):
        model.train()
        total = torch.zeros((), device=accelerator.device)
        for images, labels in train_loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            total += loss.detach()
        model.eval()
        right = 0
        for images, labels in test_loader:
            with torch.no_grad():
                guesses = model(images).argmax(1)
            guesses, labels = accelerator.gather_for_metrics((guesses, labels))
            right += int((guesses == labels).sum())
        mean = accelerator.reduce(total, "mean").item() / len(train_loader)
        accelerator.print(
            f"epoch {epoch}: loss {mean:.3f}, accuracy on digits never trained on {right / len(test):.3f}"
        )
    accelerator.save_model(model, "digits_run")


if __name__ == "__main__":
    main()

"""Train a vision transformer on digits by transformers' `Trainer`, sharded. Lines with `# was` or `# new` are changed.

torchrun --nproc_per_node 4 examples/hf_trainer.py
"""

from __future__ import annotations

from typing import Any

import torch
from digits import digits
from transformers import TrainingArguments, ViTConfig, ViTForImageClassification

from shardlib.integrations.transformers import Trainer  # was: from transformers import Trainer

args = TrainingArguments(
    "digits_run",
    use_cpu=not torch.cuda.is_available(),
    per_device_train_batch_size=32,
    accelerator_config={"split_batches": True},  # a batch is that of all data ranks
    num_train_epochs=5,
    learning_rate=3e-3,
    lr_scheduler_type="cosine",
    eval_strategy="epoch",
    save_strategy="no",
    logging_strategy="epoch",
    report_to="none",
    disable_tqdm=True,
)


def accuracy(evaluated: Any) -> dict[str, float]:
    return {"accuracy": float((evaluated.predictions.argmax(1) == evaluated.label_ids).mean())}


def rows(data: Any) -> list[dict[str, Any]]:
    return [{"pixel_values": image, "labels": label} for image, label in data]


def main() -> None:
    train, test = digits()
    torch.manual_seed(0)
    model = ViTForImageClassification(
        ViTConfig(
            image_size=8,
            patch_size=2,
            num_channels=1,
            hidden_size=32,
            initializer_range=0.1,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            id2label={digit: str(digit) for digit in range(10)},
        )
    )
    trainer = Trainer(
        model,
        args,
        train_dataset=rows(train),
        eval_dataset=rows(test),
        compute_metrics=accuracy,
        sharding="dp=-1,tp=2 | zero(2)",  # new
    )
    trainer.train()
    trainer.save_model("digits_run/trained")
    if trainer.is_world_process_zero():
        print(f"accuracy on digits never trained on: {trainer.state.log_history[-2]['eval_accuracy']:.3f}")


if __name__ == "__main__":
    main()

"""One script for a Trainer of transformers: on ranks with ours, in one process with transformers' own."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tests.families.transformer_models import build
from tests.integrations.accelerated import BATCH, examples, reset

import transformers  # isort: skip  # after what makes torchvision importable


@dataclass
class Ran:
    logs: list[dict[str, float]] = field(default_factory=list)
    predicted: Any = None
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def loss_in_float64(logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, **_: Any) -> Any:
    """transformers' own loss of a causal model computes in float32, whatever the model's dtype."""
    kind = "mean" if num_items_in_batch is None else "sum"
    rows = logits[:, :-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(rows, labels[:, 1:].flatten(), reduction=kind)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def accuracy(evaluated: transformers.EvalPrediction) -> dict[str, float]:
    guesses, labels = evaluated.predictions[:, :-1], evaluated.label_ids[:, 1:]
    return {"accuracy": float(np.mean((guesses == labels)[labels != -100]))}


def arguments(folder: str, batch: int, **options: Any) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(
        folder,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        **{"learning_rate": 1e-2, "adam_epsilon": 1e-4, "save_strategy": "no", "num_train_epochs": 2, **options},
    )


class _Stops(transformers.TrainerCallback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == self.at


def data_ranks(sharding: str | None) -> int:
    return 2 if sharding is not None and "dp=2" in sharding else 1


def run(
    sharding: str | None,
    folder: str,
    *,
    resume: bool = False,
    stop_at: int = 0,
    first: str = "",
    then: str = "",
    **options: Any,
) -> Ran:
    """Train a small GPT-2 in float64.

    Logged losses are sums in torch's default dtype, which is float64 meanwhile.

    Args:
        sharding: ours, or None for transformers' own Trainer.
        folder: of checkpoints.
        resume: go on from the last checkpoint.
        stop_at: the step after which training stops, and would have gone on.
        first: what to do before training: "evaluate".
        then: what to do after it: "predict", "save".
        **options: training arguments.
    """
    reset()
    torch.set_default_dtype(torch.float64)
    if sharding is None:
        kind, more = transformers.Trainer, {}
    else:
        from shardlib.integrations.transformers import Trainer as kind

        os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]  # as torchrun sets it
        more = {"sharding": sharding}
    torch.manual_seed(0)
    model = build("GPT2LMHeadModel").double()
    model.loss_function = loss_in_float64
    ranks = data_ranks(sharding)
    rows = [{name: row[name] for name in ("input_ids", "labels")} for row in examples()]
    trainer = kind(
        model,
        arguments(folder, BATCH // ranks, **options),
        train_dataset=rows,
        eval_dataset=rows[:8],
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        **more,
    )
    if stop_at:
        trainer.add_callback(_Stops(stop_at))
    done = Ran()
    if first == "evaluate":
        trainer.evaluate()
    trainer.train(resume_from_checkpoint=resume or None)
    keep = "loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy"
    done.logs = [{name: entry[name] for name in keep if name in entry} for entry in trainer.state.log_history]
    done.logs = [entry for entry in done.logs if entry]
    if then == "predict":
        done.predicted = trainer.predict(rows[:8]).predictions
    if then == "save":
        trainer.save_model(f"{folder}/final")
    state = trainer.accelerator.get_state_dict(trainer.model)
    done.weights = {name: value.detach().clone() for name, value in state.items()}
    torch.set_default_dtype(torch.float32)
    reset()
    return done

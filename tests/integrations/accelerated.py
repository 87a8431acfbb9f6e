"""One script for Accelerate: on ranks with our `Accelerator`, in one process with Accelerate's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.at_scale import plans_at_scale
from tests.families.transformer_models import build

import accelerate  # isort: skip  # after what makes torchvision importable
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, GradScalerKwargs, ProjectConfiguration

ROWS, LENGTH, BATCH, VOCABULARY = 24, 10, 4, 67

# What a user who is killed and resumed does: on the same mesh, and on another.
RESUMED = [("tp", "tp"), ("zero", "dp x tp"), ("fsdp", "tp")]
DEEP_RESUMED = [
    ("ep", "ep x tp"),
    ("dp", "dp"),
    ("fsdp", "fsdp"),
    ("zero", "zero"),
    ("dp x tp", "dp x tp"),
    ("ep", "ep"),
    ("ep x tp", "tp"),
]


@dataclass
class Ran:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    metrics: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    output: torch.dtype | None = None  # of the model
    scales: list[float] = field(default_factory=list)  # of the loss, after each step
    skipped: list[bool] = field(default_factory=list)


def examples(rows: int = ROWS, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Rows of which the labels count up to an end that differs."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, LENGTH), generator=generator)
    ends = torch.randint(3, LENGTH, (rows,), generator=generator)
    labels = ids.masked_fill(torch.arange(LENGTH) >= ends[:, None], -100)
    return [{"input_ids": ids[row], "labels": labels[row], "row": torch.tensor(row)} for row in range(rows)]


def model_for(sharding: Any) -> str:
    """Return the class of the model for a sharding, a mesh or ways of several: experts are those of Mixtral."""
    return "MixtralForCausalLM" if "ep" in str(sharding) else "GPT2LMHeadModel"


def build_model(model_class: str) -> torch.nn.Module:
    """Return a small model; the product of experts that transformers chooses refuses float64."""
    settings = {"experts_implementation": "eager"} if model_class.startswith("Mixtral") else {}
    return build(model_class, **settings)


def reset() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def make(shards: dict[str, Any] | None, **options: Any) -> Any:
    reset()
    torch.manual_seed(0)
    split = options.pop("split", False)
    options["dataloader_config"] = DataLoaderConfiguration(use_seedable_sampler=True, split_batches=split)
    if shards is None:
        host = accelerate.Accelerator(cpu=True, **options)
        if host.mixed_precision == "fp16":  # what it does on a GPU
            host.native_amp, host.scaler = True, torch.amp.GradScaler("cpu", **host.scaler_handler.to_kwargs())
        return host
    from shardlib.integrations.accelerate import Accelerator

    return Accelerator(**shards, **options)


@plans_at_scale()
def run(
    shards: dict[str, Any] | None,
    *,
    epochs: int = 1,
    accumulate: int = 1,
    clip: float | None = None,
    evaluate: bool = False,
    folder: str | None = None,
    resume: bool = False,
    split: bool = False,
    model_class: str = "GPT2LMHeadModel",
    precision: str | None = None,
    overflows: int | None = None,
) -> Ran:
    """Train a small model in float64, or in float32 with a mixed precision.

    `folder` is where it saves after the first epoch, or resumes after it. `overflows` is the batch of each epoch whose
    loss is infinite on the first data rank.
    """
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=1) if folder else None
    accelerator = make(
        shards,
        gradient_accumulation_steps=accumulate,
        project_config=project,
        split=split,
        mixed_precision=precision,
        kwargs_handlers=[GradScalerKwargs(init_scale=2.0**10, growth_interval=3)],
    )
    model = build_model(model_class).to(torch.float32 if precision else torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    ranks = accelerator.num_processes
    parts = 1 if split else ranks
    # Accelerate steps a prepared scheduler once for each process, unless it splits batches.
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2 * parts, gamma=0.5)
    loader = DataLoader(examples(), BATCH // parts, shuffle=True)
    rest = DataLoader(examples(10, seed=2), BATCH // parts)
    model, optimizer, loader, rest, scheduler = accelerator.prepare(model, optimizer, loader, rest, scheduler)
    assert accelerator.prepare(model) is model
    done = Ran()
    if resume:
        accelerator.load_state()
    for epoch in range(1 if resume else 0, epochs):
        loader.set_epoch(epoch)
        batches = list(loader) if accumulate > 1 else None
        for step, batch in enumerate(loader):
            with accelerator.accumulate(model):
                if batches is None:
                    logits = model(batch["input_ids"], use_cache=False).logits
                    loss = _cross_entropy(logits, batch["input_ids"], "mean")
                    done.losses.append(accelerator.gather(loss.detach()).mean().item())
                else:
                    window = batches[step // accumulate * accumulate :][:accumulate]
                    own = sum((one["labels"][:, 1:] != -100).sum() for one in window)
                    count = accelerator.gather(own).sum()
                    logits = model(batch["input_ids"], use_cache=False).logits
                    total = _cross_entropy(logits, batch["labels"], "sum")
                    loss = total / count * accumulate * ranks
                    done.losses.append(accelerator.reduce(total.detach()).item())
                done.output = logits.dtype
                accelerator.backward(loss * torch.inf if step == overflows and accelerator.process_index == 0 else loss)
                if accelerator.sync_gradients and clip is not None:
                    done.norms.append(float(accelerator.clip_grad_norm_(model.parameters(), clip)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                done.rates.append(scheduler.get_last_lr()[0])
                if accelerator.scaler is not None:
                    done.scales.append(accelerator.scaler.get_scale())
                    done.skipped.append(optimizer.step_was_skipped)
        if evaluate:
            done.metrics += _evaluate(accelerator, model, rest)
        if folder and not resume:
            accelerator.save_state()
            torch.rand(3)  # what a resumed run does not draw
    if evaluate and folder:
        accelerator.save_model(model, f"{folder}/final")
    done.weights = {name: value.detach().clone() for name, value in accelerator.get_state_dict(model).items()}
    reset()
    return done


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
    """The loss of the next token; the model's own computes in float32."""
    rows = logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(rows, labels[:, 1:].flatten(), reduction=reduction)


def _evaluate(accelerator: Any, model: Any, loader: Any) -> list[float]:
    model.eval()
    rows, guesses = [], []
    for batch in loader:
        with torch.no_grad():
            logits = model(batch["input_ids"], use_cache=False).logits
        row, guess = accelerator.gather_for_metrics((batch["row"], logits.sum((1, 2))))
        names = accelerator.gather_for_metrics([f"row {number}" for number in batch["row"].tolist()])
        assert names == [f"row {number}" for number in row.tolist()]
        rows += row.tolist()
        guesses += guess.tolist()
    model.train()
    assert sorted(rows) == list(range(10))
    return [guess for _, guess in sorted(zip(rows, guesses, strict=True))]

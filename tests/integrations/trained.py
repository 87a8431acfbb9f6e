"""One script for a Trainer of transformers: on ranks with ours, in one process with transformers' own."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import shardlib as sl
from tests.at_scale import plans_at_scale
from tests.families.transformer_models import build
from tests.integrations.accelerated import BATCH, build_model, examples, reset

import peft  # isort: skip  # after what makes torchvision importable
import transformers  # isort: skip


OVERFLOWS = 3  # in fp16, the step in which the loss of the first data rank is infinite


@dataclass
class Ran:
    logs: list[dict[str, float]] = field(default_factory=list)
    predicted: Any = None
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    scale: float | None = None  # of the loss, at the end


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
        disable_tqdm=True,
        logging_steps=1,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        **{
            "report_to": "none",
            "learning_rate": 1e-2,
            "adam_epsilon": 1e-4,
            "save_strategy": "no",
            "num_train_epochs": 2,
            **options,
        },
    )


def adapters(*layers: str) -> Any:
    """Return the config of adapters of layers of a GPT-2, which trains its last normalisation beside them."""
    return peft.LoraConfig(r=4, target_modules=[*layers], fan_in_fan_out=True, modules_to_save=["ln_f"])


class _Stops(transformers.TrainerCallback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == self.at


def data_ranks(sharding: str | None) -> int:
    return 1 if sharding is None else sl.MeshShape(sharding.partition("|")[0].strip()).data_ranks


def trainer_class(host: Any, sharding: str | None) -> tuple[Any, dict[str, Any]]:
    """Return the host's class and no options; or ours of that name, else one with the mixin, and its option."""
    if sharding is None:
        return host, {}
    from shardlib.integrations import transformers as ours

    name = host.__name__
    kind = getattr(ours, name) if name in ours.__all__ else type(name, (ours.ShardedTrainerMixin, host), {})
    return kind, {"sharding": sharding}


@plans_at_scale()
def run(
    sharding: str | None,
    folder: str,
    *,
    resume: bool = False,
    stop_at: int = 0,
    first: str = "",
    then: str = "",
    model_class: str = "GPT2LMHeadModel",
    adapt: str = "",
    late: Sequence[transformers.TrainerCallback] = (),
    **options: Any,
) -> Ran:
    """Train a small model in float64, or in float32 for bf16 and fp16.

    Logged losses are sums in torch's default dtype, which is float64 meanwhile.

    Args:
        sharding: ours, or None for transformers' own Trainer.
        folder: of checkpoints.
        resume: go on from the last checkpoint.
        stop_at: the step after which training stops, and would have gone on.
        first: what to do before training: "evaluate".
        then: what to do after it: "predict", "save".
        model_class: of transformers.
        adapt: train adapters that are added by this function: "get_peft_model" of peft, "add_adapter" of the model.
        late: callbacks that are added once the trainer is built.
        **options: training arguments.
    """
    reset()
    dtype = torch.float32 if options.get("bf16") or options.get("fp16") else torch.float64
    torch.set_default_dtype(dtype)
    kind, more = trainer_class(transformers.Trainer, sharding)
    torch.manual_seed(0)
    model = build_model(model_class).to(dtype)
    model.loss_function = loss_in_float64
    config = adapters("c_attn", "c_proj", "c_fc")
    if adapt == "get_peft_model":
        model = peft.get_peft_model(model, config, autocast_adapter_dtype=False).to(dtype)
    elif adapt:
        model.add_adapter(config)
        model.to(dtype)
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
    accelerator = trainer.accelerator
    if options.get("fp16"):
        if sharding is None:  # what it does on a GPU
            accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu")
        accelerator.scaler.load_state_dict({**accelerator.scaler.state_dict(), "scale": 2.0**10})
        place = lambda: (trainer.state.global_step, accelerator.process_index)  # noqa: E731
        model.loss_function = lambda *args, **given: (
            loss_in_float64(*args, **given) * (torch.inf if place() == (OVERFLOWS, 0) else 1)
        )
    for callback in (*late, *([_Stops(stop_at)] if stop_at else [])):
        trainer.add_callback(callback)
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
    done.scale = None if accelerator.scaler is None else accelerator.scaler.get_scale()
    state = accelerator.get_state_dict(trainer.model)
    done.weights = {name: value.detach().clone() for name, value in state.items()}
    torch.set_default_dtype(torch.float32)
    reset()
    return done


def generates(sharding: str | None, folder: str) -> tuple[Any, float]:
    """Train a small T5 and let it generate; return what it has generated, and the last loss."""
    reset()
    kind, more = trainer_class(transformers.Seq2SeqTrainer, sharding)
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 52, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    tokens = {"vocab_size": 67, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **tokens)).double()
    batch = BATCH // data_ranks(sharding)
    args = transformers.Seq2SeqTrainingArguments(
        folder,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        learning_rate=1e-2,
        num_train_epochs=2,
        logging_steps=1,
        predict_with_generate=True,
        generation_max_length=12,
    )
    rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in examples()]
    trainer = kind(model, args, train_dataset=rows, eval_dataset=rows[:8], **more)
    trainer.train()
    loss = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1]
    found = trainer.predict(rows[:8]).predictions
    reset()
    return found, loss


def generates_until(length: int, model_class: str, sharding: str | None, options: dict[str, Any]) -> tuple[Any, float]:
    """Generate a text of a length, then train a step on a batch; return the text, and the loss."""
    torch.manual_seed(0)
    model = build_model(model_class).double()
    if sharding is not None:
        mesh, _, transforms = sharding.partition("|")
        rules = None if "ep" in mesh else {"**": None}
        sl.shard_model(model, mesh.strip(), rules, transforms=sl.transforms.parse(transforms) if transforms else ())

    def ends(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(ids),), ids.shape[1] >= length)

    prompt = torch.arange(3, 7)[None]
    until = transformers.StoppingCriteriaList([ends])
    text = model.generate(prompt, max_new_tokens=12, do_sample=False, stopping_criteria=until, **options)
    loss = model(prompt, labels=prompt).loss
    loss.backward()
    return text.tolist(), loss.item()


def generates_on_ranks(lengths: tuple[int, int], *args: Any) -> tuple[Any, float]:
    return generates_until(lengths[torch.distributed.get_rank()], *args)


@plans_at_scale()
def fine_tunes(
    sharding: str | None, folder: str, trainer: str = "SFTTrainer", model_class: str = "GPT2LMHeadModel"
) -> Ran:
    """Tune a small model by a trainer of TRL, on rows of unequal lengths."""
    import datasets
    import trl
    from tokenizers import Tokenizer, models, pre_tokenizers

    reset()
    host, configure = getattr(trl, trainer), getattr(trl, trainer.replace("Trainer", "Config"))
    kind, more = trainer_class(host, sharding)
    torch.manual_seed(0)
    model = build(model_class).double()
    words = Tokenizer(models.WordLevel({str(number): number for number in range(67)}, unk_token="0"))
    model.config.pad_token_id = 0
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="0", eos_token="2", unk_token="0"
    )
    texts = [row["input_ids"][: 3 + number % 7].tolist() for number, row in enumerate(examples())]
    options: dict[str, Any] = {"max_length": 10}
    if trainer == "SFTTrainer":
        rows = [{"input_ids": text} for text in texts]
        options["dataset_kwargs"] = {"skip_prepare_dataset": True}
    else:
        rows = [_preference(trainer, number, text) for number, text in enumerate(texts)]
    args = configure(
        folder,
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
        per_device_train_batch_size=BATCH // data_ranks(sharding),
        learning_rate=1e-2,
        adam_epsilon=1e-4,
        gradient_accumulation_steps=3,
        num_train_epochs=2,
        save_strategy="epoch",
        **options,
    )
    data = datasets.Dataset.from_list(rows)
    if trainer in ("DPOTrainer", "KTOTrainer"):
        more["ref_model"] = copy.deepcopy(model)
    tuning = kind(model, args=args, train_dataset=data, processing_class=tokenizer, **more)
    tuning.train()
    measured = [entry for entry in tuning.state.log_history if "loss" in entry]
    done = Ran([{name: entry[name] for name in entry if "runtime" not in name} for entry in measured])
    state = tuning.accelerator.get_state_dict(tuning.model)
    done.weights = {name: value.detach().clone() for name, value in state.items()}
    reset()
    return done


def _preference(trainer: str, number: int, text: list[int]) -> dict[str, Any]:
    """A prompt with two answers, of which one is better, or with one that is good or bad."""
    prompt, good, bad = (" ".join(map(str, part)) for part in (text[:2], text[2:], [*text[2:], 5, number % 60 + 3]))
    if trainer == "KTOTrainer":
        return {"prompt": prompt, "completion": f" {good if number % 2 else bad}", "label": bool(number % 2)}
    return {"prompt": prompt, "chosen": f" {good}", "rejected": f" {bad}"}

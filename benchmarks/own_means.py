"""What transformers' Trainer, Accelerate and Lightning do by their own means of sharding, beside one process.

    python benchmarks/own_means.py             # some minutes on two cores; prints a table
    python benchmarks/own_means.py --only lightning [--quick] [--json FILE]

A small Llama (Mixtral for experts, two linear layers for Lightning) with random weights is trained in float32 for a few
steps, on ranks over gloo, and on one process. A cell says that losses are equal to 1e-3, how far they are off, or the
first line of an error. Each host is told of its mesh as its own documentation says. shardlib is not used.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from _report import parser, write

ROWS, LENGTH, BATCH, VOCABULARY, STEPS = 24, 10, 4, 64, 6
SECONDS = 120
# Sizes of the mesh: shards of data, tp, ep.
WAYS = {"alone": (1, 1, 1), "tp=2": (1, 2, 1), "fsdp=2": (2, 1, 1), "fsdp=2,tp=2": (2, 2, 1), "ep=2": (2, 1, 2)}
TRAININGS = "plain", "accumulation", "clipping", "evaluation"


def examples() -> list[dict[str, Any]]:
    """Rows with unequal numbers of labels."""
    import torch

    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=draw)
    ends = torch.randint(3, LENGTH, (ROWS,), generator=draw)
    labels = ids.masked_fill(torch.arange(LENGTH) >= ends[:, None], -100)
    return [{"input_ids": ids[row], "labels": labels[row]} for row in range(ROWS)]


def saved(folder: Path, experts: bool) -> None:
    """Save a model that every run starts from."""
    import torch
    import transformers

    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    torch.manual_seed(0)
    if experts:
        config: Any = transformers.MixtralConfig(**sizes, num_local_experts=4)
        transformers.MixtralForCausalLM(config).save_pretrained(folder)
    else:
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(folder)


def loaded(folder: Path, way: str) -> Any:
    """Load the model, sharded by transformers."""
    import transformers
    from transformers.distributed import DistributedConfig

    data, tp, ep = WAYS[way]
    config = DistributedConfig(fsdp_size=data, tp_size=tp, ep_size=ep) if way != "alone" else None
    more = {"distributed_config": config} if config else {}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **more)


def by_transformers(folder: Path, way: str, training: str) -> list[float]:
    import transformers

    args = transformers.TrainingArguments(
        str(folder / "run"),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=1,
        max_steps=2 if training == "accumulation" else STEPS,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        per_device_train_batch_size=BATCH // WAYS[way][0],
        per_device_eval_batch_size=BATCH // WAYS[way][0],
        gradient_accumulation_steps=3 if training == "accumulation" else 1,
        max_grad_norm=0.1 if training == "clipping" else 0.0,
        eval_strategy="steps" if training == "evaluation" else "no",
        eval_steps=2,
    )
    rows = examples()
    trainer = transformers.Trainer(loaded(folder / "model", way), args, train_dataset=rows, eval_dataset=rows[:8])  # type: ignore[arg-type]
    trainer.train()
    names = "loss", "eval_loss", *(["grad_norm"] if training == "clipping" else [])
    return [float(entry[name]) for entry in trainer.state.log_history for name in names if name in entry]


def by_accelerate(folder: Path, way: str, training: str) -> list[float]:
    import accelerate
    import torch
    from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig

    data, tp, _ = WAYS[way]
    options: dict[str, Any] = {}
    if way != "alone":
        options["parallelism_config"] = ParallelismConfig(dp_shard_size=data, tp_size=tp)
    if data > 1:
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
    parts = 3 if training == "accumulation" else 1
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=parts, **options)
    import transformers
    from transformers.distributed import DistributedConfig

    # Accelerate shards data; the model has to come with its tp from transformers.
    more = {"distributed_config": DistributedConfig(tp_size=tp)} if tp > 1 else {}
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", **more)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader: Any = torch.utils.data.DataLoader(examples(), BATCH // data)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found = []
    for batch in loader:
        with accelerator.accumulate(model):
            if training == "accumulation":  # a sum over this batch, as a mean over tokens of several needs
                loss = model(**batch, num_items_in_batch=torch.tensor(100)).loss * parts * data
            else:
                loss = model(batch["input_ids"], labels=batch["input_ids"]).loss
            accelerator.backward(loss)
            if training == "clipping":
                found.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
            optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean")
        found.append(float(mean))
        if training == "evaluation":
            with torch.no_grad():
                found.append(float(accelerator.gather_for_metrics(model(batch["input_ids"]).logits).mean()))
    return found


def by_lightning(folder: Path, way: str, training: str) -> list[float]:
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    data, tp, _ = WAYS[way]
    found: list[float] = []

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model: Any = None

        def configure_model(self) -> None:
            torch.manual_seed(0)
            up, down = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)
            self.model = torch.nn.Sequential(up, torch.nn.GELU(), down)
            if tp > 1:
                plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
                parallelize_module(self.model, self.device_mesh["tensor_parallel"], plan)  # type: ignore[index]
            if data > 1:
                fully_shard(self.model, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]

        def training_step(self, batch: Any, index: int) -> Any:
            loss = (self.model(batch) - batch).square().mean()
            self.log("loss", loss, sync_dist=True)
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            found.append(float(self.trainer.callback_metrics["loss"]))

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val", (self.model(batch) - batch).square().mean(), sync_dist=True)

        def on_validation_epoch_end(self) -> None:
            found.append(float(self.trainer.callback_metrics["val"]))

        def configure_optimizers(self) -> Any:
            if training == "clipping":  # AdamW would hide a wrong norm
                return torch.optim.SGD(self.parameters(), lr=5.0)
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    strategy: Any = ModelParallelStrategy(data, tp) if way != "alone" else "auto"
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options |= {"gradient_clip_val": 0.02} if training == "clipping" else {}
    trainer = Trainer(
        accelerator="cpu",
        devices=data * tp,
        strategy=strategy,
        max_epochs=1,
        accumulate_grad_batches=3 if training == "accumulation" else 1,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        **options,
    )
    rows = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1))
    place = int(os.environ.get("RANK", "0")) // tp
    shares = [rows[at : at + BATCH].chunk(data)[place] for at in range(0, ROWS, BATCH)]
    loader: Any = torch.utils.data.DataLoader(shares, batch_size=None)  # type: ignore[arg-type]
    trainer.fit(Net(), loader, loader if training == "evaluation" else None)
    return found


HOSTS: dict[str, Callable[[Path, str, str], list[float]]] = {
    "transformers": by_transformers,
    "accelerate": by_accelerate,
    "lightning": by_lightning,
}


def child(host: str, way: str, folder: Path) -> None:
    """Run every training on this rank, and write what each found."""
    results: dict[str, Any] = {}
    for training in TRAININGS:
        try:
            results[training] = {"found": HOSTS[host](folder, way, training)}
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            results[training] = {"error": f"{type(error).__name__}: {lines[0]}"}
        (folder / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(results))
    os._exit(0)  # ranks whose neighbour has failed would wait for it


def trained(host: str, way: str, experts: bool = False) -> dict[str, Any]:
    """Start the ranks of a mesh; return for each training the numbers of rank 0, or the first error."""
    data, tp, _ = WAYS[way]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if host != "lightning":
            saved(folder / "model", experts)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(data * tp)]
        command += [__file__, "--child", host, way, str(folder)]
        ranks = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            ranks.wait(SECONDS)
        except subprocess.TimeoutExpired:
            ranks.terminate()  # torchrun ends its ranks
            ranks.wait()
        everyone = [json.loads(file.read_text()) for file in sorted(folder.glob("[0-9].json"))]
    results = {}
    for training in TRAININGS:
        own = [one[training] for one in everyone if training in one]
        errors = [one for one in own if "error" in one]
        none = {"error": f"no answer in {SECONDS} s"}
        results[training] = (errors or (own if len(own) == data * tp else [none]))[0]
    return results


def said(found: dict[str, Any], exact: dict[str, Any]) -> str:
    if "error" in exact:
        return f"one process: `{exact['error'][:100]}`".replace("|", "\\|")
    if "error" in found:
        return f"`{found['error'][:150]}`".replace("|", "\\|")
    if len(found["found"]) != len(exact["found"]):
        return f"{len(found['found'])} numbers instead of {len(exact['found'])}"
    off = max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(found["found"], exact["found"], strict=True))
    return "equal" if off < 1e-3 else f"off by {off:.0%}" if off >= 0.01 else f"off by {off:.1e}"


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--only", choices=HOSTS)
    p.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        host, way, folder = args.child
        child(host, way, Path(folder))
    versions = {name: version(name) for name in ("torch", *HOSTS)}
    print(", ".join(f"{name} {number}" for name, number in versions.items()))
    print(f"| host | mesh | {' | '.join(TRAININGS)} |\n|---|---|{'---|' * len(TRAININGS)}", flush=True)
    results: dict[str, dict[str, list[str]]] = {}
    for host in [args.only] if args.only else HOSTS:
        exact = trained(host, "alone")
        for way in [way for way in WAYS if way != "alone" and (way != "ep=2" or host == "transformers")]:
            if args.quick and way != "tp=2":
                continue
            if way == "ep=2":
                exact = trained(host, "alone", experts=True)
            found = trained(host, way, experts=way == "ep=2")
            cells = [said(found[training], exact[training]) for training in TRAININGS]
            results.setdefault(host, {})[way] = cells
            print(f"| {host} | `{way}` | {' | '.join(cells)} |", flush=True)
    if args.json:
        write(args.json, results, **versions)


if __name__ == "__main__":
    main()

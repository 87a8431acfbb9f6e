"""Train a Llama of transformers by tensor parallelism and ZeRO, from nothing to files that transformers reads.

    torchrun --nproc_per_node 2 examples/booster_llama_hybrid.py --tp-size 2
    torchrun --nproc_per_node 4 examples/booster_llama_hybrid.py --tp-size 2 --zero-stage 2 --precision fp16

The model is built without memory and is whole on no rank. It reads bytes of Python's standard library. At the end
rank 0 loads the folder that was saved with plain transformers, which must give the loss that the sharded model gives.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from data import standard_library
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from train_gpt import console_of_rank_0, over_ranks, progress
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

import shardlib as sl
from shardlib.booster import Booster, DataLoader, HybridParallelPlugin, LazyInitContext, launch_from_torch
from shardlib.optim import HybridAdam
from shardlib.optim.lr_scheduler import CosineAnnealingWarmupLR


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--tp-size", type=int, default=2)
    p.add_argument("--zero-stage", type=int, default=1, choices=[0, 1, 2, 3])
    p.add_argument("--precision", default="bf16", choices=["fp32", "fp16", "bf16"])
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--width", type=int, default=256)
    p.add_argument("--steps", type=int, default=50)
    p.add_argument("--rows", type=int, default=16, help="texts of a step, over all data ranks")
    p.add_argument("--context", type=int, default=128, help="bytes of a text")
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--size-per-shard", type=float, default=10, help="megabytes of a file")
    p.add_argument("--folder", type=Path, help="where to save, seen by all ranks; else a temporary one")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--json", type=Path, help="write losses to this file")
    return p


def texts(tokens: Tensor, count: int, context: int) -> TensorDataset:
    """`count` texts of `context` bytes, evenly from all of the tokens."""
    starts = torch.arange(count) * ((len(tokens) - context) // count)
    return TensorDataset(tokens[starts[:, None] + torch.arange(context)].long())


def llama_config(args: argparse.Namespace) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=256, hidden_size=args.width, intermediate_size=3 * args.width, num_hidden_layers=args.layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=args.context, use_cache=False,
    )  # fmt: skip


@torch.no_grad()
def validate(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    model.eval()
    losses = [over_ranks(model(ids.to(device), labels=ids.to(device)).loss) for (ids,) in loader]
    return sum(losses) / len(losses)


@torch.no_grad()
def validate_plain(folder: Path, data: TensorDataset) -> float:
    """The same by transformers alone, from the files."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    (ids,) = data.tensors
    return model(ids, labels=ids).loss.item()


def shared_folder(given: Path | None, until: ExitStack) -> Path:
    """The same folder on all ranks; a temporary one is gone in the end."""
    name: list[Any] = [given]
    if given is None and dist.get_rank() == 0:
        name = [until.enter_context(tempfile.TemporaryDirectory())]
    dist.broadcast_object_list(name)
    return Path(name[0])


def run(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    with ExitStack() as until:
        result = train(args, device, shared_folder(args.folder, until) / "llama")
        dist.barrier()
    return result


def train(args: argparse.Namespace, device: torch.device, folder: Path) -> dict[str, Any]:
    torch.manual_seed(args.seed)
    console, text = console_of_rank_0(), standard_library()
    plugin = HybridParallelPlugin(
        tp_size=args.tp_size, pp_size=1, zero_stage=args.zero_stage, precision=args.precision, max_norm=1.0
    )
    booster = Booster(plugin=plugin)

    mine = args.rows // (dist.get_world_size() // args.tp_size)
    dataloader = plugin.prepare_dataloader(
        texts(text.train, args.steps * args.rows, args.context), batch_size=mine, shuffle=True, seed=args.seed
    )
    kept = texts(text.validation, 2 * args.rows, args.context)

    with LazyInitContext():
        model = LlamaForCausalLM(llama_config(args))
    optimizer = HybridAdam(model.parameters(), lr=args.lr, weight_decay=0.1)
    lr_scheduler = CosineAnnealingWarmupLR(optimizer, total_steps=args.steps, warmup_steps=args.steps // 10)
    model, optimizer, _, dataloader, lr_scheduler = booster.boost(
        model, optimizer, dataloader=dataloader, lr_scheduler=lr_scheduler
    )
    console.print(sl.get_plan(model).table())

    losses = []
    with progress(console) as bar:
        task = bar.add_task("training", total=args.steps, loss="")
        for (ids,) in bar.track(dataloader, task_id=task):
            loss = model(ids.to(device), labels=ids.to(device)).loss
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            lr_scheduler.step()
            losses.append(over_ranks(loss.detach()))
            bar.update(task, loss=f"loss {losses[-1]:.4f}")

    booster.save_model(model, folder, shard=True, size_per_shard=args.size_per_shard, use_safetensors=True)
    validation = validate(model, plugin.prepare_dataloader(kept, batch_size=mine), device)
    plain = validate_plain(folder, kept) if dist.get_rank() == 0 else None
    if plain is not None:
        files = sorted(file.name for file in folder.glob("*.safetensors"))
        console.print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} nats per byte; saved as {len(files)} files")
        console.print(f"on text never trained on: {validation:.6f}; by transformers alone: {plain:.6f}")
    return {
        "losses": losses,
        "validation": validation,
        "plain": plain,
        "files": len(list(folder.glob("*.safetensors"))),
    }


def main() -> None:
    args = parser().parse_args()
    disable_progress_bar()
    device = launch_from_torch(seed=args.seed, verbose=False).device
    result = run(args, device)
    if args.json and dist.get_rank() == 0:
        args.json.write_text(json.dumps(result) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

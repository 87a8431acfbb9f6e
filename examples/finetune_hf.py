"""Fine-tune a Hugging Face model that is whole on no rank: read in slices, sharded, trained, saved, resumed, read back.

    torchrun --nproc_per_node 2 examples/finetune_hf.py --mesh dp=2
    torchrun --nproc_per_node 4 examples/finetune_hf.py --mesh dp=2,tp=2 --transform "zero(3)"
    torchrun --nproc_per_node 4 examples/finetune_hf.py --mesh dp=2,tp=2 --transform "zero(3) | precision('bf16')"

Rank 0 first makes a folder such as the hub has them, a small Llama with random weights (`--model FOLDER` takes one that
is there; tokens are bytes). At the end it loads the folder that the ranks have saved with plain transformers, which
must give the loss that the sharded model gives.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from data import Text, batch, standard_library
from gpt import next_byte_loss
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from train_gpt import console_of_rank_0, data_place, over_ranks
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

import shardlib as sl
from shardlib.transforms import parse


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--mesh", default="dp=-1", help="axes and sizes; one size may be -1 (as many as are left)")
    p.add_argument("--transform", help="such as \"zero(3) | precision('bf16')\"")
    p.add_argument("--model", type=Path, help="a Hugging Face folder; else a small Llama is made")
    p.add_argument("--folder", type=Path, help="where to save, seen by all ranks; else a temporary one")
    p.add_argument("--layers", type=int, default=8, help="of the small Llama")
    p.add_argument("--width", type=int, default=64, help="of the small Llama")
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--rows", type=int, default=16, help="rows of the global batch, over all data ranks")
    p.add_argument("--context", type=int, default=64)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--json", type=Path, help="write losses and counts to this file")
    return p


@contextmanager
def shared_folder(args: argparse.Namespace) -> Iterator[Path]:
    """The folder of the run on all ranks; a temporary one is gone afterwards."""
    made = None if args.folder or dist.get_rank() else tempfile.TemporaryDirectory()
    name: list[Any] = [args.folder or (made.name if made else None)]
    dist.broadcast_object_list(name)
    try:
        yield Path(name[0])
    finally:
        dist.barrier()
        if made:
            made.cleanup()


def make_llama(folder: Path, args: argparse.Namespace) -> None:
    """Rank 0: a small Llama with random weights, in several files with an index."""
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=256, hidden_size=args.width, intermediate_size=3 * args.width, num_hidden_layers=args.layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=args.context, use_cache=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="200KB")


def sharded(folder: Path, mesh: DeviceMesh, args: argparse.Namespace) -> nn.Module:
    """The model of a folder: each rank reads the slices that it stores. Tables of angles are in no file."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    transforms = [parse(args.transform)] if args.transform else []
    model = sl.shard_model(model, mesh, transforms=transforms, init=(folder, model._init_weights), compile=None)
    return model.train()


class Held:
    """Counts the parameters that a rank has memory for: those that it stores, and those lent while modules run."""

    def __init__(self, model: nn.Module) -> None:
        self._memory: dict[int, tuple[torch.UntypedStorage, int]] = {}  # the storage is kept: no address comes twice
        for module in model.modules():
            self._look(module)

    def _look(self, module: nn.Module, _args: Any = None) -> None:
        for p in module.parameters(recurse=False):  # those of other modules may not be here now
            local = p.detach()
            local = local.to_local() if isinstance(local, DTensor) else local
            storage = local.untyped_storage()
            self._memory[storage.data_ptr()] = storage, storage.nbytes() // local.element_size()

    @property
    def most(self) -> int:
        return sum(count for _, count in self._memory.values())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look whenever a module runs."""
        hook = register_module_forward_pre_hook(self._look)
        try:
            yield
        finally:
            hook.remove()


def largest(count: int) -> int:
    """The largest of all ranks' counts."""
    counts = torch.tensor(count)
    dist.all_reduce(counts, op=dist.ReduceOp.MAX)
    return int(counts)


def loss_of(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    return next_byte_loss(model(input_ids=ids, use_cache=False).logits.float(), targets)


def train(
    model: nn.Module,
    optimizer: sl.OptimizerWrapper,
    mesh: DeviceMesh,
    text: Text,
    args: argparse.Namespace,
    steps: range,
) -> list[float]:
    """The global loss of each of these steps."""
    rank, ranks = data_place(mesh)
    losses = []
    for step in steps:
        ids, targets = batch(text.train, step, rows=args.rows, context=args.context, rank=rank, ranks=ranks)
        optimizer.zero_grad()
        loss = loss_of(model, ids.to(mesh.device_type), targets.to(mesh.device_type))
        optimizer.backward(loss)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        losses.append(over_ranks(loss.detach()))
    return losses


@torch.no_grad()
def validate(model: nn.Module, mesh: DeviceMesh, text: Text, args: argparse.Namespace) -> float:
    """The global loss of a batch that was never trained on."""
    rank, ranks = data_place(mesh)
    ids, targets = batch(text.validation, 0, rows=args.rows, context=args.context, rank=rank, ranks=ranks)
    return over_ranks(loss_of(model.eval(), ids.to(mesh.device_type), targets.to(mesh.device_type)))


@torch.no_grad()
def validate_plain(folder: Path, text: Text, args: argparse.Namespace) -> float:
    """The same of a saved folder, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids, targets = batch(text.validation, 0, rows=args.rows, context=args.context)
    return loss_of(model, ids, targets).item()


def run(args: argparse.Namespace, mesh: DeviceMesh, folder: Path) -> dict[str, Any]:
    text, half = standard_library(), args.steps // 2
    source = args.model or folder / "hub"
    if args.model is None and dist.get_rank() == 0:
        make_llama(source, args)
    dist.barrier()

    model = sharded(source, mesh, args)
    optimizer = sl.OptimizerWrapper(torch.optim.AdamW, model, lr=args.lr)
    held = Held(model)
    with held.watching():
        losses = train(model, optimizer, mesh, text, args, range(half))
    sl.save(folder / "half", model, optimizer)
    continued = train(model, optimizer, mesh, text, args, range(half, args.steps))
    sl.save(folder / "trained", model, weights="huggingface")
    validation = validate(model, mesh, text, args)

    again = sharded(source, mesh, args)
    its_optimizer = sl.OptimizerWrapper(torch.optim.AdamW, again, lr=args.lr)
    sl.load(folder / "half", again, its_optimizer)
    resumed = train(again, its_optimizer, mesh, text, args, range(half, args.steps))

    return {
        "mesh": str(sl.MeshShape.of(mesh)),
        "losses": losses + continued,
        "resumed": resumed,
        "validation": validation,
        "plain": validate_plain(folder / "trained", text, args) if dist.get_rank() == 0 else None,
        "parameters": sum(p.numel() for p in model.parameters()),
        "held": largest(held.most),
    }


def main() -> None:
    args = parser().parse_args()
    disable_progress_bar()
    mesh, console = sl.mesh(args.mesh), console_of_rank_0()
    with shared_folder(args) as folder:
        result = run(args, mesh, folder)
    losses, resumed = result["losses"], result["resumed"]
    console.print(
        f"{result['parameters']:,} parameters on {result['mesh']}; the most that one rank held: {result['held']:,}"
    )
    console.print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} nats per byte")
    console.print(
        f"after {len(losses) - len(resumed)} steps, resumed: {resumed[0]:.9f}; not stopped: {losses[-len(resumed)]:.9f}"
    )
    if result["plain"] is not None:
        console.print(
            f"on text never trained on: {result['validation']:.7f}; transformers alone: {result['plain']:.7f}"
        )
    if args.json and dist.get_rank() == 0:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""One script, one rule file, two engines: the same training on torch with four processes and on JAX with four devices.

    python examples/two_engines.py                      # the GPT of gpt.py
    python examples/two_engines.py --model llama        # Hugging Face Llama, its code unchanged (needs transformers)
    python examples/two_engines.py --png placement.png  # a picture of how a parameter lies, too

What trains is `train` below; `engine=` is its only difference. This script starts it twice, and shows both runs' losses
side by side, and how a parameter lies on each: on four processes over gloo, and in one that pretends four CPU devices.
Needs `shardlib[jax]`.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch
from data import batch, standard_library
from gpt import GPT, GPTConfig, next_byte_loss
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardlib as sl
from shardlib.functional import adamw, functional, train_step

PROCESSES = 4
SHOWN = {"gpt": "blocks.0.mlp.up.weight", "llama": "model.layers.0.mlp.up_proj.weight"}
COLOURS = (230, 159, 0), (86, 180, 233), (0, 158, 115), (204, 121, 167)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--model", choices=["gpt", "llama"], default="gpt")
    p.add_argument("--mesh", default="dp=2,tp=2")
    p.add_argument("--zero", type=int, choices=[0, 1, 2, 3], default=1)
    p.add_argument("--steps", type=int, default=10)
    p.add_argument("--rows", type=int, default=8)
    p.add_argument("--context", type=int, default=32)
    p.add_argument("--dtype", choices=["float32", "float64"], default="float64")
    p.add_argument("--engine", choices=["torch", "jax"], help="run this one alone, in this process")
    p.add_argument("--json", type=Path, help="write losses to this file")
    p.add_argument("--png", type=Path, help="write a picture of a parameter's placement to this file")
    return p


def build(args: argparse.Namespace) -> nn.Module:
    """The same values in every process; nothing in the model knows of shardlib."""
    torch.manual_seed(0)
    if args.model == "gpt":
        return GPT(GPTConfig(context=args.context, n_layer=2, d_model=64)).to(getattr(torch, args.dtype))
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: Any = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=256, num_key_value_heads=2, use_cache=False, **sizes)
    return LlamaForCausalLM(config).to(getattr(torch, args.dtype))


def loss(model: Any, ids: Tensor, targets: Tensor) -> Tensor:
    """Plain torch, on either engine."""
    output = model(ids)
    return next_byte_loss(output if isinstance(output, Tensor) else output.logits, targets)


def train(args: argparse.Namespace, engine: str) -> tuple[list[float], Any]:
    """Losses of all steps, and the trained parameters."""
    rules = sl.layouts.load("example_gpt" if args.model == "gpt" else "llama")
    transforms = [sl.zero(args.zero)] if args.zero else []
    apply, params = functional(build(args), args.mesh, rules, transforms=transforms, engine=engine)
    step = train_step(apply, adamw(1e-3), loss)
    state, losses, text = step.init(params), [], standard_library()
    for at in range(args.steps):
        state, metrics = step(state, *batch(text.train, at, rows=args.rows, context=args.context))
        losses.append(float(metrics["loss"]))
    return losses, state.params


# --- one engine -----------------------------------------------------------------------------------------------------


def run_here(args: argparse.Namespace) -> None:
    if args.engine == "jax":
        import jax

        jax.config.update("jax_enable_x64", args.dtype == "float64")
    losses, params = train(args, args.engine)
    tensor = params[SHOWN[args.model]]
    if int(os.environ.get("RANK", "0")) == 0:
        print(layout_of(tensor).picture(tensor.shape, args.mesh))
    if args.engine == "jax" and args.png:
        draw(layout_of(tensor), tuple(tensor.shape), sl.MeshShape(args.mesh), args.png)
    if args.json and int(os.environ.get("RANK", "0")) == 0:
        args.json.write_text(json.dumps(losses))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def layout_of(tensor: Any) -> sl.Layout:
    """How a parameter lies, read from the DTensor or the array itself."""
    names = ("out", "in")
    if isinstance(tensor, DTensor):
        return sl.Layout.from_placements(tensor.placements, tensor.device_mesh, dim_names=names)
    if isinstance(tensor, Tensor):
        return sl.Layout.replicate(tensor.ndim)
    import shardlib.jax as sj

    return sj.from_named_sharding(tensor.sharding, tensor.ndim, dim_names=names)


def draw(layout: sl.Layout, shape: tuple[int, int], mesh: sl.MeshShape, path: Path) -> None:
    """A picture in which a part has the stripes of the ranks that hold it."""
    held: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.world_size):
        (rows,), (columns,) = layout.local_slices(shape, mesh, mesh.coordinate(rank))
        held.setdefault((rows.start, rows.stop, columns.start, columns.stop), []).append(rank)
    scale, (height, width) = 4, shape
    pixels = [bytearray(3 * scale * width) for _ in range(scale * height)]
    for (top, bottom, left, right), ranks in held.items():
        for y in range(scale * top, scale * bottom):
            for x in range(scale * left, scale * right):
                pixels[y][3 * x : 3 * x + 3] = bytes(COLOURS[ranks[(x + y) // 16 % len(ranks)] % len(COLOURS)])
    header = struct.pack(">IIBBBBB", scale * width, scale * height, 8, 2, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + bytes(row) for row in pixels))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b""))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


# --- both -----------------------------------------------------------------------------------------------------------


def start(engine: str, result: Path) -> str:
    """The same script, for one engine; returns what it printed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={PROCESSES}"]
    command = [sys.executable, *(launcher if engine == "torch" else []), *sys.argv]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if engine == "jax":
        environment |= {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={PROCESSES}",
        }
    run = subprocess.run(
        [*command, "--engine", engine, "--json", str(result)], env=environment, text=True, capture_output=True
    )
    if run.returncode:
        raise SystemExit(f"The run on {engine} failed:\n{run.stdout}{run.stderr}")
    return run.stdout


def main() -> None:
    args = parser().parse_args()
    if args.engine:
        run_here(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        results = {engine: Path(folder) / engine for engine in ("torch", "jax")}
        printed = {engine: start(engine, result) for engine, result in results.items()}
        losses = {engine: json.loads(result.read_text()) for engine, result in results.items()}
    table = Table(title=f"{args.model} on {args.mesh}, {args.dtype}, zero({args.zero})")
    for title in ("step", "torch, 4 processes", "JAX, 4 devices", "difference"):
        table.add_column(title, justify="right")
    for at, (a, b) in enumerate(zip(losses["torch"], losses["jax"], strict=True)):
        table.add_row(str(at), f"{a:.12f}", f"{b:.12f}", f"{abs(a - b):.1e}")
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(table)
    for engine, text in printed.items():
        print(f"\n{SHOWN[args.model]} on {engine}:\n{text}", end="")
    if args.json:
        args.json.write_text(json.dumps(losses, indent=1) + "\n")


if __name__ == "__main__":
    main()
